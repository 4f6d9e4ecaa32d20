"""Logs a trained model so that `mlflow.pytorch.load_model` gives the module back in a process that has only mlflow and
torch: pickled, with the Python sources its classes come from, a signature, an input example and pinned requirements.

Through MlflowClient, step by step, rather than `mlflow.pytorch.log_model`: that reads the whole history of every metric
of the run, and when an answer is lost, a second call makes a second model.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from mlflow.entities import LoggedModelOutput, Metric
from mlflow.models import Model, infer_signature

from app.tracking.mlflow_run import MlflowRun, Refused
from app.tracking.model_files import Rebuilt, origins, rebuild, requirements, sources
from app.tracking.spool import Event

NAME = "model"
_EVENT_TAG = "trireme.event"
_METRICS = 1000
_log = logging.getLogger("writer")


class Upload:
    """One model event on its way. `log` may be called again after a failure: it goes on where it was.

    Args:
        event: of type model, with "recipe" ({"task", "task_args", "weights", "metrics"}) or "recipe_file".
        scratch: an empty folder to build in.
    """

    def __init__(self, event: Event, scratch: Path) -> None:
        self._event, self._id, self._scratch = event, event["id"], scratch
        self._recipe: dict[str, Any] = {}
        self._rebuilt: Rebuilt | None = None
        self._written = False

    def log(self, run: MlflowRun) -> None:
        """Raises:
        Refused: the model cannot be rebuilt; Away: MLflow cannot take it now.
        """
        try:
            # Before MLflow has an entry for it: one without files would be the run's latest model.
            if self._rebuilt is None:
                self._recipe = self._event.get("recipe") or json.loads(Path(self._event["recipe_file"]).read_text())
                self._rebuilt = rebuild(self._recipe)
        except Exception as error:
            _log.exception("the model cannot be rebuilt")
            raise Refused(f"{type(error).__name__}: {error}") from error
        client = run.client()
        run.refresh()  # the points that go on the model's page have just been delivered
        with run.speaking():
            model = (entries(run, self._id) or [self._new_entry(run)])[0]
            if model.status == "READY":
                return  # the answer to an earlier try was lost
        folder = self._write(run, model, self._rebuilt)
        with run.speaking():
            outputs = client.get_run(run.run_id).outputs
            if model.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
                step = max((point.step for point in run.latest if point.key in self._wanted), default=0)
                client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, step=step)])
            client.log_model_artifacts(model.model_id, str(folder))
            if metrics := self._metrics(run, model.model_id):
                client.log_batch(run.run_id, metrics=metrics, synchronous=True)
            client.finalize_logged_model(model.model_id, "READY")

    @property
    def _wanted(self) -> set[str]:
        return set(self._recipe.get("metrics") or {})

    def _new_entry(self, run: MlflowRun) -> Any:
        tags = {_EVENT_TAG: self._id, "trireme.task": str(self._recipe["task"])}
        return run.client().create_logged_model(
            run.experiment_id, name=NAME, source_run_id=run.run_id, tags=tags, params=run.known_params
        )

    def _metrics(self, run: MlflowRun, model_id: str) -> list[Metric]:
        """The recipe's metrics as the run has them (the same points, so that none is doubled), for the model's page."""
        points = [point for point in run.latest if point.key in self._wanted][:_METRICS]
        return [
            Metric(point.key, point.value, point.timestamp, point.step, model_id=model_id, run_id=run.run_id)
            for point in points
        ]

    def _write(self, run: MlflowRun, model: Any, rebuilt: Rebuilt) -> Path:
        """The MLflow model as a folder, written once."""
        import mlflow.pytorch

        folder = self._scratch / NAME
        if self._written:
            return folder
        copied, installed = origins(rebuilt.module, self._recipe["task"])
        about = Model(
            artifact_path=model.artifact_location,
            model_uuid=model.model_id,
            run_id=run.run_id,
            model_id=model.model_id,
        )
        try:
            mlflow.pytorch.save_model(
                rebuilt.module,
                str(folder),
                serialization_format="pickle",
                mlflow_model=about,
                signature=infer_signature(rebuilt.inputs, rebuilt.outputs),
                input_example=rebuilt.inputs,
                pip_requirements=requirements(installed),
                code_paths=sources(copied, self._scratch / "code"),
            )
        except Exception as error:
            _log.exception("the model cannot be saved")
            abandon(run, self._id)
            raise Refused(f"{type(error).__name__}: {error}") from error
        self._written = True
        return folder


def entries(run: MlflowRun, event: str) -> list[Any]:
    """What MLflow's list of models has for this event."""
    found = run.client().search_logged_models([run.experiment_id], f"tags.`{_EVENT_TAG}` = '{event}'", max_results=1)
    return list(found)


def abandon(run: MlflowRun, event: str) -> None:
    """Remove the entry of a model that was begun and will not be finished."""
    with run.speaking():
        for model in entries(run, event):
            if model.status != "READY":
                run.client().delete_logged_model(model.model_id)
