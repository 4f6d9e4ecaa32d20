"""A YAML file that remembers on which line each of its values stands."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ClusterError, Fault

MOST_VALUES = 50_000
Path_ = tuple[Any, ...]  # keys and indices from a document's root to a value


@dataclass
class Document:
    """One YAML document: its values, and the line of each by the path of keys and indices to it."""

    file: str
    data: Any
    lines: dict[Path_, int]
    duplicates: list[Fault]

    def line(self, path: Sequence[Any] = ()) -> int:
        """Line of the value at `path`, or of the nearest value around it."""
        whole = tuple(path)
        while whole and whole not in self.lines:
            whole = whole[:-1]
        return self.lines.get(whole, 1)

    def fault(self, path: Sequence[Any], sentence: str) -> Fault:
        return Fault(self.file, self.line(path), sentence)

    def unknown_keys(self, path: Sequence[Any], allowed: Collection[str], what: str) -> list[Fault]:
        """A fault for each key of the mapping at `path` that is not allowed, naming the nearest that is."""
        value = self.at(path)
        if not isinstance(value, dict):
            return [self.fault(path, f"{what} must be a mapping, not {describe(value)}")]
        return [
            self.fault([*path, key], f"{what} has no key {key!r}{nearest(key, allowed)}")
            for key in value
            if key not in allowed
        ]

    def at(self, path: Sequence[Any]) -> Any:
        value = self.data
        for key in path:
            value = value[key]
        return value


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
        raise ClusterError(f"{file}{at}: this is not YAML: {_problem(error)}") from error
    return [document for document in documents if document.data is not None]


def _problem(error: yaml.YAMLError) -> str:
    """What YAML says is wrong, in one line: characters that it does not allow are named otherwise than the rest."""
    return getattr(error, "problem", None) or " ".join(str(error).split())


def _document(file: str, root: yaml.Node) -> Document:
    lines: dict[Path_, int] = {}
    duplicates: list[Fault] = []
    for path, line, duplicate in _walk(root, (), root.start_mark.line + 1, ()):
        if len(lines) > MOST_VALUES:
            raise ClusterError(f"{file}: this has more than {MOST_VALUES:,} values, too many for a cluster file")
        if duplicate is None:
            raise ClusterError(f"{file}:{line}: what stands here contains itself: write it out, without the alias (*)")
        if duplicate:
            duplicates.append(Fault(file, line, f"the key {path[-1]!r} is written twice: only the last would count"))
        lines[path] = line
    loader = yaml.CSafeLoader("")
    return Document(file, loader.construct_document(root), lines, duplicates)


def _walk(
    node: yaml.Node, path: Path_, line: int, around: tuple[yaml.Node, ...]
) -> Iterator[tuple[Path_, int, bool | None]]:
    """Path, line (that of its key, for a mapping's value) and whether the key came before, of every value; None instead
    for a value that contains itself. around: what it stands in."""
    if any(node is outer for outer in around):
        yield path, line, None
        return
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
    if value is None:
        return "nothing"
    kinds = {dict: "a mapping", list: "a list", str: "the text", bool: "the truth value", int: "the number"}
    kind = kinds.get(type(value), f"a {type(value).__name__}")
    return kind if isinstance(value, dict | list) else f"{kind} {value!r}"
