"""A plan: every layout of an experiment on a machine, its memory and its time, best first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from app.config import Config
from app.planner.estimate import Estimate, Estimator
from app.planner.layouts import Candidate, Fixed, Space, enumerate_layouts, fixed_by, refuse
from app.planner.machine import Machine
from app.planner.part_costs import way_of
from app.planner.read import Reader
from app.tasks.base import Task
from app.training.job import strategy_options
from strategies.dims import DEGREES, LayoutError
from strategies.pipeline import partition

GIB = 2**30


@dataclass
class Plan:
    """All layouts, best first, and what they were planned for."""

    config: Config
    reader: Reader
    machine: Machine
    estimator: Estimator
    space: Space
    fixed: Fixed
    rows: list[Estimate]
    """Best first: those that fit, then those that do not, least memory first."""

    @property
    def best(self) -> Estimate | None:
        """The best layout, if one fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    @property
    def steps(self) -> int | None:
        """Of the run; None: they depend on data that are not there."""
        is_known = self.config.train.steps or self.reader.samples
        return self.config.train.steps_for(self.reader.samples) if is_known else None

    def on_gpus(self, world: int, fixed: Fixed, *, batch: int | None = None, pipelines: bool = False) -> list[Estimate]:
        """Layouts of the same model on another number of these devices."""
        machine = replace(self.machine, world=world, per_node=min(world, 8 if batch else self.machine.per_node))
        space = replace(
            self.space,
            world=world,
            per_node=machine.per_node,
            global_batch=batch or self.space.global_batch,
            precisions=(self.rows[0].candidate.precision,),
            offload=False,
            pipelines=pipelines,
        )
        estimator = replace(self.estimator, machine=machine)
        return [estimator.estimate(candidate) for candidate in enumerate_layouts(space, fixed)]

    def layout(self, row: Estimate) -> dict[str, Any]:
        """One layout as a dictionary that is ready for JSON."""
        candidate, machine, unit = row.candidate, self.machine, self.reader.task.unit
        samples = self.config.train.global_batch_size / row.step_seconds
        price = machine.price_per_hour
        cost = None if price is None else price * machine.world * row.step_seconds / 3600
        energy = machine.device.gpu.watts * machine.world * row.step_seconds / 3.6e6
        peak = machine.device.gpu.rate(candidate.precision) * machine.world
        return {
            "strategy": candidate.layout.name,
            "parallel": {
                **{name: getattr(candidate.dims, name) for name in DEGREES},
                "schedule": candidate.schedule or None,
                "chunks": candidate.chunks if candidate.schedule else None,
                "stages": list(row.stages) if row.stages else None,
                "offload": candidate.offload,
                "accumulate_sharded": row.reduces_each_microbatch,
            },
            "micro_batch_size": candidate.micro_batch,
            "micro_batches": candidate.micro_batches,
            "activation_checkpointing": candidate.checkpointing,
            "precision": candidate.precision,
            "memory_bytes": int(row.memory_bytes),
            "memory": {name: int(value) for name, value in row.memory.items()},
            "step_seconds": row.step_seconds,
            "seconds": row.seconds,
            "samples_per_second": samples,
            f"{unit}_per_second": samples * self.reader.items_per_sample,
            f"{unit}_per_second_range": [samples * self.reader.items_per_sample * share for share in row.range],
            "mfu": row.flops / (row.step_seconds * peak),
            "cost_per_step": cost,
            "cost_per_run": None if cost is None or self.steps is None else cost * self.steps,
            "energy_kwh_per_run": None if self.steps is None else energy * self.steps,
            "fits": row.fits,
            "chance_of_fitting": row.chance,
            "unmeasured": list(row.unseen),
            "verdict": row.verdict,
            "host_memory": row.in_host,
        }


def make_plan(
    config: Config,
    task: Task,
    machine: Machine,
    *,
    given: frozenset[str] = frozenset(),
    reader: Reader | None = None,
) -> Plan:
    """Plans an experiment. given: keys that are fixed, such as train.micro_batch_size.

    Raises:
        UserError, LayoutError: nothing could run so; one sentence.
    """
    fixed, precisions = fixed_by(config, given), _precisions(config, machine, "train.precision" in given)
    reader = reader or reader_of(config, task, machine, splits=fixed.get("parallel.tp") != 1)
    if "parallel.stages" in given and config.parallel.stages:
        parts = fixed["parallel.pp"] * fixed["parallel.chunks"]
        partition.require_sizes(config.parallel.stages, reader.blocks, parts)
    for is_sharded in (True, False) if reader.tp else ():  # whether it can be split is known once it is read
        reader.costs(way_of(is_sharded, 2, 1, precisions[-1]))
    space = Space(
        machine.world,
        machine.per_node,
        config.train.global_batch_size,
        reader.blocks,
        reader.heads,
        reader.sequence_length if config.parallel.sequence_parallel else None,
        bool(reader.tp),
        precisions,
        offload=not machine.device.is_cpu,
        length=reader.sequence_length if reader.splits_sequence else None,
        experts=math.gcd(*(found.count for found in reader.mixtures)) or 1,
        by_tp=math.gcd(*(p.shape[0] for p in reader.size.parameters if p.is_expert and p.split_dim == 0)),
    )
    candidates = enumerate_layouts(space, fixed)
    if not candidates:
        refuse(config, fixed, space)
    plan = Plan(config, reader, machine, estimator_of(config, reader, machine, given), space, fixed, [])
    plan.rows = ranked(list(_estimates(plan.estimator, candidates)))
    return plan


