"""What the tests of tracking share: a run's history read back, a driver to kill."""

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

    def runs(self, uid: str = "uid-1") -> list[str]:
        """Ids of the runs with this uid that are not deleted."""
        sql = "select run_uuid from runs r join tags t using (run_uuid) where t.key = 'trireme.run_uid' and t.value = ?"
        sql += " and lifecycle_stage = 'active' order by start_time"
        return [row[0] for row in self.query(sql, uid)]

    def run(self, uid: str = "uid-1") -> str:
        (run,) = self.runs(uid)
        return run

    def status(self, uid: str = "uid-1") -> str:
        return self.query("select status from runs where run_uuid = ?", self.run(uid))[0][0]

    def end_seconds(self) -> float:
        return self.query("select end_time from runs where run_uuid = ?", self.run())[0][0] / 1000

    def history(self, key: str, uid: str = "uid-1") -> list[tuple[int, float]]:
        """(step, value) of a metric, in the order of steps; every row, doubles included."""
        sql = "select step, case is_nan when 1 then null else value end from metrics where run_uuid = ? and key = ?"
        return sorted(self.query(sql, self.run(uid), key), key=lambda row: row[0])

    def steps(self, key: str, uid: str = "uid-1") -> list[int]:
        return [step for step, _ in self.history(key, uid)]

    def params(self) -> dict[str, str]:
        return dict(self.query("select key, value from params where run_uuid = ?", self.run()))

    def tags(self) -> dict[str, str]:
        return dict(self.query("select key, value from tags where run_uuid = ?", self.run()))

    def artifacts(self) -> Path:
        uri = self.query("select artifact_uri from runs where run_uuid = ?", self.run())[0][0]
        return Path(uri.removeprefix("file://"))
