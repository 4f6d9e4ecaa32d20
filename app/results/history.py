"""A run's logged metrics as a table: from the spool on this machine, else from MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import UserError
from app.run.manifest import local_folder
from app.storage.storage import Storage
from app.tracking.settings import resolve_tracking
from app.tracking.spool import Event, read

if TYPE_CHECKING:
    import pandas

Curves = dict[str, dict[int, float]]
"""For each metric, its value at each step."""


def history(storage: Storage) -> pandas.DataFrame:
    """The metrics of a run, without the system metrics of its machines.

    Args:
        storage: The run's folder.

    Returns:
        A row for each step at which something was logged, and a column for each metric.

    Raises:
        UserError: Neither a spool on this machine nor an MLflow run has the metrics.
    """
    import pandas

    manifest = json.loads(storage.read_bytes("run.json"))
    spool = local_folder(storage, manifest["name"], manifest["uid"]) / "tracking"
    if (spool / "events.jsonl").exists():
        curves = _from_spool(spool)
    elif manifest.get("mlflow_run_id"):
        curves = _from_mlflow(storage, manifest["mlflow_run_id"])
    else:
        raise UserError(
            f"{storage.url} has no metrics: "
            "the run was not tracked, or its spool is on another machine"
        )
    columns = {name: pandas.Series(curve) for name, curve in curves.items()}
    return pandas.DataFrame(columns).rename_axis("step")


def _from_spool(spool: Path) -> Curves:
    curves: Curves = {}
    for event in _events(spool):
        # System metrics have a time instead of a step.
        if event.get("type") != "metrics" or event.get("step") is None:
            continue
        step = event["step"]
        for name, value in event["values"].items():
            curve = curves.setdefault(name, {})
            # A resumed run repeats steps; the first value of a step counts, as in MLflow.
            is_replay = bool(curve) and step <= next(reversed(curve))
            if not is_replay:
                curve[step] = value
    return curves


def _events(spool: Path) -> Iterator[Event]:
    offset = 0
    while events := read(spool, offset):
        for event, end in events:
            yield event
            offset = end


def _from_mlflow(storage: Storage, run_id: str) -> Curves:
    from mlflow.tracking import MlflowClient

    from app.results.trained import config_of

    storage_root = storage.url.rpartition("/")[0]
    settings = resolve_tracking(config_of(storage).tracking, storage_root)
    client = MlflowClient(settings.uri)
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith("system/")]
    curves: Curves = {}
    for name in names:
        points = client.get_metric_history(run_id, name)
        curves[name] = {point.step: point.value for point in points}
    return curves
