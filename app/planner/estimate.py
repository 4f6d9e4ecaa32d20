"""Memory and time of one layout: the strategies' own cost functions, the model's parts, the machine's links.

Memory is that of the fullest device. Backward of a part u needs what all parts up to u have saved, what is alive only
within u's backward, and the gradients of the parts after u, which are there already: the peak is the largest of these
moments and of the optimizer's step. What a strategy gathers, and what waits to be reduced, is alive beside that.

What layouts have in common (costs of a part, sizes of a unit, stages of a pipeline) is worked out once for all of them.
"""

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.planner.device import family_of
from app.planner.layouts import Candidate
from app.planner.machine import Machine
from app.planner.part_costs import PartCost, Work, part_costs, way_of
from app.planner.ranges import ADAPTERS, DENSE, MIXTURE, Traits, spread_of
from app.planner.read import Reader
from app.planner.timing import Case, timing
from app.planner.trace import AFTER, BEFORE
from strategies.activation_checkpointing import recomputed_blocks
from strategies.context.apply import choose_method
from strategies.costs import RankSize, StepShape, UnitSize, part_of, rank_size, unit_size
from strategies.dims import ParallelDims
from strategies.fsdp import gradients_are_large, parameters_are_large
from strategies.options import Options
from strategies.pipeline import partition
from strategies.pipeline.schedules import Placement
from strategies.pipeline.simulate import activations_by_formula

CLOSE = 0.1
"""Share of a GPU's memory by which a plan of it errs (README.md)."""
MEMORY_ERROR = 0.06
"""Standard deviation of the logarithm of memory over its plan: a tenth is passed by one plan in twenty."""


@dataclass
class Estimate:
    """One layout's bytes and seconds, by parts."""

    candidate: Candidate
    capacity: float  # bytes of a device
    memory: dict[str, float]
    """Bytes on the fullest device: parameters, gradients, optimizer, activations, communication, buffers, margin."""
    seconds: dict[str, float]
    """Of one optimizer step; timing.py names the parts."""
    flops: float  # of the whole step, without what is computed again
    reduces_each_microbatch: bool | None
    """Whether every micro-batch's gradients are reduced (parallel.accumulate_sharded); None: does not apply."""
    stages: tuple[int, ...] | None  # blocks of each chunk of a pipeline
    range: tuple[float, float] = (1.0, 1.0)
    """Between which shares of the planned speed 80 % of runs of this kind are."""
    in_host: float = 0.0  # share of the host's memory that state kept there takes
    unseen: tuple[str, ...] = ()
    """Of what is planned, what no published run had that the ranges were made of."""

    def __post_init__(self) -> None:
        self.memory_bytes, self.step_seconds = sum(self.memory.values()), sum(self.seconds.values())
        self.fits = self.memory_bytes <= self.capacity and self.in_host <= 1

    @property
    def chance(self) -> float:
        """Probability that it fits, if plans of memory err as a normal distribution of their logarithm does."""
        if self.in_host > 1:
            return 0.0
        if self.memory_bytes <= 0:
            return 1.0
        return 0.5 * (1 + math.erf(math.log(self.capacity / self.memory_bytes) / MEMORY_ERROR / math.sqrt(2)))

    @property
    def verdict(self) -> str:
        """Whether it fits, in words: plans of memory err by `CLOSE`."""
        if abs(self.memory_bytes / self.capacity - 1) < CLOSE and self.in_host <= 1:
            return "close"
        return "fits" if self.fits else "does not fit"

    def compare(self, seconds: float, memory: float) -> dict[str, float]:
        """Beside what a run measured, as metrics to log. seconds: per step. memory: bytes that the model brought on the
        fullest worker, 0 where that is not known."""
        metrics = {
            "plan/step_seconds": self.step_seconds,
            "plan/step_seconds_measured": seconds,
            "plan/step_error": self.step_seconds / seconds - 1,
            "plan/memory_bytes": self.memory_bytes,
        }
        if memory > 0:
            metrics |= {"plan/memory_bytes_measured": memory, "plan/memory_error": self.memory_bytes / memory - 1}
        return metrics


