"""What a run has logged, as a table: from the spool that its driver left on this machine, else from MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import UserError
from app.run.manifest import local_folder
from app.storage.storage import Storage
from app.tracking.settings import resolve_tracking
from app.tracking.spool import read

if TYPE_CHECKING:
    import pandas

Curves = dict[str, dict[int, float]]


def history(storage: Storage) -> pandas.DataFrame:
    """A row for each step at which something was logged, a column for each metric; the machines' own are left out.

    Raises UserError: the run has logged nowhere that can be read here.
    """
    import pandas

    manifest = json.loads(storage.read_bytes("run.json"))
    spool = local_folder(storage, manifest["name"], manifest["uid"]) / "tracking"
    if (spool / "events.jsonl").exists():
        curves = _from_spool(spool)
    elif manifest.get("mlflow_run_id"):
        curves = _from_mlflow(storage, manifest["mlflow_run_id"])
    else:
        raise UserError(f"{storage.url} has no metrics: it was not tracked, or on a machine whose spool is not here")
    return pandas.DataFrame({name: pandas.Series(curve) for name, curve in curves.items()}).rename_axis("step")


def _from_spool(spool: Path) -> Curves:
    curves: Curves = {}
    for event in _events(spool):
        if event.get("type") != "metrics" or event.get("step") is None:  # a machine's have times instead
            continue
        for name, value in event["values"].items():
            curve = curves.setdefault(name, {})
            if not curve or event["step"] > next(reversed(curve)):  # else a step that was taken again, as for MLflow
                curve[event["step"]] = value
    return curves


def _events(spool: Path) -> Iterator[dict[str, Any]]:
    offset = 0
    while found := read(spool, offset):
        yield from (event for event, _ in found)
        offset = found[-1][1]


def _from_mlflow(storage: Storage, run_id: str) -> Curves:
    from mlflow.tracking import MlflowClient

    from app.results.trained import config_of

    client = MlflowClient(resolve_tracking(config_of(storage).tracking, storage.url.rpartition("/")[0]).uri)
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith("system/")]
    return {name: {p.step: p.value for p in client.get_metric_history(run_id, name)} for name in names}
