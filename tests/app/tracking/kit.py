"""What the tests of tracking share: a tracker, and a run's history read back."""

import sqlite3
from pathlib import Path
from typing import Any

from app.tracking.settings import Settings
from app.tracking.tracker import Tracker


def tracker(folder: Path, uri: str, **changes: Any) -> Tracker:
    """At work already."""
    settings = Settings(uri, "tests", None if uri.startswith("http") else (folder.parent / "mlartifacts").as_uri())
    run = Tracker(folder, settings, **({"run_name": "a-run", "run_uid": "uid-1"} | changes))
    run.start()
    return run


class Store:
    """Reads what MLflow has straight from its SQLite tables: no second mlflow import, no server."""

    def __init__(self, uri: str) -> None:
        self._path = uri.removeprefix("sqlite:///")

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=20) as connection:
            return connection.execute(sql, values).fetchall()

    def run(self, column: str = "run_uuid", uid: str = "uid-1") -> Any:
        """Of the one run with this uid that is not deleted; None where there is none."""
        sql = f"select {column} from runs join tags t using (run_uuid) where t.key = 'trireme.run_uid' and t.value = ?"
        found = self.query(f"{sql} and lifecycle_stage = 'active'", uid)
        assert len(found) <= 1
        return found[0][0] if found else None

    def history(self, key: str, uid: str = "uid-1") -> list[tuple[int, float]]:
        """(step, value) of a metric, in the order of steps; every row, doubles included."""
        sql = "select step, case is_nan when 1 then null else value end from metrics where run_uuid = ? and key = ?"
        return sorted(self.query(sql, self.run(uid=uid), key), key=lambda row: row[0])

    def steps(self, key: str, uid: str = "uid-1") -> list[int]:
        return [step for step, _ in self.history(key, uid)]

    def values(self, table: str) -> dict[str, str]:
        """Its tags or params."""
        return dict(self.query(f"select key, value from {table} where run_uuid = ?", self.run()))
