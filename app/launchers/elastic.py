"""Continuing with the workers there are: how many find room, which numbers make a layout, the job for another number.

`failure_policy.py` decides; this asks the cluster and prepares the job. The global batch stays what it is (fewer
workers accumulate more micro-batches), and the data order depends on the step alone, so the curve continues.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.config import Config
from app.config.io import with_values
from app.errors import UserError
from app.launchers.failure_policy import Capacity, Limits, fewer_workers, growth
from app.run.prepare import Prepared
from app.training.job import Job
from strategies.dims import MODEL_DEGREES
from strategies.layout import LayoutError

LOOK_SECONDS = 1.0
STEADY_SECONDS = 3.0
"""The same room for more workers must have been there this long before training is interrupted to use it; and too
little room before excluded nodes are used again."""

FreeByNode = Mapping[str, Mapping[str, float]]
"""What each living node has for this run, by its id: free, or held by the run itself."""


def limits_of(config: Config, *, autoscaling: bool = False) -> Limits:
    """autoscaling: nodes may be added, which takes as long as a start may wait for them."""
    patience = config.fault.elastic_seconds
    if patience is not None and autoscaling:
        patience = max(patience, config.cluster.wait_seconds)
    return Limits(config.fault.max_restarts, patience, config.cluster.min_workers)


@dataclass
class Elastic:
    """config: as written, before a layout was chosen. first: what the run started with. prepare: for a configuration
    and a number of workers. free: resources by node, without the nodes of these ids."""

    config: Config
    first: Prepared
    per_worker: Mapping[str, float]
    prepare: Callable[[Config, int], Prepared]
    free: Callable[[Sequence[str]], FreeByNode]
    autoscaling: bool = False
    excluded: tuple[str, ...] = ()  # nodes that failed too often
    known: dict[int, Prepared | None] = field(default_factory=dict)
    looked_at: float = 0.0
    missing_since: float | None = None
    more: tuple[int | None, float] = (None, 0.0)  # the larger number of workers there is room for, and since when

    @property
    def limits(self) -> Limits:
        return limits_of(self.config, autoscaling=self.autoscaling)

    @property
    def wanted(self) -> int:
        return self.first.layout.dims.world_size

    @property
    def excluded_nodes(self) -> list[str]:
        return [*self.config.cluster.exclude_nodes, *self.excluded]

    # --- layouts --------------------------------------------------------------------------------------------------

    def prepared(self, workers: int) -> Prepared | None:
        """What `workers` would train with; None where they make no layout."""
        if workers == self.wanted:
            return self.first
        if workers not in self.known:
            try:
                self.known[workers] = self.prepare(self._config(workers), workers)
            except (UserError, LayoutError):
                self.known[workers] = None
        return self.known[workers]

    def _config(self, workers: int) -> Config:
        """What would be written for another number of workers, before it is resolved.

        Whole groups of what is not data-parallel, and as much in memory at once.
        """
        values: dict[str, Any] = {"workers": str(workers)}
        if self.config.strategy != "auto":
            dims, train, parallel = self.first.layout.dims, self.config.train, self.config.parallel
            values["train.micro_batch_size"] = train.micro_batch_size or max(1, train.global_batch_size // dims.dp)
            values |= {f"parallel.{name}": getattr(dims, name) for name in MODEL_DEGREES}
            values["parallel.dp_replicate"] = None
            if not (parallel.dp_replicate and parallel.dp_shard):  # of both, the copies shrink
                values["parallel.dp_shard"] = None
        return with_values(self.config, values)

    def largest(self, available: int) -> int:
        """The most workers, of at most `available`, that make a layout; 0: none."""
        if available >= self.wanted:
            return self.wanted
        return next((n for n in range(available, 0, -1) if self.prepared(n) is not None), 0)

    def job(self, job: Job, workers: int) -> Job:
        """The same run with another number of workers, on the nodes that are not excluded now."""
        prepared = self.prepared(workers)
        assert prepared is not None, f"{workers} workers make no layout"
        return replace(
            job,
            config=prepared.config,
            layout=prepared.layout,
            failed_nodes=self.excluded,
        )

    # --- capacity -------------------------------------------------------------------------------------------------

    def capacity(self, workers: int) -> Capacity:
        """What there is now, for an attempt with `workers`."""
        nodes, now = self.free(self.excluded_nodes), time.monotonic()
        available = count_workers(self.per_worker, nodes)
        without = {
            node: count_workers(self.per_worker, {n: r for n, r in nodes.items() if n != node}) for node in nodes
        }
        self.missing_since = None if available >= workers else self.missing_since or now
        missing = now - self.missing_since if self.missing_since else 0.0
        if self.excluded and missing >= STEADY_SECONDS:  # a node that has failed is better than none
            self.excluded = ()
            return self.capacity(workers)
        valid = {self.largest(limit) for limit in (available, *without.values())} - {0}
        return Capacity(workers, self.wanted, available, tuple(sorted(valid)), without, missing)

    def excludes_others(self, job: Job) -> bool:
        """Whether an attempt should now keep off other nodes than this job does."""
        return self.excluded != job.failed_nodes

    def need_not_wait(self, job: Job) -> bool:
        """While the places of an attempt are waited for: whether to decide anew."""
        if not self._due():
            return False
        found = self.capacity(job.layout.dims.world_size)
        return fewer_workers(found, self.limits) > 0 or self.excludes_others(job)

    def growth(self, workers: int) -> int | None:
        """While training continues with fewer workers than wanted: how many there could be, once that is steady."""
        if workers >= self.wanted or not self._due():
            return None
        found, now = growth(self.capacity(workers)), time.monotonic()
        if found != self.more[0]:
            self.more = found, now
        return found if now - self.more[1] >= STEADY_SECONDS else None

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self.looked_at < LOOK_SECONDS:
            return False
        self.looked_at = now
        return True


def count_workers(per_worker: Mapping[str, float], nodes: FreeByNode) -> int:
    """How many workers could be placed."""
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    return sum(
        min((int(free.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items()), default=0)
        for free in nodes.values()
    )
