"""A YAML file that remembers on which line each of its values stands."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ClusterError, Problem

MAX_VALUES = 50_000
Keys = tuple[Any, ...]  # keys and indices from a document's root to a value


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

    def each(self, pattern: str) -> Iterator[tuple[Keys, Any]]:
        """Paths and values that `pattern` leads to: keys with dots between them, * for every key or index; "" is the
        whole document. Nothing where there is no such value."""
        found: list[tuple[Keys, Any]] = [((), self.data)]
        for key in pattern.split(".") if pattern else ():
            found = [((*path, name), inner) for path, value in found for name, inner in _inside(value, key)]
        yield from found

    def texts(self) -> Iterator[tuple[Keys, str]]:
        """Every text in it and the path to it."""
        found: list[tuple[Keys, Any]] = [((), self.data)]
        for path, value in found:  # which grows
            found += [((*path, name), inner) for name, inner in _inside(value, "*")]
            if isinstance(value, str):
                yield path, value


def _inside(value: Any, key: str) -> list[tuple[Any, Any]]:
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(name, inner) for name, inner in rows if key in ("*", name)]


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


def _document(file: str, root: yaml.Node) -> Document:
    lines: dict[Keys, int] = {}
    duplicates: list[Problem] = []
    for path, line, duplicate in _walk(root, (), root.start_mark.line + 1):
        if len(lines) > MAX_VALUES:
            raise ClusterError(f"{file}: this has more than {MAX_VALUES:,} values, too many for a cluster file")
        if duplicate:
            message = f"the key {path[-1]!r} is written twice: only the last would count"
            duplicates.append(Problem(file, line, message))
        lines[path] = line
    return Document(file, yaml.CSafeLoader("").construct_document(root), lines, duplicates)


def _walk(node: yaml.Node, path: Keys, line: int, around: Keys = ()) -> Iterator[tuple[Keys, int, bool]]:
    """Path, line (that of its key, for a mapping's value) and whether the key came before, of every value. around: the
    nodes that it is in."""
    if node in around:
        here = yaml.Mark("", 0, line - 1, 0, None, 0)
        raise yaml.MarkedYAMLError(problem="an alias makes a value contain itself", problem_mark=here)
    yield path, line, False
    around = (*around, node)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key)
            at = key.start_mark.line + 1
            if name in seen:
                yield (*path, name), at, True
            seen.add(name)
            yield from _walk(value, (*path, name), at, around)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _walk(value, (*path, number), value.start_mark.line + 1, around)


def nearest(word: object, known: Collection[str]) -> str:
    """`: did you mean 'x'?`, or what there is; for the end of a sentence."""
    near = difflib.get_close_matches(str(word), list(known), 1, 0.6)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": it may have {', '.join(sorted(known))}" if len(known) <= 12 else ""


def describe(value: object) -> str:
    """A value as a sentence calls it."""
    if value is None:
        return "nothing"
    kinds = {dict: "a mapping", list: "a list", str: "the text", bool: "the truth value", int: "the number"}
    kind = kinds.get(type(value), f"a {type(value).__name__}")
    return kind if isinstance(value, dict | list) else f"{kind} {value!r}"
