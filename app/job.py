"""What a worker is given: the job, its place among its peers, and a channel to the driver."""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from app.config import Config
from app.errors import UserError
from app.heartbeat import Beat
from strategies.parallelize import Layout, Options


@dataclass(frozen=True)
class Job:
    """What is to be trained, decided by the driver before any worker starts."""

    config: Config
    layout: Layout
    folder: str  # the run's folder in the storage
    attempt: str  # this start of the run; a later one supersedes it
    run_uid: str
    steps: int  # optimizer steps in all
    cwd: str  # the driver's current folder: what relative paths in the configuration are relative to
    stages: tuple[int, ...] | None = None  # blocks per part of a pipeline, as measured; None: the strategy decides
    may_recut: bool = True  # whether measured times may lead to another cut
    between_failures: float = 30 * 86400.0  # mean seconds, as far as the driver knows
    leased: bool = False  # whether its driver keeps a lease in the folder: where none is found, the storage is away
    spot: str = ""  # the cloud whose warnings are to be heard, where its cluster has spot machines

    @property
    def checkpoints(self) -> str:
        return f"{self.folder}/checkpoints"


@dataclass(frozen=True)
class Place:
    """Where this process stands among its peers."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


class Channel(Protocol):
    """How a worker reaches the driver. Events of ranks other than 0 go nowhere, but for warnings."""

    def emit(self, event: dict[str, Any]) -> None:
        """Sends an event on its way and returns at once."""

    def stop_requested(self) -> bool:
        """Whether somebody asked this run to save and stop."""

    def follow(self, beat: Beat) -> None:
        """Where to read, at any moment and from any thread, how far this worker is."""


def options(config: Config, stages: tuple[int, ...] | None = None) -> Options:
    """The part of the configuration that strategies take. stages: a pipeline's cut where the configuration has none."""
    train, parallel = config.train, config.parallel
    return Options(
        activation_checkpointing=train.activation_checkpointing,
        precision=train.precision,
        compile=train.compile,
        compile_backend=train.compile_backend,
        reduce_dtype=parallel.reduce_dtype,
        offload=parallel.offload,
        sequence_parallel=parallel.sequence_parallel,
        loss_parallel=parallel.loss_parallel,
        reshard_after_forward=parallel.reshard_after_forward,
        compression=parallel.compression,
        bucket_mb=parallel.bucket_mb,
        static_graph=parallel.static_graph,
        shared_memory=parallel.shared_memory,
        accumulate_sharded=parallel.accumulate_sharded,
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        stages=tuple(parallel.stages) if parallel.stages else stages,
        deepspeed=_deepspeed(parallel.deepspeed) if parallel.deepspeed else None,
    )


def _deepspeed(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"parallel.deepspeed is {path!r}, which is no readable DeepSpeed JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"parallel.deepspeed is {path!r}, which holds no JSON object: write {{...}} there")
    return found


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
