"""How cluster files are checked: JSON schemas, whose errors become sentences, and rules for what no schema says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.document import Document, Keys, describe, nearest
from cluster.errors import ClusterError, Problem
from cluster.hardware import HardwareError, gpu
from cluster.shape import link

SCHEMAS = Path(__file__).with_name("schemas")
Message = str | tuple[Any, ...]  # a sentence, or one after the keys that lead from the rule's value to the line meant
Check = Callable[[Document, Keys, Any], Iterator[Message]]


class Rules:
    """Checks by the pattern (`Document.each`) of the values that each looks at.

    A check is a generator: check(document, path, value) yields a message for each thing that is wrong.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, Check]] = []

    def at(self, *patterns: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            self.rows += [(pattern, check) for pattern in patterns]
            return check

        return add

    def problems(self, document: Document, base: str = "") -> list[Problem]:
        """Everything that the rules find. base: pattern of what the rules' own patterns begin at."""
        found = []
        for pattern, check in self.rows:
            for path, value in document.each(".".join(filter(None, (base, pattern)))):
                for message in check(document, path, value):
                    keys, sentence = ((), message) if isinstance(message, str) else (message[:-1], message[-1])
                    found.append(document.problem((*path, *keys), sentence))
        return found


def check_fact(name: str, value: Any) -> Iterator[str]:
    """A message where what a file says of a machine (a fact of `shape.node_type`) cannot be read."""
    try:
        if name == "gpu":
            gpu(str(value))
        elif name in ("link_within", "link_across"):
            link(value)
        elif name == "price_per_hour":
            float(value)
    except (ClusterError, HardwareError) as error:
        yield str(error)
    except ValueError:
        yield f"the price per hour must be a number of dollars, not {describe(value)}"


@functools.cache
def schemas(name: str) -> dict[str, Any]:
    """The schemas of one of the files in schemas/."""
    return yaml.load((SCHEMAS / name).read_text(), Loader=yaml.CSafeLoader)


def schema_problems(document: Document, schema: Mapping[str, Any], data: Any) -> list[Problem]:
    """Everything in which `data`, the document's or a part of it, breaks a JSON schema (draft 7)."""
    import jsonschema

    errors = jsonschema.Draft7Validator(schema).iter_errors(data)
    return [document.problem(*_schema_problem(error)) for error in errors]


def _schema_problem(error: Any) -> tuple[Keys, str]:
    """Where an error of jsonschema is, and one sentence for it."""
    path = tuple(error.absolute_path)
    where, rule, wanted, value = dotted(path) or "the file", error.validator, error.validator_value, error.instance
    if rule == "additionalProperties" or "propertyNames" in error.absolute_schema_path:
        allowed = error.schema.get("properties", {}) if rule == "additionalProperties" else wanted
        key = next((key for key in value if key not in allowed), None) if isinstance(value, dict) else value
        return (*path, key), f"{where} has no key {key!r}{nearest(key, allowed)}"
    form = "a Kubernetes quantity, such as 8, 500m or 64Gi" if "KMGTPE" in str(wanted) else f"of the form {wanted}"
    types = wanted if isinstance(wanted, str) else " or ".join(map(str, wanted)) if isinstance(wanted, list) else ""
    messages = {
        "required": lambda: f"{where} lacks the key {next((key for key in wanted if key not in value), '?')!r}",
        "type": lambda: f"{where} must be of type {types}, not {describe(value)}",
        "enum": lambda: f"{where} is {value!r}{nearest(value, list(map(str, wanted)))}",
        "const": lambda: f"{where} is {value}: write {wanted}",
        "minimum": lambda: f"{where} is {value}, less than {wanted}",
        "pattern": lambda: f"{where} is {value!r}, which is not {form}",
    }
    return path, messages[rule]() if rule in messages else f"{where}: {error.message.splitlines()[0][:200]}"


def dotted(path: Keys) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
