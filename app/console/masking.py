"""Keeps passwords and tokens out of MLflow, the spool, the log and the run's files."""

import os
import re
from collections.abc import Mapping

HIDDEN = "***"
_SECRET_WORDS = {
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials",
    "apikey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken",
}  # fmt: skip
_VOCABULARY = {
    "pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "start", "end", "stop", "image",
    "new",
}  # fmt: skip
"""Words before `token` in the name of a special token: `pad_token` is not a secret."""
_KEYS = {"api", "access", "secret", "private", "auth"}
"""Words before `key` in the name of a secret: `api_key` is one, `label_key` is a column."""
_ENVIRONMENT = (
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "DATABRICKS_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
)
"""Environment variables whose values are hidden wherever they appear."""
_MIN_SECRET_LENGTH = 4  # hiding shorter values would hide ordinary words
_CREDENTIALS = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@\"']+(?:@[^\s/@\"']+)*@")
_QUERY = re.compile(
    r"([?&](?:[\w.-]*[_.-])?"
    r"(?:password|passwd|pwd|token|secret|key|credential|sig|signature)=)[^&\s\"']+",
    re.I,
)
_ASSIGNMENT = re.compile(
    r"(?P<name>[A-Za-z_][\w.-]*)"
    r"(?P<sign>[\"']?[ \t]*[=:][ \t]*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;]+)"
)


def is_secret(name: str) -> bool:
    """Whether a dotted name is that of a secret.

    `hf_token`, `apiKey` and `db.password` are; `tokenizer`, `pad_token` (a special token of a
    vocabulary) and `label_key` (a column) are not.
    """
    if any(word in _SECRET_WORDS for word in _words(name)):
        return True
    last_part = name.rpartition(".")[2]
    before, last = ["", "", *_words(last_part)][-2:]
    return (last == "token" and before not in _VOCABULARY) or (last == "key" and before in _KEYS)


def _words(name: str) -> list[str]:
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return [word for word in re.split(r"[^a-z0-9]+", snake_case) if word]


def mask_uri(text: str) -> str:
    """Hide credentials in the URIs of a text.

    `scheme://user:password@host` becomes `scheme://***@host`, and `?token=…` becomes `?token=***`.
    """
    return _QUERY.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(rf"\1{HIDDEN}@", text))


def _environment_secrets() -> list[str]:
    values = (os.environ.get(variable, "") for variable in _ENVIRONMENT)
    return [value for value in values if len(value) >= _MIN_SECRET_LENGTH]


def mask_text(text: str) -> str:
    """Hide secrets in a sentence, a log line or a command line.

    Besides what `mask_uri` hides, this hides the value of every `key=value` or `key: value` whose
    key `is_secret`, and the values of MLFLOW_TRACKING_PASSWORD and similar environment variables.
    Mask a configuration with `mask_tree`, before it becomes text.
    """

    def hide(match: re.Match[str]) -> str:
        return f"{match['name']}{match['sign']}{HIDDEN}" if is_secret(match["name"]) else match[0]

    for value in _environment_secrets():
        text = text.replace(value, HIDDEN)
    return _ASSIGNMENT.sub(hide, mask_uri(text))


def mask_tree(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A copy of a nested mapping with its secrets hidden.

    Args:
        values: A configuration or another nested mapping.
        prefix: Comes before each key when its name is judged, such as "tracking.".
    """

    def masked(key: str, value: object) -> object:
        if isinstance(value, Mapping):
            return mask_tree(value, f"{key}.")
        if isinstance(value, (list, tuple)):
            return [masked(key, item) for item in value]
        if not isinstance(value, str) or not value:  # only texts can be secrets
            return value
        return HIDDEN if is_secret(key) or value in _environment_secrets() else mask_uri(value)

    return {name: masked(f"{prefix}{name}", value) for name, value in values.items()}
