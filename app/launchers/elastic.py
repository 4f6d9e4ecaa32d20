"""Continuing with the workers there are: how many find room, and the job for another number.

`failure_policy.py` decides; this asks the cluster and prepares the job. The global batch stays the
same (fewer workers accumulate more micro-batches), and the data order depends on the step alone, so
the curve continues.

When the batch grows by train.batch_schedule, more workers may pay off: `pays.py` decides that, and
this requests them from the cluster, up to cluster.max_workers. They are used like places that come
back after a failure.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.config import Config
from app.config.io import with_values
from app.config.layout_requirement import Requirement
from app.errors import UserError
from app.launchers.failure_policy import Capacity, Limits, fewer_workers, growth
from app.launchers.pays import workers_that_pay
from app.run.prepare import Prepared
from app.training.job import Job
from strategies.dims import MODEL_DEGREES
from strategies.layout import LayoutError

LOOK_SECONDS = 1.0
"""Seconds between two looks at the cluster."""
STEADY_SECONDS = 3.0
"""How long a change of the cluster must last before the run reacts to it.

There must be the same room for more workers before training is interrupted to use it, and too
little room before excluded nodes are used again.
"""
SMALLER = 0.95
"""The share of a layout's planned memory that the next one may take when a GPU was full."""
FreeByNode = Mapping[str, Mapping[str, float]]
"""Resources of each living node, by its id, that are free or held by the run itself."""


Withdraw = Callable[[], object]
"""Takes back what the cluster was asked for."""


@dataclass(frozen=True, kw_only=True)
class StepUp:
    """A run whose global batch has grown.

    Args:
        batches: The global batches from now on, the present one first.
        workers: How many train.
        measured_batch: The global batch of the steps that were measured.
        measured_seconds: Of such a step.
        steps_left: Of the run.
        moving_seconds: How long it takes to continue with other workers.
    """

    batches: tuple[int, ...]
    workers: int
    measured_batch: int
    measured_seconds: float
    steps_left: int
    moving_seconds: float


def limits_of(config: Config, *, autoscaling: bool = False) -> Limits:
    """The configuration's limits for `decide`.

    Args:
        config: The configuration.
        autoscaling: Whether nodes may be added, which takes as long as a start may wait for them.
    """
    elastic_seconds = config.fault.elastic_seconds
    if elastic_seconds is not None and autoscaling:
        elastic_seconds = max(elastic_seconds, config.cluster.wait_seconds)
    return Limits(config.fault.max_restarts, elastic_seconds, config.cluster.min_workers)