_balanced = functools.cache(partition.balanced_partition)
"""Costs are in blocks, rounded, since most layouts of a model are cut alike."""


def shards_of(dims: ParallelDims) -> tuple[int, int, int | None]:
    """Shards of all parameters; ways that experts are split, and shards of what is left of them."""
    return dims.dp_shard, dims.ep, dims.for_experts().dp_shard if dims.ep > 1 else None


class Stages(NamedTuple):
    """How a pipeline is cut. Counts are how many of each part a stage holds, in the parts' order."""

    sizes: tuple[int, ...] | None
    slowest: tuple[int, ...]  # counts of the stage that takes longest
    fullest: list[tuple[int, tuple[int, ...]]]  # number and counts of the stages that may hold most


@dataclass
class Estimator:
    """Estimates layouts of one model on one machine."""

    reader: Reader
    machine: Machine
    options: Options
    """Of the configuration; what a candidate decides (precision, recomputation, schedule, …) is the candidate's."""
    optimizer: str = "adamw"
    clips: bool = False

    def __post_init__(self) -> None:
        self._parts = functools.cache(self._read_parts)
        self._units = functools.cache(self._read_units)
        self._rank = functools.cache(self._add_up)
        self._stages = functools.cache(self._cut)
        self._traits = functools.cache(self._traits_of)

    def case(self, candidate: Candidate) -> tuple[Case, Stages]:
        """What its time and memory are made of, and how a pipeline is cut."""
        dims, strategy, options, machine = candidate.dims, candidate.strategy, self.options, self.machine
        way = way_of(strategy.is_sharded, dims.tp, dims.pp, candidate.precision)
        work = Work(candidate.micro_batch / dims.cp, dims.tp, candidate.precision, way, candidate.checkpointing)
        stages = self._stages(work, dims.pp, candidate.schedule, candidate.chunks)
        wire = 2 if options.reduce_dtype == "bf16" else 4
        held = candidate.held
        whole = self._rank(way, dims.tp, shards_of(held), tuple(self.reader.costs(way).counts.values()))
        numbers, memory_of_gpu = whole.root + whole.blocks, None if machine.device.is_cpu else machine.device.capacity
        step = StepShape(
            dp_replicate=held.dp_replicate,
            dp_shard=held.dp_shard,
            tp=dims.tp,
            pp=dims.pp,
            micro_batches=candidate.micro_batches,
            compute_itemsize=work.itemsize,
            reduce_itemsize=wire,
            reshard_after_forward=strategy.reshards_after_forward(
                options.reshard_after_forward, parameters_are_large(numbers * work.itemsize, memory_of_gpu)
            ),
            reduce_scatter_each_microbatch=strategy.reduces_each_microbatch(
                options.accumulate_sharded, gradients_are_large(numbers * wire, memory_of_gpu)
            ),
            optimizer=self.optimizer,
        )
        parts, units = self._parts(work), self._units(way, dims.tp, shards_of(held))
        context = choose_method(options.context, heads=self.reader.heads, dims=dims, workers_per_node=machine.per_node)
        again = recomputed_blocks(candidate.checkpointing, self.reader.blocks) / max(1, self.reader.blocks)
        rows = self.reader.exchanged * candidate.micro_batch / dims.cp / dims.pp
        exchanged = rows * min(work.itemsize, 4) * (1 + again / 2)
        return Case(candidate, machine, work, step, parts, units, stages.slowest, options, context, exchanged), stages

    def estimate(self, candidate: Candidate) -> Estimate:
        dims, strategy, options, machine = candidate.dims, candidate.strategy, self.options, self.machine
        case, stages = self.case(candidate)
        memory = self._memory(case, stages)
        decides = strategy.is_sharded and candidate.micro_batches > 1 and dims.pp == 1
        may_reduce_each = decides and strategy.reduces_each_microbatch(options.accumulate_sharded, None) is None
        if may_reduce_each and sum(memory.values()) > machine.device.capacity:  # then it does, at some cost of time
            case = replace(case, step=replace(case.step, reduce_scatter_each_microbatch=True))
            memory = self._memory(case, stages)
        seconds, flops = timing(case, self.reader.sample_bytes, len(self.reader.size.parameters), self.clips)
        each = case.step.reduce_scatter_each_microbatch if decides else None
        in_host = self._in_host(case, stages) if candidate.offload and machine.host_bytes else 0.0
        spread = spread_of(self.traits(candidate), machine.device.ranges)
        return Estimate(
            candidate,
            machine.device.capacity,
            memory,
            seconds,
            flops,
            each,
            stages.sizes,
            (spread.low, spread.high),
            in_host,
            spread.unseen,
        )

    def traits(self, candidate: Candidate) -> Traits:
        """What the error of its plan depends on."""
        return self._traits("+".join(name for name in candidate.kind.split("+") if name != "ep") or "data")

    def _traits_of(self, layout: str) -> Traits:
        reader = self.reader
        parameters = reader.size.parameters
        is_adapted = bool(parameters) and not all(parameter.trainable for parameter in parameters)
        model = MIXTURE if any(p.is_expert for p in parameters) else ADAPTERS if is_adapted else DENSE
        family = family_of(self.machine.device.gpu)
        billions = sum(parameter.numel for parameter in parameters) / 1e9
        return Traits(layout, model, family, billions, getattr(reader, "sequence_length", None))

    # --- what layouts share -------------------------------------------------------------------------------------

    def _read_parts(self, work: Work) -> list[PartCost]:
        compiled = self.options.compile and self.options.compile_backend == "inductor"
        loss = self.reader.compiles_loss
        return part_costs(self.reader.costs(work.way), work, self.machine.device, compiled, loss)

    def _read_units(self, way: str, tp: int, shards: tuple[int, int, int | None]) -> list[UnitSize]:
        """Of one part of each kind."""
        model = self.reader.costs(way)
        return [
            unit_size(
                tuple(part_of(p, tp, shards[1]) for p in model.parameters[name]),
                shards[0],
                is_root=not name.startswith("block"),
                expert_shards=shards[2],
            )
            for name in model.parts
        ]

    def _add_up(self, way: str, tp: int, shards: tuple[int, int, int | None], counts: tuple[int, ...]) -> RankSize:
        units = self._units(way, tp, shards)
        repeated = [unit for unit, count in zip(units, counts) for _ in range(count)]
        return rank_size(repeated, self.reader.size.buffer_bytes)

    def _cut(self, work: Work, pp: int, schedule: str, chunks: int) -> Stages:
        """Stages so that the slowest is as fast as can be, or as the person has cut them."""
        whole = tuple(self.reader.costs(work.way).counts.values())
        if pp == 1:
            return Stages(None, whole, [(0, whole)])
        model, seconds = self.reader.costs(work.way), {p.name: p.forward + p.backward for p in self._parts(work)}
        ends, sizes = (seconds.get(name, 0.0) for name in (BEFORE, AFTER)), self.options.stages
        if sizes is None or len(sizes) != pp * chunks:
            block = max(seconds[name] for name in model.order)
            costs = (seconds[name] / block for name in model.order)
            sizes = _balanced(tuple(round(c, 2) for c in costs), pp * chunks, *(round(end / block, 1) for end in ends))
        cuts = [0, *itertools.accumulate(sizes)]
        spans = [model.order[begin:end] for begin, end in itertools.pairwise(cuts)]
        spans[0], spans[-1] = [BEFORE, *spans[0]], [*spans[-1], AFTER]
        held = [Counter[str]() for _ in range(pp)]
        for part, span in enumerate(spans):
            held[Placement.of(schedule, pp, chunks).stage_of(part)].update(span)
        counts = [tuple(own[name] for name in model.parts) for own in held]
        load = [sum(own[name] * seconds[name] for name in model.parts) for own in held]
        slowest = load.index(max(load))
        looked_at = sorted({0, min(1, pp - 1), slowest, pp - 1})
        return Stages(tuple(sizes), counts[slowest], [(number, counts[number]) for number in looked_at])

    # --- memory -------------------------------------------------------------------------------------------------

    def _memory(self, case: Case, stages: Stages) -> dict[str, float]:
        found = [self._on_stage(case, number, counts) for number, counts in stages.fullest]
        fullest = max(found, key=lambda parts: sum(parts.values()))
        return fullest | {"margin": sum(fullest.values()) * self.machine.device.fragmentation}

    def _in_host(self, case: Case, stages: Stages) -> float:
        """Share of a host's memory that its GPUs' parameters, gradients and optimizer state take there."""
        size = self._rank(case.work.way, case.candidate.dims.tp, shards_of(case.candidate.held), stages.slowest)
        cost, here = case.candidate.strategy.cost(size, case.step), min(self.machine.per_node, self.machine.world)
        return float(cost.parameters + cost.gradients + cost.optimizer) * here / float(self.machine.host_bytes or 1)

    def _on_stage(self, case: Case, number: int, counts: tuple[int, ...]) -> dict[str, float]:
        candidate, dims = case.candidate, case.candidate.dims
        cost = candidate.strategy.cost(self._rank(case.work.way, dims.tp, shards_of(candidate.held), counts), case.step)
        on_device = not candidate.offload
        if dims.pp > 1:
            alive = _in_pipeline(case, number, counts)
            present = 0.0 if candidate.strategy.is_sharded else float(cost.gradients)
        else:
            alive, present = _at_worst(case, cost.gradients)
        # in the optimizer's step activations are gone; a peak before that lacks the gradients still to come
        missing = (cost.gradients - present) * on_device
        return {
            "parameters": cost.parameters * on_device,
            "gradients": cost.gradients * on_device,
            "optimizer": cost.optimizer * on_device,
            "activations": max(alive - missing, 0.0),
            "communication": float(cost.transient),
            "buffers": float(cost.buffers),
        }


