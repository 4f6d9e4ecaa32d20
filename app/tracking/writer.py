"""The one process that talks to MLflow for a run.

    python -m app.tracking.writer FOLDER ATTEMPT NICENESS [wait]

With `wait` it imports MLflow, and continues when its standard input tells it to; if that is closed,
it ends.

Every few seconds it reads the spool's new events and delivers them. It ends when everything is
delivered and the driver appends no more: the driver releases driver.lock at the end of the run, and
the kernel releases it when the driver dies. A run without a finish then ends as KILLED. The writer
is not a child of the driver and has a session of its own, so that `ray job stop` and Ctrl-C do not
end it and it can still report how the run ended.

Trackers of `tracking.also` get the same events in threads of this process (feed.py).

The writer also delivers the spools of runs within this run's folder, such as a sweep's trials, as
they appear.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path

from app.console.masking import mask_text
from app.tracking.feed import Trackers
from app.tracking.spool import ANOTHER_DELIVERS, BEGIN, State, look_at_lock, take_lock

INTERVAL_SECONDS = 5.0
POLL_SECONDS = 0.25
BACKOFF_SECONDS = (0.25, 2.0)
LINGER_SECONDS = 5.0  # to wait for MLflow after the driver has gone
TRACKER_SECONDS = 60.0  # to wait for slow trackers after that
LOCK_SECONDS = 8.0  # to wait for an earlier writer to finish its call and end
CHILDREN = "*/tracking"  # the spools of a sweep's trials, from the folder of the sweep's spool
ENVIRONMENT = {
    # By default a call to an unreachable server blocks for four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Otherwise a model gets the uv.lock of the current folder, if there is one.
    "MLFLOW_UV_AUTO_DETECT": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
AUTOGROUP = Path("/proc/self/autogroup")
_log = logging.getLogger("writer")


def serve(folder: Path, uri: str, attempt: str) -> None:
    """Deliver until no more events can come, or until a newer driver has a writer of its own.

    Args:
        folder: The spool.
        uri: MLflow's tracking URI, with credentials.
        attempt: The text in driver.lock of the driver that this writer serves.
    """
    from app.tracking.uploader import PermanentError, TransientError, Uploader

    uploaders = {folder: Uploader(folder, uri)}
    trackers = Trackers(attempt)
    trackers.add(folder)
    retry_delay = BACKOFF_SECONDS[0]
    failing_alone_since = 0.0  # since when MLflow has not answered and the driver has been gone
    while (driver := look_at_lock(folder, "driver"))[1] == attempt:
        is_appending, _ = driver  # checked before reading: if False, no more events come
        for child in sorted(folder.parent.glob(CHILDREN)):
            if child not in uploaders and claim(child, attempt):
                uploaders[child] = Uploader(child, uri)
                trackers.add(child)
        if not is_appending:
            trackers.settle()
        try:
            # The parent's comes first, because children refer to its MLflow run.
            unfinished = [uploader.deliver() for uploader in uploaders.values()]
            if not is_appending and not any(unfinished):
                _linger(trackers, folder, attempt)
                return
            pause = INTERVAL_SECONDS
            retry_delay = BACKOFF_SECONDS[0]
            failing_alone_since = 0.0
        except (TransientError, PermanentError) as error:
            for uploader in uploaders.values():
                uploader.failed(str(error))
            pause = retry_delay
            retry_delay = min(2 * retry_delay, BACKOFF_SECONDS[1])
            now = time.monotonic()
            failing_alone_since = 0.0 if is_appending else failing_alone_since or now
            if failing_alone_since and now - failing_alone_since > LINGER_SECONDS:
                _log.warning(
                    "the driver is gone and MLflow does not answer: the rest stays in the spool"
                )
                return
        trackers.wake()  # after MLflow, which comes first
        deadline = time.monotonic() + pause
        while look_at_lock(folder, "driver") == driver:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, POLL_SECONDS))
    _log.warning("a newer start of this run takes over")


def _linger(trackers: Trackers, folder: Path, attempt: str) -> None:
    """Wait for slow trackers, when the driver waits no more, unless a newer driver is there."""
    deadline = time.monotonic() + TRACKER_SECONDS
    while trackers.unfinished() and time.monotonic() < deadline:
        if look_at_lock(folder, "driver")[1] != attempt:
            return
        time.sleep(POLL_SECONDS)


def claim(folder: Path, attempt: str, seconds: float = 0.0) -> bool:
    """Make this process the one that delivers a spool, until the process ends.

    Args:
        folder: The spool.
        attempt: The attempt that this writer serves.
        seconds: How long to wait for an earlier writer to end.

    Returns:
        Whether it succeeded; False if another process delivers the spool.
    """
    if take_lock(folder, "writer", seconds=seconds, text=attempt) is None:
        return False
    state = State.load(folder)
    state.problem = ""
    state.writer = os.getpid()
    state.save(folder)
    return True


def be_nicer(niceness: int, *, session: bool) -> None:
    """Let other processes have the processors first.

    Where Linux schedules the processes of a session as a group, as on most distributions, niceness
    counts among these only, and the group has one of its own (sched(7), "The autogroup feature").

    Args:
        niceness: Added to this process's.
        session: Whether no other process belongs to this one's session.
    """
    os.nice(niceness)
    if niceness and session:
        # There may be no such file, or no right to write to it.
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))


class MaskingFormatter(logging.Formatter):
    """Masks secrets in log lines."""

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


def main(folder: str, attempt: str, niceness: str, waits: str = "") -> None:
    """Run the writer of a spool as an orphan process.

    Args:
        folder: The spool.
        attempt: The attempt of the driver that it serves.
        niceness: Added to that of the driver.
        waits: `WAITS` if it is not yet certain that there will be a spool.
    """
    has_own_session = os.getsid(0) == os.getpid()
    if os.fork():
        os._exit(0)
    os.environ.update(ENVIRONMENT)
    be_nicer(int(niceness), session=has_own_session)
    if waits and not _is_needed():
        os._exit(0)  # at once, in the middle of an import
    if not claim(Path(folder), attempt, LOCK_SECONDS):
        sys.exit(print(ANOTHER_DELIVERS))
    if waits:  # there was no folder for its log until now
        log = os.open(Path(folder, "writer.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 2)
    # This closes the pipe, for which the driver waits, and sends what libraries print to the log.
    os.dup2(2, 1)
    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler])
    try:
        serve(Path(folder), os.environ["MLFLOW_TRACKING_URI"], attempt)
    except Exception:
        _log.exception("the writer ends with an error")


def _is_needed() -> bool:
    """Waits until the driver has a spool, or none, and imports what `serve` needs meanwhile.

    The spool is claimed as soon as there is one, also if importing takes long on a busy machine:
    the driver waits for the claim.
    """
    threading.Thread(target=_import_uploader, daemon=True).start()
    return sys.stdin.read() == BEGIN


def _import_uploader() -> None:
    with contextlib.suppress(Exception):  # `serve` imports it again, and reports what is wrong
        import app.tracking.uploader  # noqa: F401


if __name__ == "__main__":
    main(*sys.argv[1:])
