"""Delivering to the end: waiting for the writer, and `sync` for what an earlier run left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from app.tracking.masking import mask_uri
from app.tracking.process import WriterProcess
from app.tracking.settings import Settings, run_url
from app.tracking.spool import Event, Reader, count_left
from app.tracking.state import Delivered, FileLock, Status

_DEATHS = 3
"""How often a writer that dies at the end is replaced."""
_START_PATIENCE = 30.0
"""Seconds that a writer may take to load mlflow and open the run, on a machine that has much else to do."""
_UPLOAD_PATIENCE = 900.0
"""Seconds that one upload (a model) may take at the end while the server answers."""


@dataclass(frozen=True)
class Delivery:
    """What became of a run's events.

    Attributes:
        run_id: the MLflow run; None if the server was never reached.
        url: the run's page ("" while unknown).
        complete: whether MLflow has everything.
        left: events still in the spool; the next start of the run, or `sync`, delivers them.
        spool: the spool's folder.
        problem: one sentence: why something is left ("" otherwise).
    """

    run_id: str | None
    url: str
    complete: bool
    left: int
    spool: Path
    problem: str = ""


def sync(folder: Path, *, uri: str | None = None, timeout: float = 30.0) -> Delivery:
    """Deliver what an earlier run left in its spool.

    Args:
        folder: the spool's folder.
        uri: tracking URI, if it is another one now; by default the one of the run (with credentials from
            MLFLOW_TRACKING_URI where the two differ in nothing else).
        timeout: seconds to wait while nothing can be delivered.
    """
    folder = Path(folder).absolute()
    start = last_start(folder)
    if not start:
        return Delivery(None, "", True, 0, folder)
    environment = os.environ.get("MLFLOW_TRACKING_URI", "")
    uri = uri or (environment if mask_uri(environment) == start["uri"] else start["uri"])
    settings = Settings(uri, start["experiment"], start["artifact_location"], "")
    return wait_for(lambda: WriterProcess(folder, uri, attempt=None), folder, settings, timeout)


def last_start(folder: Path) -> Event:
    """The first start event not yet delivered, else the one delivery is at; {} in an empty spool."""
    delivered = Delivered.load(folder)
    if delivered.start:
        return delivered.start
    for event, _ in Reader(folder, delivered.position).read():
        if event["type"] == "start":
            return event
    return {}


def wait_for(
    spawn: Callable[[], WriterProcess],
    folder: Path,
    settings: Settings,
    timeout: float,
    writer: WriterProcess | None = None,
) -> Delivery:
    """Wait until a writer has delivered all, or has got nowhere for `timeout` seconds; then end it.

    Args:
        spawn: starts a writer, where `writer` is none or dies on the way.
    """
    since, deaths = Since(), 0
    while True:
        writer = writer or spawn()
        writer.wake()
        if not _ended(writer, folder, since, timeout):
            break
        if writer.clean or deaths == _DEATHS:
            break
        deaths, writer = deaths + 1, None
    return _delivery(folder, settings)


@dataclass
class Since:
    """When the writer last got on, by a clock that does not jump, and what it said of that."""

    progress: float = 0.0
    at: float = field(default_factory=time.monotonic)


def _ended(writer: WriterProcess, folder: Path, since: Since, timeout: float) -> bool:
    """True once the writer has ended by itself; False if it was ended for getting nowhere."""
    while not writer.ended.wait(0.05):
        status, patience = Status.load(folder), timeout
        if writer.delivering and not (status.pid == writer.pid and status.contact):
            patience = max(timeout, _START_PATIENCE)
        elif status.upload and not status.away:
            patience = max(timeout, _UPLOAD_PATIENCE)
        if status.progress != since.progress:
            since.progress, since.at = status.progress, time.monotonic()
        if time.monotonic() - since.at > patience:
            writer.kill()
            return False
    return True


def _delivery(folder: Path, settings: Settings) -> Delivery:
    status, delivered = Status.load(folder), Delivered.load(folder)
    left = count_left(folder, delivered.position)
    url = run_url(settings, delivered.experiment_id, delivered.run_id)
    complete = left == 0 and not delivered.open
    problem = "" if complete else status.problem or f"the tracking writer did not get that far; see {folder}/writer.log"
    lock = FileLock(folder / "writer.lock")
    if not complete and not lock.acquire():
        problem = "another process is delivering this spool just now"
    lock.release()
    return Delivery(delivered.run_id, url, complete, left, folder, problem)
