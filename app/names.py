"""Whose `app` an import gets, where a user's own package has the name of one of Trireme's four.

In every process of Trireme's, a name under `app`, `strategies`, `cluster` or `experiments` is Trireme's where Trireme
has it, and else the user's: `app.tasks` is Trireme's and `app.shop` is the user's, whatever comes first on sys.path.
The same holds for what a module defines: where both have a module `app.config`, it is Trireme's, and what Trireme's
lacks comes from the user's. What both define cannot be decided, and app/tasks/user_code.py refuses it before anything
starts.

`trireme` is Trireme's alone, and `trireme.tasks` is `app.tasks` by a name that no package of a user's can take.

This is done by a finder at the beginning of sys.meta_path (https://docs.python.org/3/reference/import.html), which
looks up the names above in Trireme's own folder. `import app` and `import trireme` put it there (`claim`). This file
imports the standard library only, and app/trireme/__init__.py loads it by its path.
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
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = ("app", "strategies", "cluster", "experiments")
FACE = "trireme"
ROOT = str(Path(__file__).resolve().parents[1])
"""The folder that holds Trireme's four packages: a checkout, or trireme/packages in site-packages."""
THEIRS = os.path.join(ROOT, FACE, "theirs")
"""Where a copy of Trireme's sources that MLflow keeps with a model has the user's of the same names."""
MARKS = (os.path.join("app", "names.py"), os.path.join("app", "tasks", "by_value.py"))
"""A folder with one of these files holds another copy of Trireme, and no packages of a user's."""


def module() -> str:
    """What to write after `python -m`, as this program was started: `app` in a checkout that is not installed."""
    words = sys.orig_argv
    return "app" if ("-m", "app") in itertools.pairwise(words) else FACE


@dataclass(frozen=True)
class Counterpart:
    """What a user has under a name of Trireme's.

    Args:
        folders: Where its submodules are, in the order in which they are searched.
        file: Its code, app.py or app/__init__.py; "" where it is only a folder.
    """

    folders: tuple[str, ...]
    file: str


NONE = Counterpart((), "")


class TriremeFinder:
    """Finds Trireme's own modules before anyone else's of the same name, and adds what the user has to theirs."""

    trireme_root = ROOT

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, None where Trireme has no such module: then Python looks for the user's."""
        top, _, rest = fullname.partition(".")
        if top == FACE:
            return _find_face(fullname, rest)
        if top not in NAMES:
            return None
        parents = fullname.split(".")[:-1]
        spec = PathFinder.find_spec(fullname, [os.path.join(ROOT, *parents)])
        if spec is None:
            return None
        counterpart = find_counterpart(fullname, path)
        if spec.loader is None:  # a folder without __init__.py, which a user's package would come before
            loader: Any = _NamespaceLoader(counterpart)
            namespace = ModuleSpec(fullname, loader, is_package=True)
            namespace.submodule_search_locations = [os.path.join(ROOT, *fullname.split("."))]
            return namespace
        if counterpart != NONE and spec.origin:
            spec.loader = _Loader(fullname, spec.origin, counterpart)
        return spec


class _Loader(SourceFileLoader):
    """Loads a module of Trireme's under whose name a user has something, too."""

    def __init__(self, name: str, file: str, counterpart: Counterpart) -> None:
        super().__init__(name, file)
        self._counterpart = counterpart

    def exec_module(self, module: ModuleType) -> None:
        _add(module, self.name, self._counterpart)
        super().exec_module(module)


class _NamespaceLoader:
    """Loads a folder of Trireme's that has no __init__.py."""

    def __init__(self, counterpart: Counterpart) -> None:
        self._counterpart = counterpart

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _add(module, module.__name__, self._counterpart)


class _SameModule:
    """A loader for `trireme.X`, which gives the module `app.X` itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import system has replaced by that of the other name


def claim() -> None:
    """Makes the four names, and `trireme`, Trireme's in this process. A second call does nothing.

    Raises:
        ImportError: A user's module that was imported before defines what Trireme needs of its own under that name.
    """
    if any(hasattr(finder, "trireme_root") for finder in sys.meta_path):
        return  # also where it is another copy of Trireme: the one that MLflow has kept with a model, say
    imported = {name: module for name, module in sys.modules.items() if _is_rival(name, module)}
    for name, module in imported.items():
        _refuse_shared(name, module)
    sys.meta_path.insert(0, TriremeFinder())
    for name in imported:
        del sys.modules[name]
    for name, module in imported.items():  # parents come before what is in them, as they were imported
        _put_before(name, module)
    merge()


def merge() -> None:
    """Lets the user's modules be found beside Trireme's: call it again where sys.path or the folder has changed."""
    for name in NAMES:
        counterpart = find_counterpart(name)
        if counterpart == NONE:
            continue
        for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            module = sys.modules[loaded]
            if is_triremes(module):
                _add(module, loaded, counterpart if loaded == name else _below(loaded, counterpart))


def hidden_names() -> dict[str, str]:
    """The names of Trireme's under which the user has code of their own, each with its file."""
    found = {name: find_counterpart(name).file for name in NAMES}
    return {name: file for name, file in found.items() if file}


