"""The driver's end of tracking: append to the spool, keep a writer running, and at the end wait for it a little.

Nothing here talks to MLflow or imports it, and nothing waits for it except `finish` and `sync`.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.console.masking import mask_text, mask_tree, mask_uri
from app.tracking.environment import provenance_tags
from app.tracking.settings import Settings, run_url
from app.tracking.spool import Event, Spool, State, last_start, look_at_lock, take_lock, write_json

PATIENCE_SECONDS = 600.0  # that one step of delivery (an upload, say) may take at the end while nothing is wrong
MOST_WRITERS = 4  # that may die at the end
KEEP_SECONDS = 5.0  # from one look whether the writer lives to the next
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """What became of a run's events."""

    run_id: str | None  # of the MLflow run; None if the server was never reached
    url: str  # the run's page ("" while unknown)
    complete: bool  # whether MLflow has everything; else the next start of the run, or `sync`, delivers the rest
    problem: str = ""  # one sentence: why something is left ("" otherwise)
    left_out: str = ""  # why MLflow has no model of this run, where none could be made ("" otherwise)


class Tracker:
    """Everything a run reports goes through here. Thread-safe.

    folder: local folder of the spool, one per run; the same one when the run is resumed.
    run_name: given to the MLflow run when it is made. run_uid: there is never a second MLflow run with it.
    tags: of the MLflow run, besides where it runs (environment.py).
    enabled: if False every method does nothing. warn: told, in a sentence, what a person should know.
    parent: the spool of the run that this is a child of, whose folder this run's folder is in. Its writer delivers this
        one too: none is started here, and `finish` does not wait.
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
    ) -> None:
        self.folder, self.settings, self.enabled = Path(folder).absolute(), settings, enabled
        self._about = {"run_name": run_name, "run_uid": run_uid, "parent": str(parent or "")}
        self._tags, self._warn, self._parent, self._attempt = tags or {}, warn, parent, uuid.uuid4().hex
        self._writer = WriterProcess(self.folder, settings.uri, self._attempt)
        self._spool: Spool | None = None
        self._driver: int | None = None

    def start(self) -> None:
        """Begin (or resume) the run: spawn the writer, which makes or finds the MLflow run while we go on.
        Raises OSError: the folder cannot be written."""
        if not self.enabled:
            return
        self._spool = Spool(self.folder, self._warn)
        self._driver = take_lock(self.folder, "driver", 2.0, self._attempt)
        if self._driver is None:  # of a start that was superseded and does not end: it is stopped, say
            (self.folder / "driver.lock").unlink(missing_ok=True)
            self._driver = take_lock(self.folder, "driver", 2.0, self._attempt)
        tags = {**provenance_tags(), **_texts(self._tags)}
        own = {"time": time.time(), "tags": tags, "uri": mask_uri(self.settings.uri)}
        write_json(self.folder / "start.json", {**asdict(self.settings), **self._about, **own})
        self._append("start")
        self.tags(tags)
        if self._parent is None:
            self._writer.keep()

    def emit(self, event: Event) -> None:
        """Append an event as it is."""
        if self._spool is not None:
            self._spool.append(event)

    def _append(self, kind: str, **values: object) -> None:
        self.emit({"type": kind, "time": time.time(), **values})

    def metrics(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Metrics of a step; time: Unix seconds. A step not above a metric's last one is a replay, not logged again."""
        own = {"time": time} if time else {}
        self._append("metrics", step=int(step), values={key: float(value) for key, value in values.items()}, **own)

    def system_metrics(self, values: Mapping[str, float], time: float) -> None:
        """Metrics of a machine at a moment, in Unix seconds. The step that MLflow gets is the whole seconds since the
        run began, so that the curves of a resumed run go on where they were."""
        self.emit({"type": "metrics", "step": None, "time": time, "values": dict(values)})

    def params(self, values: Mapping[str, object]) -> None:
        """One that changed since the run began is kept, and the new value becomes the tag `trireme.param.KEY`."""
        self._append("params", values=_texts(values))

    def inputs(self, found: Iterable[Mapping[str, str]]) -> None:
        """Data sets that the run reads: see app/run/inputs.py."""
        self._append("inputs", values=list(found))

    def tags(self, values: Mapping[str, str]) -> None:
        self._append("tags", values=_texts(values))

    def artifact(self, path: Path, folder: str = "") -> None:
        """Upload a file or a folder, which must stay in place until delivered, into `folder` of the artifacts."""
        self._append("artifact", path=str(Path(path).absolute()), folder=folder)

    def text(self, text: str, name: str) -> None:
        """Store a text as the artifact `name`; values that look like secrets are masked."""
        self._append("text", text=mask_text(text), name=name)

    def model(self, recipe: Mapping[str, Any]) -> None:
        """Log the trained model: {"task", "task_args", "weights": path of a torch-saved state dict, "metrics": values
        for the model's page}. The weights' file must stay in place until delivered."""
        if self._spool is None:
            return
        # In a file of its own, gone once delivered: to rebuild the model, a task may need a secret that it was given.
        number = uuid.uuid4().hex
        path = self.folder / f"model-{number}.json"
        path.touch(0o600)
        here = {"cwd": os.getcwd(), "weights": str(Path(recipe["weights"]).absolute())}
        path.write_text(json.dumps({**recipe, **here}))
        self._append("model", id=number, recipe=str(path))

    def finish(self, status: str, *, message: str = "", timeout: float = 15.0) -> Delivery:
        """End the MLflow run and wait until everything is delivered.

        status: FINISHED, FAILED or KILLED. message: one sentence about the end, kept as the tag `trireme.message`.
        timeout: seconds to wait while nothing can be delivered; as long as delivery goes on it is waited for.
        """
        if self._spool is None:
            return _delivery(self.folder, self.settings, "")
        self._append("finish", status=status, message=mask_text(message))
        self._spool.close(timeout)
        self._spool = None
        if self._driver is not None:
            os.close(self._driver)  # so that the writer sees that nothing more comes
        if self._parent is not None:
            return replace(_delivery(self.folder, self.settings, ""), complete=True)
        return _delivery(self.folder, self.settings, self._writer.wait(timeout))

    def leave(self) -> None:
        """Append nothing more, and leave the MLflow run as it is: another driver reports to it."""
        if self._spool is None:
            return
        self._spool.close()
        self._spool = None
        self._writer.stop()
        if self._driver is not None:
            os.close(self._driver)


