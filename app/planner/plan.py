"""A plan: every layout of an experiment on a machine, with its memory and time, best first."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from app.config import Config
from app.planner.assumptions import OTHER_TRAINERS, apply_assumptions
from app.planner.estimate import Estimate
from app.planner.estimator import Estimator
from app.planner.layouts import Candidate, Fixed, Space, enumerate_layouts, fixed_by, refuse
from app.planner.machine import GPUS_PER_NODE, Machine
from app.planner.read import Reader
from app.planner.work import variant_of
from app.tasks.base import Task
from app.training.job import strategy_options
from strategies.costs import EIGHT_BIT_BLOCK, ITEMSIZES
from strategies.dims import DEGREES, LayoutError
from strategies.pipeline import partition

GIB = 2**30
FAR = 1.5
"""A layout that takes this many times a GPU's memory is not planned with larger micro-batches."""
NEAR = 0.03
"""Share of the time by which layouts of one model count as equally fast.

The errors of their plans have much in common, so it is less than the range of each of them.
"""
NOTABLE = 0.05
"""Share of the speed from which a plan says what another trainer would change."""
CERTAIN = 0.99
"""From this probability of fitting a layout is not ranked behind another one for it."""


@dataclass(kw_only=True)
class Plan:
    """All layouts, and what they were planned for.

    Args:
        config: The experiment.
        reader: Its model.
        machine: The machine.
        estimator: Estimates further layouts of the same model on it.
        space: What was enumerated.
        fixed: What the user has fixed.
        rows: Best first; behind those that fit come the others, least memory first.
    """

    config: Config
    reader: Reader
    machine: Machine
    estimator: Estimator
    space: Space
    fixed: Fixed
    rows: list[Estimate]

    @property
    def best(self) -> Estimate | None:
        """The best layout, if one fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    @functools.cached_property
    def by_kernels(self) -> dict[str, Estimate]:
        """The first layout "compiled" by torch.compile and "eager", operation by operation.

        Empty on CPUs, of which the planner does not know what compiling gains.
        """
        if self.machine.device.is_cpu:
            return {}
        first = self.rows[0]
        estimates = {}
        for name in ("compiled", "eager"):
            options = replace(
                self.estimator.options,
                compile=name == "compiled",
                compile_backend="inductor",
                stages=first.stages,
            )
            estimator = replace(self.estimator, options=options)
            estimates[name] = estimator.estimate(first.candidate)
        return estimates

    @functools.cached_property
    def fused_attention(self) -> tuple[str, Estimate] | None:
        """What to write for attention that keeps no scores in memory, and the first layout with it.

        None on CPUs, or if the model uses such an attention by itself, or takes none.
        """
        fused = None if self.machine.device.is_cpu else self.reader.task.with_fused_attention()
        if fused is None:
            return None
        written, task = fused
        first = self.rows[0]
        reader = reader_of(self.config, task, self.machine, splits=bool(self.reader.tp))
        options = replace(self.estimator.options, stages=first.stages)
        estimator = replace(self.estimator, reader=reader, options=options)
        return written, estimator.estimate(first.candidate)

    @functools.cached_property
    def by_trainer(self) -> dict[str, float]:
        """By which share the first layout is faster if another trainer is assumed, by assumption.

        Of `OTHER_TRAINERS`, those that change its speed by at least `NOTABLE`.
        """
        device = self.machine.device
        first = self.rows[0]
        changes = {}
        for name, value in OTHER_TRAINERS.items():
            assumption = f"{name}={value:g}"
            changed = apply_assumptions(device, (assumption,))
            row = self.estimator.changed(changed, first.stages).estimate(first.candidate)
            change = first.step_seconds / row.step_seconds - 1
            if not device.is_cpu and abs(change) >= NOTABLE:
                changes[assumption] = change
        return changes

    @property
    def steps(self) -> int | None:
        """The steps of the run; None if they depend on data that are not there."""
        is_known = self.config.train.steps or self.reader.samples
        return self.config.train.steps_for(self.reader.samples) if is_known else None

    def on_gpus(
        self,
        world: int,
        fixed: Fixed,
        *,
        global_batch: int | None = None,
        as_planned: bool = False,
    ) -> list[Estimate]:
        """Layouts of the same model on another number of these devices.

        Args:
            world: The number of devices.
            fixed: Keys of the configuration whose values stay.
            global_batch: Samples of a step, if they are not those of the plan; nodes then have the
                usual number of devices.
            as_planned: Whether all is considered that a plan of that many considers; otherwise
                neither pipelines, state in host memory nor another precision.
        """
        per_node = self.machine.most_per_node or self.machine.per_node
        if global_batch is not None:
            per_node = GPUS_PER_NODE
        machine = replace(self.machine, world=world, per_node=min(world, per_node))
        space = replace(
            self.space,
            world=world,
            per_node=machine.per_node,
            global_batch=self.space.global_batch if global_batch is None else global_batch,
            common_divisor=self.space.common_divisor if global_batch is None else None,
        )
        if not as_planned:
            precision = self.rows[0].candidate.precision
            space = replace(space, precisions=(precision,), offloads=False, pipelines=False)
        estimator = replace(self.estimator, machine=machine)
        return [estimator.estimate(candidate) for candidate in enumerate_layouts(space, fixed)]

    def layout(self, row: Estimate) -> dict[str, Any]:
        """A layout as a dictionary for JSON."""
        candidate = row.candidate
        gpu = self.machine.device.gpu
        world = self.machine.world
        unit = self.reader.task.unit
        samples_per_second = self.config.train.global_batch_size / row.step_seconds
        units_per_second = samples_per_second * self.reader.items_per_sample
        price = self.machine.price_per_hour
        cost = None if price is None else price * world * row.step_seconds / 3600
        energy_kwh = gpu.watts * world * row.step_seconds / 3.6e6
        peak = gpu.rate(candidate.precision) * world
        has_pipeline = bool(candidate.schedule)
        return {
            "strategy": candidate.layout.name,
            "parallel": {
                **{name: getattr(candidate.dims, name) for name in DEGREES},
                "schedule": candidate.schedule if has_pipeline else None,
                "chunks": candidate.chunks if has_pipeline else None,
                "stages": list(row.stages) if row.stages else None,
                "offload": candidate.offload,
                "accumulate_sharded": row.reduces_each_microbatch,
            },
            "micro_batch_size": candidate.micro_batch,
            "micro_batches": candidate.micro_batches,
            "activation_checkpointing": candidate.checkpointing,
            "activation_offloading": candidate.moves_activations,
            "precision": candidate.precision,
            "memory_bytes": int(row.memory_bytes),
            "memory_bytes_by_part": {name: int(value) for name, value in row.memory.items()},
            "step_seconds": row.step_seconds,
            "step_seconds_by_part": row.seconds,
            "samples_per_second": samples_per_second,
            f"{unit}_per_second": units_per_second,
            f"{unit}_per_second_range": [units_per_second * share for share in row.speed_range],
            "mfu": row.flops / (row.step_seconds * peak),
            "dollars_per_step": cost,
            "dollars_per_run": None if cost is None or self.steps is None else cost * self.steps,
            "energy_kwh_per_run": None if self.steps is None else energy_kwh * self.steps,
            "fits": row.fits,
            "chance_of_fitting": row.fit_probability,
            "unmeasured": list(row.unmeasured),
            "verdict": row.verdict,
            "host_memory_share": row.host_memory_share,
            "host_memory_bytes": int(row.host_memory_bytes),
        }


def make_plan(
    config: Config,
    task: Task,
    machine: Machine,
    *,
    fixed_keys: frozenset[str] = frozenset(),
    reader: Reader | None = None,
) -> Plan:
    """Plan an experiment.

    Args:
        config: The experiment.
        task: Its task.
        machine: The machine.
        fixed_keys: Keys whose values stay, such as train.micro_batch_size.
        reader: Of the same task, if there is one.

    Raises:
        UserError: The model or a value cannot be planned.
        LayoutError: No layout is possible.
    """
    fixed = fixed_by(config, fixed_keys)
    precisions = _precisions(config, machine, is_fixed="train.precision" in fixed_keys)
    if reader is None:
        reader = reader_of(config, task, machine, splits=fixed.get("parallel.tp") != 1)
    if "parallel.stages" in fixed_keys and config.parallel.stages:
        chunks = fixed["parallel.pp"] * fixed["parallel.chunks"]
        partition.require_sizes(config.parallel.stages, reader.blocks, chunks)
    space = _space_of(config, reader, machine, precisions)
    candidates = enumerate_layouts(space, fixed)
    if reader.tp:  # whether the model can be split is known only once it has been read
        split = [candidate for candidate in candidates if candidate.dims.tp > 1]
        for is_sharded in {candidate.strategy.is_sharded for candidate in split}:
            variant = variant_of(is_sharded=is_sharded, tp=2, pp=1, precision=precisions[-1])
            reader.costs(variant.casting)
        if not reader.tp:
            space = replace(space, splits_layers=False)
            candidates = enumerate_layouts(space, fixed)
    if not candidates:
        refuse(config, fixed, space)
    estimator = estimator_of(config, reader, machine, fixed_keys)
    return Plan(
        config=config,
        reader=reader,
        machine=machine,
        estimator=estimator,
        space=space,
        fixed=fixed,
        rows=ranked(list(_estimates(estimator, candidates))),
    )


def _space_of(
    config: Config, reader: Reader, machine: Machine, precisions: tuple[str, ...]
) -> Space:
    tp_experts = [
        parameter.shape[0]
        for parameter in reader.size.parameters
        if parameter.is_expert and parameter.split_dim == 0
    ]
    return Space(
        world=machine.world,
        per_node=machine.per_node,
        global_batch=config.train.global_batch_size,
        blocks=reader.blocks,
        heads=reader.heads,
        tp_sequence=reader.sequence_length if config.parallel.sequence_parallel else None,
        splits_layers=bool(reader.tp),
        precisions=precisions,
        offloads=not machine.device.is_cpu,
        moves_activations=config.train.activation_offloading,
        cp_sequence=reader.sequence_length if reader.splits_sequence else None,
        experts=math.gcd(*(mixture.count for mixture in reader.mixtures)) or 1,
        tp_experts=math.gcd(*tp_experts),
        common_divisor=config.train.batches.common_divisor,
    )


def _estimates(estimator: Estimator, candidates: list[Candidate]) -> Iterator[Estimate]:
    """The estimates of all candidates worth looking at.

    If one takes far more memory than there is, those that differ from it only in larger
    micro-batches are left out. If it takes a little more, another cut of the stages may fit, or a
    single micro-batch, which accumulates nothing.
    """
    too_large = set[tuple[Any, ...]]()
    for candidate in candidates:
        without_batch = candidate._replace(micro_batch=0, micro_batches=0)
        if without_batch in too_large and candidate.micro_batches > 1:
            continue
        row = estimator.estimate(candidate)
        if row.memory_bytes > FAR * row.capacity:
            too_large.add(without_batch)
        yield row


def _precisions(config: Config, machine: Machine, *, is_fixed: bool) -> tuple[str, ...]:
    """The configured precision and, unless that is fixed, the 16-bit one that the GPU has.

    Raises:
        LayoutError: The machine cannot compute in the configured precision.
    """
    configured = config.train.precision
    gpu = machine.device.gpu
    if configured == "fp8" and configured not in gpu.peak:
        raise LayoutError(
            f"train.precision=fp8, but {gpu.name} has no float8 products: "
            "write train.precision=bf16"
        )
    precisions = [configured]
    if not is_fixed and not machine.device.is_cpu:
        sixteen_bit = [precision for precision in ("bf16", "fp16") if precision in gpu.peak]
        precisions += sixteen_bit[:1]
    return tuple(dict.fromkeys(precisions))


def reader_of(config: Config, task: Task, machine: Machine, *, splits: bool = True) -> Reader:
    """A reader of the task's model.

    Args:
        config: Says how tensor parallelism treats sequences and losses.
        task: The task.
        machine: Where the model is to run.
        splits: Whether layouts with tensor parallelism are considered.
    """
    return Reader(
        task,
        on_gpu=not machine.device.is_cpu,
        splits=splits,
        sequence_parallel=config.parallel.sequence_parallel,
        loss_parallel=config.parallel.loss_parallel,
        weight_dtype=config.train.weight_dtype,
        block=config.optimizer.args.get("block_size", EIGHT_BIT_BLOCK),
    )


def estimator_of(
    config: Config, reader: Reader, machine: Machine, fixed_keys: frozenset[str] | None = None
) -> Estimator:
    """An estimator of a configuration's layouts.

    Args:
        config: The configuration.
        reader: Its model.
        machine: The machine.
        fixed_keys: Keys whose values stay; None for all.
    """
    options = strategy_options(config)
    if fixed_keys is not None and "parallel.stages" not in fixed_keys:
        options = replace(options, stages=None)
    return Estimator(
        reader=reader,
        machine=machine,
        options=options,
        optimizer=config.optimizer.name,
        state_itemsize=ITEMSIZES[config.optimizer.state_dtype],
        clips=config.train.clip_norm is not None,
    )


def ranked(rows: list[Estimate]) -> list[Estimate]:
    """Layouts, best first.

    They are ranked by speed times the probability of fitting, since a layout that runs out of
    memory is worth nothing. The first is the simplest of those within `NEAR` of the best, as what
    others gain is less than what is known, and of these one that fits for certain if there is one.
    What does not fit comes last, least memory first.
    Equally good layouts (within 0.1 %) are ranked by less memory, then by simplicity.
    """
    order = sorted(rows, key=_rank)
    if not order or not order[0].fits:
        return order
    limit = _log_expected_seconds(order[0]) + math.log1p(NEAR)
    near_best = [row for row in order if row.fits and _log_expected_seconds(row) <= limit]
    simplest = min(near_best, key=lambda row: (row.verdict == "close", row.candidate.complexity))
    return [simplest] + [row for row in order if row is not simplest]


def first_of(rows: list[Estimate]) -> Estimate | None:
    """The layout that is ranked first; if none fits, the one that takes the least memory."""
    return next(iter(ranked(rows)), None)


def _log_expected_seconds(row: Estimate) -> float:
    probability = min(row.fit_probability / CERTAIN, 1.0)
    return math.log(row.step_seconds / max(probability, 1e-9))


def _rank(row: Estimate) -> tuple[float, ...]:
    if row.fits:
        value: float = round(1000 * _log_expected_seconds(row))
    else:
        value = 1000 * math.log(row.memory_bytes)
    return (
        not row.fits,
        value,
        round(1000 * math.log(row.step_seconds)),
        row.memory_bytes,
        row.candidate.complexity,
    )