def theirs_in_use() -> dict[str, str]:
    """The user's modules that have been run under names of Trireme's, with their files."""
    modules = [module for name, module in list(sys.modules.items()) if _is_shared(name) and is_triremes(module)]
    fallbacks: list[Any] = [vars(module).get("__getattr__") for module in modules]
    return {each.name: file for each in fallbacks if each is not None for file in each.modules}


def worker_setup() -> str:
    """What a worker of Ray's must call before it imports anything of Trireme's, "" where nothing hides that.

    Ray puts the driver's current folder first on its workers' sys.path when the first task arrives, after this call.
    """
    if not hidden_names():
        return ""
    return f"{FACE}.claim" if _is_installed() else f"{__name__}.claim"


def find_counterpart(name: str, path: Sequence[str] | None = None) -> Counterpart:
    """What the user has under the name of a module of Trireme's.

    Args:
        name: The whole name, such as `app.data`.
        path: Folders to search, for a submodule those of its parent. None: the current folder and sys.path.
    """
    last = name.rpartition(".")[2]
    folders: list[str] = []
    for entry in dict.fromkeys(_search_path() if path is None else path):
        if _is_own_folder(entry) or _is_copy(entry):
            continue
        package = os.path.join(entry, last)
        init = os.path.join(package, "__init__.py")
        if os.path.isfile(init):
            return Counterpart((*folders, package), init)
        if os.path.isfile(f"{package}.py"):
            return Counterpart(tuple(folders), f"{package}.py")
        if os.path.isdir(package):
            folders.append(package)
    for spec in _specs_of_other_finders(name) if path is None else ():
        return Counterpart((*folders, *(spec.submodule_search_locations or ())), spec.origin or "")
    return Counterpart(tuple(folders), "")


def file_of(name: str, folders: Sequence[str]) -> str:
    """The module's file below one of the folders that its top-level package may be in, or its folder; "" if none."""
    for folder in folders:
        place = os.path.join(folder, *name.split("."))
        for candidate in (os.path.join(place, "__init__.py"), f"{place}.py"):
            if os.path.isfile(candidate):
                return candidate
        if os.path.isdir(place):
            return place
    return ""


def defined_names(file: str) -> set[str]:
    """The names that a file of Python defines at its top level; none for a folder, or for what does not parse."""
    return set(_bound(parsed(file).body))