class WriterProcess:
    """The writer of a spool, as the driver of this attempt sees it."""

    def __init__(self, folder: Path, uri: str, attempt: str) -> None:
        self._folder, self._uri, self._attempt = folder, uri, attempt
        self._over = threading.Event()
        self._keeper: threading.Thread | None = None

    def keep(self) -> None:
        """Start it, and again whenever it dies, until `wait`."""
        self._keeper = threading.Thread(target=self._keep, name="tracking-writer", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while True:
            if not self._lives():
                with contextlib.suppress(OSError):  # the disk is full, or away
                    self._spawn()
            if self._over.wait(KEEP_SECONDS):
                return

    def stop(self) -> None:
        """Keep it no longer."""
        self._over.set()
        if self._keeper is not None:
            self._keeper.join()

    def _lives(self) -> bool:
        return look_at_lock(self._folder, "writer") == (True, self._attempt)

    def _spawn(self) -> str:
        """Start a writer, which is an orphan at once; "" when it has claimed the spool, else why it has not."""
        environment = {
            **os.environ,
            # By the environment, not by argument or file: the URI may hold a password.
            "MLFLOW_TRACKING_URI": self._uri,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
        }
        # -P: a package of the person's that is called app, in the current folder, does not come first.
        command = [sys.executable, "-P", "-m", "app.tracking.writer", str(self._folder), self._attempt]
        with (self._folder / "writer.log").open("ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": log}
            # Until the writer closes its end of the pipe.
            done = subprocess.run(command, **streams, env=environment, start_new_session=True, text=True, check=False)
        return str(done.stdout).strip()

    def wait(self, timeout: float) -> str:
        """Wait until a writer has delivered all, or until it has got nowhere for `timeout` seconds; it is then ended,
        also in the midst of a call, and what it had left stays in the spool. Returns why something is left, if it is.
        """
        self.stop()
        seen, since, spawned = State.load(self._folder), time.monotonic(), 0
        while not (state := State.load(self._folder)).has_all(self._folder):
            if not self._lives():
                if spawned == MOST_WRITERS:
                    return f"the tracking writer died {spawned} times; see {self._folder}/writer.log"
                if problem := self._spawn():
                    return problem
                spawned, since = spawned + 1, time.monotonic()
            elif (state.offset, state.run_id) != (seen.offset, seen.run_id):
                seen, since = state, time.monotonic()
            elif time.monotonic() - since > (timeout if state.problem else PATIENCE_SECONDS):
                if state.writer is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(state.writer, signal.SIGKILL)
                return state.problem or "the tracking writer makes no progress"
            time.sleep(0.05)
        return ""


def sync(folder: Path, *, timeout: float = 30.0) -> Delivery:
    """Deliver what an earlier run left in its spool, to where it was tracked (with credentials from MLFLOW_TRACKING_URI
    where the two differ in nothing else). timeout: seconds to wait while nothing can be delivered.
    """
    folder = Path(folder).absolute()
    start = last_start(folder)
    if not start:
        return Delivery(None, "", True)
    environment = os.environ.get("MLFLOW_TRACKING_URI", "")
    uri = environment if mask_uri(environment) == start["uri"] else start["uri"]
    settings, attempt = Settings(uri, start["experiment"]), uuid.uuid4().hex
    driver = take_lock(folder, "driver", 1.0, attempt)  # an earlier start's writer that still tries makes way
    if driver is None:
        return _delivery(folder, settings, "the run is going on, and its own writer delivers it")
    os.close(driver)
    return _delivery(folder, settings, WriterProcess(folder, uri, attempt).wait(timeout))


def _delivery(folder: Path, settings: Settings, problem: str) -> Delivery:
    state = State.load(folder)
    url = run_url(settings, state.experiment_id, state.run_id)
    done = not problem and state.has_all(folder)
    return Delivery(state.run_id or None, url, done, problem, state.left_out)


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {key: str(value) for key, value in mask_tree(values).items()}
