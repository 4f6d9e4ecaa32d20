"""Digests of a task's own code, so that a resumed run can say which of its files have changed.

Files: the module of the task's class and of the classes it inherits from, and what these import,
directly or not, from the user's own folders: not from Python's library, installed packages or
Trireme. They are found by parsing, without running anything. Their names are those of modules
(`my_package/my_module.py`), which are the same in another folder, such as the one to which Ray
ships them.

Definitions: what a notebook or a script defines in `__main__` reaches a run by value, without a
file. For these the compiled code of the class and of what it uses is digested by name, with the
constants that it reads.
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
"""The digest of each file or definition, 16 hexadecimal digits, by its name."""
MAIN = "__main__"
INSTALLED_FOLDERS = ("site-packages", "dist-packages")
PLAIN_TYPES = (int, float, complex, str, bytes, bool, type(None))
"""Types of values that are part of a digest."""
NOT_DIGESTED = ("__module__", "__qualname__", "__firstlineno__")
"""Attributes of a class that may change without a change of what it does."""


def task_sources(task: Task) -> Sources:
    """The digests of the user's own code in a task; {} for a built-in task."""
    modules: set[str] = set()
    definitions: Sources = {}
    for task_class in type(task).__mro__:
        if task_class.__module__ == MAIN:
            modules |= _digest_definitions(task_class, definitions)
        else:
            modules.add(task_class.__module__)
    if type(task).__module__ == MAIN:
        attributes = sorted(vars(task).items())
        plain = {name: value for name, value in attributes if isinstance(value, PLAIN_TYPES)}
        definitions[f"{MAIN}.{type(task).__name__}.__dict__"] = _digest(repr(plain).encode())
    files = _digest_files(modules)
    return {**dict(sorted(files.items())), **dict(sorted(definitions.items()))}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The differences in words: `model.py`, `loss.py (new)`, `data.py (no longer used)`."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    new = [f"{name} (new)" for name in now if name not in before]
    unused = [f"{name} (no longer used)" for name in before if name not in now]
    return [*changed, *new, *unused]


def change_note(before: Mapping[str, str] | None, now: Mapping[str, str], step: int) -> str:
    """The sentence about a run that continues with other code; "" if the code is the same.

    Args:
        before: The sources that the run has been trained with; None if they are not known.
        now: The sources now.
        step: The last step that was trained.
    """
    if before is None:
        return ""
    differences = changes(before, now)
    if not differences:
        return ""
    return (
        f"the task's code has changed since step {step:,}: {', '.join(differences)}; the steps up "
        "to there were trained with the earlier code, the following ones use the code as it is "
        "now"
    )


def length_note(before: int | None, now: int | None, step: int) -> str:
    """The sentence about a run that continues with another number of samples; "" if it is the same.

    Args:
        before: The samples that the run has been trained on; None for a stream, or if not known.
        now: The samples now; None for a stream.
        step: The last step that was trained.
    """
    if before is None or now is None or before == now:
        return ""
    return (
        f"the training data has {now:,} samples, and had {before:,} until step {step:,}: the "
        "following steps are in the order of the data as it is now, so in this epoch some samples "
        "are seen twice and others not"
    )


# --- files ---


def _digest_files(modules: Iterable[str]) -> Sources:
    """The digests of these modules and of what they import, as far as they are the user's own."""
    digests: Sources = {}
    pending = list(modules)
    seen: set[str] = set()
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        path = _file_of(module)
        if path is None or not _is_users_own(path):
            continue
        try:
            source = path.read_bytes()
        except OSError:
            continue
        parent = module.rpartition(".")[0]
        is_package = path.name == "__init__.py"
        suffix = "/__init__.py" if is_package else ".py"
        digests[module.replace(".", "/") + suffix] = _digest(source.replace(b"\r\n", b"\n"))
        if parent:
            pending.append(parent)
        pending += _imported_modules(source, package=module if is_package else parent)
    return digests


