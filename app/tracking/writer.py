"""The one process that talks to MLflow for a run: `python -m app.tracking.writer FOLDER ATTEMPT`.

Every few seconds it reads what is new in the spool and delivers it. It ends when the driver appends no more
(driver.lock is released when the run is over, and by the kernel when the driver dies) and all is delivered; a run that
was not finished then ends as KILLED. It is not a child of the driver, and in a session of its own: `ray job stop` and
Ctrl-C do not end it, so that it can still report how the run ended.

The spools of runs within this run's folder, such as a sweep's trials, are delivered too, as they appear.
"""

import logging
import os
import sys
import time
from pathlib import Path

from app.console.masking import mask_text
from app.tracking.spool import State, look_at_lock, take_lock

INTERVAL_SECONDS = 5.0
POLL_SECONDS = 0.25
BACKOFF_SECONDS = (0.25, 2.0)
LINGER_SECONDS = 5.0  # that a writer whose driver is gone waits for MLflow to come back
LOCK_SECONDS = 8.0  # that an earlier writer may take to end its call and make way
CHILDREN = "*/tracking"  # the spools of a sweep's trials, from the folder that the sweep's spool is in
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # by default one call to an unreachable server blocks for four minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
_log = logging.getLogger("writer")


def serve(folder: Path, uri: str, attempt: str) -> None:
    """Deliver until nothing more can come, or until a newer driver has a writer of its own.

    uri: tracking URI, credentials included. attempt: what the driver that this writer serves has put into driver.lock.
    """
    from app.tracking.uploader import PermanentError, TransientError, Uploader

    uploaders = {folder: Uploader(folder, uri)}
    delay, alone_since = BACKOFF_SECONDS[0], 0.0
    while (driver := look_at_lock(folder, "driver"))[1] == attempt:
        appending, _ = driver  # asked before reading: afterwards nothing is added
        for child in sorted(folder.parent.glob(CHILDREN)):
            if child not in uploaders and claim(child, attempt):
                uploaders[child] = Uploader(child, uri)
        try:
            # The parent first: children name its run.
            going_on = [uploader.deliver() for uploader in uploaders.values()]
            if not appending and not any(going_on):
                return
            pause, delay, alone_since = INTERVAL_SECONDS, BACKOFF_SECONDS[0], 0.0
        except (TransientError, PermanentError) as error:
            for uploader in uploaders.values():
                uploader.failed(str(error))
            pause, delay = delay, min(2 * delay, BACKOFF_SECONDS[1])
            alone_since = 0.0 if appending else alone_since or time.monotonic()
            if alone_since and time.monotonic() - alone_since > LINGER_SECONDS:
                return _log.warning("the driver is gone and MLflow does not answer: the rest stays in the spool")
        until = time.monotonic() + pause
        while look_at_lock(folder, "driver") == driver and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
    _log.warning("a newer start of this run takes over")


def claim(folder: Path, attempt: str, seconds: float = 0.0) -> bool:
    """Make this process the one that delivers the spool, until it ends; False where another one does."""
    if take_lock(folder, "writer", seconds, attempt) is None:
        return False
    state = State.load(folder)
    state.problem, state.writer = "", os.getpid()
    state.save(folder)
    return True


class MaskingFormatter(logging.Formatter):
    """Lets no password into the log."""

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


def main(folder: str, attempt: str) -> None:
    if os.fork():
        os._exit(0)  # an orphan from the start
    if not claim(Path(folder), attempt, LOCK_SECONDS):
        sys.exit(print("another process is delivering this spool"))
    os.dup2(2, 1)  # closes the pipe, for which the driver waits; what any library prints goes to the log
    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler])
    os.environ.update(ENVIRONMENT)
    os.nice(10)  # training comes first
    try:
        serve(Path(folder), os.environ["MLFLOW_TRACKING_URI"], attempt)
    except Exception:
        _log.exception("the writer ends here")


if __name__ == "__main__":
    main(*sys.argv[1:])
