"""Runs as anyone sees them who can read their storage: their state and progress.

Reads run.json, progress.json and lease.json, and changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from app.console.terminal import duration, quantity
from app.errors import UserError, nearest
from app.run.progress import FILE as PROGRESS
from app.storage.lease import FILE as LEASE
from app.storage.lease import LEASE_SECONDS, Lease, is_alive, is_here, read_lease
from app.storage.storage import Storage
from cluster.shape import align_columns

ACTIVE = ("starting", "running")
"""States of a run whose driver lives."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run at one moment.

    Args:
        name: The run's name.
        folder: Where it is stored.
        state: starting, running, finished, stopped, failed, or lost: the driver of a lost run has
            died, and the same command continues the run.
        created: Unix time in seconds.
        updated: Unix time of the newest progress; None before the first.
        step: The newest optimizer step.
        steps: Optimizer steps in all.
        loss: Of the newest step that was logged; None before the first.
        progress: The record of the newest StepsDone; empty before the first.
        evaluated: The newest metrics on held-out data.
        driver: The driver, such as "process 123 on host"; "" if there is none.
        fork: The checkpoint of another run from which this one continues; "" for none.
    """

    name: str
    folder: str
    state: str
    created: float
    updated: float | None
    step: int
    steps: int
    loss: float | None
    progress: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    driver: str = ""
    fork: str = ""

    @property
    def over(self) -> bool:
        """Whether no driver trains the run now."""
        return self.state not in ACTIVE


def open_run(run: str) -> Storage:
    """The storage of a run.

    Args:
        run: The run's folder, or the name of one in ./runs.

    Raises:
        UserError: There is no such run.
    """
    for folder in (run, f"runs/{run}"):
        storage = Storage(folder)
        if storage.exists("run.json"):
            return storage
    parent, _, name = run.rstrip("/").rpartition("/")
    folder_of_runs = Storage(parent or "/") if "/" in run else Storage("runs")
    suggestion = nearest(name, folder_of_runs.list())
    raise UserError(
        f"{run} is not a run's folder{suggestion}: write the one that `trireme train` named, such "
        "as runs/mnist; `trireme runs FOLDER` lists them"
    )


def list_runs(folder: str) -> list[RunState]:
    """Every run in a folder, the newest first; if the folder is itself a run's, that one.

    Raises:
        UserError: There is no such folder.
    """
    storage = Storage(folder)
    advice = "write the run.storage of your experiments, such as runs"
    if not storage.exists():
        raise UserError(f"there is no folder {folder}: {advice}")
    if storage.is_local and not storage.local_path.is_dir():
        raise UserError(f"{folder} is a file: {advice}")
    if storage.exists("run.json"):
        return [look(storage)]
    folders = [storage.join(name) for name in storage.list() if not name.startswith(".")]
    runs = [look(folder) for folder in folders if folder.exists("run.json")]
    return sorted(runs, key=lambda run: -run.created)


def look(storage: Storage) -> RunState:
    """A run as it is now.

    Raises:
        UserError: Its run.json cannot be read.
    """
    try:
        manifest = json.loads(storage.read_bytes("run.json"))
        name = manifest["name"]
        state = manifest["status"]
        created = manifest["created"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{storage.url}/run.json cannot be read ({error}): remove that folder"
        ) from error
    progress = _read_progress(storage)
    lease = read_lease(storage)
    summary = manifest.get("summary") or {}
    metrics = summary.get("metrics") or {}
    if state == "running":
        if lease is None or not _driver_lives(storage, lease):
            state = "lost"
        elif lease.attempt != progress.get("attempt"):
            state = "starting"
    if state == "finished" and summary:
        # The last start may have had no step left to take, and so no progress.
        loss = metrics.get("train/loss", progress.get("loss"))
        progress |= {"step": summary["step"], "loss": loss}
    steps = manifest.get("steps", 0)
    if progress.get("step"):  # a run that decides on its batch has fewer steps than it began with
        steps = min(steps, summary.get("steps") or progress.get("steps") or steps)
    evaluated = {
        key.removeprefix("eval/"): value
        for key, value in metrics.items()
        if key.startswith("eval/")
    }
    driver = ""
    if lease and state in ACTIVE:
        driver = f"process {lease.pid} on {lease.host}"
    return RunState(
        name=name,
        folder=storage.url,
        state=state,
        created=created,
        updated=progress.get("time"),
        step=progress.get("step", summary.get("step", 0)),
        steps=steps,
        loss=progress.get("loss", metrics.get("train/loss")),
        progress=progress if "rate" in progress else {},
        evaluated=progress.get("evaluated", evaluated),
        driver=driver,
        fork=manifest.get("fork", ""),
    )


def _read_progress(storage: Storage) -> dict[str, Any]:
    try:
        progress = json.loads(storage.read_bytes(PROGRESS))
    except (OSError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}


def _driver_lives(storage: Storage, lease: Lease) -> bool:
    """Whether a run's driver lives.

    A driver on another machine lives if it has renewed its lease within a minute, by the storage's
    clock and this machine's. Taking a run over needs more certainty (app/storage/lease.py); here
    nothing depends on it.
    """
    if is_here(lease):
        return is_alive(storage, lease)
    try:
        return time.time() - storage.modified(LEASE) < LEASE_SECONDS
    except FileNotFoundError:
        return False


def follow(
    storage: Storage, seconds: float, pause: Callable[[float], object] = time.sleep
) -> Iterator[RunState]:
    """A run's states, whenever something has changed, until it is over.

    Args:
        storage: The run's folder.
        seconds: Seconds between two looks.
        pause: Waits for so many seconds.
    """
    last_state: RunState | None = None
    while True:
        state = look(storage)
        if state != last_state:
            yield state
        if state.over:
            return
        last_state = state
        pause(seconds)


def table(runs: list[RunState]) -> str:
    """Runs as lines for a person.

    A line has name, state, steps, the newest loss and held-out loss, mean speed, time left and age.
    Forks stand below the run that they continue.
    """
    now = time.time()
    rows = [("RUN", "STATE", "STEP", "LOSS", "HELD OUT", "MEAN SPEED", "LEFT", "AGE")]
    for run, depth in _as_tree(runs):
        progress = run.progress
        held_out_loss = run.evaluated.get("loss")
        speed = ""
        seconds_left = ""
        if progress:
            speed = f"{quantity(progress['rate'])} {progress['unit']}/s"
        if progress and run.state == "running":
            seconds_left = duration(progress["seconds_left"])
        rows.append(
            (
                _name_in_tree(run, depth),
                run.state,
                f"{run.step:,}/{run.steps:,}",
                "" if run.loss is None else f"{run.loss:.4f}",
                "" if held_out_loss is None else f"{held_out_loss:.4f}",
                speed,
                seconds_left,
                duration(now - run.created),
            )
        )
    return "\n".join(align_columns(rows))


def _as_tree(runs: list[RunState]) -> Iterator[tuple[RunState, int]]:
    """Runs with their depths: each fork comes after the run that it continues, one deeper."""
    folders = {run.folder for run in runs}
    forks: dict[str, list[RunState]] = {}
    for run in runs:
        forked_run = run.fork.rsplit("/", 2)[0]
        parent = forked_run if forked_run in folders else ""
        forks.setdefault(parent, []).append(run)

    def below(parent: str, depth: int) -> Iterator[tuple[RunState, int]]:
        for run in forks.get(parent, []):
            yield run, depth
            yield from below(run.folder, depth + 1)

    return below("", 0)


def _name_in_tree(run: RunState, depth: int) -> str:
    if not run.fork:
        return run.name
    step = run.fork.rpartition("/")[2].split("-")[1]
    return f"{'  ' * (depth - 1)}└ {run.name} (from {int(step):,})" if depth else run.name
