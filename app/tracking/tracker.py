"""The driver's end of tracking: append to the spool, keep a writer running, and wait at the end.

Nothing here talks to MLflow or imports it, and only `finish` and `sync` wait for delivery.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.console.masking import mask_text, mask_tree, mask_uri
from app.tracking.environment import provenance_tags
from app.tracking.feed import problems
from app.tracking.model_format import PART, files_of
from app.tracking.settings import Settings, run_url
from app.tracking.spool import (
    ANOTHER_DELIVERS,
    BEGIN,
    WAITS,
    Event,
    Spool,
    State,
    last_start,
    look_at_lock,
    take_lock,
    write_json,
)

if TYPE_CHECKING:
    from app.tasks.base import Task

PATIENCE_SECONDS = 600.0
"""How long one step of delivery, such as an upload, may take at the end while MLflow answers."""
MOST_WRITERS = 4  # to start at the end, if they die
WHILE_TRAINING = 15
"""How much nicer than its driver a writer is, since training comes first.

Ray's workers are as much nicer than Ray.
"""
STARVED_SECONDS = 5.0
"""How long a writer at the end of a run may mostly wait for a processor."""
KEEP_SECONDS = 5.0  # between checks whether the writer is alive
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """The result of delivering a run's events to MLflow.

    Args:
        run_id: The MLflow run; None if the server was never reached.
        url: The run's page; "" while unknown.
        complete: Whether MLflow has everything. If not, the next start of the run, or `sync`,
            delivers the rest.
        problem: Why events are left, as a sentence; "" otherwise.
        left_out: Why MLflow has no model of this run, if none could be made; "" otherwise.
        trackers: What is missing in trackers beside MLflow, a sentence each.
    """

    run_id: str | None
    url: str
    complete: bool
    problem: str = ""
    left_out: str = ""
    trackers: tuple[str, ...] = ()


class Tracker:
    """Takes everything that a run reports; thread-safe.

    Args:
        folder: The spool's local folder, one per run. A resumed run has the same one.
        settings: Where the run is tracked.
        run_name: The name of a new MLflow run.
        run_uid: Identifies the MLflow run: there is never a second one with the same uid.
        enabled: If False, every method does nothing.
        tags: Tags of the MLflow run, besides those of its environment (environment.py).
        warn: Called with a sentence that a person should know.
        parent: The spool of the parent run, whose folder contains this run's folder. The parent's
            writer delivers this spool too: no writer is started here, and `finish` does not wait.
        writer: Of this folder, which may import already; None makes one.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        run_name: str,
        run_uid: str,
        enabled: bool = True,
        tags: Mapping[str, str] | None = None,
        warn: Callable[[str], object] = _log.warning,
        parent: Path | None = None,
        writer: WriterProcess | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.settings = settings
        self.enabled = enabled
        self._run_name = run_name
        self._run_uid = run_uid
        self._tags = tags or {}
        self._warn = warn
        self._parent = parent
        self._writer = writer or WriterProcess(self.folder, settings.uri)
        self._attempt = self._writer.attempt
        self._spool: Spool | None = None
        self._driver_lock: int | None = None

    @property
    def is_child(self) -> bool:
        """Whether the MLflow run stands below a parent's."""
        return self._parent is not None

    def start(self) -> None:
        """Begin or resume the run, and start the writer, which creates or finds the MLflow run.

        Raises:
            OSError: The folder cannot be written.
        """
        if not self.enabled:
            return
        self._spool = Spool(self.folder, self._warn)
        self._driver_lock = self._take_driver_lock()
        if self._driver_lock is None:  # an earlier start has been superseded but does not end
            (self.folder / "driver.lock").unlink(missing_ok=True)
            self._driver_lock = self._take_driver_lock()
        tags = {**provenance_tags(), **_texts(self._tags)}
        start = {
            **asdict(self.settings),
            "run_name": self._run_name,
            "run_uid": self._run_uid,
            "parent": str(self._parent or ""),
            "time": time.time(),
            "tags": tags,
            "uri": mask_uri(self.settings.uri),
        }
        write_json(self.folder / "start.json", start)
        self.emit({"type": "start", "time": start["time"]})
        self.tags(tags)
        if self._parent is None:
            self._writer.keep()

    def _take_driver_lock(self) -> int | None:
        return take_lock(self.folder, "driver", seconds=2.0, text=self._attempt)

    def emit(self, event: Event) -> None:
        """Append an event unchanged."""
        if self._spool is not None:
            self._spool.append(event)

    def _append(self, kind: str, **values: object) -> None:
        self.emit({"type": kind, "time": time.time(), **values})

    def metrics(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Log the metrics of a step.

        Args:
            step: For each metric above its last step; otherwise the step is a replay, and not
                logged again.
            values: The metrics by name.
            time: Unix seconds; None means now.
        """
        numbers = {name: float(value) for name, value in values.items()}
        if time:
            self._append("metrics", step=int(step), values=numbers, time=time)
        else:
            self._append("metrics", step=int(step), values=numbers)

    def system_metrics(self, values: Mapping[str, float], time: float) -> None:
        """Log the metrics of a machine.

        MLflow gets the whole seconds since the run began as the step, so that the curves of a
        resumed run continue.

        Args:
            values: The metrics by name.
            time: Unix seconds.
        """
        self.emit({"type": "metrics", "step": None, "time": time, "values": dict(values)})

    def params(self, values: Mapping[str, object]) -> None:
        """Log parameters.

        MLflow keeps the first value of a parameter; a value that differs later becomes the tag
        `trireme.param.KEY`.
        """
        self._append("params", values=_texts(values))

    def inputs(self, datasets: Iterable[Mapping[str, str]]) -> None:
        """Log the data sets that the run reads; see app/run/inputs.py."""
        self._append("inputs", values=list(datasets))

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the MLflow run."""
        self._append("tags", values=_texts(values))

    def artifact(self, path: Path, folder: str = "") -> None:
        """Upload an artifact.

        Args:
            path: A file or a folder, which must not be moved or deleted before it is delivered.
            folder: The folder of the MLflow run's artifacts to upload it to.
        """
        self._append("artifact", path=str(Path(path).absolute()), folder=folder)

    def text(self, text: str, name: str) -> None:
        """Store a text as the artifact `name`, with its secrets masked."""
        self._append("text", text=mask_text(text), name=name)

    def model(self, recipe: Mapping[str, Any], task: Task | None = None) -> None:
        """Log the trained model.

        Args:
            recipe: How to build the model: "task" and "task_args"; "weights", the path of a state
                dict that torch saved, which must not be moved or deleted before it is delivered;
                "metrics", the values on the model's page.
            task: The task, from which the model's files are written now; None leaves this to the
                writer, which then imports torch and reads the task again.
        """
        if self._spool is None:
            return
        # The recipe has a file of its own, which is deleted after delivery, because the task's
        # arguments may contain secrets.
        model_id = uuid.uuid4().hex
        path = self.folder / f"model-{model_id}.json"
        path.touch(0o600)
        weights = str(Path(recipe["weights"]).absolute())
        recipe = {**recipe, "cwd": os.getcwd(), "weights": weights}
        path.write_text(json.dumps(recipe))
        if task is not None and not self._discard_unfinished_models():
            # Not at the top: trackers of runs that log no model do without torch.
            from app.tracking.model_files import write_model_files

            with contextlib.suppress(Exception):  # the writer tries again, and says what is wrong
                write_model_files(task, recipe, files_of(path))
        self._append("model", id=model_id, recipe=str(path))

    def _discard_unfinished_models(self) -> bool:
        """Deletes what earlier drivers were writing of models when they died.

        Writing may be what ended them, as with a model that fills the memory. It would end this
        one too, while a writer that dies is replaced, and the model left out in the end.

        Returns:
            Whether there was anything.
        """
        parts = [*self.folder.glob(f"model-*{PART}")]
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)
            part.with_suffix(".json").unlink(missing_ok=True)
        return bool(parts)

    def finish(self, status: str, *, message: str = "", timeout: float = 15.0) -> Delivery:
        """End the MLflow run and wait until everything is delivered.

        A second call, after the wait was interrupted, says at once what is delivered.

        Args:
            status: FINISHED, FAILED or KILLED.
            message: A sentence about the end, for the tag `trireme.message`.
            timeout: How many seconds to wait while nothing can be delivered. While delivery makes
                progress there is no limit.
        """
        if self._spool is None:
            return _delivery(self.folder, self.settings, "")
        spool = self._spool
        self._append("finish", status=status, message=mask_text(message))
        self._spool = None
        spool.close(timeout)
        if self._driver_lock is not None:
            os.close(self._driver_lock)  # the writer now knows that no more events come
        if self._parent is not None:
            return replace(_delivery(self.folder, self.settings, ""), complete=True)
        return _delivery(self.folder, self.settings, self._writer.wait(timeout))

    def leave(self) -> None:
        """Append nothing more, and do not end the MLflow run: another driver reports to it."""
        if self._spool is None:
            return
        self._spool.close()
        self._spool = None
        self._writer.stop()
        if self._driver_lock is not None:
            os.close(self._driver_lock)


