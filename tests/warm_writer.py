"""MLflow's writer as a fork of a process that has imported MLflow, for tests with many runs.

A run that is tracked in this process waits for its writer, which takes seconds to import what it
needs. What the writer does is the same; how it is started is tested in tests/app/tracking.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from app.tracking.tracker import WHILE_TRAINING, WriterProcess
from app.tracking.writer import ENVIRONMENT, LOCK_SECONDS, claim, serve

PRELOADED = ["app.tracking.uploader", "mlflow.store.tracking.sqlalchemy_store"]


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def spawn(self: WriterProcess, niceness: int = WHILE_TRAINING) -> str:
    """Starts a writer in place of `WriterProcess._spawn`; see there."""
    receiver, sender = _context().Pipe(duplex=False)
    environment = {**os.environ, "MLFLOW_TRACKING_URI": self._uri}
    arguments = (str(self._folder), self._attempt, niceness, environment, sender)
    _context().Process(target=_write, args=arguments).start()
    sender.close()
    try:
        return str(receiver.recv())
    except EOFError:
        return "the writer has ended"


def _write(
    folder: str,
    attempt: str,
    niceness: int,
    environment: dict[str, str],
    sender: Connection,
) -> None:
    """What app/tracking/writer.py does as a program."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment | ENVIRONMENT)
    if not claim(Path(folder), attempt, LOCK_SECONDS):
        sender.send("another process is delivering this spool")
        return
    sender.send("")
    sender.close()
    log = os.open(Path(folder) / "writer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig()
    os.nice(niceness)
    serve(Path(folder), os.environ["MLFLOW_TRACKING_URI"], attempt)
