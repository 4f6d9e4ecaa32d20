"""Tracking for many runs of one sweep: trials only write their spools, and one process delivers all of them.

A run of its own starts a writer process, which takes seconds to import mlflow; a trial may be shorter than that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from app.console import Console
from app.tracking.delivery import Delivery
from app.tracking.masking import mask_text
from app.tracking.settings import run_url
from app.tracking.spool import Position, Reader, Spool, segments
from app.tracking.state import Status
from app.tracking.tracker import Tracker

PARENT_TAG = "mlflow.parentRunId"
STOP_FILE = "tracking/stop"
"""In the sweep's folder: running trials are to save and stop."""
END_FILE = "tracking/all-said"
"""In the sweep's folder: the driver has said everything, and waits for its delivery."""


class _NoWriter:
    """Stands where a run's own writer would."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.ended.set()
        self.clean = True

    def trains(self) -> None:
        """Nobody has waited for that."""


class SpoolTracker(Tracker):
    """A Tracker whose spool is delivered by the sweep's `Deliverer`; nobody waits for that."""

    def _spawn(self) -> Any:
        return _NoWriter()

    def finish(self, status: str, *, message: str = "", timeout: float = 15.0) -> Delivery:
        """Says how the run ended, and returns at once."""
        if self._spool is None:
            return self._delivery
        event = {"type": "finish", "attempt": self._attempt, "time": time.time(), "status": status}
        self._append(event | {"message": mask_text(message)})
        self._finishing.set()
        self._spool.close()
        self._spool = None
        self._driver.release()
        known = Status.load(self.folder)
        url = run_url(self.settings, known.experiment_id, known.run_id)
        self._delivery = Delivery(known.run_id, url, True, 0, self.folder)
        return self._delivery


def last_start(spool: Path) -> dict[str, Any] | None:
    """The newest start event of a spool; None if it never began."""
    found = None
    for number in segments(spool):
        reader = Reader(spool, Position(number, 0))
        while events := reader.read():
            for event, _ in events:
                found = event if event["type"] == "start" else found
    return found


def add(spool: Path, *events: dict[str, Any]) -> None:
    """Says something of a run whose own driver is gone."""
    start = last_start(spool)
    if start is None:
        return
    end = Spool(spool)
    for event in events:
        end.append({"time": time.time(), "attempt": start["attempt"], **event})
    end.close()


class Deliverer:
    """The process that delivers every spool under a sweep's folder, as the driver sees it."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder = folder
        (folder / "tracking").mkdir(parents=True, exist_ok=True)
        (folder / END_FILE).unlink(missing_ok=True)
        environment = {
            **os.environ,
            "MLFLOW_TRACKING_URI": uri,  # by the environment: it may hold a password
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
        }
        command = [sys.executable, "-m", "experiments.sweep.deliver", str(folder), "--driver", str(os.getpid())]
        with (folder / "tracking" / "deliverer.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def finish(self, timeout: float) -> str:
        """Waits until everything is delivered, or nothing was for `timeout` seconds.

        Returns the problem in a sentence, or "".
        """
        (self.folder / END_FILE).touch()
        begun = time.time()
        while self.process.poll() is None:
            news = [Status.load(spool) for spool in spools(self.folder)]
            patience = max(timeout, 30.0) if not any(status.contact for status in news) else timeout
            if any(status.upload and not status.away for status in news):
                patience = 900.0
            if time.time() - max([begun, *(status.progress for status in news)]) > patience:
                self.process.send_signal(signal.SIGKILL)
                self.process.wait()
                return next((s.problem for s in news if s.problem), "the tracking process did not get that far")
            time.sleep(0.1)
        return "" if self.process.returncode == 0 else f"see {self.folder}/tracking/deliverer.log"


def spools(folder: Path) -> list[Path]:
    """The sweep's own spool, then its trials'."""
    own = folder / "tracking"
    return [own, *sorted(path for path in folder.glob("*/tracking") if path.is_dir())]


class LogConsole(Console):
    """What a trial's driver has to say goes to its run's log."""

    def __init__(self, log: Path) -> None:
        super().__init__(quiet=True)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text + "\n")

    error = result = say

    def status(self, text: str) -> None:
        return

    def progress(self, event: dict[str, Any]) -> None:
        return


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, default=str))
    return path
