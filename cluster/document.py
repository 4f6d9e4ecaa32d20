"""YAML files with the line of each value, and JSON schemas whose errors become sentences."""

import difflib
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster import ClusterError

MAX_VALUES = 50_000
SCHEMAS = Path(__file__).with_name("schemas")
Keys = tuple[Any, ...]
"""Keys and indices that lead from a document's root to a value."""
Mistakes = Iterator[tuple[Keys, str]]
"""The keys and indices that lead to each wrong value, and a sentence about it."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a cluster file."""

    file: str
    line: int  # 1-based
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass
class Document:
    """One YAML document.

    Attributes:
        file: The path of its file.
        data: Its values.
        lines: The line of each value, by the keys and indices that lead to it.
        duplicates: Keys that are written twice.
    """

    file: str
    data: Any
    lines: dict[Keys, int]
    duplicates: list[Problem]

    def problem(self, path: Sequence[Any], message: str) -> Problem:
        """A problem on the line of the value at `path`, or of the nearest value around it."""
        keys = tuple(path)
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return Problem(self.file, self.lines.get(keys, 1), message)


def read_documents(path: str | Path) -> list[Document]:
    """The non-empty documents of a YAML file.

    Raises:
        ClusterError: There is no such file, or it is not YAML; with the line.
    """
    file = str(path)
    try:
        text = Path(path).expanduser().read_text()
    except FileNotFoundError:
        advice = "`trireme cluster list` names those of Trireme"
        raise ClusterError(f"there is no file {file}: {advice}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file} cannot be read as text: {error}") from error
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.CSafeLoader))
        documents = [_document(file, node) for node in nodes if node is not None]
    except RecursionError:
        raise ClusterError(f"{file}: this is nested too deeply for a cluster file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        # PyYAML reports characters that YAML does not allow in another way than other mistakes.
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ClusterError(f"{file}{at}: this is not YAML: {reason}") from error
    return [document for document in documents if document.data is not None]


def load_yaml(text: str | bytes) -> Any:
    """The value of a YAML text that somebody else may have written.

    It is data alone and has at most MAX_VALUES values; an alias counts as what it stands for.

    Raises:
        YAMLError: It is not YAML, has too many values, or contains itself.
    """
    return read_document("", text).data


def read_document(file: str, text: str | bytes) -> Document:
    """The one document of a YAML text.

    Raises:
        YAMLError: See `load_yaml`.
    """
    root = yaml.compose(text, Loader=yaml.CSafeLoader)
    if root is None:
        return Document(file, data=None, lines={}, duplicates=[])
    return _document(file, root)


def _document(file: str, root: yaml.Node) -> Document:
    lines: dict[Keys, int] = {}
    duplicates: list[Problem] = []
    values = itertools.count(1)

    def walk(node: yaml.Node, path: Keys, line: int, around: Keys) -> None:
        """Notes the line of a value (in a mapping, that of its key) and of all values in it.

        Args:
            node: The value.
            path: The keys and indices that lead to it.
            line: Its line.
            around: The nodes that it is in.
        """
        problem = "an alias makes a value contain itself" if node in around else ""
        if next(values) > MAX_VALUES:
            problem = f"it has more than {MAX_VALUES:,} values"
        if problem:
            mark = yaml.Mark("", 0, line - 1, 0, None, 0)
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        lines[path] = line
        around = (*around, node)
        if isinstance(node, yaml.MappingNode):
            names = set()
            for key, value in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else "?"
                line_of_key = key.start_mark.line + 1
                if name in names:
                    message = f"the key {name!r} is written twice: only the last would count"
                    duplicates.append(Problem(file, line_of_key, message))
                names.add(name)
                walk(value, (*path, name), line_of_key, around)
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                walk(item, (*path, number), item.start_mark.line + 1, around)

    walk(root, (), root.start_mark.line + 1, ())
    data = yaml.CSafeLoader("").construct_document(root)
    return Document(file, data, lines, duplicates)


def nearest(word: object, known: Collection[str]) -> str:
    """The end of a sentence about an unknown word: `: did you mean 'x'?`, or all known words.

    "" where no known word is near and there are too many to name.
    """
    matches = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    if matches:
        return f": did you mean {matches[0]!r}?"
    if 0 < len(known) <= 12:
        return f": it may have {', '.join(sorted(known))}"
    return ""


def mistaken(word: object, known: Collection[str]) -> str:
    """The known word of which `word` is probably a misspelling, or "".

    For vocabularies to which others may add words: a word that differs from a known one only in
    digits (`us-east-3`) is taken for a new one.
    """
    if not isinstance(word, str) or word in known:
        return ""
    by_lower_case = {candidate.lower(): candidate for candidate in reversed(list(known))}
    matches = difflib.get_close_matches(word.lower(), list(by_lower_case), n=1, cutoff=0.8)
    if not matches:
        return ""
    match = by_lower_case[matches[0]]
    differs_in_letters = re.sub(r"\d", "", match) != re.sub(r"\d", "", word)
    return match if differs_in_letters else ""


@functools.cache
def schemas(name: str) -> dict[str, Any]:
    """The schemas of one of the files in schemas/."""
    return yaml.load((SCHEMAS / name).read_text(), Loader=yaml.CSafeLoader)


@functools.cache
def _validator() -> Any:
    """JSON schema, draft 7, and the rule `near`: words of which a value must not be a misspelling.

    (`write`, beside any rule, is for the sentence alone and says what to write instead.)
    """
    import jsonschema

    def near(_: Any, known: list[str], value: Any, __: Any) -> Iterator[Any]:
        if word := mistaken(value, known):
            yield jsonschema.ValidationError(word)

    return jsonschema.validators.extend(jsonschema.Draft7Validator, {"near": near})


def schema_problems(
    document: Document,
    schema: Mapping[str, Any],
    data: Any,
    at: Keys = (),
) -> list[Problem]:
    """Everything in which a value breaks a JSON schema.

    Args:
        document: The document that has the value.
        schema: The JSON schema.
        data: The value.
        at: The keys and indices that lead to it.
    """
    errors = _validator()(schema).iter_errors(data)
    return [document.problem(*_schema_problem(error, at)) for error in errors]


def _schema_problem(error: Any, at: Keys) -> tuple[Keys, str]:
    """Where an error of jsonschema is, and one sentence for it."""
    path = (*at, *error.absolute_path)
    where = dotted(path) or "the file"
    rule = error.validator
    wanted = error.validator_value
    value = error.instance
    instead = f": write {error.schema['write']}" if "write" in error.schema else ""
    of_key = rule == "additionalProperties" or "propertyNames" in error.absolute_schema_path
    if rule == "near":
        question = f"did you mean {error.message!r}?"
        if of_key:
            return (*path, value), f"{where} has no key {value!r}: {question}"
        return path, f"{where} is {value!r}: {question}"
    if of_key:
        allowed = error.schema.get("properties", {}) if rule == "additionalProperties" else wanted
        key = value
        if isinstance(value, dict):
            key = next((key for key in value if key not in allowed), None)
        return (*path, key), f"{where} has no key {key!r}{instead or nearest(key, allowed)}"
    if rule == "required":
        missing = next((key for key in wanted if key not in value), "?")
        return path, f"{where} lacks the key {missing!r}{instead}"
    if instead:
        return path, f"{where} is {value!r}{instead}"
    if rule == "enum":
        return path, f"{where} is {value!r}{nearest(value, list(map(str, wanted)))}"
    if rule in ("minimum", "maximum"):
        limit = "least" if rule == "minimum" else "most"
        return path, f"{where} is {value}: write at {limit} {wanted}"
    message = " ".join(error.message.split())
    return path, f"{where}: {message[-200:]}"


def strict(schema: Any) -> Any:
    """A JSON schema with rules that it does not spell out.

    Integers are at least 0, since clouds and Kubernetes take no negative ones except a priority.
    What has keys is a mapping, and what has items is a list.
    """
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(part) for key, part in schema.items() if key != "properties"}
    properties = schema.get("properties")
    if isinstance(properties, dict):
        result["properties"] = {key: strict(part) for key, part in properties.items()}
        if "priority" in properties:
            result["properties"]["priority"] = properties["priority"]
    types = []
    if {"properties", "propertyNames"} & schema.keys():
        types.append("object")
    if "items" in schema:
        types.append("array")
    if types:
        result.setdefault("type", types)
    if "integer" in schema.get("type", ()):
        result.setdefault("minimum", 0)
    return result


def dotted(path: Keys) -> str:
    """Keys and indices as a person writes them: `spec.containers[0].name`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif text:
            text += f".{part}"
        else:
            text = str(part)
    return text