FAR = 1.5
"""Times a GPU's memory from which on more of the same is not looked at."""


def _estimates(estimator: Estimator, candidates: list[Candidate]) -> Iterator[Estimate]:
    """Of all but those that have more samples at once than one that takes far more than there is, and do not differ
    from it otherwise. (Nearer by, stages that are cut otherwise may fit, and so may the whole share at once, which
    accumulates nothing.)"""
    full = set[tuple[Any, ...]]()
    for one in candidates:
        key = (one.layout, one.checkpointing, one.precision, one.schedule, one.chunks, one.offload)
        if key in full and one.micro_batches > 1:
            continue
        row = estimator.estimate(one)
        if row.memory_bytes > FAR * row.capacity:
            full.add(key)
        yield row


def _precisions(config: Config, machine: Machine, is_fixed: bool) -> tuple[str, ...]:
    """The one that is configured, and on a GPU the 16-bit one that it has, unless it is fixed.

    Raises:
        LayoutError: the machine cannot compute in the precision that is configured.
    """
    wanted, gpu = config.train.precision, machine.device.gpu
    if wanted == "fp8" and wanted not in gpu.peak:
        raise LayoutError(f"train.precision=fp8, but {gpu.name} has no float8 products: write train.precision=bf16")
    halves = [precision for precision in ("bf16", "fp16") if precision in gpu.peak and not machine.device.is_cpu]
    return tuple(dict.fromkeys([wanted, *([] if is_fixed else halves[:1])]))


def reader_of(config: Config, task: Task, machine: Machine, *, splits: bool = True) -> Reader:
    """The reader of the task's model.

    Args:
        config: which says how tensor parallelism treats sequences and losses.
        task: of which the model is.
        machine: on which it is to run.
        splits: whether layouts with tensor parallelism are looked at.
    """
    return Reader(
        task,
        on_gpu=not machine.device.is_cpu,
        splits=splits,
        sequence_parallel=config.parallel.sequence_parallel,
        loss_parallel=config.parallel.loss_parallel,
    )


def estimator_of(config: Config, reader: Reader, machine: Machine, given: frozenset[str] | None = None) -> Estimator:
    """given: keys that are fixed; None: all of them."""
    asked = strategy_options(config)
    if given is not None and "parallel.stages" not in given:
        asked = replace(asked, stages=None)
    return Estimator(reader, machine, asked, config.optimizer.name, config.train.clip_norm is not None)


NEAR = 0.03
"""Share of time by which layouts of one model are taken to be equally fast: their plans' errors have much in common,
so this is less than the range in which each of them lies."""
CERTAIN = 0.99
"""Probability of fitting from which on one layout is not preferred to another for it."""


def ranked(rows: list[Estimate]) -> list[Estimate]:
    """Best first: by speed times the probability of fitting, since a layout that runs out of memory is worth nothing.

    First of all is the simplest of those that are `NEAR` the best: what another gains is less than what is known. What
    does not fit comes last, least memory first. Equally good ones (within 0.1 %) by less memory, then by the simpler
    layout.
    """

    def worth(row: Estimate) -> float:
        return math.log(row.step_seconds / max(min(row.chance / CERTAIN, 1.0), 1e-9))

    def key(row: Estimate) -> tuple[float, ...]:
        rounded = round(1000 * worth(row)) if row.fits else 1000 * math.log(row.memory_bytes)
        return (
            not row.fits,
            rounded,
            round(1000 * math.log(row.step_seconds)),
            row.memory_bytes,
            row.candidate.complexity,
        )

    order = sorted(rows, key=key)
    if not order or not order[0].fits:
        return order
    limit = worth(order[0]) + math.log1p(NEAR)
    near = (row for row in order if row.fits and worth(row) <= limit)
    simplest = min(near, key=lambda row: row.candidate.complexity)
    return [simplest] + [row for row in order if row is not simplest]
