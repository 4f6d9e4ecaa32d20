"""The driver's end of tracking: append to the spool, start the writer, and at the end wait for it a little.

Nothing here talks to MLflow or imports it, and nothing waits for it except `finish`.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.tracking.delivery import Delivery, sync, wait_for
from app.tracking.masking import flatten, mask_text, mask_uri, mask_value
from app.tracking.process import WriterProcess
from app.tracking.provenance import user_tag
from app.tracking.settings import Settings, run_url
from app.tracking.spool import Event, Spool
from app.tracking.state import FileLock, Status

__all__ = ["Delivery", "Tracker", "sync"]

COPY_BYTES = 4 * 2**20
"""Artifacts up to this size are copied when they are handed over; larger ones must stay where they are."""
_RESPAWNS = 5
"""How often in a row a writer that dies young is replaced while the run goes on."""
_SPAWN_AGAIN_SECONDS = 1.0
_log = logging.getLogger(__name__)


class Tracker:
    """Everything a run tells the world goes through here. Thread-safe.

    Args:
        folder: local folder of the spool, one per run; the same one when the run is resumed.
        uri, experiment, artifact_location: as `resolve_tracking` found them.
        run_name: the MLflow run's name.
        run_uid: identifies the run for ever; there is never a second MLflow run with it.
        enabled: if False every method does nothing.
        tags: put on the MLflow run when it is made (for instance mlflow.parentRunId).
    """

    def __init__(
        self,
        folder: Path,
        *,
        uri: str,
        experiment: str,
        run_name: str,
        run_uid: str,
        artifact_location: str | None,
        enabled: bool = True,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.settings = Settings(uri, experiment, artifact_location, "")
        self.enabled = enabled
        self._about = {"run_name": run_name, "run_uid": run_uid, "tags": {**user_tag(), **_masked_tags(tags or {})}}
        self._attempt = uuid.uuid4().hex
        self._spool: Spool | None = None
        self._driver = FileLock(self.folder / "driver.lock")
        self._writer: WriterProcess | None = None
        self._finishing = threading.Event()
        self._disk_full = False
        self._lost = 0
        self.say: Callable[[str], None] = _log.warning
        """Where what a person should know of the tracking goes."""
        self._delivery = Delivery(None, "", True, 0, self.folder)

    def start(self) -> None:
        """Begin (or resume) the run: spawn the writer, which makes or finds the MLflow run while we go on.

        Raises:
            OSError: the folder cannot be written.
        """
        if not self.enabled:
            return
        self._spool = Spool(self.folder)
        self._driver.acquire()
        self._append(
            {
                "type": "start",
                "attempt": self._attempt,
                "time": time.time(),
                "uri": mask_uri(self.settings.uri),
                "experiment": self.settings.experiment,
                "artifact_location": self.settings.artifact_location,
                **self._about,
            }
        )
        self._writer = self._spawn()
        threading.Thread(target=self._watch, name="tracking-watch", daemon=True).start()

    def _spawn(self) -> WriterProcess:
        return WriterProcess(self.folder, self.settings.uri, attempt=self._attempt)

    def _watch(self) -> None:
        """Start the writer again when it dies before it was asked to finish."""
        deaths = 0
        while (writer := self._writer) is not None and deaths < _RESPAWNS:
            begun = time.monotonic()
            writer.ended.wait()
            if writer.clean or self._finishing.wait(0.2):
                return
            deaths = deaths + 1 if time.monotonic() - begun < 300 else 1
            _log.warning("the tracking writer died; starting it again (%s)", self.folder / "writer.log")
            while not self._finishing.is_set():
                try:
                    self._writer = self._spawn()
                    break
                except OSError:  # the disk is full, or away
                    self._finishing.wait(_SPAWN_AGAIN_SECONDS)

    def emit(self, event: Event) -> None:
        """Append an event made elsewhere, such as a `SystemSampler`'s. Never raises for a full disk."""
        self._append(event)

    def metrics(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Metrics of a step (`time` in Unix seconds). A step that is not above a metric's last one is a replay,
        and is not logged again."""
        if self._writer is not None:
            self._writer.trains()
        self._append({"type": "metrics", "step": int(step), "time": time or _now(), "values": _floats(values)})

    def params(self, values: Mapping[str, object]) -> None:
        """Parameters; nested ones get dotted keys. One that changed since the run began is kept, and the new value
        becomes the tag `trireme.param.KEY`."""
        self._append({"type": "params", "time": _now(), "values": {k: str(v) for k, v in flatten(values).items()}})

    def tags(self, values: Mapping[str, str]) -> None:
        self._append({"type": "tags", "time": _now(), "values": _masked_tags(values)})

    def artifact(self, path: Path, folder: str = "") -> None:
        """Upload a file or a folder, into `folder` of the run's artifacts. What is larger than 4 MiB, and folders,
        must stay in place until delivered."""
        if self._spool is None:
            return
        path = Path(path).absolute()
        event: Event = {"type": "artifact", "time": _now(), "path": str(path), "folder": folder}
        if path.is_file() and path.stat().st_size <= COPY_BYTES:
            try:
                copy = self._own_folder() / path.name
                shutil.copyfile(path, copy)
                event |= {"path": str(copy), "copy": True}
            except OSError as error:
                _log.warning("%s is delivered from where it is: %s", path, error)
        self._append(event)

    def text(self, text: str, name: str) -> None:
        """Store a text as the artifact `name`; values that look like secrets are masked."""
        self._append({"type": "text", "time": _now(), "text": mask_text(text), "name": name})

    def model(self, recipe: Mapping[str, Any]) -> None:
        """Log the trained model: {"task", "task_args", "weights": path of a torch-saved state dict, "metrics"}.

        The weights' file must stay in place until delivered.
        """
        if self._spool is None:
            return
        recipe = {**recipe, "weights": str(Path(recipe["weights"]).absolute())}
        event: Event = {"type": "model", "time": _now(), "id": uuid.uuid4().hex}
        arguments = dict(recipe.get("task_args") or {})
        if flatten(arguments) == flatten(arguments, hide=False):
            event["recipe"] = recipe
        else:  # a task that is given a secret needs it to be rebuilt: not in the spool, and gone once delivered
            path = self._own_folder() / "recipe.json"
            path.touch(0o600)
            path.write_text(json.dumps(recipe))
            event["recipe_file"] = str(path)
        self._append(event)

    def finish(self, status: str, *, message: str = "", timeout: float = 15.0) -> Delivery:
        """End the MLflow run and wait until everything is delivered.

        Args:
            status: FINISHED, FAILED or KILLED.
            message: one sentence about the end, kept as the tag `trireme.message`.
            timeout: seconds to wait while nothing can be delivered; a tracking server that answers is waited for as
                long as delivery goes on.
        """
        if self._spool is None:
            return self._delivery
        if status not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status {status!r} is not FINISHED, FAILED or KILLED")
        self._append(
            {
                "type": "finish",
                "attempt": self._attempt,
                "time": _now(),
                "status": status,
                "message": mask_text(message),
            }
        )
        self._finishing.set()
        self._flush(timeout)
        self._spool.close()
        writer, self._spool = self._writer, None
        if writer is not None and writer.ended.is_set():
            writer = None
        self._delivery = wait_for(self._spawn, self.folder, self.settings, timeout, writer)
        self._driver.release()
        return self._delivery

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, once the writer has reached the server."""
        return Status.load(self.folder).run_id if self.enabled else None

    @property
    def writer_pid(self) -> int | None:
        """The process that talks to MLflow; None where there is none (yet)."""
        return self._writer.pid if self._writer is not None else None

    @property
    def url(self) -> str:
        """The run's page in the MLflow UI ("" while unknown)."""
        status = Status.load(self.folder)
        return run_url(self.settings, status.experiment_id, status.run_id) if self.enabled else ""

    @property
    def problem(self) -> str:
        """One sentence: why nothing can be delivered just now ("" if all is well)."""
        return Status.load(self.folder).problem if self.enabled else ""

    def _own_folder(self) -> Path:
        folder = self.folder / "files" / uuid.uuid4().hex
        folder.mkdir(parents=True)
        return folder

    def _append(self, event: Event) -> None:
        spool = self._spool
        if spool is None:
            return
        try:
            spool.append(event)
            full = False
        except OSError as error:
            full = True
            if not self._disk_full:
                self.say(f"metrics wait in memory until there is room: {self.folder}: {error.strerror or error}")
        if spool.lost and not self._lost:
            self.say("metrics are being lost: there is no room on the disk, and no more is kept in memory")
        self._disk_full, self._lost = full, spool.lost

    def _flush(self, timeout: float) -> None:
        """Waits for room for what is kept."""
        until = time.monotonic() + timeout
        while self._spool is not None:
            try:
                return self._spool.flush()
            except OSError as error:
                if time.monotonic() > until:
                    return self.say(f"the last metrics are lost: {self.folder}: {error.strerror or error}")
            time.sleep(0.2)


def _now() -> float:
    return time.time()


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items()}


def _masked_tags(values: Mapping[str, str]) -> dict[str, str]:
    return {key: str(mask_value(key, value)) for key, value in values.items()}
