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

IDENTITY = ("task", "train.seed", "optimizer.name")
"""Keys that identify a run, besides task_args: with other values it would be another run."""


@dataclass
class Outcome:
    """How `trireme train` ended; `--json` prints it.

    Args:
        status: finished or already_finished.
        run: The run's name.
        folder: Where the run is stored.
        summary: What is known of the training at its end.
        mlflow: The MLflow run's `run_id` and `url`, and whether MLflow has everything (`complete`).
    """

    status: str
    run: str
    folder: str
    summary: dict[str, Any]
    mlflow: dict[str, Any]


@dataclass(kw_only=True)
class Manifest:
    """The content of `run.json`.

    Args:
        name: The run's name.
        uid: Identifies the run; there is one MLflow run with it.
        created: Unix time in seconds.
        identity: The values of what identifies the run (`IDENTITY`).
        status: running, finished, stopped or failed.
        starts: How often the run was started.
        seconds: Of all starts that have ended.
        steps: Optimizer steps that the latest start was to reach.
        mlflow_run_id: None until MLflow was reached.
        summary: What is known of the training at its end.
        sources: Digests of the task's own source files in the latest start.
        fork: The checkpoint of another run from which this one continues; "" for none.
    """

    name: str
    uid: str
    created: float
    identity: dict[str, Any]
    status: str = "running"
    starts: int = 0
    seconds: float = 0.0
    steps: int = 0
    mlflow_run_id: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    fork: str = ""


def run_folder(config: Config, name: str | None = None) -> Storage:
    """The folder of a run.

    A relative path is under the current folder. In a Ray job, whose current folder is a temporary
    copy of what was shipped, it is under ~/trireme.

    Args:
        config: Names the storage and the run.
        name: Names another folder beside the run's; None means the run's.
    """
    storage = config.run.storage
    is_ray_job = "runtime_resources" in Path.cwd().parts
    is_relative = "://" not in storage and not os.path.isabs(os.path.expanduser(storage))
    if is_ray_job and is_relative:
        storage = os.path.join("~", "trireme", storage)
    return Storage(storage).join(name or config.run.name)


def local_folder(storage: Storage, name: str, uid: str) -> Path:
    """The folder on this machine for a run's local files: the storage itself, or the user's cache.

    Args:
        storage: The run's folder.
        name: The run's name.
        uid: The run's uid.
    """
    if storage.is_local:
        return storage.local_path
    return below_home("XDG_CACHE_HOME", ".cache") / "trireme" / "runs" / f"{name}-{uid[:8]}"


