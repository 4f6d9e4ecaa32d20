"""A YAML file that remembers on which line each of its values stands, and JSON schemas for it, whose errors become
sentences."""

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
Keys = tuple[Any, ...]  # keys and indices from a document's root to a value


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
    """One YAML document: its values, and the line of each by the keys and indices that lead to it."""

    file: str
    data: Any
    lines: dict[Keys, int]
    duplicates: list[Problem]

    def problem(self, path: Sequence[Any], message: str) -> Problem:
        """A problem on the line of the value at `path`, or of the nearest value around it."""
        whole = tuple(path)
        while whole and whole not in self.lines:
            whole = whole[:-1]
        return Problem(self.file, self.lines.get(whole, 1), message)


def read_documents(path: str | Path) -> list[Document]:
    """The non-empty documents of a YAML file.

    Raises:
        ClusterError: there is no such file, or it is not YAML; with the line.
    """
    file = str(path)
    try:
        text = Path(path).expanduser().read_text()
    except FileNotFoundError:
        raise ClusterError(f"there is no file {file}: `trireme cluster list` names those of Trireme") from None
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
        # Characters that YAML does not allow are reported otherwise than the rest.
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ClusterError(f"{file}{at}: this is not YAML: {reason}") from error
    return [document for document in documents if document.data is not None]


def load_yaml(text: str | bytes) -> Any:
    """The value of a YAML text that somebody else may have written: data alone, and no more of it than MAX_VALUES, with
    every alias counted as what it stands for. Raises YAMLError: it is not YAML, or too much, or contains itself."""
    return read_document("", text).data


def read_document(file: str, text: str | bytes) -> Document:
    """The one document of a YAML text. Raises as `load_yaml`."""
    root = yaml.compose(text, Loader=yaml.CSafeLoader)
    return Document(file, None, {}, []) if root is None else _document(file, root)


def _document(file: str, root: yaml.Node) -> Document:
    lines: dict[Keys, int] = {}
    duplicates: list[Problem] = []
    values = itertools.count(1)

    def walk(node: yaml.Node, path: Keys, line: int, around: Keys) -> None:
        """Notes a value's line (that of its key, in a mapping). around: the nodes that it is in."""
        problem = "an alias makes a value contain itself" if node in around else ""
        if next(values) > MAX_VALUES:
            problem = f"it has more than {MAX_VALUES:,} values"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=yaml.Mark("", 0, line - 1, 0, None, 0))
        lines[path] = line
        seen = set()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name, at = key.value if isinstance(key, yaml.ScalarNode) else "?", key.start_mark.line + 1
            if name in seen:
                message = f"the key {name!r} is written twice: only the last would count"
                duplicates.append(Problem(file, at, message))
            seen.add(name)
            walk(value, (*path, name), at, (*around, node))
        for number, value in enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ():
            walk(value, (*path, number), value.start_mark.line + 1, (*around, node))

    walk(root, (), root.start_mark.line + 1, ())
    return Document(file, yaml.CSafeLoader("").construct_document(root), lines, duplicates)


def nearest(word: object, known: Collection[str]) -> str:
    """`: did you mean 'x'?`, or what there is; for the end of a sentence."""
    near = difflib.get_close_matches(str(word), list(known), 1, 0.6)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": it may have {', '.join(sorted(known))}" if 0 < len(known) <= 12 else ""


def mistaken(word: object, known: Collection[str]) -> str:
    """The known word that `word` is nearly, and is not; "" where it is one, or something else altogether.

    For vocabularies that others may add to. What differs in digits alone (`us-east-3`) is taken for a new one.
    """
    if not isinstance(word, str) or word in known:
        return ""
    near = difflib.get_close_matches(word.lower(), [each.lower() for each in known], 1, 0.8)
    found = next((each for each in known if near and each.lower() == near[0]), "")
    return "" if re.sub(r"\d", "", found) == re.sub(r"\d", "", word) else found


@functools.cache
def schemas(name: str) -> dict[str, Any]:
    """The schemas of one of the files in schemas/."""
    return yaml.load((SCHEMAS / name).read_text(), Loader=yaml.CSafeLoader)


@functools.cache
def _validator() -> Any:
    """Draft 7, with `near`: words of which a value must not be a misspelling. (`write`, beside any rule, is for the
    sentence alone: what to write instead.)"""
    import jsonschema

    def near(_: Any, known: list[str], value: Any, __: Any) -> Iterator[Any]:
        if word := mistaken(value, known):
            yield jsonschema.ValidationError(word)

    return jsonschema.validators.extend(jsonschema.Draft7Validator, {"near": near})


def schema_problems(document: Document, schema: Mapping[str, Any], data: Any, at: Keys = ()) -> list[Problem]:
    """Everything in which `data`, the document's or what it has at `at`, breaks a JSON schema."""
    errors = _validator()(schema).iter_errors(data)
    return [document.problem(*_schema_problem(error, at)) for error in errors]


def _schema_problem(error: Any, at: Keys) -> tuple[Keys, str]:
    """Where an error of jsonschema is, and one sentence for it."""
    path = (*at, *error.absolute_path)
    where, rule, wanted, value = dotted(path) or "the file", error.validator, error.validator_value, error.instance
    instead = f": write {error.schema['write']}" if "write" in error.schema else ""
    of_key = rule == "additionalProperties" or "propertyNames" in error.absolute_schema_path
    if rule == "near":
        has = f"has no key {value!r}" if of_key else f"is {value!r}"
        return (*path, value) if of_key else path, f"{where} {has}: did you mean {error.message!r}?"
    if of_key:
        allowed = error.schema.get("properties", {}) if rule == "additionalProperties" else wanted
        key = next((key for key in value if key not in allowed), None) if isinstance(value, dict) else value
        return (*path, key), f"{where} has no key {key!r}{instead or nearest(key, allowed)}"
    if rule == "required":
        return path, f"{where} lacks the key {next((key for key in wanted if key not in value), '?')!r}{instead}"
    if instead:
        return path, f"{where} is {value!r}{instead}"
    if rule == "enum":
        return path, f"{where} is {value!r}{nearest(value, list(map(str, wanted)))}"
    if rule in ("minimum", "maximum"):
        return path, f"{where} is {value}: write at {'least' if rule == 'minimum' else 'most'} {wanted}"
    return path, f"{where}: {' '.join(error.message.split())[-200:]}"


def strict(schema: Any) -> Any:
    """The schema with what it leaves unsaid: that whole numbers begin at 0 (clouds and Kubernetes take no negative one
    but a priority), and that what has keys is a mapping, and what has items a list."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: strict(each) for key, each in schema.items() if key != "properties"}
    if isinstance(named := schema.get("properties"), dict):
        changed["properties"] = {key: each if key == "priority" else strict(each) for key, each in named.items()}
    kinds = {"object": {"properties", "propertyNames"} & schema.keys(), "array": "items" in schema}
    if found := [kind for kind, is_one in kinds.items() if is_one]:
        changed = {"type": found} | changed
    return ({"minimum": 0} | changed) if "integer" in schema.get("type", ()) else changed


def dotted(path: Keys) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
