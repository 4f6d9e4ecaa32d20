"""Keeps passwords and tokens out of MLflow, of the spool and of the log."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "***"

_SECRET_WORDS = {
    "password", "passwd", "passphrase", "pwd", "token", "secret", "secrets", "key", "credential", "credentials",
    "apikey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken",
}  # fmt: skip
_SECRET_ENVIRONMENT = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN", "AWS_SECRET_ACCESS_KEY")

_CREDENTIALS_IN_URI = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@\"']+(?:@[^\s/@\"']+)*@")
_SECRET_IN_QUERY = re.compile(
    r"(?P<name>[?&](?:[\w.-]*[_.-])?(?:password|passwd|pwd|token|secret|key|credential|sig|signature)=)[^&\s\"']+", re.I
)
_NAME = r"(?P<before>(?:^|[\s{,(;])(?:--|export\s+)?[\"']?(?P<name>[A-Za-z_][\w.-]*)[\"']?[ \t]*"
_QUOTED = r"\"[^\"]*\"|'[^']*'"
_ASSIGNMENTS = (
    re.compile(rf"{_NAME}:[ \t]*)(?P<value>{_QUOTED}|[^\s|>{{}}\[\]\"'][^\n,{{}}\[\]\"']*)", re.M),  # YAML, JSON
    re.compile(rf"{_NAME}=[ \t]*)(?P<value>{_QUOTED}|[^\s,;{{}}\[\]\"']+)", re.M),  # a command line, .env, TOML
    re.compile(
        r"(?P<before>^(?P<indent>[ \t]*)(?P<name>[\w.-]+):[ \t]*)(?P<value>[|>].*(?:\n(?P=indent)[ \t]+.*)*)", re.M
    ),
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OF_A_VOCABULARY = {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "start", "end", "stop", "image", "new"}
_NO_SECRET = {"", "null", "none", "true", "false", "~", HIDDEN}


def looks_secret(name: str) -> bool:
    """Whether a word of this dotted name is one of password, token, secret, key, credential and their like.

    Whole words: `hf_token` and `apiKey` are secrets, `tokenizer` and `tokens_per_second` are not.
    """
    return any(word in _SECRET_WORDS for word in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()))


def mask_uri(text: str) -> str:
    """`scheme://user:password@host` anywhere in the text becomes `scheme://***@host`; likewise `?token=…`."""
    text = _without_credentials(text)
    for variable in _SECRET_ENVIRONMENT:
        value = os.environ.get(variable, "")
        if len(value) >= 4:  # shorter ones would eat ordinary words
            text = text.replace(value, HIDDEN)
    return text


def _without_credentials(text: str) -> str:
    text = _CREDENTIALS_IN_URI.sub(lambda match: f"{match['scheme']}{HIDDEN}@", text)
    return _SECRET_IN_QUERY.sub(lambda match: match["name"] + HIDDEN, text)


def mask_text(text: str) -> str:
    """Like `mask_uri`, and the value of every `key: value` or `key=value` whose key looks like a secret."""

    def hide(match: re.Match[str]) -> str:
        value = match["value"].strip().strip("\"'")
        harmless = value.lower() in _NO_SECRET or _is_number(value)
        if harmless or not looks_secret(match["name"]):
            return match[0]
        # `***` alone would be a broken alias in YAML, and the text should still be read by its own parser.
        bare = "" if "=" in match["before"] else "'"
        quote = match["value"][0] if match["value"][0] in "\"'" else bare
        return f"{match['before']}{quote}{HIDDEN}{quote}"

    text = mask_uri(text)
    for assignment in _ASSIGNMENTS:
        text = assignment.sub(hide, text)
    return text


def mask_value(name: str, value: object) -> object:
    """The value of a parameter or tag as it may be shown: masked if the name looks like a secret's."""
    if looks_secret(name) and not (value is None or isinstance(value, (bool, int, float))) and value != "":
        return HIDDEN
    return mask_uri(value) if isinstance(value, str) else value


def surely_secret(name: str) -> bool:
    """Whether a configuration's key names a secret and nothing else: `hf_token`, `api_key`, `db.password`; not
    `pad_token` (a word of a vocabulary) or `label_key` (a column)."""
    words = [word for word in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name.rpartition(".")[2]).lower()) if word]
    if not words or words[-1] not in _SECRET_WORDS or (len(words) > 1 and words[-2] in _OF_A_VOCABULARY):
        return False
    return words[-1] != "key" or (len(words) > 1 and words[-2] in ("api", "access", "secret", "private", "auth"))


def mask_tree(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """The same nested mapping, its secrets hidden: what a run may write down. Everything else stays as it is."""

    def masked(key: str, value: object) -> object:
        if isinstance(value, Mapping):
            return mask_tree(value, f"{key}.")
        if isinstance(value, (list, tuple)):
            return [masked(key, one) for one in value]
        if not isinstance(value, str) or not value:
            return value
        known = value in (os.environ.get(variable) for variable in _SECRET_ENVIRONMENT)
        return HIDDEN if known or surely_secret(key) else _without_credentials(value)

    return {name: masked(f"{prefix}{name}", value) for name, value in values.items()}


def flatten(values: Mapping[str, object], prefix: str = "", *, hide: bool = True) -> dict[str, object]:
    """Nested mappings as one level with dotted keys; lists stay whole; masked unless told not to."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{key}.", hide=hide))
        else:
            flat[key] = mask_value(key, value) if hide else value
    return flat


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