class Run:
    """The driver's handle on a run: `open` starts it, for the first time or again; `end` ends it.

    Args:
        config: Names the storage and the run.

    Raises:
        UserError: The storage cannot be read, or the folder holds another run.
    """

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
        """The run's folder as a path or URL."""
        return self.storage.url

    @property
    def local_folder(self) -> Path:
        """The folder on this machine for logs and the tracking spool, for any kind of storage."""
        return local_folder(self.storage, self.manifest.name, self.manifest.uid)

    @property
    def spool(self) -> Path:
        """The folder in which what is tracked waits for MLflow, on this machine."""
        return self.local_folder / "tracking"

    @property
    def finished(self) -> bool:
        """Whether the run's latest start has finished."""
        return self.manifest.status == "finished"

    def outcome_if_finished(self, steps: int, say: Callable[[str], None]) -> Outcome | None:
        """The outcome of the latest start, if it has finished and no step is left to take.

        Args:
            steps: Optimizer steps that this start is to reach.
            say: Tells a person that nothing is left to do.

        Returns:
            None if there is something to train.
        """
        manifest = self.manifest
        if not self.finished or manifest.steps < steps:
            return None
        say(
            f"{manifest.name} has finished already ({manifest.steps:,} steps, {self.folder}): "
            "raise train.steps or train.epochs to train it further, or add --again to train it "
            "anew"
        )
        mlflow = {"run_id": manifest.mlflow_run_id, "url": "", "complete": True}
        return Outcome("already_finished", manifest.name, self.folder, manifest.summary, mlflow)

    def _read_or_new(self) -> Manifest:
        identity = self._identity()
        try:
            saved = Manifest(**json.loads(self.storage.read_bytes("run.json")))
        except FileNotFoundError:
            return Manifest(
                name=self.config.run.name,
                uid=uuid.uuid4().hex,
                created=time.time(),
                identity=identity,
            )
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{self.storage.url}/run.json is damaged ({error}): remove that folder or use "
                "another run.name"
            ) from error
        except Exception as error:  # each object store library has its own
            reason = str(error) or type(error).__name__
            raise UserError(
                f"the storage {self.storage.url} cannot be read ({reason}): use another run.storage"
            ) from error
        for key in identity | saved.identity:
            saved_value = saved.identity.get(key)
            value = identity.get(key)
            if saved_value != value and self._has_trained():
                raise UserError(
                    f"the run {saved.name!r} in {self.storage.url} was started with "
                    f"{key}={saved_value}, and this is {key}={value}; to train something else use "
                    "another run.name"
                )
        saved.identity = identity
        return saved

    def _has_trained(self) -> bool:
        """Whether an earlier start has taken a step that is kept or was reported."""
        if self.storage.exists("progress.json"):
            return True
        return bool(self.storage.join("checkpoints").list())

    def _identity(self) -> dict[str, Any]:
        values = flatten(mask_tree(to_dict(self.config)))
        identity = {
            key: value
            for key, value in values.items()
            if key in IDENTITY or key.startswith("task_args.")
        }
        return json.loads(json.dumps(identity, default=str))  # as it is when read from run.json

    def open(
        self, config: Config, steps: int, say: Callable[[str], None] = lambda text: None
    ) -> None:
        """Takes the lease: from now on this start alone may write to the run's folder.

        Args:
            config: The resolved configuration.
            steps: Optimizer steps that this start is to reach.
            say: Tells a person what happens to the lease.

        Raises:
            UserError: The storage cannot be written, or another driver is training this run now.
        """
        self.storage.check_writable()
        self.lease.say = say
        self.lease.steps = steps
        if not self.lease.taken:
            self.lease.take(self.lease.refuse_if_held())
        self.opened = True
        self.manifest.starts += 1
        self.manifest.status = "running"
        self.manifest.steps = steps
        self.save()
        self.save_config(config)
        self.lease.check()

    def save_config(self, config: Config) -> None:
        """Writes the resolved configuration, without secrets.

        To continue, a run reads the configuration of the new start, not this.
        """
        masked_config = mask_tree(to_dict(config))
        self.storage.write_bytes("config.yaml", to_yaml(masked_config).encode())

    def take_over(self, say: Callable[[str], None]) -> None:
        """Takes the lease from another start, alive or not, and reads what it has written by then.

        Args:
            say: Tells a person what happens to the lease.
        """
        self.lease.say = say
        self.lease.steps = self.manifest.steps
        self.lease.take_over()
        self.manifest = self._read_or_new()

    def save(self) -> None:
        """Writes run.json."""
        text = json.dumps(asdict(self.manifest), indent=1, default=str)
        self.storage.write_bytes("run.json", text.encode())

    def end(self, status: str, summary: dict[str, Any] | None = None) -> None:
        """Writes down how this start ended, and releases the lease.

        Args:
            status: finished, stopped or failed.
            summary: What is known of the training; None keeps that of an earlier start.
        """
        self.manifest.status = status
        if summary is not None:
            self.manifest.summary = summary
        self.lease.release(self.save)

    def forget_if_never_opened(self) -> None:
        """Removes the lease and the logs of a refused start, so that wrong input leaves nothing."""
        if self.lease.taken and not self.opened:
            self.lease.release()
        if self.storage.is_local and not self.storage.exists("run.json"):
            self.storage.remove_tree("logs")
            with contextlib.suppress(OSError):
                self.storage.local_path.rmdir()

    def _end_superseded(self, sentence: str) -> None:
        """Ends this process, because another start supersedes it and it does not end by itself."""
        abort(1, sentence, say=self.lease.say)

    def _is_newest(self) -> bool:
        """Whether no later start has taken this run over, even if it has ended since."""
        stored = json.loads(self.storage.read_bytes("run.json"))
        return int(stored["starts"]) <= self.manifest.starts


def under_free_name(config: Config) -> Config:
    """The configuration with the first of NAME, NAME-2, NAME-3, … that no finished run has."""
    renamed_config = config
    number = 1
    while Run(renamed_config).finished:
        number += 1
        renamed_config = with_values(config, {"run.name": f"{config.run.name}-{number}"})
    return renamed_config
