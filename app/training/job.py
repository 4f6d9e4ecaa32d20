"""What a worker is given: the job, its place among the other ranks, and a channel to the driver, with its heartbeat."""

import json
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from app.config import Config
from app.errors import UserError
from app.training.events import Event
from strategies.layout import Layout
from strategies.options import Options


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
    sources: dict[str, str] = field(default_factory=dict)  # digests of the task's own code: see app/tasks/sources.py
    failed_nodes: tuple[str, ...] = ()  # ids of nodes that failed too often

    @property
    def checkpoints(self) -> str:
        return f"{self.folder}/checkpoints"

    @property
    def excluded_nodes(self) -> list[str]:
        """Ids of nodes that get no worker: those that the configuration names, and failed ones."""
        return [*self.config.cluster.exclude_nodes, *self.failed_nodes]


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
    """The part of the configuration that strategies take; `float_output` is the task's to say (hooks.options).

    Raises:
        UserError: the file of parallel.deepspeed cannot be read.
    """
    train = config.train
    parallel = config.parallel
    return Options(
        precision=train.precision,
        compile=train.compile,
        compile_backend=train.compile_backend,
        activation_checkpointing=train.activation_checkpointing,
        reduce_dtype=parallel.reduce_dtype,
        bucket_mb=parallel.bucket_mb,
        find_unused_parameters=parallel.find_unused_parameters,
        offload=parallel.offload,
        reshard_after_forward=parallel.reshard_after_forward,
        accumulate_sharded=parallel.accumulate_sharded,
        deepspeed=_deepspeed(parallel.deepspeed) if parallel.deepspeed else None,
        sequence_parallel=parallel.sequence_parallel,
        async_tp=parallel.async_tp,
        loss_parallel=parallel.loss_parallel,
        context=parallel.context,
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        stages=tuple(parallel.stages) if parallel.stages else None,
    )


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
