"""Decides whose module an import gets if a user's package has a name of one of Trireme's four.

In every process of Trireme's, a name under `app`, `strategies`, `cluster` or `experiments` is
Trireme's if Trireme has it, and else the user's: `app.tasks` is Trireme's and `app.shop` is the
user's, whatever comes first on sys.path. The same holds for what a module defines: if both have a
module `app.config`, it is Trireme's, and names that it lacks come from the user's. A name that both
define is ambiguous, and app/tasks/user_code.py refuses it before anything starts.

`trireme` is Trireme's alone, and `trireme.tasks` is `app.tasks` under a name that no package of a
user's can take.

A finder at the beginning of sys.meta_path (https://docs.python.org/3/reference/import.html) does
this: it looks up the names above in Trireme's own folder. `import app` and `import trireme` install
it (`claim`). This file imports only the standard library, because app/trireme/__init__.py loads it
by its path.
"""

import ast
import contextlib
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import (
    BuiltinImporter,
    FrozenImporter,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = ("app", "strategies", "cluster", "experiments")
FACE = "trireme"
ROOT = str(Path(__file__).resolve().parents[1])
"""The folder that has Trireme's four packages: a checkout, or trireme/packages in site-packages."""
USER_COPY = os.path.join(ROOT, FACE, "theirs")
"""Where the sources that MLflow keeps with a model have the user's modules with Trireme's names."""
MARKS = (os.path.join("app", "names.py"), os.path.join("app", "tasks", "by_value.py"))
"""A folder with one of these files has another copy of Trireme, and not a user's packages."""


def module() -> str:
    """What to write after `python -m` to start this program in the same way."""
    is_checkout = ("-m", "app") in itertools.pairwise(sys.orig_argv)
    return "app" if is_checkout else FACE


@dataclass(frozen=True)
class Counterpart:
    """What a user has under the name of a module of Trireme's.

    Args:
        folders: Where its submodules are, in the order in which they are searched.
        file: Its code, such as app.py or app/__init__.py; "" if it is only a folder.
    """

    folders: tuple[str, ...]
    file: str


NONE = Counterpart((), "")


# --- the finder and its loaders ---


class TriremeFinder:
    """Finds Trireme's modules before others with their names, and adds the user's code to them."""

    trireme_root = ROOT
    """By this attribute another copy of Trireme recognises the finder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Python's hook: the spec of a module of Trireme's.

        It is None if Trireme has no such module. Python then looks for the user's.
        """
        top, _, below = fullname.partition(".")
        if top == FACE:
            return _find_face(fullname, below)
        if top not in NAMES:
            return None
        parents = fullname.split(".")[:-1]
        spec = PathFinder.find_spec(fullname, [os.path.join(ROOT, *parents)])
        if spec is None:
            return None
        counterpart = find_counterpart(fullname, path)
        if spec.loader is None:
            # A folder without __init__.py. A user's package with one would come before it.
            loader: Any = _NamespaceLoader(counterpart)
            namespace = ModuleSpec(fullname, loader, is_package=True)
            namespace.submodule_search_locations = [os.path.join(ROOT, *fullname.split("."))]
            return namespace
        if counterpart != NONE and spec.origin:
            spec.loader = _Loader(fullname, spec.origin, counterpart)
        return spec


class _Loader(SourceFileLoader):
    """Loads a module of Trireme's with a name under which the user has something too."""

    def __init__(self, name: str, file: str, counterpart: Counterpart) -> None:
        super().__init__(name, file)
        self._counterpart = counterpart

    def exec_module(self, module: ModuleType) -> None:
        _add_counterpart(module, self.name, self._counterpart)
        super().exec_module(module)


class _NamespaceLoader:
    """Loads a folder of Trireme's that has no __init__.py."""

    def __init__(self, counterpart: Counterpart) -> None:
        self._counterpart = counterpart

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _add_counterpart(module, module.__name__, self._counterpart)


class _AliasLoader:
    """Loads `trireme.X` as the module `app.X` itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's spec by that of the other name.
        module.__spec__ = self._spec


# --- what a process calls ---


def claim() -> None:
    """Make the four names, and `trireme`, Trireme's in this process. A second call does nothing.

    Raises:
        ImportError: A user's module that was imported before defines what Trireme needs of its own
            under that name.
    """
    # The finder may be that of another copy of Trireme, such as one that MLflow keeps with a model.
    if any(hasattr(finder, "trireme_root") for finder in sys.meta_path):
        return
    user_modules: dict[str, ModuleType] = {}
    for name, imported in sys.modules.items():
        if _hides_trireme(name, imported):
            user_modules[name] = imported
    for name, user_module in user_modules.items():
        _refuse_shared_names(name, user_module)
    sys.meta_path.insert(0, TriremeFinder())
    for name in user_modules:
        del sys.modules[name]
    # In the order of their import, in which packages come before their modules.
    for name, user_module in user_modules.items():
        _import_instead(name, user_module)
    merge()


def prepare_imports() -> None:
    """Put the current folder first on sys.path, and merge the user's packages with Trireme's."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    merge()


def merge() -> None:
    """Let the user's modules be found beside Trireme's.

    It must be called again if sys.path or the current folder has changed.
    """
    for top in NAMES:
        counterpart = find_counterpart(top)
        if counterpart == NONE:
            continue
        loaded_names = [name for name in sys.modules if name == top or name.startswith(f"{top}.")]
        for name in loaded_names:
            loaded = sys.modules[name]
            if is_triremes(loaded):
                counterpart_name = (
                    counterpart if name == top else _counterpart_below(name, counterpart)
                )
                _add_counterpart(loaded, name, counterpart_name)


def hidden_names() -> dict[str, str]:
    """The names of Trireme's under which the user has code, each with the user's file."""
    files = {name: find_counterpart(name).file for name in NAMES}
    return {name: file for name, file in files.items() if file}


def user_modules_in_use() -> dict[str, str]:
    """The names of Trireme's under which the user's code has run, each with the user's file."""
    in_use: dict[str, str] = {}
    for name, loaded in list(sys.modules.items()):
        if _is_shared(name) and is_triremes(loaded):
            fallback: Any = vars(loaded).get("__getattr__")
            if getattr(type(fallback), "has_users_modules", False):
                for file in fallback.modules:
                    in_use[fallback.name] = file
    return in_use


def worker_setup() -> str:
    """The import path of what Ray's workers must call before they import anything of Trireme's.

    It is "" if nothing hides Trireme's modules. Ray puts the driver's current folder first on its
    workers' sys.path when the first task arrives, which is after this call.
    """
    if not hidden_names():
        return ""
    return f"{FACE}.claim" if _is_installed() else f"{__name__}.claim"


# --- what the user has ---


def find_counterpart(name: str, path: Sequence[str] | None = None) -> Counterpart:
    """What the user has under the name of a module of Trireme's.

    Args:
        name: The full name, such as `app.data`.
        path: The folders to search, for a submodule those of its package. None means the current
            folder and sys.path.
    """
    last = name.rpartition(".")[2]
    folders: list[str] = []
    for entry in dict.fromkeys(_search_path() if path is None else path):
        if _is_own_folder(entry) or _is_copy(entry):
            continue
        package = os.path.join(entry, last)
        init_file = os.path.join(package, "__init__.py")
        if os.path.isfile(init_file):
            return Counterpart((*folders, package), init_file)
        if os.path.isfile(f"{package}.py"):
            return Counterpart(tuple(folders), f"{package}.py")
        if os.path.isdir(package):
            folders.append(package)
    if path is None:
        spec = _spec_of_other_finders(name)
        if spec is not None:
            locations = spec.submodule_search_locations or ()
            return Counterpart((*folders, *locations), spec.origin or "")
    return Counterpart(tuple(folders), "")


def _spec_of_other_finders(name: str) -> ModuleSpec | None:
    """The spec of a user's module that only finders other than Python's own know.

    Packages that are installed in editable mode have such finders.
    """
    for finder in sys.meta_path:
        is_pythons = finder in (BuiltinImporter, FrozenImporter, PathFinder)
        if is_pythons or hasattr(finder, "trireme_root") or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, None)
        if spec is None or not spec.origin or _is_own_folder(os.path.realpath(spec.origin)):
            continue
        if not _is_copy(os.path.dirname(os.path.dirname(spec.origin))):
            return spec
    return None


