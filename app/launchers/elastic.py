"""Goes on with the workers there are: how many find room, which numbers make a layout, and the job for another number.

What to do with that is decided by `failure_policy.py`; this asks Ray and prepares the job. The global batch stays what
it is (fewer workers accumulate more micro-batches), and data order depends on the step alone, so the curve continues.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray

from app.config import Config
from app.config_io import with_values
from app.errors import UserError
from app.job import Job
from app.launchers.failure_policy import Limits, Room, grown, settled
from app.launchers.room import held_by
from app.run.prepare import Prepared, prepare
from strategies.layout import LayoutError

if TYPE_CHECKING:
    from app.tasks.base import Task

LOOK_SECONDS = 1.0
SETTLED_SECONDS = 3.0
"""The same room for more must have been there this long before training is held up to use it: machines that come back
one after another cost one pause."""


def limits_of(config: Config, *, growing: bool = False) -> Limits:
    """growing: an autoscaler may add nodes, which takes as long as a start may wait for them."""
    patience = config.fault.elastic_seconds
    if patience is not None and growing:
        patience = max(patience, config.cluster.wait_seconds)
    return Limits(config.fault.max_restarts, patience, config.cluster.min_workers)


@dataclass
class Elastic:
    """written: the configuration before a layout was chosen from it; started_with: after. first: the start's layout.

    reshape: has the launcher's places made anew for a job of another size.
    """

    written: Config
    started_with: Config
    task: Task
    per_worker: dict[str, float]
    per_node: int | None
    first: Prepared
    reshape: Callable[[Job], None] = lambda job: None
    growing: bool = False
    known: dict[int, tuple[Config, Prepared] | None] = field(default_factory=dict)
    looked_at: float = 0.0
    lacking_since: float | None = None
    more_found: int | None = None
    more_since: float = 0.0

    @property
    def limits(self) -> Limits:
        return limits_of(self.written, growing=self.growing)

    @property
    def wanted(self) -> int:
        return self.first.layout.dims.world_size

    # --- layouts --------------------------------------------------------------------------------------------------

    def found(self, workers: int) -> tuple[Config, Prepared] | None:
        """What `workers` would train with; None where they make no layout."""
        if workers not in self.known:
            config = self.config(workers)
            try:
                prepared = prepare(config, self.task, workers, devices_per_node=self.per_node)
                self.known[workers] = (prepared.config, prepared)
            except (UserError, LayoutError):
                self.known[workers] = None
        return self.known[workers]

    def config(self, workers: int) -> Config:
        """The configuration for another number of workers: whole tensor and pipeline groups, as much in memory at once
        as before."""
        written = self.written
        values: dict[str, Any] = {"workers": str(workers)}
        if written.strategy != "auto":
            dims, train, parallel = self.first.layout.dims, written.train, written.parallel
            values["train.micro_batch_size"] = train.micro_batch_size or max(1, train.global_batch_size // dims.dp)
            values |= {"parallel.tp": dims.tp, "parallel.pp": dims.pp, "parallel.dp_replicate": None}
            if not (parallel.dp_replicate and parallel.dp_shard):  # of both, the copies shrink
                values["parallel.dp_shard"] = None
        return with_values(written, values)

    def largest(self, room: int) -> int:
        """The most workers, of at most `room`, that make a layout; 0: none."""
        group = self.first.layout.dims.tp * self.first.layout.dims.pp if self.written.strategy != "auto" else 1
        if room >= self.wanted:
            return self.wanted
        return next((n for n in range(room - room % group, 0, -group) if self.found(n) is not None), 0)

    def job(self, job: Job, workers: int) -> Job:
        """The same run with another number of workers."""
        if workers == self.wanted:
            config, layout = self.started_with, self.first.layout
        else:
            found = self.found(workers)
            assert found is not None, f"{workers} workers make no layout"
            config, layout = found[0], found[1].layout
        config = with_values(config, {"cluster.exclude_nodes": list(job.config.cluster.exclude_nodes)})
        return replace(job, config=config, layout=layout, stages=None)

    # --- room -------------------------------------------------------------------------------------------------------

    def look(self, job: Job) -> Room:
        """What there is now, for an attempt of this job."""
        workers, now = job.layout.dims.world_size, time.monotonic()
        nodes = free_by_node(job.config.cluster.exclude_nodes)
        room = count_room(self.per_worker, nodes)
        without = {node: count_room(self.per_worker, {n: r for n, r in nodes.items() if n != node}) for node in nodes}
        pardoned = room
        if job.config.cluster.exclude_nodes != (named := self.written.cluster.exclude_nodes):
            pardoned = count_room(self.per_worker, free_by_node(named))
        valid = sorted({self.largest(limit) for limit in (room, pardoned, *without.values())} - {0})
        self.lacking_since = None if room >= workers else self.lacking_since or now
        lacking = now - self.lacking_since if self.lacking_since else 0.0
        return Room(workers, self.wanted, room, tuple(valid), without, lacking, pardoned)

    def lacks(self, job: Job) -> bool:
        """While places are waited for: whether to decide anew."""
        if not self._due():
            return False
        return settled(self.look(job), self.limits)

    def more(self, job: Job) -> int | None:
        """While training goes on with fewer workers than wanted: how many there could be, once that is sure."""
        if job.layout.dims.world_size >= self.wanted or not self._due():
            return None
        found, now = grown(self.look(job)), time.monotonic()
        if found != self.more_found:
            self.more_found, self.more_since = found, now
        return found if now - self.more_since >= SETTLED_SECONDS else None

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self.looked_at < LOOK_SECONDS:
            return False
        self.looked_at = now
        return True


Nodes = Mapping[str, Mapping[str, float]]
"""What each living node has for this run, by its id."""


def free_by_node(excluded: list[str]) -> Nodes:
    """What is free on the nodes that may be used, and what this run itself holds there."""
    free: dict[str, Any] = ray._private.state.available_resources_per_node()
    found = {
        node["NodeID"]: Counter(free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in excluded
    }
    for node, resources in held_by(ray.get_runtime_context().get_job_id()):
        if node in found:
            found[node].update(resources)
    return found


def living(node: str) -> bool:
    """Whether Ray takes a node, given by its id, for alive."""
    return any(entry["Alive"] for entry in ray.nodes() if entry["NodeID"] == node)


def count_room(per_worker: Mapping[str, float], nodes: Nodes) -> int:
    """How many workers could be placed. Pure."""
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    return sum(
        min((int(has.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items()), default=0)
        for has in nodes.values()
    )