@dataclass(kw_only=True)
class Elastic:
    """Counts the room for workers, and prepares jobs for other numbers of them.

    Args:
        config: As it was written, before a layout was chosen.
        first: What the run started with.
        per_worker: Ray resources of one worker.
        prepare: Prepares a configuration for a number of workers, with a layout as it is required,
            if auto chooses it.
        free: The resources by node, without nodes of these ids.
        autoscaling: Whether nodes may be added.
        has_stages: Whether the workers can be stages of a pipeline.
        step_seconds: The planned seconds of a step of a prepared run with a global batch; None if
            nothing is planned.
        request: Asks the cluster for so many workers beside those that train, on none of these
            nodes.
    """

    config: Config
    first: Prepared
    per_worker: Mapping[str, float]
    prepare: Callable[[Config, int, Requirement], Prepared]
    free: Callable[[Sequence[str]], FreeByNode]
    autoscaling: bool = False
    has_stages: bool = True
    step_seconds: Callable[[Prepared, int], float] | None = None
    request: Callable[[int, Sequence[str]], Withdraw] | None = None
    wanted: int = field(init=False)
    """Workers at the start of the run, or more once its batch has grown."""
    batches: tuple[int, ...] = field(default=(), init=False)
    """The global batches from the last step up on; empty before it."""
    memory_below: float | None = field(default=None, init=False)
    """The bytes of a worker's memory that layouts have to stay below; None for no such bound."""
    excluded: tuple[str, ...] = field(default=(), init=False)
    """Ids of nodes that failed too often."""
    _prepared: dict[int, Prepared | None] = field(default_factory=dict, init=False)
    _look_clock: float = field(default=0.0, init=False)
    _missing_clock: float | None = field(default=None, init=False)
    """Since when there is less room than workers."""
    _larger_size: int | None = field(default=None, init=False)
    """The larger number of workers that there is room for."""
    _larger_clock: float = field(default=0.0, init=False)
    """Since when there is room for it."""
    _withdraw: Withdraw | None = field(default=None, init=False)
    """Takes back what a step up has asked for; None if nothing is asked for."""
    _asked_clock: float = field(default=0.0, init=False)
    """When it was asked for."""

    def __post_init__(self) -> None:
        self.wanted = self.first_size

    @property
    def limits(self) -> Limits:
        """The limits for `decide`."""
        return limits_of(self.config, autoscaling=self.autoscaling)

    @property
    def first_size(self) -> int:
        """Workers at the start of the run."""
        return self.first.layout.dims.world_size

    @property
    def excluded_nodes(self) -> list[str]:
        """Ids of all nodes that get no workers."""
        return [*self.config.cluster.exclude_nodes, *self.excluded]

    # --- layouts ----------------------------------------------------------------------------------

    def prepared(self, workers: int) -> Prepared | None:
        """What `workers` would train with; None if they make no layout."""
        if workers == self.first_size:
            return self.first
        if workers not in self._prepared:
            try:
                config = self._config_for(workers)
                requirement = Requirement(memory_below=self.memory_below, batches=self.batches)
                self._prepared[workers] = self.prepare(config, workers, requirement)
            except (UserError, LayoutError):
                self._prepared[workers] = None
        return self._prepared[workers]

    def _config_for(self, workers: int) -> Config:
        """The configuration for another number of workers, before it is resolved.

        The degrees that are not data-parallel stay, and as many samples are in memory at once.
        """
        values: dict[str, object] = {"workers": str(workers)}
        if self.config.strategy != "auto":
            dims = self.first.layout.dims
            train = self.config.train
            parallel = self.config.parallel
            samples_per_worker = max(1, train.global_batch_size // dims.dp)
            values["train.micro_batch_size"] = train.micro_batch_size or samples_per_worker
            for name in MODEL_DEGREES:
                values[f"parallel.{name}"] = getattr(dims, name)
            values["parallel.dp_replicate"] = None
            if not (parallel.dp_replicate and parallel.dp_shard):
                # If both are written, shards keep their size and there are fewer replicas.
                values["parallel.dp_shard"] = None
        return with_values(self.config, values)

    def largest(self, available: int) -> int:
        """The most workers, of at most `available`, that make a layout; 0 if none do."""
        if available >= self.wanted:
            return self.wanted
        for workers in range(available, 0, -1):
            if self.prepared(workers) is not None:
                return workers
        return 0

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

    def take_smaller_layout(self, workers: int) -> Prepared | None:
        """What auto chooses if the layout that these workers train with takes too much memory.

        Further attempts, also with other numbers of workers, take less memory too.

        Returns:
            What the run continues with; None if the layout was written, or none is smaller.
        """
        failed = self.prepared(workers)
        if self.config.strategy != "auto" or failed is None or failed.prediction is None:
            return None
        memory_below = SMALLER * failed.prediction.memory_bytes
        config = self.config if workers == self.first_size else self._config_for(workers)
        requirement = Requirement(memory_below=memory_below, batches=self.batches)
        try:
            smaller = self.prepare(config, workers, requirement)
        except (UserError, LayoutError):
            return None
        needs_stages = smaller.layout.dims.pp > 1 and not self.has_stages
        if smaller.prediction is None or needs_stages:
            return None
        self.memory_below = memory_below
        self._prepared = {}
        self._keep(workers, smaller)
        return smaller

    def take_layout(self, workers: int, key: str, stages: tuple[int, ...] = ()) -> Prepared:
        """What these workers train with under another layout of auto's plan.

        Args:
            workers: How many there are.
            key: The layout, as `Candidate.key` names it.
            stages: The number of blocks of each part of its pipeline; empty for the plan's.

        Raises:
            UserError: It cannot train the model after all.
            LayoutError: See UserError.
        """
        config = self.config if workers == self.first_size else self._config_for(workers)
        requirement = Requirement(
            memory_below=self.memory_below, key=key, stages=stages, batches=self.batches
        )
        prepared = self.prepare(config, workers, requirement)
        if prepared.prediction is None or prepared.prediction.candidate.key != key:
            raise UserError("the plan no longer has that layout")
        self._keep(workers, prepared)
        return prepared

    def _keep(self, workers: int, prepared: Prepared) -> None:
        if workers == self.first_size:
            self.first = prepared
        else:
            self._prepared[workers] = prepared

    # --- capacity ---------------------------------------------------------------------------------

    def capacity(self, workers: int) -> Capacity:
        """What there is now, for an attempt with `workers`."""
        nodes = self.free(self.excluded_nodes)
        now = time.monotonic()
        room = room_by_node(self.per_worker, nodes)
        available = sum(room.values())
        available_without = {node: available - workers for node, workers in room.items()}
        if available >= workers:
            self._missing_clock = None
        elif self._missing_clock is None:
            self._missing_clock = now
        missing_seconds = 0.0 if self._missing_clock is None else now - self._missing_clock
        if self.excluded and missing_seconds >= STEADY_SECONDS:
            # A node that has failed is better than none.
            self.excluded = ()
            return self.capacity(workers)
        limits = {available, *available_without.values()}
        valid = {self.largest(limit) for limit in limits} - {0}
        return Capacity(
            workers=workers,
            wanted=self.wanted,
            available=available,
            valid=tuple(sorted(valid)),
            available_without=available_without,
            missing_seconds=missing_seconds,
        )

    def excludes_others(self, job: Job) -> bool:
        """Whether other nodes are excluded now than in this job."""
        return self.excluded != job.failed_nodes

    def need_not_wait(self, job: Job) -> bool:
        """Whether to decide anew while an attempt waits for its places."""
        if not self._look_is_due():
            return False
        capacity = self.capacity(job.layout.dims.world_size)
        return fewer_workers(capacity, self.limits) > 0 or self.excludes_others(job)

    def growth(self, workers: int) -> int | None:
        """How many workers there could be while training runs with fewer than wanted.

        Args:
            workers: Of the attempt that runs.

        Returns:
            The number once the room for it is steady; None before, and if there is no more room.
        """
        if workers >= self.wanted or not self._look_is_due():
            return None
        larger_size = growth(self.capacity(workers))
        now = time.monotonic()
        if larger_size != self._larger_size:
            self._larger_size = larger_size
            self._larger_clock = now
        return larger_size if now - self._larger_clock >= STEADY_SECONDS else None

    # --- a larger batch ---------------------------------------------------------------------------

    def step_up(self, event: StepUp) -> str:
        """Asks the cluster for as many workers as pay with a larger batch.

        Args:
            event: What has happened.

        Returns:
            What was asked for, for a person; "" if no more workers pay.
        """
        if event.batches != self.batches:
            self.batches = event.batches
            self._prepared = {}
        workers = event.workers
        batch = event.batches[0]
        seconds = self._seconds_by_size(event)
        paying = workers_that_pay(
            seconds,
            present=workers,
            steps_left=event.steps_left,
            moving_seconds=event.moving_seconds,
        )
        self.withdraw()
        self.wanted = max(self.first_size, paying)
        if paying <= workers or self.request is None:
            return ""
        self._withdraw = self.request(paying - workers, self.excluded_nodes)
        self._asked_clock = time.monotonic()
        return (
            f"with a batch of {batch:,}, {paying} workers are expected to take "
            f"{seconds[paying]:.3g} s per step and {workers} {seconds[workers]:.3g} s: asking for "
            f"{paying - workers} more"
        )

    def _seconds_by_size(self, event: StepUp) -> dict[int, float]:
        """The seconds of a step expected of the present number of workers, and of larger ones.

        The plan is scaled to what was measured. Numbers that make no layout are left out, and all
        but the present one if nothing can be planned.
        """
        workers = event.workers
        most = self.config.cluster.max_workers or 0
        present = self.prepared(workers)
        if self.step_seconds is None or present is None:
            return {}
        try:
            scale = event.measured_seconds / self.step_seconds(present, event.measured_batch)
        except Exception:  # whatever is wrong with a plan, the run is right
            return {}
        seconds = {}
        for size in sizes_to_try(workers, most):
            prepared = self.prepared(size)
            if prepared is None:
                continue
            try:
                seconds[size] = scale * self.step_seconds(prepared, event.batches[0])
            except Exception:  # such as a cluster that can never have as many
                continue
        return seconds

    def withdraw(self) -> None:
        """Takes back what a step up has asked for, so that its places can be used."""
        if self._withdraw is not None:
            self._withdraw()
            self._withdraw = None

    def stop_waiting(self, workers: int) -> str:
        """Continues without workers that were requested and did not come in time.

        Args:
            workers: How many train.

        Returns:
            A sentence that they did not come; "" if the run still waits, or has requested none.
        """
        wait_seconds = self.config.cluster.wait_seconds
        is_waiting = self._withdraw is not None
        if not is_waiting or time.monotonic() - self._asked_clock < wait_seconds:
            return ""
        asked = self.wanted - workers
        self.withdraw()
        self.wanted = max(self.first_size, workers)
        return (
            f"the {asked} workers that were asked for did not come within {wait_seconds:g} s: "
            f"continuing with {workers}"
        )

    def _look_is_due(self) -> bool:
        now = time.monotonic()
        if now - self._look_clock < LOOK_SECONDS:
            return False
        self._look_clock = now
        return True


def sizes_to_try(present: int, most: int) -> list[int]:
    """The present number of workers, its doublings up to `most`, and `most` itself."""
    sizes = [present]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes if most <= sizes[-1] else [*sizes, most]


def room_by_node(per_worker: Mapping[str, float], nodes: FreeByNode) -> dict[str, int]:
    """How many workers could be placed on each of these nodes."""
    needs = {name: amount for name, amount in per_worker.items() if amount > 0}
    room: dict[str, int] = {}
    for node, free in nodes.items():
        room_by_resource = [
            int(free.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items()
        ]
        room[node] = min(room_by_resource, default=0)
    return room
