"""The beginning of a fork: which checkpoint of which other run it continues from.

`checkpoint.fork` may name a run, whose newest checkpoint changes while that run trains. The first
start of a fork therefore decides on one checkpoint and writes it into the fork's run.json; every
later start of the fork takes it from there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.checkpoint import Commit, find
from app.checkpoint.forks import hold
from app.config import Config
from app.errors import UserError
from app.run.manifest import Run
from app.storage.storage import Storage


def find_origin(config: Config, run: Run, steps: int | None) -> Commit | None:
    """The checkpoint that a run continues from, and that has yet to be marked as needed.

    Args:
        config: The configuration of this start.
        run: The run, not opened yet.
        steps: Optimizer steps that this start is to reach; None if that is not known yet.

    Returns:
        None if the run is no fork, or has decided on its checkpoint in an earlier start.

    Raises:
        UserError: There is no such checkpoint, it belongs to this run, or no step is left to take.
    """
    path = config.checkpoint.fork
    if not path or run.manifest.fork:
        return None
    commit = find(path)
    if run_of(commit.path).url == run.folder:
        raise UserError(
            f"checkpoint.fork is a checkpoint of the run {run.manifest.name} itself, which "
            "continues from its newest one anyway: leave checkpoint.fork out, or write another "
            "run.name"
        )
    if steps is not None and commit.step >= steps:
        raise UserError(
            f"the checkpoint is of step {commit.step:,}, and the fork is to train until step "
            f"{steps:,}: write train.steps={2 * commit.step} or another number above "
            f"{commit.step:,}"
        )
    return commit


def config_file(run: Storage) -> Path:
    """A run's config.yaml as a file on this machine.

    Args:
        run: The run's folder.
    """
    if run.is_local:
        return run.local_path / "config.yaml"
    file = Path(tempfile.mkdtemp(prefix="trireme-fork-"), "config.yaml")
    file.write_bytes(run.read_bytes("config.yaml"))
    return file


def adopt(commit: Commit, run: Run, note: Callable[[str], None] = lambda text: None) -> None:
    """Write down where a fork begins, and keep that checkpoint until the fork has its own.

    Args:
        commit: From `find_origin`.
        run: The fork, opened.
        note: Tells a person that the checkpoint cannot be kept.

    Raises:
        UserError: The checkpoint was removed meanwhile.
    """
    if not hold(commit, run.folder):
        note(
            f"nothing can be written beside the checkpoint {commit.path}: its run may remove it "
            "before this one has a checkpoint of its own"
        )
    run.manifest.fork = commit.path
    run.save()


def run_of(checkpoint: str) -> Storage:
    """The folder of the run that a checkpoint belongs to.

    Args:
        checkpoint: The checkpoint's folder, as an absolute path or URL.
    """
    return Storage(checkpoint.rsplit("/", 2)[0])


def origin_name(checkpoint: str) -> str:
    """Where a fork begins, for a person, such as "gpt@300".

    Args:
        checkpoint: The checkpoint's folder; "" for a run that is no fork.
    """
    if not checkpoint:
        return ""
    folder, _, name = checkpoint.rpartition("/")
    run_name = folder.rpartition("/")[0].rpartition("/")[2]
    step = int(name.split("-")[1])
    return f"{run_name}@{step}"


def tags_of(checkpoint: str, *, is_child: bool = False) -> dict[str, str]:
    """MLflow's tags of a fork: where it begins, and the run below which MLflow shows it.

    Args:
        checkpoint: The checkpoint's folder; "" for a run that is no fork.
        is_child: Whether MLflow shows the fork below another run already, that of its sweep.
    """
    if not checkpoint:
        return {}
    tags = {"trireme.fork": origin_name(checkpoint)}
    parent = "" if is_child else _mlflow_run_id(run_of(checkpoint))
    if parent:
        tags["mlflow.parentRunId"] = parent
    return tags


def _mlflow_run_id(parent: Storage) -> str:
    """The MLflow run of a run that has ended or is being trained; "" if it has none."""
    for file, key in (("tracking/delivered.json", "run_id"), ("run.json", "mlflow_run_id")):
        try:
            values: Any = json.loads(parent.read_bytes(file))
        except (OSError, ValueError):
            continue
        if isinstance(values, dict) and values.get(key):
            return str(values[key])
    return ""
