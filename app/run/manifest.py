"""A run: one name, one folder, one MLflow run, however often it is started.

FOLDER/run.json         what the run is and how it ended
FOLDER/config.yaml      the resolved configuration of its latest start, without its secrets
FOLDER/lease.json       which start may write here, and that its driver lives
FOLDER/checkpoints/     see app/checkpoint
FOLDER/logs/            the driver's and the workers' output
FOLDER/model/           the trained weights
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.config import Config
from app.config.io import flatten, to_dict, to_yaml, with_values
from app.console.masking import mask_tree
from app.errors import UserError
from app.run.abort import abort
from app.storage.lease import LeaseHolder
from app.storage.storage import Storage
from cluster.environment import below_home

IDENTITY = ("task", "train.seed", "optimizer.name")  # what a run cannot change and remain itself; and task_args


@dataclass
class Outcome:
    """What became of `trireme train`; `--json` prints it."""

    status: str  # finished, already_finished
    run: str
    folder: str
    summary: dict[str, Any]
    mlflow: dict[str, Any]


@dataclass
class Manifest:
    """What `run.json` holds."""

    name: str
    uid: str
    created: float
    identity: dict[str, Any]
    status: str = "running"  # running, finished, stopped, failed
    starts: int = 0
    seconds: float = 0.0  # of all starts that have ended
    steps: int = 0  # optimizer steps that the latest start was to reach
    mlflow_run_id: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # of the latest start: digests of the task's own code


def run_folder(config: Config, name: str | None = None) -> Storage:
    """Where a run lives.

    Relative paths are under the current folder; in a Ray job, whose current folder is a temporary
    copy of what was shipped, under ~/trireme.

    Args:
        config: Names the storage, and the run.
        name: Of another folder beside it.
    """
    storage = config.run.storage
    shipped = "runtime_resources" in Path.cwd().parts
    if shipped and "://" not in storage and not os.path.isabs(os.path.expanduser(storage)):
        storage = os.path.join("~", "trireme", storage)
    return Storage(storage).join(name or config.run.name)


def local_folder(storage: Storage, name: str, uid: str) -> Path:
    """Where this machine keeps what a run has beside its storage: there itself, else in the cache."""
    if storage.is_local:
        return storage.local_path
    return below_home("XDG_CACHE_HOME", ".cache") / "trireme" / "runs" / f"{name}-{uid[:8]}"


class Run:
    """The driver's handle on a run. `open` starts it or starts it again; `end` says how it went."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.storage = run_folder(config)
        self.attempt = uuid.uuid4().hex[:12]
        self.manifest = self._read_or_new()
        self.opened = False
        self.lease = LeaseHolder(
            self.storage,
            self.manifest.name,
            self.attempt,
            is_newest=self._is_newest,
            on_lost=self._end_superseded,
        )

    @property
    def folder(self) -> str:
        return self.storage.url

    @property
    def local_folder(self) -> Path:
        """A folder on this machine for logs and the tracking spool, also when the storage is an object store."""
        return local_folder(self.storage, self.manifest.name, self.manifest.uid)

    @property
    def finished(self) -> bool:
        return self.manifest.status == "finished"

    def _read_or_new(self) -> Manifest:
        identity = self._identity()
        try:
            saved = Manifest(**json.loads(self.storage.read_bytes("run.json")))
        except FileNotFoundError:
            return Manifest(self.config.run.name, uuid.uuid4().hex, time.time(), identity)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{self.storage.url}/run.json is damaged ({error}): remove that folder or use another run.name"
            ) from error
        except Exception as error:  # each object store library has its own
            said = str(error) or type(error).__name__
            raise UserError(
                f"the storage {self.storage.url} cannot be read ({said}): use another run.storage"
            ) from error
        for key in identity | saved.identity:
            before, now = saved.identity.get(key), identity.get(key)
            if before != now and self._has_trained():
                raise UserError(
                    f"the run {saved.name!r} in {self.storage.url} was started with {key}={before}, and this is "
                    f"{key}={now}; to train something else use another run.name"
                )
        saved.identity = identity
        return saved

    def _has_trained(self) -> bool:
        """Whether an earlier start has taken a step that is kept or was reported."""
        return self.storage.exists("progress.json") or bool(self.storage.join("checkpoints").list())

    def _identity(self) -> dict[str, Any]:
        flat = flatten(mask_tree(to_dict(self.config)))
        kept = {key: value for key, value in flat.items() if key in IDENTITY or key.startswith("task_args.")}
        return json.loads(json.dumps(kept, default=str))

    def open(self, config: Config, steps: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Takes the lease: from now on this start, and no earlier one, may write to the run's folder.

        config: as it was resolved, with what `auto` stood for. steps: optimizer steps that this start is to reach.

        Raises:
            UserError: the storage cannot be written, or another driver is training this run now.
        """
        self.storage.check_writable()
        self.lease.say, self.lease.steps = say, steps
        if not self.lease.taken:
            self.lease.take(self.lease.refuse_if_held())
        self.opened = True
        self.manifest.starts += 1
        self.manifest.status, self.manifest.steps = "running", steps
        self.save()
        # Secrets stay out; to go on, a run reads the configuration that it is given again, not this one.
        self.storage.write_bytes("config.yaml", to_yaml(mask_tree(to_dict(config))).encode())
        self.lease.check()

    def take_over(self, say: Callable[[str], None]) -> None:
        """Takes the lease from another start, alive or not, and what it has written by then."""
        self.lease.say, self.lease.steps = say, self.manifest.steps
        self.lease.take_over()
        self.manifest = self._read_or_new()

    def save(self) -> None:
        self.storage.write_bytes("run.json", json.dumps(asdict(self.manifest), indent=1, default=str).encode())

    def end(self, status: str, summary: dict[str, Any] | None = None) -> None:
        self.manifest.status = status
        if summary is not None:
            self.manifest.summary = summary
        self.lease.release(self.save)

    def forget_if_never_opened(self) -> None:
        """Removes the lease and the logs of a start that was refused, so that wrong input leaves nothing."""
        if self.lease.taken and not self.opened:
            self.lease.release()
        if self.storage.is_local and not self.storage.exists("run.json"):
            self.storage.remove_tree("logs")
            with contextlib.suppress(OSError):
                self.storage.local_path.rmdir()

    def _end_superseded(self, sentence: str) -> None:
        """Ends this process, which another start has superseded and which does not end by itself."""
        abort(1, sentence, say=self.lease.say)

    def _is_newest(self) -> bool:
        """Whether no later start has taken this run over, and maybe ended: its number would be higher."""
        return int(json.loads(self.storage.read_bytes("run.json"))["starts"]) <= self.manifest.starts


def under_free_name(config: Config) -> Config:
    """The configuration with the first of NAME, NAME-2, NAME-3, … that no finished run has."""
    named = config
    number = 1
    while Run(named).finished:
        number += 1
        named = with_values(config, {"run.name": f"{config.run.name}-{number}"})
    return named
