"""Ends processes of this run that are stopped (SIGSTOP) before they have been heard of.

A worker that has said where it is gets asked when it is silent (`watching.py`). One that is stopped while it starts has
nobody who asks it, and everything that waits for it (Ray's start of an actor, the process group) waits without end.
The kernel knows that a process is stopped, and Ray knows the processes of actors before they answer. Once it is killed,
what follows is as after a death.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.launchers.member import kill_at
from app.launchers.whereabouts import is_stopped

ANSWER_SECONDS = 3.0
BEGUN = ("PENDING_CREATION", "ALIVE")  # what Ray says of an actor that has a process

Somebody = tuple[str, int]
"""A process: its node's id and its own."""


class Unheard:
    """patience: seconds that a process may stay stopped; 0: nobody is looked at."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.every = max(0.5, patience / 2)
        self.looked = time.monotonic()
        self.since: dict[Somebody, float] = {}
        self.ended: list[str] = []
        """A sentence for each process that was ended."""

    def look(self, heard: Collection[Somebody]) -> list[str]:
        """Ends those of this driver's actors that have been stopped for too long, but for those `heard` of; a sentence
        for each. Looks now and then only, so it may be called often."""
        now = time.monotonic()
        if not self.patience or now - self.looked < self.every:
            return []
        self.looked = now
        found = {who: ip for who, ip in _actors().items() if who not in heard}
        stopped = _stopped(found)
        self.since = {who: self.since.get(who, now) for who in stopped}
        late = [who for who, since in self.since.items() if now - since >= self.patience]
        said = []
        for node, pid in late:
            del self.since[node, pid]
            kill_at(node, pid)
            said.append(f"process {pid} on {found[node, pid]} was stopped before it was heard of")
        self.ended += said
        return said


def _actors() -> dict[Somebody, str]:
    """The processes of this driver's actors, and their nodes' addresses."""
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return {
        (actor["Address"]["NodeID"], actor["Pid"]): actor["Address"]["IPAddress"]
        for actor in ray._private.state.actors(job_id=job).values()
        if actor["State"] in BEGUN and actor["Pid"]
    }


def _stopped(found: Collection[Somebody]) -> list[Somebody]:
    """Those that are stopped, as their nodes say; a node that does not answer says nothing."""
    own = ray.get_runtime_context().get_node_id()
    pids: dict[str, list[int]] = {}
    for node, pid in found:
        pids.setdefault(node, []).append(pid)
    stopped = [(own, pid) for pid in pids.pop(own, []) if pid != os.getpid() and is_stopped(pid)]
    calls = {}
    for node, there in pids.items():
        affinity = NodeAffinitySchedulingStrategy(node, soft=False)
        calls[look_there.options(scheduling_strategy=affinity).remote(there)] = node
    for call in ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_SECONDS)[0] if calls else []:
        try:
            stopped += [(calls[call], pid) for pid in ray.get(call)]
        except ray.exceptions.RayError:  # the node is gone: that is noticed elsewhere
            continue
    return stopped


@ray.remote(num_cpus=0)
def look_there(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_stopped(pid)]
