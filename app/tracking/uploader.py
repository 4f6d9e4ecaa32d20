"""Delivers a spool into its MLflow run, in order, each event exactly once, even if processes die.

Every call may be repeated. The key of a metric in MLflow's SQL stores is (key, step, time, value).
A step that is not above the highest one that MLflow has of the metric is a replay, of a resumed run
or of a call whose answer was lost, and is not sent. These highest steps are read from MLflow at
every start and after every failure.
"""

import contextlib
import functools
import itertools
import logging
import os
import posixpath
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from app.console.masking import mask_text, mask_uri
from app.tracking import model
from app.tracking.settings import sqlite_path
from app.tracking.spool import Event, State, last_start, look_at_lock, read, size

UID_TAG = "trireme.run_uid"
PARENT_TAG = "mlflow.parentRunId"
BATCH = {"metrics": 1000, "params": 100, "tags": 100}  # what MLflow accepts in one call
UPLOAD_TRIES = 3
TEXTS = "texts"
"""The folder of a spool in which a text is written to be uploaded."""
_TAG_CHARACTERS = 5000
_PARAM_CHARACTERS = 6000
_PERMANENT = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "MALFORMED_REQUEST",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}
"""MLflow's error codes for requests that it will always refuse."""
_INVALID = (TypeError, ValueError, AttributeError, KeyError)
"""Errors of MLflow's client for values that it does not accept."""
_CAUSES = (
    r"refused|timed out|timeout|not known|name resolution|CERTIFICATE\w*|reset|closed|aborted"
    r"|too many \d+ error"
)
"""Causes of a failed connection, in the messages of MLflow's HTTP client."""
_OF_SQL = r"^\(raised as a result of [^)]*\) |\s*\[SQL: .*"
"""What SQLAlchemy says before and after the database's own words."""
_log = logging.getLogger("writer")


class TransientError(Exception):
    """MLflow cannot be reached now; the message is a sentence for a person."""


class PermanentError(Exception):
    """MLflow will always refuse this."""


@contextlib.contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Turn the errors of a block into `TransientError` or `PermanentError`."""
    try:
        yield
    except (TransientError, PermanentError):
        raise
    except Exception as error:  # artifact stores raise errors of their own libraries
        message = re.sub(_OF_SQL, "", " ".join(mask_text(str(error)).split()))
        server = f"MLflow at {mask_uri(uri)}"
        answer = f"{server} answered: {message[:300] or type(error).__name__}"
        code = error.error_code if isinstance(error, MlflowException) else ""
        # Errors of `requests` are OSErrors, and some of them are ValueErrors as well.
        is_invalid = isinstance(error, _INVALID) and not isinstance(error, OSError)
        if code in _PERMANENT or is_invalid:
            raise PermanentError(answer) from error
        if "failed with exception" in message or "failed with timeout" in message:
            causes = ", ".join(dict.fromkeys(re.findall(_CAUSES, message)))
            answer = f"{server} does not answer ({causes or message[:200]})"
        raise TransientError(answer) from error


@functools.cache
def connect(uri: str) -> MlflowClient:
    """MLflow's client, shared by all runs of this process."""
    if uri.startswith("sqlite:") and not sqlite_path(uri).exists():
        _make_database(sqlite_path(uri))
    return MlflowClient(uri)


