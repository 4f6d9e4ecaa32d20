"""Points written at once are those that MLflow's own call would have logged."""

from __future__ import annotations

import math
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from app.tracking import points as quick
from app.tracking.mlflow_run import MlflowRun
from app.tracking.points import Point

NOW = 1_700_000_000_000
POINTS: list[Point] = [
    (key, value + step, NOW + step, step)
    for step in range(30)
    for key, value in (("loss", 0.5), ("odd", math.nan if step % 7 == 3 else math.inf if step % 7 == 5 else 1.0))
]


def _run(folder: Path) -> MlflowRun:
    folder.mkdir()
    run = MlflowRun(f"sqlite:///{folder}/mlflow.db")
    run.open(
        {"experiment": "x", "artifact_location": str(folder), "run_uid": "u", "run_name": "n", "time": time.time()},
        None,
    )
    return run


def _tables(folder: Path) -> list[Any]:
    columns = "key, value, timestamp, step, is_nan"
    with sqlite3.connect(folder / "mlflow.db") as tables:
        return [
            sorted(tables.execute(f"SELECT {columns} FROM {name}").fetchall()) for name in ("metrics", "latest_metrics")
        ]


def test_they_are_what_log_batch_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, one_by_one = _run(tmp_path / "a"), _run(tmp_path / "b")
    at_once.metrics(POINTS)
    at_once.metrics(POINTS)  # again, as after an answer that was lost
    monkeypatch.setattr(quick, "FEWEST", 10**9)
    one_by_one.metrics(POINTS)
    assert _tables(tmp_path / "a") == _tables(tmp_path / "b")
    assert len(_tables(tmp_path / "a")[0]) == len(POINTS) and len(_tables(tmp_path / "a")[1]) == 2


def test_only_the_newest_of_each_and_what_is_not_finite_is_left_to_mlflow(tmp_path: Path) -> None:
    run = _run(tmp_path / "a")
    left = quick.write(run.client(), run.run_id, POINTS)
    assert [p for p in left if math.isfinite(p[1])] == [POINTS[-2], POINTS[-1]]
    assert len(_tables(tmp_path / "a")[0]) == len(POINTS) - len(left)


def test_an_unknown_table_is_left_to_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "_COLUMNS", {"key"})
    run = _run(tmp_path / "a")
    assert quick.write(run.client(), run.run_id, POINTS) is POINTS
    assert _tables(tmp_path / "a")[0] == []