def _in_pipeline(case: Case, number: int, counts: tuple[int, ...]) -> float:
    """Bytes of the micro-batches that a stage has in flight, and of the part that is at work."""
    candidate = case.candidate
    pp, chunks = candidate.dims.pp, candidate.chunks
    in_flight = (
        activations_by_formula(
            candidate.schedule, stages=pp, micro_batches=candidate.micro_batches, chunks=chunks, stage=number
        )
        / chunks
    )
    held = [(part, count) for part, count in zip(case.parts, counts) if count]
    own = sum(part.each * count for part, count in held) * in_flight
    return own + max(part.rebuilt + part.extra for part, _ in held)


def _at_worst(case: Case, gradients: float) -> tuple[float, float]:
    """Bytes of activations at the moment when they and the gradients that are there take most, and those gradients.

    Without the parameters' copies in 16 bits: `transient` has those (strategies/costs.py)."""
    strategy, dims = case.candidate.strategy, case.candidate.dims
    # gradients of earlier micro-batches are there from the start, and so are DDP's buckets; but of whole ones that wait
    # for the last micro-batch (`transient`) the shards come as those go
    several = case.candidate.micro_batches > 1
    waiting = several and strategy.is_sharded and not case.step.reduce_scatter_each_microbatch
    gradients = 0.0 if waiting else gradients
    always = several or (strategy.averages_gradients and dims.tp == 1)
    before, after, worst = 0.0, float(gradients), (float("-inf"), 0.0, 0.0)
    for part, unit, count in zip(case.parts, case.units, case.counts):
        own = unit.sharded_gradients if strategy.is_sharded else unit.gradients
        at_work = part.rebuilt + part.extra
        for place in {1, count}:  # of alike blocks one after the other the first or the last is worst
            there = gradients if always else max(0.0, after - own * place)
            alive = before + part.each * place + at_work
            worst = max(worst, (alive + there, alive, there))
        before += part.each * count
        after = max(0.0, after - own * count)
    return worst[1], worst[2]
