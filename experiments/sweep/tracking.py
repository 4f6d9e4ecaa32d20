"""A sweep's trials only write their spools; the sweep's own writer delivers all of them (app/tracking/README.md)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from app.console import Console
from app.tracking.spool import Event, Spool, last_start

STOP_FILE = "tracking/stop"
"""In the sweep's folder: running trials are to save and stop."""


def report(spool: Path, event: Event) -> None:
    """Reports something of a trial whose own driver is gone."""
    if last_start(spool):
        end = Spool(spool)
        end.append({**event, "time": time.time()})
        end.close()


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
