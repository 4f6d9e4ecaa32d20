"""Writes what MLflow keeps of a trained model, as far as that takes torch and the task.

The driver does this at the end of a run: it has imported torch and read the task, for which the
writer would need seconds. app/tracking/model.py then adds MLflow's own files, without torch. If it
was not done, as when the driver was killed, the writer does it.

    data/              `model.pth`, the pickled module, and what `mlflow.pytorch.load_model` needs
    code/              the sources of the model's classes, of its task, and of what these import
    description.pkl    `Description`

The inputs and outputs of the model are defined in app/models/prediction.py.
"""

import ast
import contextlib
import copy
import importlib.util
import pickle
import shutil
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import (
    PackageNotFoundError,
    distribution,
    packages_distributions,
    version,
)
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize

from app import names as import_names
from app.data.loader import fetch
from app.models import prediction
from app.models.prediction import Predictor, watched_arguments
from app.storage.storage import Storage
from app.tasks import load_task
from app.tasks.base import Task
from app.tasks.by_value import read_task_file
from app.tracking.model_format import DESCRIPTION, PICKLING, WEIGHTS, Description, part_of

OURS = ("app", "strategies", "cluster", import_names.FACE)


def read_task_of(recipe: Mapping[str, Any]) -> Task:
    """The task of a run, read again in a process that has not prepared the run.

    Args:
        recipe: See `Tracker.model`.
    """
    read_task_file(recipe["task"], Storage(recipe.get("folder", ".")))
    return load_task(recipe["task"], dict(recipe["task_args"]))


def write_model_files(task: Task, recipe: Mapping[str, Any], folder: Path) -> None:
    """Write the files of a trained model; may raise errors of the task.

    Args:
        task: The task of the run.
        recipe: See `Tracker.model`.
        folder: Does not exist yet, and is there afterwards only if everything is in it.
    """
    part = part_of(folder)
    part.mkdir(mode=0o700)
    try:
        _write(task, recipe, part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(task: Task, recipe: Mapping[str, Any], folder: Path) -> None:
    with contextlib.chdir(recipe["cwd"]):  # the task's relative paths refer to this folder
        module = task.build_trained()
        example = fetch(task.train_data(), [(0, 0)])
    module.load_state_dict(torch.load(recipe["weights"], map_location="cpu", weights_only=True))
    module.eval()
    _remove_parametrizations(module)
    preprocessor = task.preprocessor()
    model = Predictor(module, preprocessor) if preprocessor else module
    inputs_of_model = preprocessor or watched_arguments(module, task.loss, example)
    inputs = inputs_of_model.example
    outputs = Predictor(_sharing_tensors(module), inputs_of_model).predict(inputs)
    data = folder / "data"
    data.mkdir()
    # Before the sources are copied: pickling may import more of them.
    torch.save(model, data / WEIGHTS, pickle_module=cloudpickle)
    (data / "pickle_module_info.txt").write_text(PICKLING)
    if not preprocessor:
        torch.save(inputs_of_model, data / prediction.FILE)
    packages, pins = _origins(model, recipe["task"])
    _copy_sources(packages, _roots(model, task), folder / "code")
    description = Description(
        inputs=inputs, outputs=outputs, requirements=pins, torch_version=str(torch.__version__)
    )
    (folder / DESCRIPTION).write_bytes(pickle.dumps(description))


def _remove_parametrizations(module: nn.Module) -> None:
    """Compute parametrized weights (wav2vec2 normalizes one) once: torch pickles no others."""
    for part in module.modules():
        if parametrize.is_parametrized(part):
            parametrizations: Any = part.parametrizations
            for name in list(parametrizations):
                parametrize.remove_parametrizations(part, name)


def _sharing_tensors(module: nn.Module) -> nn.Module:
    """A copy of a module with the same tensors.

    Some models of transformers, such as SegFormer, hook into themselves when they are first called,
    and could not be pickled afterwards.
    """
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


# --- where a model's classes come from ---


def _roots(model: nn.Module, task: Task) -> set[str]:
    """The modules of a model's classes and of its task, and those that MLflow names."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    return {prediction.__name__, *(kind.__module__ for kind in (*kinds, *type(task).__mro__))}


def _origins(module: nn.Module, task: str) -> tuple[set[str], list[str]]:
    """The code of the model's classes and its task, beside Trireme's.

    Returns:
        (names of top-level modules that are not installed, pins of packages that are)
    """
    modules = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    modules.add(task.partition(":")[0])
    top_level = {name.partition(".")[0] for name in modules}
    top_level -= {"__main__", *OURS, *sys.stdlib_module_names}
    installed = {name for name in top_level if _is_installed(name)}
    packages = {_package_of(name) for name in installed | {"torch"}}
    # Package indexes do not have the local part of a version (`+cpu`).
    pins = [f"{name}=={version(name).split('+')[0]}" for name in sorted(packages)]
    return top_level - installed, pins


def _package_of(name: str) -> str:
    """The package that has installed a top-level module.

    Most say so themselves under the module's name; reading what all packages have installed takes
    most of a second.
    """
    with contextlib.suppress(PackageNotFoundError):
        if name in (distribution(name).read_text("top_level.txt") or "").split():
            return name
    return packages_distributions().get(name, [name])[0]


def _is_installed(name: str) -> bool:
    return "-packages" in str(getattr(sys.modules.get(name), "__file__", ""))


# --- their sources ---


def _copy_sources(packages: set[str], roots: Iterable[str], folder: Path) -> None:
    """Copy the loaded modules from which the model can be built and called.

    Args:
        packages: Top-level modules of the user's, of which everything is copied.
        roots: Modules that are needed. Of Trireme's these are copied, and what they import, as the
            driver has loaded much else.
        folder: Where to.
    """
    folder.mkdir()
    needed = _with_imports(roots)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        top_level = name.partition(".")[0]
        is_theirs = top_level in import_names.NAMES and not import_names.is_triremes(module)
        is_wanted = name in needed or top_level in packages or is_theirs
        if is_wanted and file.endswith(".py") and module.__name__ == name:
            _copy_module(file, folder.joinpath(*name.split(".")))
    for name in (import_names.FACE, PICKLING):  # not imported here: the second imports MLflow
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            _copy_module(spec.origin, folder.joinpath(*name.split(".")))
    for name, file in import_names.user_modules_in_use().items():
        _copy_module(file, folder.joinpath(import_names.FACE, "theirs", *name.split(".")))


def _with_imports(roots: Iterable[str]) -> set[str]:
    """Trireme's loaded modules among some, and those that these import, at any depth."""
    modules = set[str]()
    waiting = [*roots]
    while waiting:
        name = waiting.pop()
        if name in modules or name not in sys.modules or name.partition(".")[0] not in OURS:
            continue
        modules.add(name)
        waiting.append(name.rpartition(".")[0])
        waiting.extend(_imports_of(sys.modules[name]))
    return modules


def _imports_of(module: ModuleType) -> list[str]:
    """What the source of a module imports anywhere, except for type checkers."""
    file = getattr(module, "__file__", None) or ""
    if not file.endswith(".py"):
        return []
    visitor = _Imports()
    visitor.visit(ast.parse(Path(file).read_bytes()))
    return visitor.names


class _Imports(ast.NodeVisitor):
    """Collects the names of imported modules, and of what may be one."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names.extend(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is not None:
            self.names.append(node.module)
            self.names.extend(f"{node.module}.{alias.name}" for alias in node.names)


def _copy_module(file: str, place: Path) -> None:
    is_package = Path(file).name == "__init__.py"
    copy = place / "__init__.py" if is_package else place.with_suffix(".py")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
