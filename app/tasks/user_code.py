"""A user's own modules: found from the current folder, also in a package that has the name of one of Trireme's.

Which of two modules with one name is imported is decided in app/names.py. What both define under it is refused here,
before the user's module runs: one of the two would silently be taken for the other.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from app import names
from app.errors import UserError


def user_module(name: str, attribute: str = "") -> ModuleType:
    """The module called `name`; the current folder comes first, as it does on workers and under `python -m`.

    Args:
        name: The whole name of the module.
        attribute: What the caller wants of it; "" for nothing in particular.

    Raises:
        UserError: What is wanted, or what the module imports, could be Trireme's as well as the user's.
        Exception: Whatever importing the module raises.
    """
    prepare_imports()
    refuse_ambiguous(name, attribute)
    return importlib.import_module(name)


def prepare_imports() -> None:
    """Puts the current folder first on sys.path, and lets the user's modules be found beside Trireme's."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    names.merge()


# --- what cannot be decided ------------------------------------------------------------------------------------------

MOST_INSTALLED = 200
"""Files of the task's own package that are read where it is installed: some hundredths of a second."""


@dataclass(frozen=True)
class Taken:
    """What a line of a user's code takes from a module.

    Args:
        line: Its number in the file.
        module: The whole name of the module.
        attribute: What is taken from it; "" for the module itself, "*" for all that it has.
    """

    line: int
    module: str
    attribute: str


def refuse_ambiguous(name: str, attribute: str = "") -> None:
    """Reads a user's module, and those of the user's that it imports, without running them.

    Args:
        name: The whole name of the module.
        attribute: What the configuration takes from it.

    Raises:
        UserError: Something is taken from a module that Trireme and the user both have, and both define it there.
    """
    parents = {top: _parents(top) for top in names.NAMES}
    if not any(_is_shared(top, folders) for top, folders in parents.items() if folders):
        return
    waiting = [Taken(0, name, attribute)]
    first = name.partition(".")[0]
    if attribute:
        _refuse_taken(waiting[0], "the configuration", parents, set())
    seen: set[str] = set()
    installed = 0
    while waiting:
        taken = waiting.pop()
        for module in _modules(taken):
            file = _file(module, parents)
            if module in seen or not file.endswith(".py"):
                continue
            seen.add(module)
            if "-packages" in file:
                installed += 1
                if module.partition(".")[0] != first or installed > MOST_INSTALLED:
                    continue
            tree = names.parsed(file)
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            for each in _taken(tree, module, is_package=Path(file).name == "__init__.py"):
                _refuse_taken(each, f"{file}, line {each.line},", parents, used)
                waiting.append(each)


def _parents(top: str) -> list[str]:
    """The folders that hold a package or module of the user's with one of Trireme's names."""
    found = names.find_counterpart(top)
    files = [found.file] if found.file and Path(found.file).name != "__init__.py" else []
    return [str(Path(each).parent) for each in (*found.folders, *files)]


def _is_shared(top: str, parents: list[str]) -> bool:
    """Whether there is code of the user's under a name that Trireme has, too."""
    ours = Path(names.ROOT, top)
    for place in (ours, *ours.rglob("*")):
        is_module = place.suffix == ".py" or (place.is_dir() and place.name != "__pycache__")
        name = ".".join(place.relative_to(names.ROOT).with_suffix("").parts).removesuffix(".__init__")
        if is_module and names.file_of(name, parents).endswith(".py"):
            return True
    return False


def _modules(taken: Taken) -> list[str]:
    """The modules that Python runs for an import: those named, the packages that they are in, and what may be one."""
    parts = taken.module.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return [*modules, f"{taken.module}.{taken.attribute}"] if taken.attribute not in ("", "*") else modules


def _file(module: str, parents: dict[str, list[str]]) -> str:
    """The file of a user's module; "" for one that is Python's or Trireme's."""
    top = module.partition(".")[0]
    if top == names.FACE or top in sys.stdlib_module_names:
        return ""
    return names.file_of(module, parents[top] if top in parents else [os.getcwd(), *sys.path])


def _refuse_taken(taken: Taken, who: str, parents: dict[str, list[str]], used: set[str]) -> None:
    """Raises UserError where Trireme and the user both have what is taken.

    Args:
        taken: What is taken.
        who: Takes it, for a person.
        parents: For each of Trireme's names, the folders that hold a package of the user's with that name.
        used: Attributes that the file takes from anything, by a dot.
    """
    module = taken.module
    wanted = {taken.attribute} if taken.attribute else used
    as_module = f"{module}.{taken.attribute}"
    if taken.attribute not in ("", "*") and all(_both(as_module, parents)):
        module = as_module
        wanted = used
    ours, theirs = _both(module, parents)
    if not ours or not theirs.endswith(".py"):
        return
    of_user = names.defined_names(theirs)
    if taken.attribute == "*":
        shared = {name for name in of_user if not name.startswith("_")}
    else:
        modules = {name for name in of_user if names.file_of(f"{module}.{name}", [names.ROOT])}
        shared = of_user & (names.defined_names(ours) | modules) & wanted
    if shared:
        top, _, rest = module.partition(".")
        safe = f"{names.FACE}.{rest if top == 'app' else module}".rstrip(".")
        raise UserError(
            f"{who} takes {min(shared)} from {module}, which is both Trireme's ({ours}) and yours ({theirs}): give "
            f"{theirs} another name, and write {safe} where you mean Trireme's"
        )


def _both(module: str, parents: dict[str, list[str]]) -> tuple[str, str]:
    """Trireme's file or folder of a module and the user's; "" for who has none."""
    top = module.partition(".")[0]
    if top not in names.NAMES:
        return "", ""
    return names.file_of(module, [names.ROOT]), names.file_of(module, parents[top])


def _taken(tree: ast.Module, module: str, *, is_package: bool) -> list[Taken]:
    """All that a user's module takes by import statements, wherever in the file they are."""
    package = module if is_package else module.rpartition(".")[0]
    taken: list[Taken] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            taken += [Taken(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                try:
                    source = importlib.util.resolve_name("." * node.level + source, package)
                except ImportError:  # beyond the top: importing it says so
                    continue
            taken += [Taken(node.lineno, source, alias.name) for alias in node.names]
    return taken
