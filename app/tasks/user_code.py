"""Imports a user's own modules, also from a package that has the name of one of Trireme's.

They are looked for in the current folder first. app/names.py decides which of two modules with one
name is imported. If both define the name that is used, the import is refused here before the user's
module runs, because otherwise one of the two would silently be taken for the other.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from app import names
from app.errors import UserError

MAX_INSTALLED_FILES = 200
"""How many files of an installed package are read at most, which takes some hundredths of a
second."""

Folders = Mapping[str, list[str]]
"""For each top-level name of Trireme's, the folders that hold a package or module of the user's
with that name."""


@dataclass(frozen=True)
class Import:
    """What one line of a user's code imports.

    Args:
        line: The number of the line.
        module: The full name of the module.
        attribute: What is taken from it; "" means the module itself, "*" all its names.
    """

    line: int
    module: str
    attribute: str


def user_module(name: str, attribute: str = "") -> ModuleType:
    """Import a user's module.

    The current folder comes first, as it does on workers and under `python -m`.

    Args:
        name: The full name of the module.
        attribute: What the caller wants from it; "" for nothing in particular.

    Raises:
        UserError: What is wanted, or what the module imports, may be Trireme's or the user's.
        Exception: Whatever the module raises.
    """
    names.prepare_imports()
    refuse_ambiguous(name, attribute)
    return importlib.import_module(name)


# --- ambiguous names ---


def refuse_ambiguous(name: str, attribute: str = "") -> None:
    """Check a user's module, and those of the user's that it imports, without running them.

    Args:
        name: The full name of the module.
        attribute: What the configuration takes from it.

    Raises:
        UserError: Something is taken from a module that Trireme and the user both have, and both
            define it there.
    """
    user_folders = {top: _user_folders(top) for top in names.NAMES}
    if not any(_has_shared_module(top, folders) for top, folders in user_folders.items()):
        return
    configured = Import(line=0, module=name, attribute=attribute)
    if attribute:
        _refuse_shared(configured, "the configuration", user_folders, used=set())
    task_package = name.partition(".")[0]
    pending = [configured]
    seen: set[str] = set()
    installed_files = 0
    while pending:
        for module in _modules_run_by(pending.pop()):
            file = _user_file(module, user_folders)
            if module in seen or not file.endswith(".py"):
                continue
            seen.add(module)
            if "-packages" in file:
                installed_files += 1
                is_of_task = module.partition(".")[0] == task_package
                if not is_of_task or installed_files > MAX_INSTALLED_FILES:
                    continue
            tree = names.parsed(file)
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            is_package = Path(file).name == "__init__.py"
            for imported in _imports(tree, module, is_package=is_package):
                _refuse_shared(imported, f"{file}, line {imported.line},", user_folders, used=used)
                pending.append(imported)


def _user_folders(top: str) -> list[str]:
    """The folders that hold a package or module of the user's with one of Trireme's names."""
    counterpart = names.find_counterpart(top)
    paths = [*counterpart.folders]
    is_module = counterpart.file and Path(counterpart.file).name != "__init__.py"
    if is_module:
        paths.append(counterpart.file)
    return [str(Path(path).parent) for path in paths]


def _has_shared_module(top: str, folders: list[str]) -> bool:
    """Whether the user has code under the name of a module that Trireme has too.

    Args:
        top: A top-level name of Trireme's.
        folders: The folders that hold a package or module of the user's with this name.
    """
    if not folders:
        return False
    trireme_package = Path(names.ROOT, top)
    for path in (trireme_package, *trireme_package.rglob("*")):
        is_module = path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
        if not is_module:
            continue
        parts = path.relative_to(names.ROOT).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if names.file_of(module, folders).endswith(".py"):
            return True
    return False


def _modules_run_by(imported: Import) -> list[str]:
    """The modules that Python runs for an import.

    They are the packages that the module is in, the module, and the attribute, which may be a
    module.
    """
    parts = imported.module.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    if imported.attribute not in ("", "*"):
        modules.append(f"{imported.module}.{imported.attribute}")
    return modules


def _user_file(module: str, user_folders: Folders) -> str:
    """The file of a user's module; "" for a module of Python's library or of Trireme's."""
    top = module.partition(".")[0]
    if top == names.FACE or top in sys.stdlib_module_names:
        return ""
    folders = user_folders[top] if top in user_folders else [os.getcwd(), *sys.path]
    return names.file_of(module, folders)


def _refuse_shared(
    imported: Import, importer: str, user_folders: Folders, *, used: Iterable[str]
) -> None:
    """Check that what is imported is not both Trireme's and the user's.

    Args:
        imported: What is imported.
        importer: Who imports it, for messages.
        user_folders: The user's folders with Trireme's names.
        used: The attributes that the importing file takes from anything, by a dot.

    Raises:
        UserError: Trireme and the user both have it.
    """
    module = imported.module
    wanted = {imported.attribute} if imported.attribute else set(used)
    if imported.attribute not in ("", "*"):
        submodule = f"{module}.{imported.attribute}"
        if all(_files_of_both(submodule, user_folders)):
            module = submodule
            wanted = set(used)
    trireme_file, user_file = _files_of_both(module, user_folders)
    if not trireme_file or not user_file.endswith(".py"):
        return
    user_names = names.defined_names(user_file)
    if imported.attribute == "*":
        shared = {name for name in user_names if not name.startswith("_")}
    else:
        trireme_modules = {
            name for name in user_names if names.file_of(f"{module}.{name}", [names.ROOT])
        }
        trireme_names = names.defined_names(trireme_file) | trireme_modules
        shared = user_names & trireme_names & wanted
    if shared:
        top, _, below = module.partition(".")
        safe_name = f"{names.FACE}.{below if top == 'app' else module}".rstrip(".")
        raise UserError(
            f"{importer} takes {min(shared)} from {module}, "
            f"which is both Trireme's ({trireme_file}) and yours ({user_file}): "
            f"give {user_file} another name, and write {safe_name} where you mean Trireme's"
        )


def _files_of_both(module: str, user_folders: Folders) -> tuple[str, str]:
    """Trireme's file or folder of a module, and the user's; each is "" if there is none."""
    top = module.partition(".")[0]
    if top not in names.NAMES:
        return "", ""
    return names.file_of(module, [names.ROOT]), names.file_of(module, user_folders[top])


def _imports(tree: ast.Module, module: str, *, is_package: bool) -> list[Import]:
    """Everything that a module imports, anywhere in its file.

    Args:
        tree: The module's source.
        module: Its full name.
        is_package: Whether the file is a package's __init__.py.
    """
    package = module if is_package else module.rpartition(".")[0]
    imports: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [Import(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                try:
                    source = importlib.util.resolve_name("." * node.level + source, package)
                except ImportError:  # above the top-level package: importing it raises this error
                    continue
            imports += [Import(node.lineno, source, alias.name) for alias in node.names]
    return imports
