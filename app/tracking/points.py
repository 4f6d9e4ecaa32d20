"""Many points into MLflow's SQLite tables in one statement.

MLflow's `log_batch` makes an object of each point: 0.1 ms of a core, for which a run of short steps that logs each one
waits where its workers need every core. So all but the newest point of each metric are written into the table of
points at once, and the newest go through `log_batch`, which looks at the run and keeps the record of latest values. Cut
off between the two, the same points come again and are those that are there already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

FEWEST = 20
"""Fewer are not worth a transaction of their own."""
_COLUMNS = ("key", "value", "timestamp", "step", "is_nan", "run_uuid")
_INSERT = f"INSERT OR IGNORE INTO metrics ({', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?)"

Point = tuple[str, float, int, Any]
"""Metric key, value, time (Unix milliseconds), step (None until the courier has given a sample its step)."""


def write(client: Any, run_id: str, points: Sequence[Point]) -> Sequence[Point]:
    """Writes what it can, and returns the points that are left for `log_batch`: all, where MLflow's store is no SQLite
    database, or has another table than the one known here."""
    engine = getattr(client._tracking_client.store, "engine", None)
    if len(points) < FEWEST or engine is None or engine.dialect.name != "sqlite":
        return points
    from mlflow.store.tracking.dbmodels.models import SqlMetric

    table = SqlMetric.__table__
    if table.name != "metrics" or set(table.columns.keys()) != set(_COLUMNS):
        return points
    newest = {point[0]: number for number, point in enumerate(points)}
    left = [p for number, p in enumerate(points) if newest[p[0]] == number or not math.isfinite(p[1])]
    rows = [
        (key, value, milliseconds, step, False, run_id)
        for number, (key, value, milliseconds, step) in enumerate(points)
        if newest[key] != number and math.isfinite(value)
    ]
    if rows:
        with engine.begin() as connection:
            connection.exec_driver_sql(_INSERT, rows)
    return left
