"""What a worker is given: the job, its place among the other ranks, and a channel to the driver, with its heartbeat."""

import json
import resource
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from app.config import Config
from app.errors import UserError
from app.training.events import Event
from strategies.dims import Options
from strategies.layout import Layout


@dataclass(frozen=True)
class Job:
    """What is to be trained, decided by the driver before any worker starts."""

    config: Config
    layout: Layout
    folder: str  # the run's folder in the storage
    attempt: str  # this start of the run; a later one supersedes it
    run_uid: str
    steps: int  # optimizer steps in all
    cwd: str  # the driver's current folder, to which relative paths in the configuration refer
    mtbf_seconds: float = 30 * 86400.0  # mean time between failures, as far as the driver knows
    leased: bool = False  # whether its driver keeps a lease in the folder: none there, and the storage is not reached
    spot_provider: str = ""  # the cloud whose preemption notices are watched, where its cluster has spot machines
    sources: dict[str, str] = field(default_factory=dict)  # digests of the task's own code: see app/run/sources.py

    @property
    def checkpoints(self) -> str:
        return f"{self.folder}/checkpoints"


@dataclass(frozen=True)
class Place:
    """A rank's place among the others. device: `cuda` alone becomes the current GPU: not all of torch takes it so."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.device.type == "cuda" and self.device.index is None:
            object.__setattr__(self, "device", torch.device("cuda", torch.cuda.current_device()))


@dataclass
class Heartbeat:
    """What a worker does and how far it is: written by the loop in a few plain stores per step, read by another thread
    at any moment."""

    phase: str = "starting"
    """starting, reading, training, evaluating, saving, ending or finished."""
    step: int = 0
    """Optimizer steps taken."""
    ticks: int = 0
    """Grows with every batch of an evaluation."""
    save_requested: bool = False
    """Set from outside: a checkpoint is wanted at the next boundary."""


class Channel(Protocol):
    """How a worker reaches the driver. Of ranks other than 0 only warnings and notices are sent."""

    heartbeat: Heartbeat

    def emit(self, event: Event) -> None:
        """Sends an event and returns at once."""

    def stop_requested(self) -> bool:
        """Whether the run is asked to save and stop."""


class SilentChannel:
    """The Channel of a worker that has nothing to say, and the base of the others; `stopping` asks it to stop."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self.stopping = False

    def emit(self, event: Event) -> None: ...

    def stop_requested(self) -> bool:
        return self.stopping


def strategy_options(config: Config) -> Options:
    """The part of the configuration that strategies take."""
    known = vars(config.train) | vars(config.parallel)  # where they have the names that Options gives them
    values = {field.name: known[field.name] for field in fields(Options) if field.name in known}
    path = config.parallel.deepspeed
    stages = tuple(config.parallel.stages or ()) or None
    return replace(Options(**values), stages=stages, deepspeed=_deepspeed(path) if path else None)


def _deepspeed(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"parallel.deepspeed is {path!r}, which cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"parallel.deepspeed is {path!r}, which holds no JSON object: write {{...}} there")
    return found


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
