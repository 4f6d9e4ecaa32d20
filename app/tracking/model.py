"""Logs the trained model to MLflow.

`mlflow.pytorch.load_model` returns the module in a process that has only mlflow and torch. The
model is pickled, with the Python sources of its classes, a signature, an input example and pinned
versions. Its inputs and outputs are defined in app/models/prediction.py.

This file calls MlflowClient step by step instead of `mlflow.pytorch.log_model`, which would make a
second model when it is repeated after a lost answer.
"""

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlflow.pyfunc
from mlflow.entities import LoggedModelOutput, Metric, Run
from mlflow.models import Model, ModelSignature, infer_signature
from mlflow.tracking import MlflowClient
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import AnyType

from app import names
from app.tracking.model_format import DESCRIPTION, Description, files_of
from app.tracking.spool import Event

NAME = "model"
LOADER = f"{names.FACE}.models.prediction"
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
        event: Has the path of the recipe, which is deleted afterwards, as the model's files are;
            see `Tracker.model`.

    Raises:
        Unusable: The model cannot be built again or pickled.
    """
    run = client.get_run(run_id)
    has_event = f"tags.`{EVENT_TAG}` = '{event['id']}'"
    models = client.search_logged_models([run.info.experiment_id], has_event, max_results=1)
    recipe_path = Path(event["recipe"])
    if not models or models[0].status != "READY":
        recipe = json.loads(recipe_path.read_text())
        files = files_of(recipe_path)
        with tempfile.TemporaryDirectory(dir=recipe_path.parent) as scratch:
            # Build the model before MLflow has an entry for it: an entry without files would be the
            # run's latest model.
            try:
                if not files.exists():
                    _write_files(recipe, files)
                _save(files, run_id, Path(scratch))
            except Exception as error:
                raise Unusable(f"{type(error).__name__}: {error}") from error
            if models:
                model_id = models[0].model_id
            else:
                tags = {EVENT_TAG: event["id"], "trireme.task": str(recipe["task"])}
                model_id = _create_entry(client, run, tags)
            _publish(client, run, model_id, files=Path(scratch) / NAME, metrics=recipe["metrics"])
    discard(recipe_path)


def discard(recipe_path: Path) -> None:
    """Delete a recipe and the files of its model.

    Args:
        recipe_path: The recipe.
    """
    shutil.rmtree(files_of(recipe_path), ignore_errors=True)
    recipe_path.unlink(missing_ok=True)


def _write_files(recipe: dict[str, Any], files: Path) -> None:
    """Write what the driver has not written."""
    # Not at the top: it imports torch, which takes seconds.
    from app.tracking.model_files import read_task_of, write_model_files

    write_model_files(read_task_of(recipe), recipe, files)


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


def _save(files: Path, run_id: str, scratch: Path) -> None:
    """Write the model in MLflow's format into `scratch`/model.

    `mlflow.pytorch.save_model` would import torch and pickle the module here. Of what it writes,
    the flavor `pytorch` and the folder that this names are MLflow's documented format
    (https://mlflow.org/docs/latest/ml/model/), and `mlflow.pyfunc.save_model` writes the rest.

    Args:
        files: What app/tracking/model_files.py has written.
        run_id: The MLflow run.
        scratch: On the same file system.
    """
    description: Description = pickle.loads((files / DESCRIPTION).read_bytes())
    folder = scratch / NAME
    model = Model(artifact_path=NAME, run_id=run_id)
    mlflow.pyfunc.save_model(
        str(folder),
        loader_module=LOADER,
        mlflow_model=model,
        signature=_signature(description.inputs, description.outputs),
        input_example=description.inputs,
        pip_requirements=description.requirements,
        code_paths=[str(path) for path in sorted((files / "code").iterdir())],
    )
    # Linked, because the weights may be large.
    shutil.copytree(files / "data", folder / "data", copy_function=_link)
    flavor = {"model_data": "data", "pytorch_version": description.torch_version, "code": "code"}
    model.add_flavor("pytorch", **flavor)
    model.add_flavor("python_function", **model.flavors["python_function"] | {"data": "data"})
    model.model_size_bytes = sum(path.stat().st_size for path in folder.rglob("*"))
    model.save(str(folder / "MLmodel"))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no links
        shutil.copyfile(source, target)


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
