"""A started tracker, and a reader of what MLflow has stored, for the tests of tracking."""

import sqlite3
from pathlib import Path
from typing import Any

from app.tracking.settings import Settings
from app.tracking.tracker import Tracker


def tracker(folder: Path, uri: str, **options: Any) -> Tracker:
    """A tracker that has been started."""
    artifacts = None if uri.startswith("http") else (folder.parent / "mlartifacts").as_uri()
    settings = Settings(uri, "tests", artifacts)
    run = Tracker(folder, settings, **({"run_name": "a-run", "run_uid": "uid-1"} | options))
    run.start()
    return run


class Store:
    """Reads MLflow's SQLite tables, without a second import of mlflow and without a server."""

    def __init__(self, uri: str) -> None:
        self._path = uri.removeprefix("sqlite:///")

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=20) as connection:
            return connection.execute(sql, values).fetchall()

    def run(self, column: str = "run_uuid", uid: str = "uid-1") -> Any:
        """A column of the one run with this UID that is not deleted; None where there is none."""
        sql = f"select {column} from runs join tags t using (run_uuid)"
        sql += " where t.key = 'trireme.run_uid' and t.value = ? and lifecycle_stage = 'active'"
        rows = self.query(sql, uid)
        assert len(rows) <= 1
        return rows[0][0] if rows else None

    def history(self, key: str, uid: str = "uid-1") -> list[tuple[int, float]]:
        """All rows (step, value) of a metric in the order of steps, duplicates included."""
        sql = "select step, case is_nan when 1 then null else value end from metrics"
        sql += " where run_uuid = ? and key = ?"
        return sorted(self.query(sql, self.run(uid=uid), key), key=lambda row: row[0])

    def steps(self, key: str, uid: str = "uid-1") -> list[int]:
        return [step for step, _ in self.history(key, uid)]

    def values(self, table: str) -> dict[str, str]:
        """The run's tags or params, by the table's name."""
        return dict(self.query(f"select key, value from {table} where run_uuid = ?", self.run()))
