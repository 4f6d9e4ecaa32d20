"""Logs the trained model to MLflow.

`mlflow.pytorch.load_model` returns the module in a process that has only mlflow and torch. The
model is pickled, with the Python sources of its classes, a signature, an input example and pinned
versions. Its inputs and outputs are defined in app/models/prediction.py.

This file calls MlflowClient step by step instead of `mlflow.pytorch.log_model`, which would make a
second model when it is repeated after a lost answer.
"""

import contextlib
import copy
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Collection
from importlib.metadata import (
    PackageNotFoundError,
    distribution,
    packages_distributions,
    version,
)
from pathlib import Path
from typing import Any

import mlflow.pytorch
import torch
from mlflow.entities import LoggedModelOutput, Metric, Run
from mlflow.models import Model, ModelSignature, infer_signature
from mlflow.tracking import MlflowClient
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import AnyType
from torch import nn
from torch.nn.utils import parametrize

from app import names as import_names
from app.data.loader import fetch
from app.models import prediction
from app.models.prediction import Predictor, watched_arguments
from app.storage.storage import Storage
from app.tasks import load_task
from app.tasks.by_value import read_task_file
from app.tracking.spool import Event

NAME = "model"
OURS = ("app", "strategies", "cluster", import_names.FACE)
PICKLING = f"{import_names.FACE}.pickling"
LOADER = f"{import_names.FACE}.models.prediction"
"""Under `trireme.…`, so that the program that loads the model may have another package `app`."""
EVENT_TAG = "trireme.event"
NUMBERS = (DataType.integer, DataType.long, DataType.float, DataType.double)


class Unusable(Exception):
    """The model cannot be built again or pickled."""


def upload(client: MlflowClient, run_id: str, event: Event) -> None:
    """Log the model of a "model" event; may be repeated after a failure.

    Args:
        client: MLflow's client.
        run_id: The MLflow run.
        event: Has the path of the recipe, which is deleted afterwards; see `Tracker.model`.

    Raises:
        Unusable: The model cannot be built again or pickled.
    """
    run = client.get_run(run_id)
    has_event = f"tags.`{EVENT_TAG}` = '{event['id']}'"
    models = client.search_logged_models([run.info.experiment_id], has_event, max_results=1)
    recipe_path = Path(event["recipe"])
    if not models or models[0].status != "READY":
        recipe = json.loads(recipe_path.read_text())
        with tempfile.TemporaryDirectory() as scratch:
            # Build the model before MLflow has an entry for it: an entry without files would be the
            # run's latest model.
            try:
                _save(recipe, run_id, Path(scratch))
            except Exception as error:
                raise Unusable(f"{type(error).__name__}: {error}") from error
            if models:
                model_id = models[0].model_id
            else:
                tags = {EVENT_TAG: event["id"], "trireme.task": str(recipe["task"])}
                model_id = _create_entry(client, run, tags)
            _publish(client, run, model_id, files=Path(scratch) / NAME, metrics=recipe["metrics"])
    recipe_path.unlink(missing_ok=True)


def _create_entry(client: MlflowClient, run: Run, tags: dict[str, str]) -> str:
    model = client.create_logged_model(
        run.info.experiment_id,
        name=NAME,
        source_run_id=run.info.run_id,
        tags=tags,
        params=run.data.params,
    )
    return model.model_id


def _publish(
    client: MlflowClient, run: Run, model_id: str, *, files: Path, metrics: Collection[str]
) -> None:
    """Upload a model's files and metrics, and mark it as ready."""
    run_id = run.info.run_id
    # The model's page shows the points that the run has; repeating them doubles nothing.
    latest = [metric for metric in run.data.to_proto().metrics if metric.key in metrics]
    points = [
        Metric(
            key=metric.key,
            value=metric.value,
            timestamp=metric.timestamp,
            step=metric.step,
            model_id=model_id,
            run_id=run_id,
        )
        for metric in latest
    ]
    step = max((metric.step for metric in latest), default=0)
    client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
    client.log_model_artifacts(model_id, str(files))
    client.log_batch(run_id, metrics=points, synchronous=True)
    client.finalize_logged_model(model_id, "READY")