def _imported_modules(source: bytes, *, package: str) -> Iterator[str]:
    """Names of the modules that a file may import.

    Of `from a import b` these are a and a.b, since b may be a module.

    Args:
        source: The file's content.
        package: The package that relative imports start from.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts: list[str] = []
            if node.level:
                parents = package.split(".") if package else []
                parts += parents[: len(parents) - node.level + 1]
            if node.module:
                parts.append(node.module)
            module = ".".join(parts)
            if module:
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> Path | None:
    """The Python file of a module, loaded or not; None if it has none. Nothing is imported."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return Path(file) if file and file.endswith(".py") else None
    parent = module.rpartition(".")[0]
    folders = None
    if parent:
        folders = _folders_of(parent)
        if folders is None:
            return None
    spec = _find_spec(module, folders)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _folders_of(package: str) -> list[str] | None:
    """The folders of a package, loaded or not; None if there is no such package."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        return list(getattr(loaded, "__path__", [])) or None
    parent = package.rpartition(".")[0]
    parent_folders = None
    if parent:
        parent_folders = _folders_of(parent)
        if parent_folders is None:
            return None
    spec = _find_spec(package, parent_folders)
    if spec is None:
        return None
    return list(spec.submodule_search_locations or []) or None


def _find_spec(module: str, folders: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Where a module is; None if it is not found.

    Args:
        module: Its full name.
        folders: The folders of its package; None means sys.path.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):  # a broken entry of sys.path
        return importlib.machinery.PathFinder.find_spec(module, folders)
    return None


def _is_users_own(path: Path) -> bool:
    """Whether a file is not of Python's library, an installed package or Trireme."""
    file = path.resolve()
    if any(part in INSTALLED_FOLDERS for part in file.parts):
        return False
    python_paths = sysconfig.get_paths()
    root = Path(__file__).resolve().parents[2]
    not_users = [
        *(python_paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        site.getusersitepackages(),
        *(str(root / package) for package in names.NAMES),
    ]
    return not any(file.is_relative_to(Path(folder).resolve()) for folder in not_users)


# --- definitions ---


def _digest_definitions(task_class: type, digests: Sources) -> set[str]:
    """Digest a class of `__main__`, and what it uses there.

    Args:
        task_class: The class.
        digests: Gets the digests.

    Returns:
        The modules that these definitions use.
    """
    modules: set[str] = set()
    pending: list[type | FunctionType] = [task_class]
    while pending:
        definition = pending.pop()
        name = f"{MAIN}.{definition.__qualname__}"
        if name in digests:
            continue
        digests[name] = ""  # a definition that uses itself is not visited again
        contents = [
            sys.version.split()[0],  # the compiled code differs between versions of Python
            repr(sorted(_plain_attributes(definition).items())),
        ]
        for function in _functions(definition):
            contents.append(repr(_code_contents(function.__code__)))
            contents.append(_plain_defaults(function))
            for global_name, value in _globals_read(function):
                if isinstance(value, PLAIN_TYPES):
                    contents.append(f"{global_name}={value!r}")
                elif isinstance(value, ModuleType):
                    modules.add(value.__name__)
                elif isinstance(value, (type, FunctionType)):
                    if value.__module__ == MAIN:
                        pending.append(value)
                    else:
                        modules.add(value.__module__)
        if isinstance(definition, type):
            for base in definition.__bases__:
                if base.__module__ == MAIN:
                    pending.append(base)
                else:
                    modules.add(base.__module__)
        digests[name] = _digest("\n".join(contents).encode())
    return modules


def _functions(definition: type | FunctionType) -> Iterator[FunctionType]:
    """A function itself; or the functions in a class, and in the classes inside it."""
    if isinstance(definition, FunctionType):
        yield definition
        return
    for member in vars(definition).values():
        # Of a class method or static method its function, of a property its getter.
        unwrapped = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if isinstance(unwrapped, FunctionType):
            yield unwrapped
        elif isinstance(unwrapped, type):
            is_inside = unwrapped.__qualname__.startswith(f"{definition.__qualname__}.")
            if is_inside:
                yield from _functions(unwrapped)


def _plain_attributes(definition: type | FunctionType) -> dict[str, Any]:
    """The attributes of a class that have plain values."""
    if not isinstance(definition, type):
        return {}
    return {
        name: value
        for name, value in vars(definition).items()
        if name not in NOT_DIGESTED and isinstance(value, PLAIN_TYPES)
    }


def _plain_defaults(function: FunctionType) -> str:
    """The defaults of a function's arguments; "" unless all of them are plain values."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(isinstance(value, PLAIN_TYPES) for value in defaults):
        return ""
    return repr([function.__defaults__, function.__kwdefaults__])


def _globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values of its module that a function's code, and code inside it, may read."""
    read: set[str] = set()
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        read |= set(code.co_names)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name in sorted(read & function.__globals__.keys()):
        yield name, function.__globals__[name]


def _code_contents(code: CodeType) -> tuple[Any, ...]:
    """What compiled code does, without its place in a file."""
    constants = [_constant_contents(constant) for constant in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)


def _constant_contents(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return _code_contents(constant)
    if isinstance(constant, frozenset):  # whose order differs from process to process
        return sorted(map(repr, constant))
    return constant


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