def _counterpart_below(name: str, counterpart: Counterpart) -> Counterpart:
    """The user's counterpart of a submodule.

    Args:
        name: The full name of the submodule.
        counterpart: The user's counterpart of its top-level package.
    """
    folders: Sequence[str] = counterpart.folders
    _, *packages, _ = name.split(".")
    for package in packages:
        folders = [os.path.join(folder, package) for folder in folders]
    return find_counterpart(name, folders)


def file_of(name: str, folders: Sequence[str]) -> str:
    """The file of a module, or its folder if it has none; "" if there is no such module.

    Args:
        name: The full name of the module.
        folders: The folders that its top-level package may be in.
    """
    for folder in folders:
        path = os.path.join(folder, *name.split("."))
        for file in (os.path.join(path, "__init__.py"), f"{path}.py"):
            if os.path.isfile(file):
                return file
        if os.path.isdir(path):
            return path
    return ""


def defined_names(file: str) -> set[str]:
    """The names that a Python file defines at its top level.

    There are none for a folder, or for a file that cannot be parsed.
    """
    return set(bound_names(parsed(file).body))


def parsed(file: str) -> ast.Module:
    """The syntax tree of a Python file.

    It is empty for a folder, or for a file that cannot be parsed: importing that says why.
    """
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def bound_names(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that statements bind, also within if, try, with and loops.

    What is bound within functions and classes does not count.
    """
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name).partition(".")[0]
        else:
            for node in ast.iter_child_nodes(statement):
                if isinstance(node, ast.stmt):
                    yield from bound_names([node])
                elif isinstance(node, ast.ExceptHandler):
                    yield from bound_names(node.body)
                else:
                    yield from _stored_names(node)


def _stored_names(expression: ast.AST) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


# --- `trireme` ---


def _find_face(fullname: str, below: str) -> ModuleSpec | None:
    """The spec of `trireme` itself, or of a module of `app` under the name `trireme.X`.

    Args:
        fullname: The full name of the module.
        below: What follows `trireme.` in it.
    """
    folder = _face_folder()
    spec = PathFinder.find_spec(fullname, [os.path.join(folder, FACE) if below else folder])
    if spec is not None and spec.loader is not None:
        return spec
    first = below.partition(".")[0]
    name = below if first in NAMES else f"app.{below}"
    is_function = first == "train"  # trireme.train is not a module, although app/train may be
    if first == "" or is_function or not file_of(name, [ROOT]):
        return None
    loader: Any = _AliasLoader(name)
    is_package = os.path.isdir(os.path.join(ROOT, *name.split(".")))
    return ModuleSpec(fullname, loader, is_package=is_package)


def _face_folder() -> str:
    """The folder that has the package `trireme`."""
    checkout = os.path.join(ROOT, "app")
    if os.path.isfile(os.path.join(checkout, FACE, "__init__.py")):
        return checkout
    # Among the sources that MLflow keeps with a model it is beside the other packages.
    if os.path.isfile(os.path.join(ROOT, FACE, "__init__.py")):
        return ROOT
    site_packages = os.path.dirname(os.path.dirname(ROOT))
    return site_packages


def _is_installed() -> bool:
    """Whether other processes of this Python find `trireme` by themselves."""
    init_files = [os.path.join(entry, FACE, "__init__.py") for entry in sys.path if entry]
    return any(map(os.path.isfile, init_files))


# --- whose a folder or a module is ---


def _search_path() -> list[str]:
    """The current folder, which workers search too, and sys.path: absolute and without links."""
    with contextlib.suppress(OSError):  # the current folder has been deleted
        return [os.path.realpath(entry or ".") for entry in ("", *sys.path)]
    return [os.path.realpath(entry) for entry in sys.path if os.path.isabs(entry)]


def _is_own_folder(path: str) -> bool:
    """Whether a path is one of Trireme's packages, in one, or the folder that has them."""
    packages = [os.path.join(ROOT, name, "") for name in NAMES]
    return path == ROOT or any(f"{path}{os.sep}".startswith(package) for package in packages)


def _is_copy(folder: str) -> bool:
    """Whether a folder has another copy of Trireme."""
    return any(os.path.isfile(os.path.join(folder, mark)) for mark in MARKS)


def is_triremes(module: ModuleType) -> bool:
    """Whether a module that has been imported is Trireme's own."""
    file = getattr(module, "__file__", None)
    if file:
        return _is_own_folder(os.path.realpath(file))
    folders = list(getattr(module, "__path__", ()))
    return bool(folders) and _is_own_folder(os.path.realpath(folders[0]))


def _is_shared(name: str) -> bool:
    """Whether the full name of a module is one of Trireme's four, or below one."""
    return name.partition(".")[0] in NAMES


def _hides_trireme(name: str, module: ModuleType) -> bool:
    """Whether an imported module is a user's under the name of a module of Trireme's."""
    if not _is_shared(name) or not isinstance(module, ModuleType):
        return False
    return not is_triremes(module) and bool(file_of(name, [ROOT]))


# --- one module from two files ---


def _add_counterpart(module: ModuleType, name: str, counterpart: Counterpart) -> None:
    """Let a module of Trireme's take what it lacks from the user's code.

    The user's submodules are found too.

    Args:
        module: The module.
        name: Its full name.
        counterpart: What the user has under this name.
    """
    copied = NONE
    if os.path.isdir(USER_COPY):
        parents = name.split(".")[:-1]
        copied = find_counterpart(name, [os.path.join(USER_COPY, *parents)])
    for source in (counterpart, copied):
        if source.folders:
            folders = list(getattr(module, "__path__", ()))
            new_folders = [folder for folder in source.folders if folder not in folders]
            module.__path__ = [*folders, *new_folders]
        if source.file.endswith(".py"):
            fallback: Any = vars(module).setdefault("__getattr__", Fallback(name))
            fallback.add(source)


class Fallback:
    """A module's `__getattr__` (PEP 562), which takes what the module lacks from the user's code.

    Args:
        name: The full name of the module.
    """

    has_users_modules = True
    """By this attribute another copy of this file, such as `app.names` beside the one that
    app/trireme/__init__.py loads, recognises a fallback."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.modules: dict[str, ModuleType] = {}
        """The user's modules that have run, by file. sys.modules has Trireme's under their name."""
        self._counterparts: dict[str, Counterpart] = {}

    def add(self, counterpart: Counterpart, module: ModuleType | None = None) -> None:
        """Take names from another file too.

        Args:
            counterpart: The file.
            module: The module that it has been imported as already; None if it has not.
        """
        self._counterparts.setdefault(counterpart.file, counterpart)
        if module is not None:
            self.modules[counterpart.file] = module

    def __call__(self, attribute: str) -> Any:
        is_submodule = file_of(f"{self.name}.{attribute}", [ROOT])
        is_special = attribute.startswith("__") and attribute.endswith("__")
        if not is_special and not is_submodule:
            for counterpart in list(self._counterparts.values()):
                user_module = self.modules.get(counterpart.file) or self._run(counterpart)
                if hasattr(user_module, attribute):
                    return getattr(user_module, attribute)
        raise AttributeError(f"module {self.name!r} has no attribute {attribute!r}")

    def _run(self, counterpart: Counterpart) -> ModuleType:
        """Run the user's module, when something from it is first needed."""
        file = counterpart.file
        is_package = os.path.basename(file) == "__init__.py"
        spec = importlib.util.spec_from_file_location(
            self.name,
            file,
            submodule_search_locations=list(counterpart.folders) if is_package else None,
        )
        assert spec is not None and spec.loader is not None
        user_module = importlib.util.module_from_spec(spec)
        # As in sys.modules before it has run, because what it imports may need it.
        self.modules[file] = user_module
        try:
            spec.loader.exec_module(user_module)
        except BaseException:
            del self.modules[file]
            raise
        return user_module


def _refuse_shared_names(name: str, user_module: ModuleType) -> None:
    """Check that an imported module of the user's defines nothing that Trireme's defines.

    Args:
        name: The full name of both modules.
        user_module: The user's.

    Raises:
        ImportError: Both define a name.
    """
    trireme_file = file_of(name, [ROOT])
    both_define = defined_names(trireme_file) & vars(user_module).keys()
    shared = {attribute for attribute in both_define if not attribute.startswith("_")}
    if shared:
        user_file = getattr(user_module, "__file__", name)
        raise ImportError(
            f"{user_file} was imported as {name} before trireme, which needs {min(shared)} of its "
            f"own module of that name ({trireme_file}): "
            "import trireme first, and give your module another name"
        )


def _import_instead(name: str, user_module: ModuleType) -> None:
    """Import Trireme's module in the place of a user's, from which it takes what it lacks.

    Args:
        name: The full name of both modules.
        user_module: The user's.
    """
    module = importlib.import_module(name)
    counterpart = Counterpart(
        folders=tuple(getattr(user_module, "__path__", ())),
        file=getattr(user_module, "__file__", None) or "",
    )
    _add_counterpart(module, name, counterpart)
    if counterpart.file.endswith(".py"):
        vars(module)["__getattr__"].add(counterpart, user_module)
