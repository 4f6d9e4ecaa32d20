"""What a worker says to the driver: one frozen dataclass for each kind of message.

A worker makes an event and gives it to its `Channel`; the launcher carries it, pickled as it is,
and the supervisor and the driver handle it by `match`. This module stands low and imports little,
since the small processes in between (app/launchers/driver_actors.py) need it too.

Two kinds of event are also kept in files of a run. Both write and read their own record, here and
nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.pipeline.simulate import Span

# --- for the launcher and the supervisor ----------------------------------------------------------


@dataclass(frozen=True)
class WorkerInfo:
    """Where a rank runs, as it said itself when it began."""

    rank: int
    pid: int
    ip: str
    node: str  # Ray's id of the node; "" without Ray
    label: str = ""  # "stage 2 of 4"
    oom_kills: int = 0  # that the kernel of its node had counted then

    def __str__(self) -> str:
        label = f" ({self.label})" if self.label else ""
        return f"worker {self.rank}{label}, process {self.pid} on {self.ip},"


@dataclass(frozen=True, kw_only=True)
class WorkerStarted:
    """A worker's process runs, and has yet to build its model."""

    info: WorkerInfo


@dataclass(frozen=True, kw_only=True)
class WorkerFailed:
    """A worker ends with an exception."""

    rank: int
    error: BaseException


@dataclass(frozen=True, kw_only=True)
class WorkerDied:
    """A worker's process is gone, which its launcher has noticed."""

    rank: int
    details: str
    """What the launcher says about it."""


@dataclass(frozen=True, kw_only=True)
class NodePreempted:
    """A node will be taken away soon. The workers save a checkpoint."""

    node: str
    """Ray's id of the node."""
    reason: str
    message: str
    """For a person."""


# --- for the driver -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainingStarted:
    """The workers are about to take their first step."""

    time: float
    """Unix time in seconds."""
    resumed_from: int | None
    """The step of the checkpoint that training continues from; None without one."""
    step: int
    steps: int
    device: str
    parameters: int


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """How far training is. The progress.json of a run holds the record of the newest one."""

    step: int
    """The newest optimizer step."""
    steps: int
    """Optimizer steps in all."""
    loss: float | None
    """Of the newest step that was logged; None before the first."""
    loss_step: int
    """The step that `loss` is of."""
    rate: float
    """Items a second, as `Speed` in app/training/loop.py counts them."""
    unit: str
    """What an item is: tokens, samples."""
    gpus: int
    """GPUs whose peak is known; 0 where it is not."""
    mfu: float | None
    """Model FLOP utilization, 0 to 1; None where the peak of the GPUs is not known."""
    seconds_left: float
    seconds_per_step: float
    memory_bytes: int
    """Peak memory of the first worker."""

    def to_record(self) -> dict[str, Any]:
        """As progress.json has it."""
        return {"type": "progress", **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepsDone:
        """From a progress.json, also an older version's, which lacks what is optional here."""
        return cls(
            step=record["step"],
            steps=record["steps"],
            loss=record.get("loss"),
            loss_step=record.get("loss_step") or record["step"],
            rate=record["rate"],
            unit=record["unit"],
            gpus=record.get("gpus", 0),
            mfu=record.get("mfu"),
            seconds_left=record["seconds_left"],
            seconds_per_step=record.get("seconds_per_step", 0.0),
            memory_bytes=record["memory_bytes"],
        )


@dataclass(frozen=True, kw_only=True)
class MetricsLogged:
    """Metrics of one step. Checkpoints hold the newest ones, so that a killed driver loses none."""

    step: int
    time: float
    """Unix time in seconds."""
    training_seconds: float
    """Seconds of training in this start of the run."""
    values: Mapping[str, float]

    def to_json(self) -> str:
        """As checkpoints have it."""
        return json.dumps({"type": "metrics", **vars(self), "values": dict(self.values)})

    @classmethod
    def from_json(cls, text: str) -> MetricsLogged:
        """From a checkpoint."""
        record = json.loads(text)
        return cls(
            step=record["step"],
            time=record["time"],
            training_seconds=record.get("training_seconds", 0.0),
            values=record["values"],
        )


@dataclass(frozen=True, kw_only=True)
class SystemSampled:
    """Metrics of a node at one moment, by their whole names (system/NODE/…)."""

    time: float
    """Unix time in seconds."""
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint was begun; it is committed in the background."""

    step: int
    stall_seconds: float
    """For which this one has held up training."""
    previous_seconds: float
    """From the beginning of the checkpoint before to its commit; 0 where there was none."""
    interval_seconds: float | None
    """From one checkpoint to the next, where it is measured (checkpoint.auto); else None."""


@dataclass(frozen=True, kw_only=True)
class FilesWritten:
    """A worker has written files into the storage, to be kept with the MLflow run."""

    folder: str
    """Relative to the run's."""


@dataclass(frozen=True, kw_only=True)
class ProfileTaken:
    """Steps were profiled, and the traces are in the storage."""

    step: int
    """The last of them."""
    folder: str
    """Relative to the run's."""
    profile: Mapping[str, Any]
    """What its profile.json holds."""


@dataclass(frozen=True, kw_only=True)
class PipelineTraced:
    """What the stages of one replica did in one step."""

    step: int
    spans: Sequence[Span]


@dataclass(frozen=True, kw_only=True)
class WarningIssued:
    """A sentence that the person should read."""

    message: str


@dataclass(frozen=True, kw_only=True)
class TrainingDone:
    """Training has ended, at its last step or because it was asked to stop."""

    summary: dict[str, Any]


DriverEvent = (
    TrainingStarted
    | StepsDone
    | MetricsLogged
    | SystemSampled
    | CheckpointSaved
    | FilesWritten
    | ProfileTaken
    | PipelineTraced
    | WarningIssued
    | TrainingDone
)
"""What the driver handles."""
WorkerEvent = WorkerStarted | WorkerFailed | WorkerDied | NodePreempted
"""What the launcher and the supervisor handle."""
Event = DriverEvent | WorkerEvent

FROM_ANY_RANK = (WorkerStarted, WorkerFailed, NodePreempted, SystemSampled, WarningIssued)
"""Ranks other than 0 send these alone."""
