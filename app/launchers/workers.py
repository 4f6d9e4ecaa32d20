"""The processes that train a job, as the supervisor sees them: one interface, four implementations.

ray_train.py   workers of Ray Train's TorchTrainer   torchrun.py  processes of torchrun or Slurm
actors.py      Ray actors, placed stage by stage     local.py     a thread of this process
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.launchers.aggregator import Beat
from app.tracking.environment import SystemSampler
from app.training.events import Event, SystemSampled, WarningIssued, WorkerInfo
from app.training.job import Channel, Job

Failures = Mapping[int | None, BaseException]
"""What ended each worker, by rank; None is the launcher itself. Empty if all have finished."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """A rank's newest heartbeat, as the driver has it.

    Args:
        phase: See `Heartbeat.phase`.
        step: Optimizer steps taken.
        ticks: Grows with every batch of an evaluation.
        waiting: Whether the training thread is in a collective, or waits for a transfer.
    """

    phase: str
    step: int
    ticks: int
    waiting: bool

    @classmethod
    def of(cls, beat: Beat) -> Status:
        """The status that a heartbeat tells."""
        phase, step, ticks, waiting = beat
        return cls(phase=phase, step=step, ticks=ticks, waiting=waiting)


@dataclass(kw_only=True)
class Poll:
    """What is new since the last poll.

    Args:
        events: New events of the workers.
        statuses: The status of each rank of which it is new.
        silent: All ranks that have begun and do not answer.
        ended: What ended the attempt; None while it runs.
        placed: Whether every worker has its place in Ray, so that it must begin within
            fault.start_seconds.
    """

    events: list[Event] = field(default_factory=list)
    statuses: dict[int, Status] = field(default_factory=dict)
    silent: frozenset[int] = frozenset()
    ended: Failures | None = None
    placed: bool = False


class WorkerLost(Exception):
    """A rank's process has died.

    Args:
        who: Names the process if there is no WorkerInfo of it; "" otherwise.
        details: What the launcher says about it.
    """

    def __init__(self, who: str = "", details: str = "") -> None:
        super().__init__(who)
        self.details = details


def kill_process(pid: int) -> None:
    """Ends a worker's process on this machine at once, if it still exists.

    A process that may not be signalled belongs to another user: the worker has ended, and the
    kernel has given its number to that process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_processes(pids: Sequence[int]) -> None:
    """Ends several workers' processes on this machine at once; see `kill_process`."""
    for pid in pids:
        kill_process(pid)


def start_system_sampler(channel: Channel, node: str, every: float) -> SystemSampler:
    """Starts a thread that sends metrics of this machine to the driver, until it is closed.

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
    """All ranks of a job.

    An attempt lasts from `start` to `stop`, or to the first poll with `ended`.
    """

    restartable: bool
    """Whether `start` may be called again after an attempt has ended."""

    def start(self, job: Job) -> None:
        """Begins an attempt; returns before the workers run."""

    def poll(self, stop: bool) -> Poll:
        """Returns what is new; waits a fraction of a second at most.

        Args:
            stop: Whether the workers are to save and stop.
        """

    def ask(self, question: str, ranks: Collection[int] = ()) -> dict[int, str]:
        """Asks ranks, and collects the answers of a few seconds.

        Args:
            question: See `heartbeats.Reply`.
            ranks: Those who are to answer; none means all.

        Returns:
            The answers by rank.
        """

    def kill(self, infos: list[WorkerInfo]) -> None:
        """Ends processes at once, also stopped ones; the attempt then ends with failures."""

    def stop(self) -> None:
        """Ends the attempt and gives its resources back; does nothing if there is none."""
