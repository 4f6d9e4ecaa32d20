"""Between workers in Ray and their driver: an actor on the driver's node for events, heartbeats and answers.

Metrics do not go through `ray.train.report`, which is a barrier over all ranks. The actor holds no CPU and imports next
to nothing, so that its process starts quickly; what it passes on is pickled already.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from app.launchers.heartbeats import Beat


@ray.remote(num_cpus=0)
class EventQueue:
    """What workers have sent and the driver has not yet read, what the driver asks, and where ranks meet. Calls of
    workers of an earlier attempt are ignored."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, attempt: int) -> None:
        self.attempt = attempt
        self.events: list[bytes] = []
        self.beats: dict[int, tuple[Beat, float]] = {}
        self.answers: dict[int, str] = {}
        self.stop = False
        self.question, self.number = "", 0
        self.members: dict[int, str] = {}
        self.store: tuple[str, int] | None = None

    # --- workers ------------------------------------------------------------------------------------------------

    def put(self, attempt: int, events: bytes) -> None:
        if attempt == self.attempt:
            self.events.append(events)

    def beat(self, attempt: int, rank: int, beat: Beat, answer: tuple[int, str] | None) -> tuple[bool, str, int]:
        """Takes a heartbeat and an answer; returns whether to stop, the question, and its number."""
        if attempt != self.attempt:
            return True, "", 0
        self.beats[rank] = beat, time.monotonic()
        if answer is not None and answer[0] == self.number:
            self.answers[rank] = answer[1]
        return self.stop, self.question, self.number

    def join(self, attempt: int, rank: int, node: str, store: tuple[str, int] | None) -> None:
        """A rank is there, on this node; rank 0 brings the address of the store where they meet."""
        if attempt == self.attempt:
            self.members[rank] = node
            self.store = store or self.store

    def everyone(self, attempt: int, world_size: int) -> tuple[list[str], tuple[str, int]] | None:
        """The node of each rank and the store's address, once all have joined."""
        if attempt != self.attempt or len(self.members) < world_size or self.store is None:
            return None
        return [self.members[rank] for rank in range(world_size)], self.store

    # --- the driver ---------------------------------------------------------------------------------------------

    def drain(self, stop: bool) -> tuple[list[bytes], dict[int, tuple[Beat, float]]]:
        """The events since the last call, and each rank's newest heartbeat with its age in seconds."""
        self.stop = self.stop or stop
        events, self.events = self.events, []
        now = time.monotonic()
        return events, {rank: (beat, now - at) for rank, (beat, at) in self.beats.items()}

    def ask(self, question: str) -> None:
        self.question, self.number, self.answers = question, self.number + 1, {}

    def answered(self) -> dict[int, str]:
        return dict(self.answers)


def start_event_queue() -> Any:
    """An EventQueue on this node. The affinity must be hard: Ray puts an actor without CPUs on a random node otherwise,
    and a worker may not reach that one."""
    here = ray.get_runtime_context().get_node_id()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
    return EventQueue.options(scheduling_strategy=affinity).remote()  # type: ignore[attr-defined]
