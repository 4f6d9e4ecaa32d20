"""Keeps passwords and tokens out of MLflow, the spool, the log and the run's files."""

import os
import re
from collections.abc import Mapping

HIDDEN = "***"
_SECRET_WORDS = {
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials", "apikey", "accesskey",
    "secretkey", "privatekey", "authtoken", "accesstoken",
}  # fmt: skip
_VOCABULARY = {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "start", "end", "stop", "image", "new"}
"""What a tokenizer's tokens are called: `pad_token` is not a secret."""
_KEYS = {"api", "access", "secret", "private", "auth"}
"""What makes a key a secret one: `label_key` is a column."""
_ENVIRONMENT = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN", "AWS_SECRET_ACCESS_KEY")
_CREDENTIALS = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@\"']+(?:@[^\s/@\"']+)*@")
_QUERY = re.compile(
    r"([?&](?:[\w.-]*[_.-])?(?:password|passwd|pwd|token|secret|key|credential|sig|signature)=)[^&\s\"']+", re.I
)
_ASSIGNMENT = re.compile(
    r"(?P<name>[A-Za-z_][\w.-]*)(?P<sign>[\"']?[ \t]*[=:][ \t]*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;]+)"
)


def is_secret(name: str) -> bool:
    """Whether a dotted name is a secret's: `hf_token`, `apiKey`, `db.password`; not `tokenizer`, `pad_token` (a word
    of a vocabulary) or `label_key` (a column)."""
    if any(word in _SECRET_WORDS for word in _words(name)):
        return True
    before, last = ["", "", *_words(name.rpartition(".")[2])][-2:]
    return (last == "token" and before not in _VOCABULARY) or (last == "key" and before in _KEYS)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()) if word]


def mask_uri(text: str) -> str:
    """`scheme://user:password@host` anywhere in the text becomes `scheme://***@host`; likewise `?token=…`."""
    return _QUERY.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(rf"\1{HIDDEN}@", text))


def _known_secrets() -> list[str]:
    values = (os.environ.get(variable, "") for variable in _ENVIRONMENT)
    return [value for value in values if len(value) >= 4]  # shorter ones would hide ordinary words


def mask_text(text: str) -> str:
    """Like `mask_uri`, and the value of every `key=value` or `key: value` whose key is a secret's, and what
    MLFLOW_TRACKING_PASSWORD and its like hold. For sentences, logs
    and command lines; a configuration is masked before it becomes text, by `mask_tree`."""

    def hide(match: re.Match[str]) -> str:
        return f"{match['name']}{match['sign']}{HIDDEN}" if is_secret(match["name"]) else match[0]

    for value in _known_secrets():
        text = text.replace(value, HIDDEN)
    return _ASSIGNMENT.sub(hide, mask_uri(text))


def mask_tree(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """The same nested mapping, its secrets hidden: what a run may write down. Everything else stays as it is."""

    def masked(key: str, value: object) -> object:
        if isinstance(value, Mapping):
            return mask_tree(value, f"{key}.")
        if isinstance(value, (list, tuple)):
            return [masked(key, one) for one in value]
        if not isinstance(value, str) or not value:  # only texts can be secrets
            return value
        return HIDDEN if is_secret(key) or value in _known_secrets() else mask_uri(value)

    return {name: masked(f"{prefix}{name}", value) for name, value in values.items()}
