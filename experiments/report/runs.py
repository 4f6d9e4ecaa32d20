"""What a run left behind: its manifest, its configuration, and what MLflow has of it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.config_io import flatten, from_dict
from app.errors import UserError
from app.tracking.settings import resolve_tracking
from app.tracking.spool import State, last_start

MOST_POINTS = 600
"""Of one curve on a page: no screen shows more."""


@dataclass
class RunRecord:
    """A run as a page shows it. problem: why there are no curves."""

    name: str
    folder: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    status: str = ""
    problem: str = ""

    @property
    def summary(self) -> dict[str, Any]:
        return self.manifest.get("summary") or {}

    def last(self, metric: str) -> float | None:
        return self.curves[metric][-1][1] if self.curves.get(metric) else None


def read_run(folder: Path) -> RunRecord:
    """Raises UserError if the folder holds no run."""
    try:
        manifest = json.loads((folder / "run.json").read_text())
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not the folder of a run, sweep or study: write one that `trireme train`, sweep or scale named"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder} is damaged: {error}") from error
    record = RunRecord(manifest["name"], folder, manifest, config, status=manifest["status"])
    try:
        _from_mlflow(record)
    except Exception as error:  # a page without curves is better than none
        record.problem = f"the metrics of {record.name} could not be read from MLflow ({_first_line(error)})"
    return record


def _from_mlflow(record: RunRecord) -> None:
    # A trial's run ends before the sweep's writer has made it in MLflow.
    run_id = record.manifest.get("mlflow_run_id") or State.load(record.folder / "tracking").run_id
    if not run_id:
        record.problem = f"{record.name} was not tracked"
        return
    tracking = from_dict(record.config).tracking
    client = _client(record.folder, tracking.uri or resolve_tracking(tracking, str(record.folder.parent)).uri)
    run = client.get_run(run_id)
    record.status, record.tags, record.params = run.info.status, dict(run.data.tags), dict(run.data.params)
    for name in run.data.metrics:
        points = sorted((p.step, p.value) for p in client.get_metric_history(run_id, name))
        every = max(1, len(points) // MOST_POINTS)
        record.curves[name] = points[::every] + ([points[-1]] if (len(points) - 1) % every else [])


def _client(folder: Path, otherwise: str = "") -> Any:
    """MLflow's client for the server that a folder's run was tracked by: as the environment says, else as its spool
    does (a trial's database is beside its sweep), else `otherwise`."""
    from mlflow.tracking import MlflowClient

    spool = folder / "tracking"
    told = last_start(spool).get("uri") if spool.is_dir() else None
    return MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or told or otherwise)


def store_artifacts(folder: Path, *files: Path) -> str:
    """Puts files among the artifacts of the MLflow run that `folder` (of a run, a sweep or a study, on this machine)
    was tracked as; a note where that was not possible."""
    names = ", ".join(file.name for file in files)
    spool = folder / "tracking"
    run_id = State.load(spool).run_id if spool.is_dir() else None
    if not run_id:
        return f"{names} is not in MLflow, since this was not tracked"
    try:
        for file in files:
            _client(folder).log_artifact(run_id, str(file))
    except Exception as error:  # the file is there; MLflow may be away
        return f"{names} is not in MLflow ({_first_line(error)})"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def differences(records: list[RunRecord]) -> list[dict[str, str]]:
    """Configuration keys in which the runs differ, and the value of each."""
    flat = {record.name: flatten(record.config) for record in records}
    keys = dict.fromkeys(key for config in flat.values() for key in config if not key.startswith("run."))
    rows = [{"key": key, **{name: str(config.get(key, "–")) for name, config in flat.items()}} for key in keys]
    return [row for row in rows if len({value for name, value in row.items() if name != "key"}) > 1]
