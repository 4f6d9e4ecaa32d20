"""What the two launchers in Ray share: events and heartbeats through the queue, and ending processes by their ids."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import cloudpickle
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.launchers.elastic import is_placed
from app.launchers.event_queue import start_event_queue
from app.launchers.recovery import Nodes, oom_kills
from app.launchers.workers import Event, Failures, Poll, WorkerInfo, WorkerLost, status_of

POLL_SECONDS = 0.05
ANSWER_SECONDS = 3.0
GATHER_SECONDS = 3.0
"""After the first failure, for the others' exceptions: one of them may be the cause."""


class RayWorkers:
    """Base of both launchers; a subclass starts and ends the processes."""

    restartable = True

    def __init__(self) -> None:
        self.queue: Any = start_event_queue()
        self.give_back: Callable[[], None] = lambda: None
        """Frees what has kept the workers' places until now; called before the first attempt asks for them."""
        self.attempt = 0
        self._begin(0)

    def _begin(self, world_size: int) -> None:
        self.world_size = world_size
        self.infos: dict[int, WorkerInfo] = {}
        self.group: Any = None  # the placement group of the attempt, as soon as it is known
        self.failures: dict[int | None, BaseException] = {}
        self.failed_at: float | None = None
        self.finished = False

    def begin_attempt(self, world_size: int) -> None:
        self.give_back()
        self.give_back = lambda: None
        self.attempt += 1
        self._begin(world_size)
        self.queue.begin.remote(self.attempt)

    # --- the interface ------------------------------------------------------------------------------------------

    def poll(self, stop: bool) -> Poll:
        self._wait()
        said, beats = ray.get(self.queue.drain.remote(stop))
        events = [event for part in said for event in cloudpickle.loads(part)]
        statuses = {rank: status_of(beat, age) for rank, (beat, age) in beats.items()}
        self.finished = len(statuses) == self.world_size and all(s.phase == "finished" for s in statuses.values())
        events = [event for event in events if not self._take(event)]
        return Poll(events, statuses, self._ended(), placed=bool(self.infos) or is_placed())

    def ask(self, question: str) -> dict[int, str]:
        ray.get(self.queue.ask.remote(question))
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            found = ray.get(self.queue.answered.remote())
            if len(found) == self.world_size or time.monotonic() > until:
                return found
            time.sleep(0.1)

    def kill(self, infos: list[WorkerInfo]) -> None:
        for info in infos:
            kill_process(info.node, info.pid)

    def close(self) -> None:
        """Ends what outlives attempts."""
        ray.kill(self.queue)

    # --- for subclasses -----------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Waits a fraction of a second, until something has happened to the processes."""
        raise NotImplementedError

    def _lost(self) -> Failures:
        """The ranks whose processes have ended without an exception of their own, as far as is known."""
        raise NotImplementedError

    def _take(self, event: Event) -> bool:
        """Keeps what is this object's own; whether that is all of the event."""
        if event["type"] == "worker":
            self.infos[event["info"].rank] = event["info"]
            self.group = self.group or event["group"]
        elif event["type"] == "failed":
            self.failures[event["rank"]] = event["error"]
            return True
        return False

    def _ended(self) -> Failures | None:
        for rank, error in self._lost().items():
            self.failures.setdefault(rank, error)
        if not self.failures:
            return {} if self.finished else None
        now = time.monotonic()
        self.failed_at = self.failed_at or now
        complete = len(self.failures) >= self.world_size or any(
            isinstance(error, WorkerLost) for error in self.failures.values()
        )
        return dict(self.failures) if complete or now - self.failed_at > GATHER_SECONDS else None

    def _end_attempt(self, *, keep_group: bool = False) -> None:
        """Ends every process that is known, also stopped ones, which Ray's own way would wait for, and gives their
        places back: the group of an actor that was killed stays until the job ends."""
        if not self.finished:
            self.kill(list(self.infos.values()))
        if self.group is not None and not keep_group:
            remove_placement_group(self.group)
        self.group = None


def kill_process(node: str, pid: int) -> None:
    """Ends a process on a node by their ids; does not wait for it."""
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    with contextlib.suppress(ray.exceptions.RayError):
        _kill_remote.options(scheduling_strategy=there).remote(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@ray.remote(num_cpus=0)
def _kill_remote(pid: int) -> None:
    _kill(pid)


def ray_nodes() -> Nodes:
    """What a Ray cluster says about its nodes."""
    return Nodes(is_alive=_is_alive, oom_kills=_oom_kills)


def _is_alive(node: str) -> bool:
    return any(entry["Alive"] for entry in ray.nodes() if entry["NodeID"] == node)


def _oom_kills(node: str) -> int | None:
    """The count of a node's kernel; None if it does not answer soon."""
    if node == ray.get_runtime_context().get_node_id():
        return oom_kills()
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    asked = ray.remote(num_cpus=0)(oom_kills).options(scheduling_strategy=there).remote()
    try:
        return ray.get(asked, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError:
        return None
