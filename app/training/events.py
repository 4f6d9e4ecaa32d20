"""Events that workers send to the driver: a frozen dataclass for each kind.

A worker passes an event to its `Channel`. The launcher transports it, pickled, and the supervisor
and the driver handle it by `match`. This module imports little, because the small processes in
between (app/launchers/driver_actors.py) import it too.

Two kinds of event are also stored in files of a run. Only this module writes and reads their
records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.errors import SourceLine
    from strategies.pipeline.simulate import BlockSeconds, Span

# --- for the launcher and the supervisor ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Where a rank runs, as reported by the rank when it starts."""

    rank: int
    pid: int
    ip: str
    node: str
    """Ray's id of the node; "" without Ray."""
    oom_kills: int
    """How many processes the kernel of its node had killed by then for lack of memory."""
    label: str = ""
    """For a person, such as "stage 2 of 4"."""

    def __str__(self) -> str:
        label = f" ({self.label})" if self.label else ""
        return f"worker {self.rank}{label}, process {self.pid} on {self.ip},"


@dataclass(frozen=True, kw_only=True)
class WorkerStarted:
    """A worker's process has started, and is about to build its model."""

    info: WorkerInfo


@dataclass(frozen=True, kw_only=True)
class WorkerFailed:
    """A worker has ended with an exception."""

    rank: int
    error: BaseException
    line: SourceLine | None = None
    """The line of the person's own code that it came from: a pickled exception has no traceback."""


@dataclass(frozen=True, kw_only=True)
class WorkerDied:
    """A worker's process has died, as its launcher has noticed."""

    rank: int
    details: str
    """The launcher's description of the death."""


@dataclass(frozen=True, kw_only=True)
class NodePreempted:
    """The cloud will take a node away soon; the workers save a checkpoint."""

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
    """Optimizer steps taken so far."""
    steps: int
    """Optimizer steps of the whole run."""
    device: str
    """Rank 0's, such as "cuda:0"."""
    parameters: int
    """How many parameters the whole model has."""
    trained_parameters: int | None = None
    """How many of them are trained; None if that is not known."""


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """How far training is; progress.json in the run's folder has the newest one."""

    step: int
    """The newest optimizer step."""
    steps: int
    """Optimizer steps of the whole run."""
    loss: float | None
    """The loss of the newest logged step of this start; None before the first."""
    loss_step: int
    """The step of `loss`."""
    rate: float
    """Items per second, as `Speed` in app/training/reporting.py counts them."""
    unit: str
    """What an item is: tokens, samples."""
    gpus: int
    """The number of GPUs; 0 if their peak is not known."""
    mfu: float | None
    """Model FLOP/s utilization, 0 to 1; None if the peak of the GPUs is not known."""
    seconds_left: float
    seconds_per_step: float
    memory_bytes: int
    """Peak memory of the first worker."""
    global_batch_size: int = 0
    """Samples of the newest step; 0 if that is not known."""
    samples_seen: int = 0
    """Samples that the run has seen."""

    def to_record(self) -> dict[str, Any]:
        """The content of progress.json."""
        return {"type": "progress", **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepsDone:
        """Read a progress.json; that of an older version lacks some keys."""
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
            global_batch_size=record.get("global_batch_size", 0),
            samples_seen=record.get("samples_seen", 0),
        )


@dataclass(frozen=True, kw_only=True)
class MetricsLogged:
    """Metrics of a step.

    Checkpoints contain the newest ones, so that none is lost if the driver is killed.
    """

    step: int
    time: float
    """Unix time in seconds."""
    training_seconds: float
    """Seconds of training in this start of the run."""
    values: Mapping[str, float]
    """By name."""

    def to_json(self) -> str:
        """The text that checkpoints contain."""
        return json.dumps({"type": "metrics", **vars(self), "values": dict(self.values)})

    @classmethod
    def from_json(cls, text: str) -> MetricsLogged:
        """Read the text from a checkpoint."""
        record = json.loads(text)
        return cls(
            step=record["step"],
            time=record["time"],
            training_seconds=record.get("training_seconds", 0.0),
            values=record["values"],
        )


@dataclass(frozen=True, kw_only=True)
class SystemSampled:
    """Metrics of a node at one moment."""

    time: float
    """Unix time in seconds."""
    values: Mapping[str, float]
    """By full name, `system/NODE/…`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint has begun; it is committed in the background."""

    step: int
    stall_seconds: float
    """How long this checkpoint has held up training."""
    previous_seconds: float
    """From the start of the checkpoint before to its commit; 0 if there was none."""
    interval_seconds: float | None
    """From one checkpoint to the next, with checkpoint.auto; otherwise None."""


@dataclass(frozen=True, kw_only=True)
class FilesWritten:
    """A worker has written files into the storage, which MLflow gets too."""

    folder: str
    """Relative to the run's folder."""


@dataclass(frozen=True, kw_only=True)
class ProfileTaken:
    """Steps were profiled, and the traces are in the storage."""

    step: int
    """The last profiled step."""
    folder: str
    """Relative to the run's folder."""
    profile: Mapping[str, Any]
    """The content of profile.json."""


@dataclass(frozen=True, kw_only=True)
class PipelineTraced:
    """What the stages of one replica of a pipeline did in one step."""

    step: int
    spans: Sequence[Span]


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Where the seconds of one optimizer step go; the parts add up to the step.

    Args:
        computing: Kernels, the optimizer, and whatever does not belong to the other parts.
        communication: Communication that is not hidden behind computation, including the wait for
            a rank that is late.
        bubble: The time in which the slowest stage waits for the pipeline to fill and drain.
        data: Waiting for samples.
    """

    computing: float
    communication: float = 0.0
    bubble: float = 0.0
    data: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.computing + self.communication + self.bubble + self.data


@dataclass(frozen=True, kw_only=True)
class StepPartsMeasured:
    """Steps early in a start were measured, to be compared with the plan."""

    step: int
    """The last of these steps."""
    parts: StepParts
    """Means over the ranks."""
    blocks: BlockSeconds | None = None
    """What the pieces of the model compute in a step of a pipeline; None for other layouts."""


@dataclass(frozen=True, kw_only=True)
class WarningIssued:
    """A sentence that the user should read."""

    message: str


@dataclass(frozen=True, kw_only=True)
class TrainingDone:
    """Training has ended: at its last step, early, or because it was asked to stop."""

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
    | StepPartsMeasured
    | WarningIssued
    | TrainingDone
)
"""Events that the driver handles."""
WorkerEvent = WorkerStarted | WorkerFailed | WorkerDied | NodePreempted
"""Events that the launcher and the supervisor handle."""
Event = DriverEvent | WorkerEvent

FROM_ANY_RANK = (WorkerStarted, WorkerFailed, NodePreempted, SystemSampled, WarningIssued)
"""Ranks other than 0 send only these."""
