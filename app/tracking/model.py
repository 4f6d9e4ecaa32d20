"""The trained model, so that `mlflow.pytorch.load_model` gives the module back in a process that has only mlflow and
torch: pickled, with the Python sources that its classes come from, a signature, an input example and pinned versions.

What a person gives it, and what it answers, is in app/models/prediction.py.

Through MlflowClient, step by step, rather than `mlflow.pytorch.log_model`: of that, a second call after a lost answer
makes a second model.
"""

import contextlib
import importlib
import json
import shutil
import sys
import tempfile
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import mlflow.pytorch
import torch
from mlflow.entities import LoggedModelOutput, Metric
from mlflow.models import Model, ModelSignature, infer_signature
from mlflow.tracking import MlflowClient
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import AnyType

from app import names as import_names
from app.data.loader import fetch
from app.models import prediction
from app.models.prediction import Predictor, watched_arguments
from app.storage.storage import Storage
from app.tasks import load_task
from app.tasks.by_value import read_task_file
from app.tracking.spool import Event

NAME = "model"
OURS = ("app", "strategies", import_names.FACE)
PICKLING = f"{import_names.FACE}.pickling"
LOADER = f"{import_names.FACE}.prediction"
"""Named as `trireme.…`, so that the sources beside the model come before another `app` of the program that loads it."""
EVENT_TAG = "trireme.event"
NUMBERS = (DataType.integer, DataType.long, DataType.float, DataType.double)


class Unusable(Exception):
    """The model cannot be rebuilt or pickled."""


def upload(client: MlflowClient, run_id: str, event: Event) -> None:
    """Log the model of a "model" event; may be repeated after a failure. Raises Unusable."""
    run = client.get_run(run_id)
    experiment = run.info.experiment_id
    found = client.search_logged_models([experiment], f"tags.`{EVENT_TAG}` = '{event['id']}'", max_results=1)
    recipe = Path(event["recipe"])
    if not found or found[0].status != "READY":
        about = json.loads(recipe.read_text())
        with tempfile.TemporaryDirectory() as scratch:
            try:  # before MLflow has an entry for it: one without files would be the run's latest model
                _save(about, run_id, Path(scratch))
            except Exception as error:
                raise Unusable(f"{type(error).__name__}: {error}") from error
            tags = {EVENT_TAG: event["id"], "trireme.task": str(about["task"])}
            entry = found[0] if found else client.create_logged_model(experiment, NAME, run_id, tags, run.data.params)
            # The same points as the run has, for the model's page, so that none is doubled.
            latest = [m for m in run.data.to_proto().metrics if m.key in about["metrics"]]
            points = [Metric(m.key, m.value, m.timestamp, m.step, entry.model_id, run_id=run_id) for m in latest]
            client.log_outputs(run_id, [LoggedModelOutput(entry.model_id, max((m.step for m in latest), default=0))])
            client.log_model_artifacts(entry.model_id, str(Path(scratch) / NAME))
            client.log_batch(run_id, metrics=points, synchronous=True)
            client.finalize_logged_model(entry.model_id, "READY")
    recipe.unlink(missing_ok=True)


def _save(recipe: dict[str, Any], run_id: str, scratch: Path) -> None:
    """Write the model in MLflow's format into `scratch`/model. Raises whatever the task's own code raises."""
    read_task_file(recipe["task"], Storage(recipe.get("folder", ".")))
    with contextlib.chdir(recipe["cwd"]):  # where its relative paths mean what they did
        task = load_task(recipe["task"], dict(recipe["task_args"]))
        module = task.build_trained()
        example = fetch(task.train_data(), [(0, 0)])
    module.load_state_dict(torch.load(recipe["weights"], map_location="cpu", weights_only=True))
    module.eval()
    preprocessor = task.preprocessor()
    model = Predictor(module, preprocessor) if preprocessor else module
    known = preprocessor or watched_arguments(module, task.loss, example)
    inputs = known.example
    output = Predictor(module, known).predict(inputs)
    ours, pins = _origins(model, recipe["task"])
    about = Model(artifact_path=NAME, run_id=run_id)
    mlflow.pytorch.save_model(
        model,
        str(scratch / NAME),
        serialization_format="pickle",
        pickle_module=importlib.import_module(PICKLING),
        mlflow_model=about,
        signature=_signature(inputs, output),
        input_example=inputs,
        pip_requirements=pins,
        code_paths=_copy_sources(ours, scratch / "code"),
    )
    if not preprocessor:
        torch.save(known, scratch / NAME / "data" / prediction.FILE)
    served = about.flavors["python_function"] | {"loader_module": LOADER}
    about.add_flavor("python_function", **served)
    about.save(str(scratch / NAME / "MLmodel"))


def _signature(inputs: Any, output: Any) -> ModelSignature:
    """With numbers of any type in columns of numbers: MLflow would refuse whole ones among floats, and floats, which
    missing values make of them, among whole ones. A single column of texts has no name, so that a text will do."""
    found = infer_signature(inputs, output)
    if found.inputs is None or found.inputs.is_tensor_spec():
        return found
    columns: list[Any] = [
        ColSpec(AnyType() if column.type in NUMBERS else column.type, column.name, column.required)
        for column in found.inputs.inputs
    ]
    if [column.type for column in columns] == [DataType.string]:
        columns = [ColSpec(DataType.string)]
    return ModelSignature(Schema(columns), found.outputs, found.params)


def _origins(module: torch.nn.Module, task: str) -> tuple[set[str], list[str]]:
    """Where the model's classes and its task come from: (top-level modules to copy, pins of installed packages)."""
    names = {kind.__module__ for part in module.modules() for kind in type(part).__mro__} | {task.partition(":")[0]}
    names = {name.partition(".")[0] for name in names} - {"__main__", *OURS, *sys.stdlib_module_names}
    installed = {name for name in names if "-packages" in str(getattr(sys.modules.get(name), "__file__", ""))}
    providers = packages_distributions()
    packages = {providers.get(name, [name])[0] for name in installed | {"torch"}}
    # Without the local part of a version (`+cpu`), which no index has.
    pins = [f"{name}=={version(name).split('+')[0]}" for name in sorted(packages)]
    return (names - installed) | {*OURS}, pins


def _copy_sources(names: set[str], folder: Path) -> list[str]:
    """Copy what rebuilding the model and calling it once has loaded of these; return what to give as `code_paths`."""
    folder.mkdir()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        top = name.partition(".")[0]
        is_theirs = top in import_names.NAMES and not import_names.is_triremes(module)
        if (top in names or is_theirs) and file.endswith(".py") and module.__name__ == name:
            place = folder.joinpath(*name.split("."))
            copy = place / "__init__.py" if Path(file).name == "__init__.py" else place.with_suffix(".py")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    for name, file in import_names.theirs_in_use().items():
        place = folder.joinpath(import_names.FACE, "theirs", *name.split("."))
        copy = place / "__init__.py" if Path(file).name == "__init__.py" else place.with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return [str(path) for path in sorted(folder.iterdir())]
