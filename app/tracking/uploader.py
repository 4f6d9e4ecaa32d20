"""Delivers a spool into its MLflow run, in order, each event exactly once, however often either side dies.

Every call may be repeated: MLflow's SQL stores key metrics by (key, step, time, value), and a metric's step that is not
above the highest one that MLflow has is a replay (of a resumed run, or of a call whose answer was lost) and is not
sent. MLflow is asked for these steps at every start and after every failure.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from app.console.masking import mask_text, mask_uri
from app.tracking.settings import sqlite_path
from app.tracking.spool import Event, State, last_start, look_at_lock, read, size

UID_TAG, PARENT_TAG = "trireme.run_uid", "mlflow.parentRunId"
BATCH = {"metrics": 1000, "params": 100, "tags": 100}  # what MLflow takes in one call
UPLOAD_TRIES = 3
_TAG_CHARACTERS, _PARAM_CHARACTERS = 5000, 6000
_PERMANENT = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "INVALID_STATE"}
_PERMANENT |= {"RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"}
_CAUSES = r"refused|timed out|timeout|not known|name resolution|CERTIFICATE\w*|reset|closed|aborted|too many \d+ error"
_log = logging.getLogger("writer")


class TransientError(Exception):
    """MLflow cannot take it now; the message is a sentence for a person."""


class PermanentError(Exception):
    """MLflow will never take this."""


@contextlib.contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Sorts what calls may raise into `TransientError` and `PermanentError`."""
    try:
        yield
    except (TransientError, PermanentError):
        raise
    except Exception as error:  # artifact stores raise errors of their own libraries
        text = " ".join(mask_text(str(error)).split())
        code = error.error_code if isinstance(error, MlflowException) else ""
        # requests' errors are OSErrors, and some of them ValueErrors as well
        ours = isinstance(error, (TypeError, ValueError, AttributeError, KeyError)) and not isinstance(error, OSError)
        if code in _PERMANENT or ours:
            raise PermanentError(f"MLflow at {mask_uri(uri)} said: {text[:300] or type(error).__name__}") from error
        what = f"said: {text[:300] or type(error).__name__}"
        if "failed with exception" in text or "failed with timeout" in text:
            what = f"does not answer ({', '.join(dict.fromkeys(re.findall(_CAUSES, text))) or text[:200]})"
        raise TransientError(f"MLflow at {mask_uri(uri)} {what}") from error


@functools.cache
def connect(uri: str) -> MlflowClient:
    """A client for all runs of this process."""
    if uri.startswith("sqlite:") and not sqlite_path(uri).exists():
        _make_database(sqlite_path(uri))
    return MlflowClient(uri)


