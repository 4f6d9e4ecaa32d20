"""Carries the spool's events into MLflow, in order, each exactly once, however often either side dies.

Metrics: per key MLflow keeps the highest step (the watermark). A point at or below it is a replay (of a resumed run,
or of a call whose answer was lost) and is not sent. So that a lost answer doubles nothing, MLflow is asked for its
watermarks after every failure, and whenever a writer starts.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from app.tracking.masking import mask_uri
from app.tracking.mlflow_run import METRICS_AT_ONCE, Away, Gone, MlflowRun, Refused, valid_key
from app.tracking.points import Point
from app.tracking.spool import Event, Position
from app.tracking.state import Delivered, Status
from app.tracking.turns import Rewind, Superseded, Turn

if TYPE_CHECKING:
    from app.tracking import model

BACKOFF_SECONDS = (0.25, 2.0)
REQUEST_SECONDS = "10"
"""Time-out of MLflow's HTTP requests. By its defaults one call to a server that is away blocks for four minutes."""
_UPLOAD_SECONDS = "120"
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_MODEL_TRIES = 2
_UPLOAD_TRIES = 5
_log = logging.getLogger("writer")


class Courier:
    """Delivers events to one run.

    Args:
        folder: the spool's.
        attempt: the driver's start this writer serves; None: all of them.
        back_off: called between two tries with the seconds to wait; raises to give up.
    """

    def __init__(self, folder: Path, run: MlflowRun, *, attempt: str | None, back_off: Callable[[float], None]) -> None:
        self.folder, self.run, self.attempt = folder, run, attempt
        self.delivered = Delivered.load(folder)
        self.status = Status(pid=os.getpid(), uri=run.shown, progress=time.time())
        self.status.run_id, self.status.experiment_id = self.delivered.run_id, self.delivered.experiment_id
        self.tell()
        self._back_off = back_off
        self._opened = False

    @property
    def ours(self) -> bool:
        """Whether delivery has reached the events of our own attempt."""
        return self.attempt is not None and self.delivered.start.get("attempt") == self.attempt

    def deliver(self, events: list[tuple[Event, Position]]) -> None:
        """Deliver and commit. Raises Turn."""
        points: list[Point] = []
        before: Position | None = None
        for event, after in events:
            fresh = _points(event)
            if event["type"] != "metrics" or len(points) + len(fresh) > METRICS_AT_ONCE:
                self._log(points, before)
                points, before = [], None
            if event["type"] == "metrics":
                points += fresh
                before = after
                self._seen(event)
            else:
                self._handle(event)
                self._commit(after)
        self._log(points, before)

    def killed(self) -> None:
        """The driver is gone without a finish event, and all it said is delivered."""
        self._insist(lambda: self.run.finish("KILLED", self.delivered.last_time or time.time()))
        self.delivered.open = False
        self._commit(self.delivered.position)

    def rewind(self, position: Position) -> None:
        """Forget the MLflow run; delivery begins again at `position`."""
        self.delivered = Delivered(segment=position.segment, offset=position.offset)
        self.delivered.save(self.folder)
        self._opened = False

    def tell(self, **changes: object) -> None:
        """Write status.json if something in it changes."""
        before = dict(vars(self.status))
        vars(self.status).update(changes)
        if vars(self.status) != before or not changes:
            self.status.save(self.folder)

    def _seen(self, event: Event) -> None:
        self.delivered.last_time = max(self.delivered.last_time, event.get("time", 0.0))

    def _commit(self, position: Position) -> None:
        self.delivered.position, self.delivered.tries = position, 0
        self.delivered.save(self.folder)
        self.tell(progress=time.time())

    def _log(self, points: list[Point], after: Position | None) -> None:
        if after is None:
            return
        if self.delivered.start:
            each = self.run.metrics_per_call
            for begin in range(0, len(points), each):
                batch = points[begin : begin + each]
                self._insist(lambda batch=batch: self._log_batch(batch))  # type: ignore[misc]
        self._commit(after)

    def _log_batch(self, batch: list[Point]) -> None:
        high, fresh = dict(self.delivered.steps), []
        for key, value, milliseconds, step in batch:
            if step is None:  # a sample of a machine belongs to no step: seconds since the run began
                step = max(0, int(milliseconds / 1000 - self.run.began))
            if step > high.get(key, -1):
                high[key] = step
                fresh.append((key, value, milliseconds, step))
        if fresh:
            self._log_fresh(fresh)
        self.delivered.steps = high

    def _log_fresh(self, fresh: list[Point]) -> None:
        """Log points; if MLflow refuses some, all the others."""
        try:
            self.run.metrics(fresh)
        except Refused as refusal:
            self.run.refresh()  # raises Gone if it is the run that is refused
            if len(fresh) == 1:
                _log.error("left out the metric %s: %s", fresh[0], refusal)
            else:
                self._log_fresh(fresh[: len(fresh) // 2])
                self._log_fresh(fresh[len(fresh) // 2 :])

    def _handle(self, event: Event) -> None:
        try:
            self._carry(event)
        except Turn:
            raise
        except Exception:  # an event that nobody foresaw must not hold up all that follow it
            _log.exception("left out an event of type %s", event["type"])

    def _carry(self, event: Event) -> None:
        kind = event["type"]
        if kind == "start":
            self._start(event)
        elif not self.delivered.start:
            return  # the beginning of the spool is lost
        elif kind == "params":
            self._insist(lambda: self.run.params(event["values"]))
        elif kind == "tags":
            self._insist(lambda: self.run.tags(event["values"]))
        elif kind == "text":
            self._upload(event["name"], lambda: self.run.text(event["text"], event["name"]))
        elif kind == "artifact":
            path = Path(event["path"])
            self._upload(path.name, lambda: self.run.artifact(path, event["folder"]))
            if event.get("copy"):
                shutil.rmtree(path.parent, ignore_errors=True)
        elif kind == "model":
            self._model(event)
        elif kind == "finish" and event["attempt"] == self.delivered.start["attempt"]:
            self._finish(event)
        self._seen(event)

    def _start(self, event: Event) -> None:
        if self.ours and event["attempt"] != self.attempt:
            raise Superseded
        resumed = event.get("again") and event["attempt"] == self.delivered.start.get("attempt")
        self.delivered.start = event
        if not resumed:
            self.delivered.open = True
            self._insist(self.run.running)

    def _finish(self, event: Event) -> None:
        if event["message"]:
            self._insist(lambda: self.run.tags({"trireme.message": event["message"]}))
        self._insist(lambda: self.run.finish(event["status"], event["time"]))
        self.delivered.open = False

    def _model(self, event: Event) -> None:
        from app.tracking import model  # torch and more of mlflow: seconds, and not every run logs a model

        if self.delivered.tries >= _MODEL_TRIES:  # out of memory, say: not for ever
            error = f"the writer died {self.delivered.tries} times while it was logging the model"
            self._insist(lambda: model.abandon(self.run, event["id"]))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                upload = model.Upload(event, Path(scratch))
                error = self._upload("the model", lambda: self._try_model(upload))
        if error:
            _log.error("the model is not logged: %s", error)
            self._insist(lambda: self.run.tags({"trireme.model_error": mask_uri(error)}))
        if "recipe_file" in event:
            shutil.rmtree(Path(event["recipe_file"]).parent, ignore_errors=True)

    def _try_model(self, upload: model.Upload) -> None:
        self.delivered.tries += 1
        self.delivered.save(self.folder)
        try:
            upload.log(self.run)
        except Away:
            self.delivered.tries = 0  # that was not the model's doing
            self.delivered.save(self.folder)
            raise

    def _upload(self, name: str, operation: Callable[[], object]) -> str:
        error = self._insist(operation, upload=name)
        self.tell(upload="")
        return error

    def _insist(self, operation: Callable[[], object], upload: str = "") -> str:
        """Do it, however long MLflow is away. Returns why it was left out, if it was refused ("" else).

        An upload that fails again and again while MLflow itself answers (no access to the artifact store) is left out
        as well, so that it cannot hold up everything behind it.
        """
        delay, answered = BACKOFF_SECONDS[0], 0
        while True:
            try:
                self._open()
                os.environ[_TIMEOUT] = REQUEST_SECONDS
                if upload:
                    self.run.refresh()  # a server that is away is found out quickly, before anybody waits for long
                    self.tell(upload=upload)
                    os.environ[_TIMEOUT] = _UPLOAD_SECONDS
                operation()
                self.tell(away=False, problem="")
                return ""
            except Refused as refusal:
                return self._left_out(str(refusal))
            except (Away, Gone) as error:
                problem = str(error)
            answered += self._ask()
            if upload and answered >= _UPLOAD_TRIES:
                return self._left_out(problem)
            if problem != self.status.problem:
                _log.warning("%s; trying again", problem)
            self.tell(away=True, contact=True, problem=problem)
            self._back_off(delay)
            delay = min(delay * 2, BACKOFF_SECONDS[1])

    def _left_out(self, reason: str) -> str:
        _log.error("left out: %s", reason)
        self.tell(away=False, problem="")
        return reason

    def _open(self) -> None:
        """Find or make the run, once."""
        if self._opened:
            return
        try:
            steps = self.run.open(self.delivered.start, self.delivered.run_id)
        except Gone as gone:
            _log.warning("%s; a new one is made and filled from the beginning of the spool", gone)
            raise Rewind from None
        except Refused as refusal:
            raise Away(str(refusal)) from None
        self._raise_watermarks(steps)
        self._opened = True
        self.delivered.run_id, self.delivered.experiment_id = self.run.run_id, self.run.experiment_id
        self.delivered.save(self.folder)
        self.tell(run_id=self.run.run_id, experiment_id=self.run.experiment_id, contact=True, progress=time.time())

    def _ask(self) -> bool:
        """Whether MLflow answers at all. What it has by now raises the watermarks, so that nothing is doubled."""
        if not self._opened:
            return False
        try:
            self._raise_watermarks(self.run.refresh())
        except Gone as gone:
            if not gone.deleted:
                raise Rewind from None
            return False
        except Away:
            return False
        return True

    def _raise_watermarks(self, steps: dict[str, int]) -> None:
        for key, step in steps.items():
            self.delivered.steps[key] = max(step, self.delivered.steps.get(key, -1))


def _points(event: Event) -> list[Point]:
    """The points of a metrics event; none of any other, or of one that is not as it should be."""
    try:
        milliseconds, step = int(event["time"] * 1000), event["step"]
        return [(valid_key(key), float(value), milliseconds, step) for key, value in event["values"].items()]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