def _make_database(file: Path) -> None:
    """Create MLflow's database under a temporary name and then give it its own.

    MLflow creates a database in a hundred steps and without a lock. Two processes at once, or a
    kill, would leave a database that MLflow can never open again.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        MlflowClient(f"sqlite:///{part}")
        # Fails if another process was faster, or if the file system has no links.
        with contextlib.suppress(OSError):
            os.link(part, file)
    finally:
        part.unlink(missing_ok=True)


class Uploader:
    """Delivers one spool, which this process has claimed.

    Args:
        folder: The spool.
        uri: MLflow's tracking URI, with credentials.
    """

    client: MlflowClient

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder = folder
        self.uri = uri
        self.state = State.load(folder)
        self._run: Run | None = None
        self._steps: dict[str, int] = {}  # the highest step that MLflow has of each metric
        self._params: dict[str, str] = {}  # the parameters that MLflow has

    def deliver(self) -> bool:
        """Deliver the events in the spool, and the end of a run whose driver has died.

        Returns:
            Whether more events may come.

        Raises:
            TransientError: MLflow cannot be reached. Another call continues.
            PermanentError: MLflow refuses to create or find the run.
        """
        # The lock comes before the size: once it is free, the spool does not grow.
        is_appending, _ = look_at_lock(self.folder, "driver")
        end = size(self.folder)
        with mlflow_errors(self.uri):
            while self.state.offset < end:
                run = self._run or self._open()
                events = read(self.folder, self.state.offset)
                if not events:
                    break  # the last line is still being written
                for is_metrics, group in itertools.groupby(events, _is_metrics):
                    self._deliver_group(run, list(group), is_metrics=is_metrics)
            if not is_appending and self.state.open:
                self._run = self._run or self._open()
                self._finish("KILLED", self.state.last_time or time.time())
                self.state.save(self.folder)
        return is_appending

    def _deliver_group(self, run: Run, group: list[tuple[Event, int]], *, is_metrics: bool) -> None:
        if is_metrics:
            self._log_metrics(run, (event for event, _ in group))
            self._commit(*group[-1])
            return
        for event, offset in group:
            self._handle(event)
            self._commit(event, offset)

    def failed(self, problem: str) -> None:
        """Note why nothing is delivered.

        Before anything is sent again, MLflow's highest steps are read anew.
        """
        if problem != self.state.problem:
            _log.warning("%s; trying again", problem)
        self._run = None
        self.state.problem = problem
        self.state.save(self.folder)

    # --- the run

    def _open(self) -> Run:
        """Find the run by its id or its tag, or create it."""
        start = last_start(self.folder)
        self.client = connect(self.uri)
        run = self._existing_run() or self._find_or_create(start)
        if run.info.run_id != self.state.run_id:  # deliver the spool again from its beginning
            self.state = State(
                run_id=run.info.run_id,
                experiment_id=run.info.experiment_id,
                writer=os.getpid(),
            )
        self._run = run
        self._params = dict(run.data.params)
        self._steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self.state.problem = ""
        self.state.save(self.folder)
        return run

    def _existing_run(self) -> Run | None:
        """The run of earlier deliveries; None if it or the database has been deleted."""
        if not self.state.run_id:
            return None
        try:
            run = self.client.get_run(self.state.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _find_or_create(self, start: dict[str, Any]) -> Run:
        experiment = self.client.get_experiment_by_name(start["experiment"])
        if experiment is None:
            # With this tag the experiment's page shows training runs instead of traces of LLM
            # calls.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            self.client.create_experiment(start["experiment"], start["artifact_location"], tags)
            return self._find_or_create(start)
        has_uid = f"tags.`{UID_TAG}` = '{start['run_uid']}'"
        runs = self.client.search_runs([experiment.experiment_id], has_uid, max_results=1)
        if runs:
            return runs[0]
        tags = {**start["tags"], UID_TAG: start["run_uid"]}
        if start["parent"]:
            tags[PARENT_TAG] = State.load(Path(start["parent"])).run_id
        return self.client.create_run(
            experiment.experiment_id,
            start_time=int(start["time"] * 1000),
            tags=tags,
            run_name=start["run_name"],
        )

    def _finish(self, status: str, seconds: float) -> None:
        self.client.set_terminated(self.state.run_id, status, end_time=int(seconds * 1000))
        self.state.open = False

    # --- events

    def _commit(self, event: Event, offset: int) -> None:
        self.state.offset = offset
        self.state.tries = 0
        self.state.problem = ""
        self.state.last_time = max(self.state.last_time, event.get("time", 0.0))
        self.state.save(self.folder)

    def _log_metrics(self, run: Run, events: Iterable[Event]) -> None:
        """Log the points of these events that are not replays."""
        points = []
        steps = dict(self._steps)
        for event in events:
            milliseconds = int(event["time"] * 1000)
            step = event["step"]
            if step is None:  # system metrics: the seconds since the run began
                step = max(0, (milliseconds - run.info.start_time) // 1000)
            event_points = [
                Metric(valid_key(name), value, timestamp=milliseconds, step=step)
                for name, value in event["values"].items()
            ]
            points += [point for point in event_points if step > steps.get(point.key, -1)]
            for point in event_points:
                steps[point.key] = max(step, steps.get(point.key, -1))
        self._log("metrics", points)
        self._steps = steps

    def _log(self, kind: str, items: list[Any]) -> None:
        """Log metrics, params or tags in batches, without the items that MLflow refuses."""
        for begin in range(0, len(items), BATCH[kind]):
            batch = items[begin : begin + BATCH[kind]]
            try:
                with mlflow_errors(self.uri):
                    self.client.log_batch(self.state.run_id, **{kind: batch}, synchronous=True)
            except PermanentError as refusal:
                if self._existing_run() is None:
                    raise TransientError(
                        f"the MLflow run {self.state.run_id} was deleted"
                    ) from refusal
                if len(batch) == 1:
                    _log.error("left out %s of %s: %s", batch[0].key, kind, refusal)
                else:
                    middle = len(batch) // 2
                    self._log(kind, batch[:middle])
                    self._log(kind, batch[middle:])

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
                    self._log_inputs(event["values"])
                elif kind in ("text", "artifact", "model"):
                    self._upload(event)
                elif kind == "finish":
                    if event["message"]:
                        self._log_tags({"trireme.message": event["message"]})
                    self._finish(event["status"], event["time"])
        except PermanentError as error:  # one event must not block those after it
            _log.error("left out an event of type %s: %s", kind, error)

    def _log_params(self, values: dict[str, str]) -> None:
        """Log parameters; the new value of one that MLflow has with another value becomes a tag."""
        values = {valid_key(key): value[:_PARAM_CHARACTERS] for key, value in values.items()}
        new = [Param(key, value) for key, value in values.items() if key not in self._params]
        self._log("params", new)
        changed = {}
        for key, value in values.items():
            if self._params.setdefault(key, value) != value:
                changed[f"trireme.param.{key}"] = value
        self._log_tags(changed)

    def _log_tags(self, values: dict[str, str]) -> None:
        tags = [RunTag(valid_key(key), value[:_TAG_CHARACTERS]) for key, value in values.items()]
        self._log("tags", tags)

    def _log_inputs(self, datasets: list[dict[str, str]]) -> None:
        for fields in datasets:
            context = InputTag("mlflow.data.context", fields.pop("context"))
            dataset = DatasetInput(Dataset(**fields), [context])
            self.client.log_inputs(self.state.run_id, datasets=[dataset])

    def _upload(self, event: Event) -> None:
        """Upload a text, file, folder or model.

        An upload that has failed or killed the writer `UPLOAD_TRIES` times is left out.
        """
        path = Path(event.get("path", ""))
        try:
            if self.state.tries >= UPLOAD_TRIES:
                raise PermanentError(f"it failed, or ended the writer, {UPLOAD_TRIES} times")
            self.state.tries += 1
            self.state.save(self.folder)
            if event["type"] == "model":
                try:
                    model.upload(self.client, self.state.run_id, event)
                except model.Unusable as error:
                    raise PermanentError(mask_text(str(error))) from error
            elif event["type"] == "text":
                self._log_text(event["text"], event["name"])
            elif path.exists():
                folder = event["folder"] or None
                self.client.log_artifact(self.state.run_id, str(path), folder)
            else:
                raise PermanentError(f"{path} is no longer there")
        except PermanentError as error:
            if event["type"] == "model":
                model.discard(Path(event["recipe"]))
                self.state.left_out = str(error)
                self._log_tags({"trireme.model_error": str(error)})
            raise

    def _log_text(self, text: str, name: str) -> None:
        """Log a text as a file among the run's artifacts.

        It is written in the spool, where the next try overwrites it. `MlflowClient.log_text` writes
        it in the machine's temporary folder, where it stays when this process is killed meanwhile.

        Args:
            text: The file's content.
            name: Its path among the artifacts.
        """
        folder, file_name = posixpath.split(name)
        file = self.folder / TEXTS / file_name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        self.client.log_artifact(self.state.run_id, str(file), folder or None)
        shutil.rmtree(file.parent)


def _is_metrics(event_and_offset: tuple[Event, int]) -> bool:
    event, _ = event_and_offset
    return event["type"] == "metrics"


@functools.cache
def valid_key(key: str) -> str:
    """The key in at most 250 characters, with `_` for each that MLflow does not allow in a name."""
    return re.sub(r"[^\w.\-/: ]", "_", key)[:250]
