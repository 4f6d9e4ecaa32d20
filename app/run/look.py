"""Runs as anybody sees them who can read their storage: which there are, how far they are, whether their driver lives.

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
from cluster.shape import aligned


@dataclass(frozen=True)
class RunState:
    """A run at one moment. Times are in seconds."""

    name: str
    folder: str
    state: str
    """starting, running, finished, stopped, failed, or lost: its driver has died, and the same command continues."""
    created: float  # Unix time
    updated: float | None  # Unix time of the newest progress
    step: int
    steps: int
    loss: float | None  # of the newest logged step
    progress: dict[str, Any] = field(default_factory=dict)  # the newest progress event
    evaluated: dict[str, float] = field(default_factory=dict)  # the newest figures on held-out data
    driver: str = ""  # "process 123 on host" while there is one

    @property
    def over(self) -> bool:
        return self.state not in ("starting", "running")


def open_run(run: str) -> Storage:
    """The storage of a run: its folder, wherever it is, or the name of one in ./runs. Raises UserError."""
    for text in (run, f"runs/{run}"):
        if (storage := Storage(text)).exists("run.json"):
            return storage
    where = Storage("runs") if "/" not in run else Storage(run.rstrip("/").rpartition("/")[0] or "/")
    near = nearest(run.rstrip("/").rpartition("/")[2], where.list())
    raise UserError(
        f"{run} is not a run's folder{near}: write the one that `trireme train` named, such as runs/mnist; "
        "`trireme runs FOLDER` lists them"
    )


def list_runs(folder: str) -> list[RunState]:
    """Every run in a folder, the newest first. Raises UserError: there is no such folder."""
    storage = Storage(folder)
    if not storage.exists():
        raise UserError(f"there is no folder {folder}: write the run.storage of your experiments, such as runs")
    each = [storage.join(name) for name in storage.list() if not name.startswith(".")]
    found = [look(run) for run in each if run.exists("run.json")]
    return sorted(found, key=lambda run: -run.created)


def look(storage: Storage) -> RunState:
    """A run as it is now. Raises UserError where its run.json is not readable."""
    try:
        manifest = json.loads(storage.read_bytes("run.json"))
        name, state, created = manifest["name"], manifest["status"], manifest["created"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{storage.url}/run.json cannot be read ({error}): remove that folder") from error
    progress, lease = _progress(storage), read_lease(storage)
    summary = manifest.get("summary") or {}
    metrics = summary.get("metrics") or {}
    if state == "running":
        if lease is None or not _lives(storage, lease):
            state = "lost"
        elif lease.attempt != progress.get("attempt"):
            state = "starting"
    if state == "finished" and summary:  # its last start may have had no step left to take, and so no progress
        progress |= {"step": summary["step"], "loss": metrics.get("train/loss", progress.get("loss"))}
    evaluated = {key.removeprefix("eval/"): value for key, value in metrics.items() if key.startswith("eval/")}
    return RunState(
        name=name,
        folder=storage.url,
        state=state,
        created=created,
        updated=progress.get("time"),
        step=progress.get("step", summary.get("step", 0)),
        steps=manifest.get("steps", 0),
        loss=progress.get("loss", metrics.get("train/loss")),
        progress=progress if "rate" in progress else {},
        evaluated=progress.get("evaluated", evaluated),
        driver=f"process {lease.pid} on {lease.host}" if lease and state in ("starting", "running") else "",
    )


def _progress(storage: Storage) -> dict[str, Any]:
    try:
        found = json.loads(storage.read_bytes(PROGRESS))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lives(storage: Storage, lease: Lease) -> bool:
    """Of a driver elsewhere: whether it has renewed its lease within a minute, by the storage's clock and ours.
    (To take a run over more is asked, see app/storage/lease.py; here nothing depends on it.)"""
    if is_here(lease):
        return is_alive(storage, lease)
    try:
        return time.time() - storage.modified(LEASE) < LEASE_SECONDS
    except FileNotFoundError:
        return False


def follow(storage: Storage, seconds: float, pause: Callable[[float], object] = time.sleep) -> Iterator[RunState]:
    """What is new of a run, as often as every `seconds`, until it is over; that is the last."""
    seen: RunState | None = None
    while True:
        now = look(storage)
        if now != seen:
            yield now
        if now.over:
            return
        seen = now
        pause(seconds)


def table(runs: list[RunState]) -> str:
    """Runs as lines for a person: name, state, steps, loss and held-out loss, both the newest, mean speed, time left,
    age."""
    now = time.time()
    rows = [("RUN", "STATE", "STEP", "LOSS", "HELD OUT", "MEAN SPEED", "LEFT", "AGE")]
    for run in runs:
        event, held = run.progress, run.evaluated.get("loss")
        goes_on = run.state == "running" and bool(event)
        rows.append(
            (
                run.name,
                run.state,
                f"{run.step:,}/{run.steps:,}",
                "" if run.loss is None else f"{run.loss:.4f}",
                "" if held is None else f"{held:.4f}",
                f"{quantity(event['rate'])} {event['unit']}/s" if event else "",
                duration(event["seconds_left"]) if goes_on else "",
                duration(now - run.created),
            )
        )
    return "\n".join(aligned(rows))
