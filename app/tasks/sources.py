"""Digests of a task's own code, by which a resumed run can say which of its files have changed.

Files: the module of the task's class and of the classes it inherits from, and whatever these import, directly or not,
from folders that are a person's own: not Python's library, not installed packages, not Trireme. They are found by
reading, without running anything, and named as modules are (`my_package/my_module.py`), so that a run has the same
names in another folder or where Ray has shipped it to.

Definitions: what a notebook or a script defines in `__main__` reaches a run by value, and no file stands for it. There
the compiled code of the class and of what it uses is digested, with the constants that it reads, each by its name.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.machinery
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from app import names
from app.tasks.base import Task

Sources = dict[str, str]
"""Name of a file or definition → its digest, 16 hexadecimal digits."""
MAIN = "__main__"
_INSTALLED = ("site-packages", "dist-packages")
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def task_sources(task: Task) -> Sources:
    """Of everything that is a person's own in the task's code; {} for a built-in task."""
    modules: set[str] = set()
    definitions: Sources = {}
    for kind in type(task).__mro__:
        if kind.__module__ == MAIN:
            modules |= _digest_definitions(kind, definitions)
        else:
            modules.add(kind.__module__)
    if type(task).__module__ == MAIN:
        values = {name: value for name, value in sorted(vars(task).items()) if isinstance(value, _PLAIN)}
        definitions[f"{MAIN}.{type(task).__name__}.__dict__"] = _digest(repr(values).encode())
    return {**dict(sorted(_digest_files(modules).items())), **dict(sorted(definitions.items()))}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs, in words: `model.py`, `loss.py (new)`, `data.py (no longer used)`."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    new = [f"{name} (new)" for name in now if name not in before]
    gone = [f"{name} (no longer used)" for name in before if name not in now]
    return [*changed, *new, *gone]


def change_note(before: Mapping[str, str] | None, now: Mapping[str, str], step: int) -> str:
    """One sentence for a run that continues after `step` with other code; "" where it is the same or not known."""
    found = changes(before, now) if before is not None else []
    if not found:
        return ""
    return (
        f"the task's code has changed since step {step:,}: {', '.join(found)}; the steps up to there were trained with "
        "the code as it was, the following ones are with the code as it is now"
    )


# --- files ------------------------------------------------------------------------------------------------------------


def _digest_files(modules: Iterable[str]) -> Sources:
    """Of these modules and of what they import, as far as they are a person's own."""
    found: Sources = {}
    pending, seen = list(modules), set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _file_of(name)
        if path is None or not _is_own(path):
            continue
        try:
            text = path.read_bytes()
        except OSError:
            continue
        is_package = path.name == "__init__.py"
        found[name.replace(".", "/") + ("/__init__.py" if is_package else ".py")] = _digest(
            text.replace(b"\r\n", b"\n")
        )
        pending += [name.rpartition(".")[0]] if "." in name else []
        pending += _imports(text, name if is_package else name.rpartition(".")[0])
    return found


def _imports(text: bytes, package: str) -> Iterator[str]:
    """Names of modules that a file may import: of `from a import b` both a and a.b, which may be one."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if package else []
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module:
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)


def _file_of(name: str) -> Path | None:
    """The Python file of a module, loaded or not; None where there is none. Nothing is imported."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return Path(file) if file and file.endswith(".py") else None
    parent, _, _ = name.rpartition(".")
    places: list[str] | None = None
    if parent:
        places = _folders_of(parent)
        if places is None:
            return None
    spec = _find_spec(name, places)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _folders_of(package: str) -> list[str] | None:
    loaded = sys.modules.get(package)
    if loaded is not None:
        return list(getattr(loaded, "__path__", [])) or None
    parent = package.rpartition(".")[0]
    places = _folders_of(parent) if parent else None
    if parent and places is None:
        return None
    spec = _find_spec(package, places)
    return list(spec.submodule_search_locations or []) or None if spec is not None else None


def _find_spec(name: str, places: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # a broken entry of sys.path
        return importlib.machinery.PathFinder.find_spec(name, places)
    return None


def _is_own(path: Path) -> bool:
    """Whether a file is a person's own."""
    file = path.resolve()
    if any(part in _INSTALLED for part in file.parts):
        return False
    known = sysconfig.get_paths()
    library = [known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    root = Path(__file__).resolve().parents[2]
    installed = [*library, site.getusersitepackages(), *(str(root / package) for package in names.NAMES)]
    return not any(file.is_relative_to(Path(folder).resolve()) for folder in installed)


# --- definitions ------------------------------------------------------------------------------------------------------


def _digest_definitions(kind: type, into: Sources) -> set[str]:
    """Adds the class and what it uses of `__main__`; returns the modules that these use."""
    modules: set[str] = set()
    pending: list[Any] = [kind]
    while pending:
        value = pending.pop()
        name = f"{MAIN}.{value.__qualname__}"
        if name in into:
            continue
        into[name] = ""  # so that what uses itself ends
        functions = list(_functions(value))
        parts = [repr(sorted(_plain_attributes(value).items()))]
        for function in functions:
            parts.append(repr(_code(function.__code__)))
            parts.append(repr([function.__defaults__, function.__kwdefaults__]) if _is_plain(function) else "")
            for read, found in _globals_read(function):
                if isinstance(found, _PLAIN):
                    parts.append(f"{read}={found!r}")
                elif isinstance(found, ModuleType):
                    modules.add(found.__name__)
                elif isinstance(found, (type, FunctionType)) and found.__module__ == MAIN:
                    pending.append(found)
                elif isinstance(found, (type, FunctionType)):
                    modules.add(found.__module__)
        if isinstance(value, type):
            pending += [base for base in value.__bases__ if base.__module__ == MAIN]
            modules |= {base.__module__ for base in value.__bases__ if base.__module__ != MAIN}
        into[name] = _digest("\n".join([sys.version.split()[0], *parts]).encode())
    return modules


def _functions(value: Any) -> Iterator[FunctionType]:
    """A function itself; of a class those of its own body, of classes inside it too."""
    if isinstance(value, FunctionType):
        yield value
        return
    for member in vars(value).values():
        inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(inner, FunctionType):
            yield inner
        elif isinstance(inner, type) and inner.__qualname__.startswith(f"{value.__qualname__}."):
            yield from _functions(inner)


def _plain_attributes(value: Any) -> dict[str, Any]:
    hidden = ("__module__", "__qualname__", "__firstlineno__")
    attributes = vars(value).items() if isinstance(value, type) else ()
    return {name: found for name, found in attributes if name not in hidden and isinstance(found, _PLAIN)}


def _is_plain(function: FunctionType) -> bool:
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(isinstance(value, _PLAIN) for value in defaults)


def _globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's code, and code inside it, reads of its module."""
    names: set[str] = set()
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        names |= set(code.co_names)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name in sorted(names & function.__globals__.keys()):
        yield name, function.__globals__[name]


def _code(code: CodeType) -> tuple[Any, ...]:
    """What code does, without where it stands."""
    constants = [_code(c) if isinstance(c, CodeType) else _ordered(c) for c in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)


def _ordered(constant: Any) -> Any:
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
