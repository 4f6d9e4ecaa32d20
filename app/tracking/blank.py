"""An empty MLflow database, made once for each version of MLflow and copied to where a new one is wanted.

MLflow makes one by repeating its schema's whole history, which takes three seconds of a core: longer than many a first
run trains, and beside its workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

import mlflow

from app.data.files import cached

_log = logging.getLogger("writer")


def begin(database: Path) -> None:
    """Put an empty database where there is none. What goes wrong is left to MLflow, which makes its own then."""
    if database.exists():
        return
    copy = database.with_name(f".{database.name}.{os.getpid()}.new")
    try:
        shutil.copyfile(cached(f"mlflow-{mlflow.__version__}.db", _make), copy)
        os.link(copy, database)  # unless somebody else has made one by now
    except Exception as error:  # a file system without links, a full disk, whatever a database may say
        _log.info("MLflow makes its own database: %s", error)
    with contextlib.suppress(OSError):
        copy.unlink()


def _make(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with tempfile.TemporaryDirectory() as artifacts:
        SqlAlchemyStore(f"sqlite:///{path}", artifacts).engine.dispose()
    with contextlib.closing(sqlite3.connect(path)) as tables:
        tables.execute("DELETE FROM experiments")  # the one that it makes wherever there is none knows its folder
        tables.commit()
