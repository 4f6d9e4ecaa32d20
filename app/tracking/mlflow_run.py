"""One MLflow run, as the writer sees it: the only module (with `model.py`) that imports mlflow.

Every call either succeeds or raises `Away` (try again: nobody answers, or not now), `Refused` (MLflow will never take
this) or `Gone` (the run itself is no longer there). Called again after a failure nobody can be sure of, each leaves
MLflow as one success would: SQL stores key metrics by all of (key, step, time, value), and the writer asks for the
latest steps before it repeats metrics.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking.client import MlflowClient

from app.tracking import blank
from app.tracking.masking import mask_uri
from app.tracking.points import Point, write
from app.tracking.settings import sqlite_path
from app.tracking.spool import Event
from app.tracking.state import exclusive

UID_TAG = "trireme.run_uid"
METRICS_PER_CALL = 1000
METRICS_AT_ONCE = 20_000
"""Into MLflow's own SQLite tables, where a call costs more than a thousand points."""
_PAIRS_PER_CALL = 100
_SETTLE_SECONDS = 0.3
_TAG_CHARACTERS = 5000
_PARAM_CHARACTERS = 6000
_log = logging.getLogger("writer")
_REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "MALFORMED_REQUEST",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "INVALID_STATE",
}

_REASONS = (
    ("Connection refused|Failed to establish", "connection refused"),
    ("Name or service|name resolution|getaddrinfo|NameResolution", "no such host"),
    ("timed out|timeout", "it took too long"),
    ("CERTIFICATE|SSLError", "its certificate is not trusted"),
    ("RemoteDisconnected|Connection reset|Connection aborted", "it closed the connection"),
    ("too many 50", "it is overloaded or starting: HTTP 5xx"),
    ("too many 429", "it asks for fewer requests: HTTP 429"),
)
"""What is said for what requests' errors contain."""

KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tells the MLflow UI to open the experiment on its training runs, rather than on traces of language-model calls."""


class Away(Exception):
    """MLflow cannot take it now; the message is a sentence for a person."""


class Refused(Exception):
    """MLflow will never take this."""


class Gone(Exception):
    """The MLflow run was deleted by a person (`deleted`), or does not exist (its database was replaced)."""

    def __init__(self, message: str, *, deleted: bool) -> None:
        super().__init__(message)
        self.deleted = deleted


class MlflowRun:
    """The run at one tracking URI. `open` before anything else."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.shown = mask_uri(uri)
        self.run_id = ""
        self.experiment_id = ""
        self.status = ""
        self.began = 0.0
        self._client: Any = None
        self.known_params: dict[str, str] = {}
        self.latest: list[Any] = []
        """MLflow's own record of the last point of each metric, as of the last `refresh`."""

    def client(self) -> Any:
        """The client; a SQLite database is created by whoever comes first, under a lock."""
        if self._client is None:
            with self.speaking():
                if self.uri.startswith("sqlite:"):
                    database = sqlite_path(self.uri)
                    database.parent.mkdir(parents=True, exist_ok=True)
                    with exclusive(database.with_name(f"{database.name}.create.lock")):
                        blank.begin(database)
                        self._client = MlflowClient(self.uri)
                        self._client.search_experiments(max_results=1)
                else:
                    self._client = MlflowClient(self.uri)
        return self._client

    def open(self, start: Event, run_id: str | None) -> dict[str, int]:
        """Find the run (by id, else by its uid) or make it.

        Returns: per metric the highest step that MLflow has.
        Raises:
            Gone: `run_id` was given and that run is no longer there.
        """
        if run_id:
            self.run_id = run_id
            return self.refresh()
        self.client()
        with self.speaking():
            self.experiment_id = self._experiment(start)
            found = self._search(start["run_uid"]) or self._create(start)
            self.run_id = found[0]
        return self.refresh()

    def _create(self, start: Event) -> list[str]:
        """Make the run; returns its id, or that of the one which somebody else made at the same moment."""
        tags = {UID_TAG: start["run_uid"], **start.get("tags", {})}
        began = int(start["time"] * 1000)
        created = self._client.create_run(
            self.experiment_id, start_time=began, run_name=start["run_name"], tags=tags
        ).info.run_id
        # Whoever has not seen ours when looking for one makes his within a moment; then both see both, and the same
        # one comes first.
        time.sleep(_SETTLE_SECONDS)
        found = self._search(start["run_uid"]) or [created]
        if created in found[1:]:
            self._client.delete_run(created)
        return found

    def _experiment(self, start: Event) -> str:
        name = start["experiment"]
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                location = start["artifact_location"]
                return str(self._client.create_experiment(name, artifact_location=location, tags=KIND))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = self._client.get_experiment_by_name(name)
        if experiment.lifecycle_stage != "active":
            raise Away(
                f"the MLflow experiment {name!r} was deleted: restore it with `mlflow experiments restore "
                f"--experiment-id {experiment.experiment_id}`, or set tracking.experiment to another name."
            )
        return str(experiment.experiment_id)

    def _search(self, uid: str) -> list[str]:
        """Ids of the active runs with this uid, the earliest first."""
        runs = self._client.search_runs(
            [self.experiment_id], f"tags.`{UID_TAG}` = '{uid}'", ViewType.ACTIVE_ONLY, max_results=10
        )
        return [run.info.run_id for run in sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))]

    def refresh(self) -> dict[str, int]:
        """Ask MLflow what it has: status, parameters, and (returned) the highest step of each metric."""
        client = self.client()
        try:
            with self.speaking():
                run = client.get_run(self.run_id)
        except Refused as error:
            raise Gone(str(error), deleted=False) from None
        if run.info.lifecycle_stage != "active":
            raise Gone(f"the MLflow run {self.run_id} was deleted: restore it in MLflow, or start again", deleted=True)
        self.experiment_id, self.status = run.info.experiment_id, run.info.status
        self.began = run.info.start_time / 1000
        self.known_params = dict(run.data.params)
        self.latest = run.data._metric_objs
        return {metric.key: metric.step for metric in self.latest}

    def running(self) -> None:
        """The run goes on (again)."""
        if self.status != "RUNNING":
            with self.speaking():
                self.client().update_run(self.run_id, status="RUNNING")
            self.status = "RUNNING"

    @property
    def metrics_per_call(self) -> int:
        return METRICS_AT_ONCE if self.uri.startswith("sqlite:") else METRICS_PER_CALL

    def metrics(self, points: Sequence[Point]) -> None:
        """Log at most `metrics_per_call` points."""
        client = self.client()
        with self.speaking():
            left = write(client, self.run_id, points)
            for begin in range(0, len(left), METRICS_PER_CALL):
                batch = [Metric(*point) for point in left[begin : begin + METRICS_PER_CALL]]
                client.log_batch(self.run_id, metrics=batch, synchronous=True)

    def params(self, values: dict[str, str]) -> None:
        """Log parameters; one that has another value already keeps it, and the new one becomes a tag."""
        values = {valid_key(key): value[:_PARAM_CHARACTERS] for key, value in values.items()}
        changed = {k: v for k, v in values.items() if k in self.known_params and self.known_params[k] != v}
        fresh = [Param(k, v) for k, v in values.items() if k not in self.known_params]
        self._pairs("params", fresh)
        self.known_params.update({param.key: param.value for param in fresh})
        self.tags({f"trireme.param.{key}": value for key, value in changed.items()})

    def tags(self, values: dict[str, str]) -> None:
        self._pairs("tags", [RunTag(valid_key(key), value[:_TAG_CHARACTERS]) for key, value in values.items()])

    def _pairs(self, kind: str, pairs: list[Any]) -> None:
        """Log parameters or tags, 100 at a time; if MLflow refuses some (or their size), all the others."""
        for begin in range(0, len(pairs), _PAIRS_PER_CALL):
            batch = pairs[begin : begin + _PAIRS_PER_CALL]
            try:
                with self.speaking():
                    self.client().log_batch(self.run_id, **{kind: batch}, synchronous=True)
            except Refused as refusal:
                self.refresh()  # raises Gone if it is the run that is refused
                if len(batch) == 1:
                    _log.error("left out %s of %s: %s", batch[0].key, kind, refusal)
                else:
                    self._pairs(kind, batch[: len(batch) // 2])
                    self._pairs(kind, batch[len(batch) // 2 :])

    def artifact(self, path: Path, folder: str) -> None:
        if not path.exists():
            raise Refused(f"{path} is no longer there")
        with self.speaking():
            if path.is_dir():
                self.client().log_artifacts(self.run_id, str(path), "/".join(filter(None, (folder, path.name))))
            else:
                self.client().log_artifact(self.run_id, str(path), folder or None)

    def text(self, text: str, name: str) -> None:
        with self.speaking():
            self.client().log_text(self.run_id, text, name)

    def finish(self, status: str, seconds: float) -> None:
        """End the run with this status, at this Unix time."""
        with self.speaking():
            self.client().set_terminated(self.run_id, status, end_time=int(seconds * 1000))
        self.status = status

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Sorts what a call may raise into `Away` and `Refused`."""
        try:
            yield
        except (Away, Refused, Gone):
            raise
        except MlflowException as error:
            sentence = self._sentence(error)
            raise (Refused if error.error_code in _REFUSALS else Away)(sentence) from error
        except OSError as error:  # requests' errors too, some of which are ValueErrors as well
            raise Away(self._sentence(error)) from error
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise Refused(self._sentence(error)) from error
        except Exception as error:  # stores raise errors of their own libraries (boto3, Azure, …)
            raise Away(self._sentence(error)) from error

    def _sentence(self, error: Exception) -> str:
        text = " ".join(mask_uri(str(error)).split())
        if "failed with exception" in text or "failed with timeout" in text:
            reason = next((reason for sign, reason in _REASONS if re.search(sign, text)), text[:200])
            return f"MLflow at {self.shown} does not answer ({reason})"
        return f"MLflow at {self.shown} said: {text[:300]}"


@functools.cache
def valid_key(key: str) -> str:
    """The key with what MLflow does not allow in a name replaced by `_`, at most 250 characters."""
    return re.sub(r"[^\w.\-/: ]", "_", key)[:250]