def _save(recipe: dict[str, Any], run_id: str, scratch: Path) -> None:
    """Write the model in MLflow's format into `scratch`/model; may raise errors of the task."""
    read_task_file(recipe["task"], Storage(recipe.get("folder", ".")))
    with contextlib.chdir(recipe["cwd"]):  # the task's relative paths refer to this folder
        task = load_task(recipe["task"], dict(recipe["task_args"]))
        module = task.build_trained()
        example = fetch(task.train_data(), [(0, 0)])
    module.load_state_dict(torch.load(recipe["weights"], map_location="cpu", weights_only=True))
    module.eval()
    _remove_parametrizations(module)
    preprocessor = task.preprocessor()
    model = Predictor(module, preprocessor) if preprocessor else module
    inputs_of_model = preprocessor or watched_arguments(module, task.loss, example)
    inputs = inputs_of_model.example
    output = Predictor(_sharing_tensors(module), inputs_of_model).predict(inputs)
    modules, pins = _origins(model, recipe["task"])
    description = Model(artifact_path=NAME, run_id=run_id)
    mlflow.pytorch.save_model(
        model,
        str(scratch / NAME),
        serialization_format="pickle",
        pickle_module=importlib.import_module(PICKLING),
        mlflow_model=description,
        signature=_signature(inputs, output),
        input_example=inputs,
        pip_requirements=pins,
        code_paths=_copy_sources(modules, scratch / "code"),
    )
    if not preprocessor:
        torch.save(inputs_of_model, scratch / NAME / "data" / prediction.FILE)
    flavor = description.flavors["python_function"] | {"loader_module": LOADER}
    description.add_flavor("python_function", **flavor)
    description.save(str(scratch / NAME / "MLmodel"))


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


def _signature(inputs: Any, output: Any) -> ModelSignature:
    """The model's signature, more tolerant than the one that MLflow infers.

    MLflow would refuse whole numbers in a column of floats, and floats, which missing values lead
    to, in a column of whole numbers: columns of numbers accept both. A single column of texts gets
    no name, so that a plain text is accepted.
    """
    inferred = infer_signature(inputs, output)
    if inferred.inputs is None or inferred.inputs.is_tensor_spec():
        return inferred
    columns: list[Any] = [
        ColSpec(AnyType() if column.type in NUMBERS else column.type, column.name, column.required)
        for column in inferred.inputs.inputs
    ]
    if [column.type for column in columns] == [DataType.string]:
        columns = [ColSpec(DataType.string)]
    return ModelSignature(Schema(columns), inferred.outputs, inferred.params)


def _origins(module: torch.nn.Module, task: str) -> tuple[set[str], list[str]]:
    """The code of the model's classes and its task.

    Returns:
        (names of top-level modules to copy, pins of installed packages)
    """
    modules = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    modules.add(task.partition(":")[0])
    top_level = {name.partition(".")[0] for name in modules}
    top_level -= {"__main__", *OURS, *sys.stdlib_module_names}
    installed = {name for name in top_level if _is_installed(name)}
    packages = {_package_of(name) for name in installed | {"torch"}}
    # Package indexes do not have the local part of a version (`+cpu`).
    pins = [f"{name}=={version(name).split('+')[0]}" for name in sorted(packages)]
    return (top_level - installed) | {*OURS}, pins


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


def _copy_sources(names: set[str], folder: Path) -> list[str]:
    """Copy the loaded modules of these packages, from which the model can be built and called.

    Returns:
        The paths for MLflow's `code_paths`.
    """
    folder.mkdir()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        top_level = name.partition(".")[0]
        is_theirs = top_level in import_names.NAMES and not import_names.is_triremes(module)
        is_wanted = top_level in names or is_theirs
        if is_wanted and file.endswith(".py") and module.__name__ == name:
            _copy_module(file, folder.joinpath(*name.split(".")))
    for name, file in import_names.user_modules_in_use().items():
        _copy_module(file, folder.joinpath(import_names.FACE, "theirs", *name.split(".")))
    return [str(path) for path in sorted(folder.iterdir())]


def _copy_module(file: str, place: Path) -> None:
    is_package = Path(file).name == "__init__.py"
    copy = place / "__init__.py" if is_package else place.with_suffix(".py")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
