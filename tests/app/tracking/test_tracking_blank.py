"""A new database is what MLflow would have made, made once."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from app.data.files import cache_folder
from app.tracking import blank


def _everything(path: Path) -> list[Any]:
    """Schema and rows, but for times and for the order of a table's constraints, which differs from time to time."""
    with sqlite3.connect(path) as tables:
        schema = tables.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
        rows = [tables.execute(f"SELECT * FROM {name}").fetchall() for kind, name, _ in schema if kind == "table"]
    schema = [(kind, name, sorted((sql or "").replace(",", "").splitlines())) for kind, name, sql in schema]
    return [schema, [[value for value in row if not isinstance(value, int)] for table in rows for row in table]]


def test_it_is_what_mlflow_makes(tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking.client import MlflowClient

    monkeypatch.chdir(tmp_path)
    names = ("own.db", "copy.db", "again.db")
    for name in names:
        if name != "own.db":
            blank.begin(tmp_path / name)
            assert sqlite3.connect(tmp_path / name).execute("SELECT * FROM experiments").fetchall() == []
        assert len(MlflowClient(f"sqlite:///{tmp_path / name}").search_experiments()) == 1
    own, *others = (_everything(tmp_path / name) for name in names)
    assert own[0] and own[1] and all(other == own for other in others)
    assert len(list(cache_folder().glob("mlflow-*.db"))) == 1
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == set(names)


def test_a_database_that_is_there_is_left_alone(tmp_path: Path, own_cache: None) -> None:
    (tmp_path / "a.db").write_bytes(b"somebody's")
    blank.begin(tmp_path / "a.db")
    assert (tmp_path / "a.db").read_bytes() == b"somebody's"


def test_without_one_to_copy_mlflow_makes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blank, "cached", lambda *_: (_ for _ in ()).throw(sqlite3.DatabaseError("damaged")))
    blank.begin(tmp_path / "a.db")
    assert list(tmp_path.iterdir()) == []
