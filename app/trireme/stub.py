"""Writes __init__.pyi: what editors and type checkers know of `import trireme`.

    python -m app.trireme.stub

Its functions are those of app/api.py, with the configuration's keys as keywords in place of
`**keys`. A test says when the file is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from app import api
from app.config import Config
from app.config.io import documentation

FILE = Path(__file__).with_name("__init__.pyi")
HEADER = '''"""What `import trireme` gives, for editors and type checkers.

Made by `python -m app.trireme.stub`: change app/config/schema.py or app/api.py instead.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from app.api import Plan as Plan
from app.api import Run as Run
from app.api import Scaling as Scaling
from app.api import Sweep as Sweep
from app.api import compare as compare
from app.api import load_run as load_run
from app.api import report as report
from app.errors import Interrupted as Interrupted
from app.errors import RunFailed as RunFailed
from app.errors import TriremeError as TriremeError
from app.errors import UserError as UserError
from app.tasks.base import Task as Task

def claim() -> None:
    """Make `app`, `strategies`, `cluster` and `experiments` Trireme\'s in this process."""
'''
OTHER_TYPES = {
    **api.PROGRAM_TYPES,
    "run.storage": "str | Path",
    "checkpoint.load": "str | Path | None",
    "checkpoint.fork": "str | Path | None",
    "cluster.file": "str | Path | None",
    "parallel.deepspeed": "str | Path | None",
    "train.batch_schedule": 'Sequence[Sequence[int]] | Literal["auto"]',
}
"""Keys for which a program may give something else than the configuration keeps."""
SWEEP_TYPES = {"space": "Mapping[str, Any]", "budget": "float | Mapping[str, float]"}
"""The same for the keys of a sweep file."""


def text() -> str:
    """The content of the file."""
    sections = [_section(field.name) for field in dataclasses.fields(Config)]
    functions = [
        _function(api.train),
        _function(api.fork),
        _function(api.plan),
        _function(api.scale),
        _sweep(),
    ]
    return "\n".join([HEADER, *filter(None, sections), *functions])


def _section(name: str) -> str:
    """The class with the keys of a section of the configuration; "" for a plain key."""
    hint = typing.get_type_hints(Config)[name]
    if not dataclasses.is_dataclass(hint):
        return ""
    docs = documentation()
    lines = [f"class {_class_name(name)}(TypedDict, total=False):"]
    lines += [*_filled(f'"""{docs[name]}"""', "    "), ""]
    for key, key_hint in typing.get_type_hints(hint).items():
        full_key = f"{name}.{key}"
        lines.append(f"    {key}: {OTHER_TYPES.get(full_key) or _type(key_hint)}")
        lines += _filled(f'"""{docs[full_key]}"""', "    ")
    return "\n".join([*lines, ""])


def _class_name(section: str) -> str:
    return f"{section.title()}Keys"


def _type(hint: Any) -> str:
    """A type as it is written; lists and mappings may be of any kind."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case None:
            return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))
        case origin if origin is list:
            return f"Sequence[{_type(arguments[0])}]"
        case origin if origin is dict:
            return f"Mapping[{_type(arguments[0])}, {_type(arguments[1])}]"
        case _:  # a union
            return " | ".join(map(_type, arguments))


def _keys(known: Collection[str]) -> dict[str, tuple[str, str]]:
    """The type and the documentation of each top-level key that is not known yet."""
    docs = documentation()
    keys = {}
    for name, hint in typing.get_type_hints(Config).items():
        if name not in known:
            is_section = dataclasses.is_dataclass(hint)
            plain = OTHER_TYPES.get(name) or _type(hint)
            keys[name] = (_class_name(name) if is_section else plain, docs[name])
    return keys


def _function(function: Callable[..., Any]) -> str:
    written = inspect.signature(inspect.unwrap(function))
    parameters = [p for p in written.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keys = _keys([parameter.name for parameter in parameters])
    return _definition(function, parameters, keys)


def _sweep() -> str:
    """`sweep`, whose keywords are a sweep file's keys, and then those of its experiment."""
    from experiments.sweep.spec import FILE_KEYS, Sweep

    written = inspect.signature(inspect.unwrap(api.sweep))
    parameters = [p for p in written.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = typing.get_type_hints(Sweep)
    own_keys = {
        key: (SWEEP_TYPES.get(key) or _type(hints[key]), "As in a sweep file.")
        for key in sorted(FILE_KEYS - {"experiment"})
    }
    keys = own_keys | _keys([*own_keys, *(parameter.name for parameter in parameters)])
    return _definition(api.sweep, parameters, keys)


def _definition(
    function: Callable[..., Any],
    parameters: list[inspect.Parameter],
    keys: dict[str, tuple[str, str]],
) -> str:
    """The definition of a function, with a keyword for each key."""
    written = inspect.signature(inspect.unwrap(function))
    lines = [f"def {function.__name__}("]
    has_bare_star = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not has_bare_star:
            lines.append("    *,")
            has_bare_star = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        lines.append(f"    {star}{parameter.name}: {parameter.annotation}{default},")
    lines += [f"    {key}: {kind} = ...," for key, (kind, _) in keys.items()]
    lines.append(f") -> {written.return_annotation}:")
    docs = [f"{key}: {doc}" for key, (_, doc) in keys.items()]
    before, _, after = inspect.cleandoc(inspect.unwrap(function).__doc__ or "").partition(
        "    keys: "
    )
    body = f'"""{before.rstrip()}'
    lines += textwrap.indent(body, "    ").splitlines()
    for doc in docs:
        lines += _filled(doc, "        ", hanging="    ")
    rest = after.partition("\n")[2].rstrip()
    lines += [*textwrap.indent(rest, "    ").splitlines(), '    """', ""]
    return "\n".join(lines)


def _filled(text: str, indent: str, hanging: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        100,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    FILE.write_text(text())
