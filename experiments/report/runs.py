"""What a run left behind: its manifest, its configuration, and what MLflow has of it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.config_io import flatten, from_dict
from app.errors import UserError
from app.tracking.delivery import last_start
from app.tracking.settings import resolve_tracking

MOST_POINTS = 600
"""Of one curve on a page: more than that no screen shows."""


@dataclass
class RunRecord:
    """A run as a page shows it."""

    name: str
    folder: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    status: str = ""
    problem: str = ""  # why there are no curves
    cost: dict[str, float] = field(default_factory=dict)  # dollars: what app/run/cost.py has counted; {} without prices

    def last(self, metric: str) -> float | None:
        return self.curves[metric][-1][1] if self.curves.get(metric) else None


def read_run(folder: Path) -> RunRecord:
    """Raises UserError if the folder holds no run."""
    try:
        manifest = json.loads((folder / "run.json").read_text())
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no run, sweep or study: write a folder that `trireme train`, sweep or scale named"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder} is damaged: {error}") from error
    record = RunRecord(manifest["name"], folder, manifest, config, status=manifest["status"])
    with contextlib.suppress(FileNotFoundError, ValueError):
        record.cost = json.loads((folder / "cost.json").read_text())
    try:
        _from_mlflow(record)
    except Exception as error:  # a page without curves is better than none
        record.problem = f"MLflow gave nothing of {record.name} ({(str(error).splitlines() or ['no reason'])[0]})"
    return record


def client_for(record: RunRecord) -> Any:
    """MLflow's client for the server that the run was tracked by."""
    from mlflow.tracking import MlflowClient

    tracking, spool = from_dict(record.config).tracking, record.folder / "tracking"
    told = last_start(spool).get("uri") if spool.is_dir() else None
    if told and not tracking.uri and "MLFLOW_TRACKING_URI" not in os.environ:
        return MlflowClient(told)  # without a server the store is beside the run; that of a trial beside its sweep
    return MlflowClient(resolve_tracking(tracking, str(record.folder.parent)).uri)


def _from_mlflow(record: RunRecord) -> None:
    run_id = record.manifest.get("mlflow_run_id")
    if not run_id:
        record.problem = f"{record.name} was not tracked"
        return
    client = client_for(record)
    run = client.get_run(run_id)
    record.status, record.tags, record.params = run.info.status, dict(run.data.tags), dict(run.data.params)
    for name in run.data.metrics:
        points = [(p.step, p.value) for p in client.get_metric_history(run_id, name)]
        points.sort()
        every = max(1, len(points) // MOST_POINTS)
        record.curves[name] = points[::every] + ([points[-1]] if (len(points) - 1) % every else [])


def differences(records: list[RunRecord]) -> tuple[list[str], list[list[object]]]:
    """Configuration keys in which the runs differ: header and rows."""
    flat = [flatten(record.config) for record in records]
    keys = [key for key in dict.fromkeys(k for f in flat for k in f) if not key.startswith("run.")]
    rows: list[list[object]] = []
    for key in keys:
        values = [f.get(key, "–") for f in flat]
        if any(value != values[0] for value in values):
            rows.append([key, *(str(value) for value in values)])
    return ["key", *(record.name for record in records)], rows
