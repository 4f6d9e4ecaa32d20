"""`python -m experiments.sweep.deliver FOLDER`: carries the spools of a sweep and of all its trials into MLflow.

The sweep's own run is made first, and every trial's run becomes its child as it is made. It ends when the driver has
said that all is said and all of that is delivered; or when the driver is gone: then runs that are still open end as
KILLED, after what they said is delivered.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from app.tracking.courier import Courier
from app.tracking.mlflow_run import MlflowRun
from app.tracking.spool import Position, Reader, segments
from app.tracking.state import FileLock
from app.tracking.turns import Leave, Rewind
from app.tracking.writer import _ENVIRONMENT, _NOT_OURS, LINGER_SECONDS, MaskedStream, _birth
from experiments.sweep.tracking import END_FILE, PARENT_TAG, spools

POLL_SECONDS = 0.5


class Parent:
    """The sweep's driver: whether it lives."""

    def __init__(self, pid: int) -> None:
        self.pid, self.born, self.gone_since = pid, _birth(pid), 0.0

    def gone(self) -> bool:
        if not self.gone_since and (not self.born or _birth(self.pid) != self.born):
            self.gone_since = time.monotonic()
        return self.gone_since > 0

    def back_off(self, seconds: float) -> None:
        """Waits while MLflow is away. Raises Leave when nobody is left who would miss it."""
        time.sleep(seconds)
        if self.gone() and time.monotonic() - self.gone_since > LINGER_SECONDS:
            raise Leave("the driver is gone and MLflow is away")


class Lane:
    """One spool on its way."""

    def __init__(self, folder: Path, uri: str, parent: Parent) -> None:
        self.folder, self.lock = folder, FileLock(folder / "writer.lock")
        self.held = False
        self.uri, self.parent = uri, parent

    def take(self) -> bool:
        """Whether this spool is ours to deliver: a deliverer of an earlier driver may still be at it."""
        if not self.held and self.lock.acquire():
            self.held = True
            self.courier = Courier(self.folder, MlflowRun(self.uri), attempt=None, back_off=self.parent.back_off)
            self.reader = Reader(self.folder, self.courier.delivered.position)
        return self.held

    def carry(self, parent_run: str | None) -> bool:
        """Delivers what is there; whether there was anything."""
        if not self.take():
            time.sleep(0.2)
            return True
        if not self.reader.waiting():
            return False
        try:
            events = self.reader.read()
            for event, _ in events:
                if event["type"] == "start" and parent_run:
                    event.setdefault("tags", {})[PARENT_TAG] = parent_run
            if events:
                self.courier.deliver(events)
                self.reader.discard_delivered()
            return bool(events)
        except Rewind:
            self.courier.rewind(Position((segments(self.folder) or [1])[0], 0))
            self.reader = Reader(self.folder, self.courier.delivered.position)
            return True

    def killed(self) -> None:
        if self.held and self.courier.delivered.open:
            with contextlib.suppress(Rewind):
                self.courier.killed()


def serve(folder: Path, uri: str, parent: Parent) -> None:
    """Delivers until nothing more can come."""
    lanes: dict[Path, Lane] = {}
    while True:
        last = (folder / END_FILE).exists() or parent.gone()  # asked before reading: afterwards nothing is added
        busy = False
        for spool in spools(folder):
            lane = lanes.setdefault(spool, Lane(spool, uri, parent))
            own = lanes.get(folder / "tracking")
            known = own.courier.delivered.run_id if own and own.held else None
            if lane is not own and known is None:
                continue  # children come after their parent
            busy = lane.carry(known if lane is not own else None) or busy
        if last and not busy:
            break
        if not busy:
            time.sleep(POLL_SECONDS)
    for lane in lanes.values():
        lane.killed()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.sweep.deliver")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--driver", type=int, required=True)
    arguments = parser.parse_args()
    uri = os.environ["MLFLOW_TRACKING_URI"]
    os.environ.update(_ENVIRONMENT)
    for variable in _NOT_OURS:
        os.environ.pop(variable, None)
    os.nice(5)  # training comes first
    sys.stdout = sys.stderr = MaskedStream(sys.stderr)  # type: ignore[assignment]
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        serve(arguments.folder, uri, Parent(arguments.driver))
    except Leave as leave:
        logging.getLogger("writer").warning("%s: the rest stays in the spools", leave)
        sys.exit(1)


if __name__ == "__main__":
    main()
