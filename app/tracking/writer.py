"""The writer: `python -m app.tracking.writer FOLDER`, the one process that talks to MLflow for a run.

Nobody's child, in a session of its own. It tails the spool and delivers it in order; while MLflow is away it
tries again and again. It ends when it has delivered the driver's `finish` event. When the driver is gone without one,
it delivers what is there and ends the MLflow run as KILLED. Without `--attempt` it delivers what is there and ends.

A lock on the spool makes it the only writer: one of an earlier driver that is still at work is waited for, and stops
where the new driver's events begin.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from app.tracking.masking import mask_text
from app.tracking.process import TRAINING
from app.tracking.spool import Position, Reader, segments
from app.tracking.state import FileLock
from app.tracking.turns import Leave, Rewind, Superseded

if TYPE_CHECKING:
    from app.tracking.courier import Courier

POLL_SECONDS = 0.25
PACE_SECONDS = 1.0
PACE_SHARE = 1 / 400
LONGEST_PACE_SECONDS = 10.0
"""Points are let gather for so long, and longer where delivering takes more of a core than that share: a call costs
about the same for one as for many."""
START_SECONDS = 10.0
"""How long the first step is let go before: importing MLflow takes two seconds of a core that the workers want too."""
LINGER_SECONDS = 60.0
"""How long a writer whose driver is gone waits for MLflow to come back."""
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the courier tries again, and asks first what has arrived
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
_NOT_OURS = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_ACTIVE_MODEL_ID", "PYTEST_CURRENT_TEST")
_log = logging.getLogger("writer")


class Driver:
    """The process we write for: is it there, does it want us to hurry, does any live?"""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid, self._folder = pid, folder
        self._born = _birth(pid)
        self._listening = True
        self._gone_since = 0.0
        self.hurry = False
        self.training = False

    def gone(self) -> bool:
        # Its end of our pipe closes when it dies; but a process it forked may still hold that open.
        if not self._gone_since and not (self._listening and self._born and _birth(self._pid) == self._born):
            self._gone_since = time.monotonic()
        return self._gone_since > 0

    def pause(self, seconds: float) -> None:
        """Sleep, but wake when the driver says that it trains, asks for haste, or is gone (the end of our stdin)."""
        if not self._listening:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            said = os.read(0, 4096).decode()
            self._listening = bool(said)
            self.training = True
            self.hurry = self.hurry or said != TRAINING

    def lives(self) -> bool:
        """Whether any driver of this spool is alive: its lock dies with it."""
        lock = FileLock(self._folder / "driver.lock")
        free = lock.acquire()
        lock.release()
        return not free

    def lingered(self) -> bool:
        return self.gone() and time.monotonic() - self._gone_since > LINGER_SECONDS


def _birth(pid: int) -> str:
    """When the process began, so that a number used again is not taken for it; "" if there is none (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "unknown"
    return "" if fields[0] in "ZX" else fields[19]


def _let_it_start(driver: Driver) -> None:
    """Waits for the driver's first step, or its end, or until it takes too long."""
    until = time.monotonic() + START_SECONDS
    while not (driver.training or driver.hurry or driver.gone()) and (left := until - time.monotonic()) > 0:
        driver.pause(min(POLL_SECONDS, left))


def serve(folder: Path, courier: Courier, driver: Driver) -> None:
    """Deliver until nothing more can come.

    Raises:
        Superseded, Leave: what follows is another writer's.
    """
    reader, took = Reader(folder, courier.delivered.position), 0.0
    while not (courier.ours and not courier.delivered.open):  # until our finish event is delivered
        last = courier.attempt is None or driver.gone()  # asked before reading: afterwards nothing can be added
        try:
            if events := reader.read():
                begun = time.process_time()
                courier.deliver(events)
                reader.discard_delivered()
                took = time.process_time() - begun
            elif last:
                if courier.delivered.open and (courier.ours or (courier.attempt is None and not driver.lives())):
                    courier.killed()
                return
            else:
                _wait_for_events(reader, driver, min(max(PACE_SECONDS, took / PACE_SHARE), LONGEST_PACE_SECONDS))
        except Rewind:
            courier.rewind(Position((segments(folder) or [1])[0], 0))
            reader = Reader(folder, courier.delivered.position)


def _wait_for_events(reader: Reader, driver: Driver, seconds: float) -> None:
    """Lets events gather for so long, and then until there are any; in haste, only for those."""
    gathered = time.monotonic() + seconds
    while not (driver.hurry or driver.gone()) and (left := gathered - time.monotonic()) > 0:
        driver.pause(min(left, PACE_SECONDS))
    while not driver.gone() and not reader.waiting():
        driver.pause(POLL_SECONDS)
        if driver.hurry:
            driver.pause(0.02)  # already in haste: do not spin while there is nothing yet


class Patience:
    """How long to wait for MLflow: as long as our driver lives; then a while, unless a newer start takes over."""

    def __init__(self, driver: Driver, folder: Path, attempt: str | None) -> None:
        self._driver, self._folder, self._attempt = driver, folder, attempt
        self.courier: Courier | None = None
        self._ahead: Reader | None = None

    def back_off(self, seconds: float) -> None:
        """Wait before the next try. Raises Leave when there is no use in it."""
        until = time.monotonic() + (min(seconds, 0.5) if self._driver.hurry else seconds)
        while (left := until - time.monotonic()) > 0:
            if self._driver.lingered():
                raise Leave("the driver is gone and MLflow is away")
            if self._driver.gone() and self._superseded():
                raise Leave("a newer start of this run takes over")
            self._driver.pause(min(POLL_SECONDS, left))

    def _superseded(self) -> bool:
        """Whether a start other than ours lies ahead, once delivery has reached ours."""
        if self.courier is None or not self.courier.ours:
            return False
        self._ahead = self._ahead or Reader(self._folder, self.courier.delivered.position)
        while events := self._ahead.read():
            if any(event["type"] == "start" and event["attempt"] != self._attempt for event, _ in events):
                return True
        return False


class MaskedStream:
    """A text stream that writes no passwords."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask_text(text))
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m app.tracking.writer", description="Deliver a run's spool to MLflow."
    )
    parser.add_argument("folder", type=Path, help="the spool")
    parser.add_argument("--driver", type=int, default=os.getppid(), help="process id of the driver")
    parser.add_argument("--attempt", help="the driver's start to serve; without it: deliver what is there and end")
    arguments = parser.parse_args()
    if "MLFLOW_TRACKING_URI" not in os.environ:
        parser.error("MLFLOW_TRACKING_URI is not set; `trireme sync RUN_FOLDER` delivers what a run left")
    if os.fork():
        os._exit(0)  # so that the writer is an orphan from the start
    print(os.getpid(), flush=True)
    os.environ.update(_ENVIRONMENT)
    for variable in _NOT_OURS:
        os.environ.pop(variable, None)
    os.nice(10)  # training comes first, and so does what starts it
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever anybody prints goes to the log
    sys.stdout = sys.stderr = MaskedStream(sys.stderr)  # type: ignore[assignment]
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    driver = Driver(arguments.driver, arguments.folder)
    lock = FileLock(arguments.folder / "writer.lock")
    while not lock.acquire():
        time.sleep(0.1)
    print("delivering", file=pipe, flush=True)
    _let_it_start(driver)

    from app.tracking.courier import Courier
    from app.tracking.mlflow_run import MlflowRun

    patience = Patience(driver, arguments.folder, arguments.attempt)
    run = MlflowRun(os.environ["MLFLOW_TRACKING_URI"])
    courier = Courier(arguments.folder, run, attempt=arguments.attempt, back_off=patience.back_off)
    patience.courier = courier
    try:
        serve(arguments.folder, courier, driver)
    except Superseded:
        _log.warning("a newer start of this run takes over")
    except Leave as leave:
        _log.warning("%s: the rest stays in the spool", leave)
    with contextlib.suppress(OSError):  # nobody listens any more
        print("done", file=pipe, flush=True)


if __name__ == "__main__":
    main()