class WriterProcess:
    """Starts the writer of a spool, keeps it running, and waits for it.

    Args:
        folder: The spool.
        uri: MLflow's tracking URI, with credentials.
        attempt: The attempt of the driver, which the writer serves; "" makes one.
    """

    def __init__(self, folder: Path, uri: str, attempt: str = "") -> None:
        self.attempt = attempt or uuid.uuid4().hex
        self._folder = folder
        self._uri = uri
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._waiting: subprocess.Popen[str] | None = None
        """A writer that has imported MLflow, and waits until there is a spool."""

    def import_ahead(self) -> None:
        """Starts a writer that imports MLflow now, while it is not yet certain that it is needed.

        It ends with this process, or at `dismiss`, unless the spool has been given to it.
        """
        with contextlib.suppress(OSError):  # too many processes; `keep` starts one later
            self._waiting = self._start(WHILE_TRAINING, waits=True, log=subprocess.DEVNULL)

    def dismiss(self) -> None:
        """Ends a writer that was started ahead and has not been given the spool."""
        waiting = self._waiting
        self._waiting = None
        if waiting is not None:
            # The writer is an orphan in the session of the process that it was started as, whose
            # number stays taken until it is waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(waiting.pid, signal.SIGKILL)
            waiting.communicate()

    def keep(self) -> None:
        """Start the writer, and start it again whenever it dies, until `stop` or `wait`."""
        self._keeper = threading.Thread(target=self._keep, name="tracking-writer", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while True:
            if not self._is_alive():
                with contextlib.suppress(OSError):  # the disk is full or gone
                    self._spawn()
            if self._stop.wait(KEEP_SECONDS):
                return

    def stop(self) -> None:
        """Start the writer no more."""
        self._stop.set()
        if self._keeper is not None:
            self._keeper.join()

    def _is_alive(self) -> bool:
        return look_at_lock(self._folder, "writer") == (True, self.attempt)

    def _earlier_writer(self, state: State) -> int | None:
        """The process that delivers this spool for an earlier start; None if it is not here.

        The number may be that of a process on another host, or have gone to another process since.
        """
        try:
            words = Path(f"/proc/{state.writer}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        return state.writer if os.fsencode(self._folder) in words else None

    def _spawn(self, niceness: int = WHILE_TRAINING) -> str:
        """Start a writer, or give the spool to the one that waits for it.

        It is an orphan process from the beginning.

        Args:
            niceness: Added to this process's.

        Returns:
            "" when the writer has claimed the spool, otherwise why it has not.
        """
        waiting = self._waiting
        if waiting is not None and niceness == WHILE_TRAINING:
            self._waiting = None
            problem, _ = waiting.communicate(BEGIN)
            if problem.strip() == ANOTHER_DELIVERS or self._is_alive():
                return problem.strip()
        with (self._folder / "writer.log").open("ab") as log:
            writer = self._start(niceness, waits=False, log=log.fileno())
        problem, _ = writer.communicate()  # returns when the writer closes its end of the pipe
        return problem.strip()

    def _start(self, niceness: int, *, waits: bool, log: int) -> subprocess.Popen[str]:
        """Starts the program of a writer.

        Args:
            niceness: Added to this process's.
            waits: Whether it waits until it is given the spool.
            log: The file descriptor for what goes wrong.
        """
        code = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            # The environment is hidden from other users, unlike the command line: the URI may
            # contain a password.
            "MLFLOW_TRACKING_URI": self._uri,
            "PYTHONPATH": os.pathsep.join([code, *filter(None, sys.path)]),
        }
        # -P: a package called app in the current folder does not come first.
        command = [sys.executable, "-P", "-m", "app.tracking.writer"]
        arguments = [str(self._folder), self.attempt, str(niceness)]
        if waits:
            arguments.append(WAITS)
        return subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
            text=True,
        )

    def run_once(self) -> str:
        """Start a writer and wait until it ends; it feeds the trackers beside MLflow too.

        Returns:
            Why there is no writer; "" if there was one.
        """
        problem = self._spawn()
        while not problem and self._is_alive():
            time.sleep(0.05)
        return problem

    def wait(self, timeout: float) -> str:
        """Wait until a writer has delivered everything.

        A writer that makes no progress is killed, even in the middle of a call; what it has not
        delivered stays in the spool. One that has served while training went on is nicer than other
        processes. If these leave it no processor, another one takes its place that is not. The
        writer of an earlier start, which ends after its call, is waited for in the same way.

        Args:
            timeout: How many seconds to wait without progress while MLflow cannot be reached, or
                while the writer of an earlier start does not end.

        Returns:
            Why events are left; "" if none are.
        """
        self.stop()
        last_state = State.load(self._folder)
        progress_time = time.monotonic()
        writers = 0
        starvation = Starvation()
        while not (state := State.load(self._folder)).has_all(self._folder):
            if (state.offset, state.run_id) != (last_state.offset, last_state.run_id):
                last_state = state
                progress_time = time.monotonic()
            if not self._is_alive():
                if writers == MOST_WRITERS:
                    log = self._folder / "writer.log"
                    return f"the tracking writer died {writers} times; see {log}"
                problem = self._spawn(niceness=0)
                if not problem:
                    writers += 1
                    progress_time = time.monotonic()
                elif problem != ANOTHER_DELIVERS:
                    return problem
                elif (earlier := self._earlier_writer(state)) and starvation.lasts(earlier):
                    _kill(earlier)
                elif time.monotonic() - progress_time > timeout:
                    return problem
            elif not writers and state.writer is not None and starvation.lasts(state.writer):
                _kill(state.writer)
            else:
                limit = timeout if state.problem else PATIENCE_SECONDS
                if time.monotonic() - progress_time > limit:
                    if state.writer is not None:
                        _kill(state.writer)
                    return state.problem or "the tracking writer makes no progress"
            time.sleep(0.05)
        return ""


