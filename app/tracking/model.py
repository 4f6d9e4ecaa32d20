"""Logs a trained model so that `mlflow.pytorch.load_model` gives the module back in a process that has only mlflow and
torch: pickled, with the Python sources its classes come from, a signature, an input example and pinned requirements.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from mlflow.entities import LoggedModelOutput, Metric
from mlflow.models import Model, infer_signature

from app.tracking.mlflow_run import MlflowRun, Refused
from app.tracking.spool import Event

NAME = "model"
_EVENT_TAG = "trireme.event"
_INSTALLED = {"site-packages", "dist-packages"}
_log = logging.getLogger("writer")


class Upload:
    """One model event on its way. `log` may be called again after a failure: it goes on where it was.

    Args:
        event: of type model.
        scratch: an empty folder to build in.
    """

    def __init__(self, event: Event, scratch: Path) -> None:
        self._event, self._scratch = event, scratch
        self._loaded: Any = None
        self._built: Path | None = None

    def log(self, run: MlflowRun) -> None:
        """Raises:
        Refused: the model cannot be rebuilt; Away: MLflow cannot take it now.
        """
        client = run.client()
        run.refresh()  # the points that go on the model's page have just been delivered
        with run.speaking():
            model = self._entry(run, client)
            if model.status == "READY":
                return  # the answer to an earlier try was lost
        folder = self._build(run, model)
        with run.speaking():
            step = max((metric.step for metric in run.latest), default=0)
            outputs = client.get_run(run.run_id).outputs
            if model.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
                client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, step=step)])
            client.log_model_artifacts(model.model_id, str(folder))
            if metrics := self._metrics(run, model.model_id):
                client.log_batch(run.run_id, metrics=metrics, synchronous=True)
            client.finalize_logged_model(model.model_id, "READY")

    def _entry(self, run: MlflowRun, client: Any) -> Any:
        """The model in MLflow's list of models: the one an earlier try made, or a new one."""
        event = self._event["id"]
        found = client.search_logged_models([run.experiment_id], f"tags.`{_EVENT_TAG}` = '{event}'", max_results=1)
        if found:
            return found[0]
        recipe = self._event["recipe"]
        return client.create_logged_model(
            run.experiment_id,
            name=NAME,
            source_run_id=run.run_id,
            tags={_EVENT_TAG: event, "trireme.task": str(recipe["task"])},
            params=run.known_params,
        )

    def _metrics(self, run: MlflowRun, model_id: str) -> list[Metric]:
        """The recipe's metrics as the run has them (the same points, so that none is doubled), for the model's page."""
        wanted = set(self._event["recipe"].get("metrics") or {})
        return [
            Metric(point.key, point.value, point.timestamp, point.step, model_id=model_id, run_id=run.run_id)
            for point in run.latest
            if point.key in wanted
        ][:1000]

    def _build(self, run: MlflowRun, model: Any) -> Path:
        """The MLflow model as a folder, built once."""
        if self._built is None:
            try:
                self._built = self._write(run, model)
            except Exception as error:
                _log.exception("the model cannot be rebuilt")
                raise Refused(f"{type(error).__name__}: {error}") from error
        return self._built

    def _write(self, run: MlflowRun, model: Any) -> Path:
        import mlflow.pytorch

        recipe, begun = self._event["recipe"], time.monotonic()
        module, inputs, outputs = rebuild(recipe)
        _log.warning("rebuilt the model in %.1f s", time.monotonic() - begun)
        ours, installed = origins(module, recipe)
        folder = self._scratch / NAME
        mlflow.pytorch.save_model(
            module,
            str(folder),
            serialization_format="pickle",
            mlflow_model=Model(
                artifact_path=model.artifact_location,
                model_uuid=model.model_id,
                run_id=run.run_id,
                model_id=model.model_id,
            ),
            signature=infer_signature(inputs, outputs),
            input_example=inputs,
            pip_requirements=requirements(installed),
            code_paths=sources(ours, self._scratch / "code"),
        )
        return folder


def rebuild(recipe: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The trained module on the CPU, an example of its input, and its output on that, as NumPy."""
    import torch

    from app.tasks import load_task

    task = load_task(recipe["task"], dict(recipe.get("task_args") or {}))
    module = task.build_model()
    module.load_state_dict(torch.load(recipe["weights"], map_location="cpu", weights_only=True))
    module.eval()
    example = task.example_input()
    with torch.no_grad():
        outputs = module(*example)
    arrays = [_array(value) for value in example]
    inputs = arrays[0] if len(arrays) == 1 else {f"input_{index}": array for index, array in enumerate(arrays)}
    return module, inputs, _output(outputs)


def _array(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    return value


def _output(value: Any) -> Any:
    """A model's output for the signature: the tensor, or the first of several."""
    if isinstance(value, dict):
        return {key: _array(item) for key, item in value.items() if hasattr(item, "detach")}
    return _array(value[0]) if isinstance(value, (tuple, list)) else _array(value)


def requirements(names: set[str]) -> list[str]:
    """Pins of the installed versions of these top-level modules' packages; without the local part of a version
    (`+cpu`), which no index has."""
    providers = packages_distributions()  # `mlflow` has two: mlflow and mlflow-tracing
    packages = {name if name in providers[name] else providers[name][0] for name in names & set(providers)}
    return [f"{package}=={version(package).split('+')[0]}" for package in sorted(packages)]


def origins(module: Any, recipe: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Names of the top-level modules that the model's classes and its task come from: (ours to copy, installed)."""
    names = {kind.__module__.split(".")[0] for part in module.modules() for kind in type(part).__mro__}
    if ":" in str(recipe["task"]):
        names.add(str(recipe["task"]).split(":")[0].split(".")[0])
    names -= {"__main__", "app", *sys.stdlib_module_names}
    installed = {
        name for name in names if (path := _source(name)) and {"site-packages", "dist-packages"} & set(path.parts)
    }
    return (names - installed) | {"app"}, installed | {"mlflow", "torch", "numpy"}


def sources(names: set[str], folder: Path) -> list[str]:
    """Copies of these top-level packages and modules, .py files only; returns what to give as `code_paths`.

    Of `app`, what rebuilding the model and calling it once has imported, and all models.
    """
    copies = []
    for name in sorted(names):
        path = _source(name)
        if path is None:
            continue
        target = folder / path.name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if name != "app" or _of_a_model(file, path):
                copy = target / file.relative_to(path) if path.is_dir() else target
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        copies.append(str(target))
    return copies


def _of_a_model(file: Path, app: Path) -> bool:
    inside = file.relative_to(app)
    name = ".".join(("app", *inside.with_suffix("").parts)).removesuffix(".__init__")
    return inside.parts[0] == "models" or (name in sys.modules and inside.parts[0] != "tracking")


def _source(name: str) -> Path | None:
    """The folder or file of an imported top-level module."""
    module = sys.modules.get(name)
    if file := getattr(module, "__file__", None):
        path = Path(file).resolve()
        return path.parent if path.name == "__init__.py" else path
    places = list(getattr(module, "__path__", []))  # a package without __init__.py
    return Path(places[0]).resolve() if places else None