def _make_database(file: Path) -> None:
    """MLflow makes a new database in a hundred steps and without a lock: two processes at once, or a kill, would leave
    one that it can never open again. So it is made beside its place, and the first writer moves it there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        MlflowClient(f"sqlite:///{part}")
        with contextlib.suppress(OSError):  # another process was first; or there are no links on this file system
            os.link(part, file)
    finally:
        part.unlink(missing_ok=True)


class Uploader:
    """Delivers one spool, which this process has claimed. uri: tracking URI, credentials included."""

    client: MlflowClient

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri
        self.state = State.load(folder)
        self._run: Run | None = None
        self._steps: dict[str, int] = {}
        self._params: dict[str, str] = {}

    def deliver(self) -> bool:
        """Deliver what is in the spool by now, and the end of a run whose driver died. Returns whether more may come.

        Raises TransientError or PermanentError; called again it goes on.
        """
        appending, _ = look_at_lock(self.folder, "driver")  # before its size: afterwards nothing is added
        end = size(self.folder)
        with mlflow_errors(self.uri):
            while self.state.offset < end:
                run = self._run or self._open()
                events = read(self.folder, self.state.offset)
                for is_metrics, some in itertools.groupby(events, lambda pair: pair[0]["type"] == "metrics"):
                    group = list(some)
                    if is_metrics:
                        self._metrics(run, (event for event, _ in group))
                        self._commit(*group[-1])
                    else:
                        for event, after in group:
                            self._handle(event)
                            self._commit(event, after)
                if not events:
                    break  # the last line is being written
            if not appending and self.state.open:
                self._run = self._run or self._open()
                self._finish("KILLED", self.state.last_time or time.time())
                self.state.save(self.folder)
        return appending

    def failed(self, problem: str) -> None:
        """Note why nothing is delivered; MLflow is asked anew what it has before anything is sent again."""
        if problem != self.state.problem:
            _log.warning("%s; trying again", problem)
        self._run, self.state.problem = None, problem
        self.state.save(self.folder)

    # --- the run

    def _open(self) -> Run:
        """Find the run (by its id, else by its tag) or make it."""
        about = last_start(self.folder)
        self.client = connect(self.uri)
        run = self._known() or self._find_or_create(about)
        if run.info.run_id != self.state.run_id:  # filled from the beginning of the spool, but for what it has already
            self.state = State(run_id=run.info.run_id, experiment_id=run.info.experiment_id, writer=os.getpid())
        self._run, self._params = run, dict(run.data.params)
        self._steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self.state.problem = ""
        self.state.save(self.folder)
        return run

    def _known(self) -> Run | None:
        """The run that was delivered to before, unless a person has deleted it or replaced the database."""
        try:
            run = self.client.get_run(self.state.run_id) if self.state.run_id else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run is not None and run.info.lifecycle_stage == "active" else None

    def _find_or_create(self, about: dict[str, Any]) -> Run:
        experiment = self.client.get_experiment_by_name(about["experiment"])
        if experiment is None:
            # Opens the experiment's page on its training runs, rather than on traces of language-model calls.
            kind = {"mlflow.experimentKind": "custom_model_development"}
            self.client.create_experiment(about["experiment"], about["artifact_location"], kind)
            return self._find_or_create(about)
        where = [experiment.experiment_id], f"tags.`{UID_TAG}` = '{about['run_uid']}'"
        if found := self.client.search_runs(*where, max_results=1):
            return found[0]
        tags = {**about["tags"], UID_TAG: about["run_uid"]}
        if about["parent"]:
            tags[PARENT_TAG] = State.load(Path(about["parent"])).run_id
        began = int(about["time"] * 1000)
        return self.client.create_run(experiment.experiment_id, began, tags, run_name=about["run_name"])

    def _finish(self, status: str, seconds: float) -> None:
        self.client.set_terminated(self.state.run_id, status, end_time=int(seconds * 1000))
        self.state.open = False

    # --- events

    def _commit(self, event: Event, offset: int) -> None:
        state = self.state
        state.offset, state.tries, state.problem = offset, 0, ""
        state.last_time = max(state.last_time, event.get("time", 0.0))
        state.save(self.folder)

    def _metrics(self, run: Run, events: Iterable[Event]) -> None:
        fresh, steps = [], dict(self._steps)
        for event in events:
            milliseconds, step = int(event["time"] * 1000), event["step"]
            if step is None:  # a sample of a machine: seconds since the run began
                step = max(0, (milliseconds - run.info.start_time) // 1000)
            points = [Metric(valid_key(key), value, milliseconds, step) for key, value in event["values"].items()]
            fresh += [point for point in points if step > steps.get(point.key, -1)]
            steps |= {point.key: max(step, steps.get(point.key, -1)) for point in points}
        self._log("metrics", fresh)
        self._steps = steps

    def _log(self, kind: str, items: list[Any]) -> None:
        """Log metrics, params or tags in batches; of a batch that MLflow refuses, what it takes."""
        for begin in range(0, len(items), BATCH[kind]):
            batch = items[begin : begin + BATCH[kind]]
            try:
                with mlflow_errors(self.uri):
                    self.client.log_batch(self.state.run_id, **{kind: batch}, synchronous=True)
            except PermanentError as refusal:
                if self._known() is None:
                    raise TransientError(f"the MLflow run {self.state.run_id} was deleted") from refusal
                if len(batch) == 1:
                    _log.error("left out %s of %s: %s", batch[0].key, kind, refusal)
                else:
                    self._log(kind, batch[: len(batch) // 2])
                    self._log(kind, batch[len(batch) // 2 :])

    def _handle(self, event: Event) -> None:
        kind = event["type"]
        try:
            with mlflow_errors(self.uri):
                if kind == "start":
                    self.state.open = True
                    self.client.update_run(self.state.run_id, status="RUNNING")
                elif kind == "params":
                    self._log_params(event["values"])
                elif kind == "tags":
                    self._log_tags(event["values"])
                elif kind == "inputs":
                    for each in event["values"]:
                        tag = InputTag("mlflow.data.context", each.pop("context"))
                        self.client.log_inputs(self.state.run_id, datasets=[DatasetInput(Dataset(**each), [tag])])
                elif kind in ("text", "artifact", "model"):
                    self._upload(event)
                elif kind == "finish":
                    self._log_tags({"trireme.message": event["message"]} if event["message"] else {})
                    self._finish(event["status"], event["time"])
        except PermanentError as error:  # one event must not hold up all that follow it
            _log.error("left out an event of type %s: %s", kind, error)

    def _log_params(self, values: dict[str, str]) -> None:
        """One that has another value already keeps it, and the new value becomes a tag."""
        values = {valid_key(key): value[:_PARAM_CHARACTERS] for key, value in values.items()}
        self._log("params", [Param(k, v) for k, v in values.items() if k not in self._params])
        self._log_tags({f"trireme.param.{k}": v for k, v in values.items() if self._params.setdefault(k, v) != v})

    def _log_tags(self, values: dict[str, str]) -> None:
        self._log("tags", [RunTag(valid_key(key), value[:_TAG_CHARACTERS]) for key, value in values.items()])

    def _upload(self, event: Event) -> None:
        """A text, file, folder or model; left out once it has failed (or killed the writer) again and again."""
        path = Path(event.get("path", ""))
        try:
            if self.state.tries >= UPLOAD_TRIES:
                raise PermanentError(f"it failed, or ended the writer, {UPLOAD_TRIES} times")
            self.state.tries += 1
            self.state.save(self.folder)
            if event["type"] == "model":
                from app.tracking import model  # torch and more of mlflow: seconds, and not every run logs a model

                try:
                    model.upload(self.client, self.state.run_id, event)
                except model.Unusable as error:
                    raise PermanentError(mask_text(str(error))) from error
            elif event["type"] == "text":
                self.client.log_text(self.state.run_id, event["text"], event["name"])
            elif path.exists():  # a file or a folder
                self.client.log_artifact(self.state.run_id, str(path), event["folder"] or None)
            else:
                raise PermanentError(f"{path} is no longer there")
        except PermanentError as error:
            if event["type"] == "model":
                Path(event["recipe"]).unlink(missing_ok=True)
                self.state.left_out = str(error)
                self._log_tags({"trireme.model_error": str(error)})
            raise


@functools.cache
def valid_key(key: str) -> str:
    """The key with what MLflow does not allow in a name replaced by `_`, at most 250 characters."""
    return re.sub(r"[^\w.\-/: ]", "_", key)[:250]