def parsed(file: str) -> ast.Module:
    """What a file is parsed to; an empty module for a folder, and for what does not parse: importing it says why."""
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _bound(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that statements bind, also within if, try, with and loops, but not within functions and classes."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name).partition(".")[0]
        else:
            for node in ast.iter_child_nodes(statement):
                if isinstance(node, ast.stmt):
                    yield from _bound([node])
                elif isinstance(node, ast.ExceptHandler):
                    yield from _bound(node.body)
                else:
                    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
                    yield from (each.id for each in names if isinstance(each.ctx, ast.Store))


def _find_face(fullname: str, rest: str) -> ModuleSpec | None:
    """`trireme` itself, or a module of `app` under the name `trireme.X`."""
    folder = _face_folder()
    spec = PathFinder.find_spec(fullname, [os.path.join(folder, FACE) if rest else folder])
    if spec is not None and spec.loader is not None:
        return spec
    first = rest.partition(".")[0]
    name = rest if first in NAMES else f"app.{rest}"
    if first in ("", "train") or not file_of(name, [ROOT]):  # trireme.train is a function
        return None
    loader: Any = _SameModule(name)
    return ModuleSpec(fullname, loader, is_package=os.path.isdir(os.path.join(ROOT, *name.split("."))))


def _face_folder() -> str:
    """The folder that holds the package `trireme`: in a checkout app/, else where it is installed."""
    checkout = os.path.join(ROOT, "app")
    if os.path.isfile(os.path.join(checkout, FACE, "__init__.py")):
        return checkout
    copied = os.path.join(ROOT, FACE, "__init__.py")  # beside the others, as MLflow keeps them with a model
    return ROOT if os.path.isfile(copied) else os.path.dirname(os.path.dirname(ROOT))


def _is_installed() -> bool:
    """Whether other processes of this Python find `trireme` by themselves."""
    return any(os.path.isfile(os.path.join(entry, FACE, "__init__.py")) for entry in sys.path if entry)


def _search_path() -> list[str]:
    """The current folder, which workers search too, and sys.path: absolute, and without links."""
    with contextlib.suppress(OSError):  # the current folder has been deleted
        return [os.path.realpath(entry or ".") for entry in ("", *sys.path)]
    return [os.path.realpath(entry) for entry in sys.path if os.path.isabs(entry)]


def _is_own_folder(path: str) -> bool:
    """Whether a file or folder is one of Trireme's four, or in one, or the folder that holds them."""
    return path == ROOT or any(f"{path}{os.sep}".startswith(os.path.join(ROOT, name, "")) for name in NAMES)


def _is_copy(folder: str) -> bool:
    """Whether a folder holds another copy of Trireme."""
    return any(os.path.isfile(os.path.join(folder, mark)) for mark in MARKS)


def is_triremes(module: ModuleType) -> bool:
    """Whether a module that has been imported is Trireme's own."""
    file = getattr(module, "__file__", None)
    if file:
        return _is_own_folder(os.path.realpath(file))
    folders = list(getattr(module, "__path__", ()))
    return bool(folders) and _is_own_folder(os.path.realpath(folders[0]))


def _specs_of_other_finders(name: str) -> Iterator[ModuleSpec]:
    """What finders other than Python's own know under a name: those of packages installed in editable mode, say."""
    for finder in sys.meta_path:
        if finder in (BuiltinImporter, FrozenImporter, PathFinder) or hasattr(finder, "trireme_root"):
            continue
        spec = finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
        if spec is None or not spec.origin or _is_own_folder(os.path.realpath(spec.origin)):
            continue
        if not _is_copy(os.path.dirname(os.path.dirname(spec.origin))):
            yield spec


def _below(name: str, counterpart: Counterpart) -> Counterpart:
    """The user's counterpart of a submodule, by that of its top-level package."""
    folders: Sequence[str] = counterpart.folders
    parts = name.split(".")[1:]
    for part in parts[:-1]:
        folders = [os.path.join(folder, part) for folder in folders]
    return find_counterpart(name, folders)


def _add(module: ModuleType, name: str, counterpart: Counterpart) -> None:
    """Adds the user's folders to a module of Trireme's, and lets it take from the user's code what it lacks."""
    parents = name.split(".")[:-1]
    kept = find_counterpart(name, [os.path.join(THEIRS, *parents)]) if os.path.isdir(THEIRS) else NONE
    for each in (counterpart, kept):
        if each.folders:
            folders = list(getattr(module, "__path__", ()))
            module.__path__ = [*folders, *(folder for folder in each.folders if folder not in folders)]
        if each.file.endswith(".py"):
            fallback: Any = vars(module).setdefault("__getattr__", Fallback(name))
            fallback.add(each)


class Fallback:
    """A module's `__getattr__` (PEP 562): takes what Trireme's module lacks from the user's of the same name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.modules: dict[str, ModuleType] = {}
        """The user's modules that have been run, by their files. They are not in sys.modules: their name is taken."""
        self._counterparts: dict[str, Counterpart] = {}

    def add(self, counterpart: Counterpart, module: ModuleType | None = None) -> None:
        """Takes from this file, too; module: what it has been imported as already."""
        self._counterparts.setdefault(counterpart.file, counterpart)
        if module is not None:
            self.modules[counterpart.file] = module

    def __call__(self, attribute: str) -> Any:
        is_submodule = file_of(f"{self.name}.{attribute}", [ROOT])
        is_special = attribute.startswith("__") and attribute.endswith("__")
        if not is_special and not is_submodule:
            for counterpart in list(self._counterparts.values()):
                module = self.modules.get(counterpart.file) or self._run(counterpart)
                if hasattr(module, attribute):
                    return getattr(module, attribute)
        raise AttributeError(f"module {self.name!r} has no attribute {attribute!r}")

    def _run(self, counterpart: Counterpart) -> ModuleType:
        """The user's module, run when something of it is first needed."""
        file = counterpart.file
        is_package = os.path.basename(file) == "__init__.py"
        spec = importlib.util.spec_from_file_location(
            self.name, file, submodule_search_locations=list(counterpart.folders) if is_package else None
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        self.modules[file] = module  # before it has been run, as in sys.modules: what it imports may need it
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del self.modules[file]
            raise
        return module


def _is_shared(name: str) -> bool:
    """Whether a module's whole name is one of the four, or below one."""
    return name.partition(".")[0] in NAMES


def _is_rival(name: str, module: ModuleType) -> bool:
    """Whether a module that has been imported is a user's and has a name of Trireme's."""
    is_imported = _is_shared(name) and isinstance(module, ModuleType)
    return is_imported and not is_triremes(module) and bool(file_of(name, [ROOT]))


def _refuse_shared(name: str, theirs: ModuleType) -> None:
    """Raises ImportError where a user's module that is in use defines what Trireme's module of that name defines."""
    ours = file_of(name, [ROOT])
    shared = {each for each in defined_names(ours) & vars(theirs).keys() if not each.startswith("_")}
    if shared:
        raise ImportError(
            f"{getattr(theirs, '__file__', name)} was imported as {name} before trireme, which needs {min(shared)} of "
            f"its own module of that name ({ours}): import trireme first, and give your module another name"
        )


def _put_before(name: str, theirs: ModuleType) -> None:
    """Imports Trireme's module in the place of a user's, which is asked for what Trireme's lacks."""
    module = importlib.import_module(name)
    counterpart = Counterpart(tuple(getattr(theirs, "__path__", ())), getattr(theirs, "__file__", None) or "")
    _add(module, name, counterpart)
    if counterpart.file.endswith(".py"):
        vars(module)["__getattr__"].add(counterpart, theirs)