class Starvation:
    """Whether a process is ready to run and other processes have the processors (Linux only)."""

    def __init__(self) -> None:
        self._start: tuple[float, dict[str, float]] | None = None
        """The first look of some seconds: the clock, and how long each thread had waited."""

    def lasts(self, pid: int) -> bool:
        """Whether one of its threads has waited for most of the last seconds.

        The main thread may wait for another one, such as the one that imports MLflow. Each time
        that it cannot be said, it is looked at anew: the process may have waited for something
        else before, such as another writer's database.

        Args:
            pid: The process.
        """
        waited = _waited_seconds(pid)
        now = time.monotonic()
        if self._start is None:
            self._start = now, waited
        start, waited_before = self._start
        seconds = now - start
        if seconds < STARVED_SECONDS:
            return False
        if any(waited[each] - waited_before.get(each, 0.0) > seconds / 2 for each in waited):
            return True
        self._start = now, waited
        return False


def _waited_seconds(pid: int) -> dict[str, float]:
    """How long each thread of a process has been ready and waited for a processor; {} if unknown.

    See https://docs.kernel.org/scheduler/sched-stats.html.
    """
    waited = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            # Nanoseconds on a processor, nanoseconds ready and waiting for one, times on one.
            _, waited_nanoseconds, _ = file.read_text().split()
            waited[file.parent.name] = int(waited_nanoseconds) / 1e9
    return waited


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def sync(folder: Path, *, timeout: float = 30.0) -> Delivery:
    """Deliver what an earlier run left in its spool, to where it was tracked.

    If MLFLOW_TRACKING_URI is the same address with credentials, these are used.

    Args:
        folder: The spool.
        timeout: How many seconds to wait while nothing can be delivered.
    """
    folder = Path(folder).absolute()
    start = last_start(folder)
    if not start:
        return Delivery(run_id=None, url="", complete=True)
    environment_uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    uri = environment_uri if mask_uri(environment_uri) == start["uri"] else start["uri"]
    settings = Settings(uri, start["experiment"])
    attempt = uuid.uuid4().hex
    # With the lock's new text, the writer of an earlier start ends.
    driver_lock = take_lock(folder, "driver", seconds=1.0, text=attempt)
    if driver_lock is None:
        problem = "the run is still training, and its own writer delivers its metrics"
        return _delivery(folder, settings, problem)
    os.close(driver_lock)
    writer = WriterProcess(folder, uri, attempt)
    problem = writer.run_once() if problems(folder) else ""
    return _delivery(folder, settings, problem or writer.wait(timeout))


def _delivery(folder: Path, settings: Settings, problem: str) -> Delivery:
    state = State.load(folder)
    return Delivery(
        run_id=state.run_id or None,
        url=run_url(settings, state.experiment_id, state.run_id),
        complete=not problem and state.has_all(folder),
        problem=problem,
        left_out=state.left_out,
        trackers=tuple(problems(folder)),
    )


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {key: str(value) for key, value in mask_tree(values).items()}
