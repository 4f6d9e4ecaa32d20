"""What a worker receives: its job, its place among the ranks, and a channel to the driver."""

import json
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from app.config import Config
from app.errors import UserError
from app.training.events import Event
from app.training.width_transfer import Widths
from strategies.layout import Layout
from strategies.options import Options


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train; the driver decides it before any worker starts."""

    config: Config
    layout: Layout
    folder: str
    """The run's folder in the storage."""
    attempt: str
    """This start of the run; a later one supersedes it."""
    run_uid: str
    steps: int
    """Optimizer steps of the whole run."""
    cwd: str
    """The driver's current folder, to which relative paths in the configuration refer."""
    mtbf_seconds: float = 30 * 86400.0
    """Mean time between failures, as far as the driver knows."""
    leased: bool = False
    """Whether the driver keeps a lease in the folder, so that without one the storage is away."""
    spot_provider: str = ""
    """The cloud whose preemption notices are watched; "" if the cluster has no spot machines."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digests of the task's own code; see app/tasks/sources.py."""
    samples: int | None = None
    """Of the training data; None for a stream, or if it is not known."""
    fork: str = ""
    """The checkpoint of another run from which this one continues; "" if it begins anew."""
    widths: Widths = field(default_factory=dict)
    """The parameters beside those of the base model of optimizer.width_transfer, by name."""
    failed_nodes: tuple[str, ...] = ()
    """Ids of nodes that have failed too often."""
    measures_parts: bool = False
    """Whether early steps are measured by part, to be compared with the plan (step_parts.py)."""

    @property
    def checkpoints(self) -> str:
        """The folder of the run's checkpoints."""
        return f"{self.folder}/checkpoints"

    @property
    def excluded_nodes(self) -> list[str]:
        """Ids of the nodes that get no workers: configured or failed ones."""
        return [*self.config.cluster.exclude_nodes, *self.failed_nodes]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place among the others."""

    rank: int
    world_size: int
    local_rank: int
    """The rank among those of its node."""
    device: torch.device
    """`cuda` without an index becomes the current GPU, because parts of torch need an index."""

    def __post_init__(self) -> None:
        if self.device.type == "cuda" and self.device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
            object.__setattr__(self, "device", device)


@dataclass(kw_only=True)
class Heartbeat:
    """What a worker does, and how far it is.

    The loop writes it, in a few plain stores per step; another thread reads it at any moment.
    """

    phase: str = "starting"
    """starting, reading, training, evaluating, saving, ending or finished."""
    step: int = 0
    """Optimizer steps taken."""
    ticks: int = 0
    """Grows with every batch of an evaluation."""
    save_requested: bool = False
    """Set from outside: a checkpoint is wanted at the next boundary."""


class Channel(Protocol):
    """How a worker reaches the driver; ranks other than 0 send only what FROM_ANY_RANK lists."""

    heartbeat: Heartbeat

    def emit(self, event: Event) -> None:
        """Send an event; returns at once."""

    def stop_requested(self) -> bool:
        """Whether the run is asked to save and stop."""


class SilentChannel:
    """A channel that sends nothing, and the base of those that do.

    Attributes:
        stopping: Whether the worker is asked to stop.
    """

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self.stopping = False

    def emit(self, event: Event) -> None: ...

    def stop_requested(self) -> bool:
        return self.stopping


def strategy_options(config: Config) -> Options:
    """The part of the configuration that strategies take.

    `float_output` is missing, since the task decides it; see `hooks.options`.

    Raises:
        UserError: The file of parallel.deepspeed cannot be read.
    """
    train = config.train
    parallel = config.parallel
    return Options(
        precision=train.precision,
        weight_dtype=train.weight_dtype,
        compile=train.compile,
        compile_backend=train.compile_backend,
        activation_checkpointing=train.activation_checkpointing,
        activation_offloading=train.activation_offloading,
        reduce_dtype=parallel.reduce_dtype,
        bucket_mb=parallel.bucket_mb,
        find_unused_parameters=parallel.find_unused_parameters,
        offload=parallel.offload,
        reshard_after_forward=parallel.reshard_after_forward,
        accumulate_sharded=parallel.accumulate_sharded,
        deepspeed=_read_deepspeed(parallel.deepspeed) if parallel.deepspeed else None,
        sequence_parallel=parallel.sequence_parallel,
        async_tp=parallel.async_tp,
        loss_parallel=parallel.loss_parallel,
        context=parallel.context,
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        stages=tuple(parallel.stages) if parallel.stages else None,
    )


def _read_deepspeed(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"parallel.deepspeed is {path!r}, which cannot be read as JSON: {error}"
        ) from error
    if not isinstance(content, dict):
        raise UserError(
            f"parallel.deepspeed is {path!r}, which holds no JSON object: write {{...}} there"
        )
    return content


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on a GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
