"""The processes that train a job, as the supervisor sees them: one small interface, four implementations.

ray_train.py   workers of Ray Train's TorchTrainer        torchrun.py   processes that torchrun or Slurm started
actors.py      Ray actors, placed stage by stage          local.py      a thread of this process
"""

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from app.tracking.environment import SystemSampler
from app.training.events import Event, SystemSampled, WarningIssued, WorkerInfo
from app.training.job import Channel, Job

Failures = Mapping[int | None, BaseException]
"""What ended each worker, by rank; None is the launcher itself. Empty: all have finished."""


@dataclass(frozen=True)
class Status:
    """A rank's newest heartbeat, as the driver has it."""

    phase: str
    step: int
    ticks: int
    waiting: bool  # whether its training thread is in a collective or waits for a transfer
    age: float  # seconds since it arrived


@dataclass
class Poll:
    """What is new since the last poll."""

    events: list[Event] = field(default_factory=list)
    statuses: dict[int, Status] = field(default_factory=dict)  # of every rank that has begun
    ended: Failures | None = None  # None: they run
    placed: bool = False  # whether every worker has its place in Ray, so that it must begin within fault.start_seconds


class WorkerLost(Exception):
    """A rank is gone: its process has died. details: what the launcher says about it."""

    def __init__(self, sentence: str = "", details: str = "") -> None:
        super().__init__(sentence)
        self.details = details


def kill_process(pid: int) -> None:
    """Ends a worker's process on this machine at once, if it still exists.

    A process that may not be signalled belongs to another user: the worker has ended, and the
    kernel has given its number to that process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def start_system_sampler(channel: Channel, node: str, every: float) -> SystemSampler:
    """A thread that sends metrics of this machine to the driver, until it is closed.

    Args:
        channel: Of a worker on this machine.
        node: Names the machine in `system/NODE/...`.
        every: Seconds between samples; 0 samples nothing.
    """

    def sampled(time: float, values: dict[str, float]) -> None:
        channel.emit(SystemSampled(time=time, values=values))

    def warn(message: str) -> None:
        channel.emit(WarningIssued(message=message))

    return SystemSampler(node, every, sampled=sampled, warn=warn)


class Workers(Protocol):
    """All ranks of a job. An attempt is from `start` to the first poll that says `ended`, or to `stop`."""

    restartable: bool
    """Whether `start` may be called again after an attempt has ended."""

    def start(self, job: Job) -> None:
        """Begins an attempt; returns before the workers run."""

    def poll(self, stop: bool) -> Poll:
        """What is new; waits a fraction of a second at most. stop: whether the workers are to save and stop."""

    def ask(self, question: str) -> dict[int, str]:
        """Every rank's "stack" or "flight_recorder", as text, of those that answer within a few seconds."""

    def kill(self, infos: list[WorkerInfo]) -> None:
        """Ends processes at once, also stopped ones; the attempt then ends with failures."""

    def stop(self) -> None:
        """Ends the attempt, whatever its state, and gives its resources back; does nothing where there is none."""
