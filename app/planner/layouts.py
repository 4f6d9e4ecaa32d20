"""Every layout that could run: degrees, strategy, micro-batch, recomputation, precision and schedule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any, NamedTuple

from app.config import Config
from app.errors import UserError
from app.training.job import strategy_options
from strategies import registry
from strategies.activation_checkpointing import checkpoint_every
from strategies.context.apply import check_length
from strategies.dims import DEGREES, MODEL_DEGREES, Layout, LayoutError, ParallelDims
from strategies.layout import check, choose, require_sequence_parallel_for_async_tp
from strategies.pipeline import schedules
from strategies.strategy import Strategy

LEAST_TOKENS = 4096
"""Of a sequence on one worker: below it a device's memory is full of other things."""
CHECKPOINTING = ("none", "selective", "full")  # what is looked at, unless it is fixed


class Candidate(NamedTuple):
    """One layout with all that a plan decides."""

    layout: Layout
    micro_batch: int
    micro_batches: int
    checkpointing: str
    precision: str
    schedule: str = ""
    chunks: int = 1
    offload: bool = False

    @property
    def dims(self) -> ParallelDims:
        return self.layout.dims

    @property
    def strategy(self) -> Strategy:
        """What its data-parallel workers do."""
        return _data_strategy(self.layout)

    @property
    def held(self) -> ParallelDims:
        """Its degrees as parameters see them."""
        return _held(self.layout)

    @property
    def family(self) -> str:
        """The strategy that it is told under: the last of its name."""
        return self.layout.parts[-1]

    @property
    def kind(self) -> str:
        """Of layouts whose plans err alike: tp, pp, tp+pp, or data."""
        return "+".join(name for name in ("cp", "ep", "tp", "pp") if getattr(self.dims, name, 1) > 1) or "data"

    @property
    def complexity(self) -> int:
        """How many ideas it takes: one device, copies, shards, both; experts, tensor, offload, context, pipeline."""
        return _complexity(self.layout) + 20 * self.offload


# what thousands of candidates have in common is found once
_data_strategy = cache(registry.data_strategy)


@cache
def _held(layout: Layout) -> ParallelDims:
    return layout.dims.for_parameters(_data_strategy(layout).is_sharded)


@cache
def _complexity(layout: Layout) -> int:
    dims, strategy = layout.dims, _data_strategy(layout)
    data = (dims.dp_replicate > 1) + 2 * (dims.dp_shard > 1) + 2 * bool(strategy.degrees and not _is_plain(strategy))
    return data + 5 * (dims.ep > 1) + 10 * (dims.tp > 1) + 30 * (dims.cp > 1) + 100 * (dims.pp > 1)


Fixed = dict[str, Any]
"""What a person has fixed: key of the configuration → value. What is not there is free."""
KEYS = (
    "strategy",
    *(f"parallel.{name}" for name in DEGREES),
    *("train.micro_batch_size", "train.activation_checkpointing", "train.precision"),
    *("parallel.schedule", "parallel.chunks", "parallel.offload"),
)
"""Those that decide which layouts are looked at."""


@dataclass(frozen=True)
class Space:
    """What layouts are looked for in: workers, a batch and a model."""

    world: int
    per_node: int
    global_batch: int
    blocks: int
    heads: int | None
    sequence: int | None  # its length, where tensor parallelism splits it
    splits: bool  # whether tensor parallelism can split the model
    precisions: tuple[str, ...]
    offload: bool = False  # whether state in host memory is looked at
    pipelines: bool = True
    length: int | None = None  # of a sequence, where context parallelism can split it
    experts: int = 1  # that ep must divide
    by_tp: int = 0  # experts that tensor parallelism splits too, so that tp·ep must divide them


def fixed_by(config: Config, given: frozenset[str]) -> Fixed:
    """given: the keys of the configuration that are fixed.

    Raises:
        UserError, LayoutError: one of them cannot be.
    """
    checkpoint_every(config.train.activation_checkpointing)  # raises for what is not a mode
    require_sequence_parallel_for_async_tp(strategy_options(config))
    fixed: Fixed = {key: reduce(getattr, key.split("."), config) for key in KEYS if key in given}
    fixed = {key: value for key, value in fixed.items() if value not in (None, "auto")}
    records = registry.records(fixed.get("strategy", "single"))
    if not records[0].plannable:
        raise UserError(
            f"strategy={config.strategy} is not planned: write {registry.INSTEAD[records[0].name]}, which does the "
            "same for less, or auto"
        )
    parallel, stages = config.parallel, config.parallel.stages
    if "parallel.stages" in given and stages:  # says how many stages there are, too
        chunks = schedules.chunks_per_stage(parallel.schedule, parallel.chunks)
        fixed |= {"parallel.schedule": parallel.schedule, "parallel.chunks": chunks}
        fixed["parallel.pp"] = parallel.pp or max(1, len(stages) // chunks)
    return fixed


def enumerate_layouts(space: Space, fixed: Fixed, family: str | None = None) -> list[Candidate]:
    """All layouts (of one family) that `fixed` leaves open and the model allows; of those that differ in their
    micro-batch only, the smaller one comes first."""
    modes = _wanted(fixed, "train.activation_checkpointing") or CHECKPOINTING
    precisions, found = _wanted(fixed, "train.precision") or space.precisions, list[Candidate]()
    # parts whose degree is fixed by itself may be there or not
    beside = [record for record in registry.STRATEGIES.values() if record.splits_model]
    free = {record.name for record in beside if f"parallel.{record.degrees[0]}" in fixed}
    parts = {record.alias_of or record.name for record in registry.records(fixed.get("strategy", "single"))} - free
    for dims in _grids(space, fixed):
        share, rest = divmod(space.global_batch, dims.dp)
        if rest or not share:
            continue
        sizes = [min(size, share) for size in _wanted(fixed, "train.micro_batch_size")] or _divisors(share)
        for strategy in _strategies(dims):
            layout = Layout(_name(strategy, dims), dims)
            if ("strategy" in fixed and set(layout.parts) - free != parts) or family not in (None, layout.parts[-1]):
                continue
            able = [p for p in precisions if all(p in record.precisions for record in registry.records(layout.name))]
            found += [
                Candidate(layout, size, count, mode, precision, schedule, chunks, offload)
                for size, count in ((size, -(-share // size)) for size in sizes)
                for schedule, chunks in schedules_of(dims.pp, count, space.blocks, fixed)
                for offload in _offloads(strategy, dims, space, fixed)
                for mode in modes
                for precision in able
            ]
    return found


def _wanted(fixed: Fixed, key: str) -> list[Any]:
    return [fixed[key]] if key in fixed else []


def _grids(space: Space, fixed: Fixed) -> Iterator[ParallelDims]:
    for tp in _wanted(fixed, "parallel.tp") or _divisors(space.world):
        if space.world % tp or (tp > 1 and not _can_split(space, tp, fixed)):
            continue
        left = space.world // tp
        for pp in _wanted(fixed, "parallel.pp") or _divisors(left):
            if left % pp or pp > max(1, space.blocks) or (pp > 1 and not space.pipelines):
                continue
            for cp in _wanted(fixed, "parallel.cp") or _divisors(left // pp):
                if not (left // pp) % cp and (cp == 1 or _can_cut(space, cp, tp, fixed)):
                    yield from _data_grids(left // pp // cp, ParallelDims(cp=cp, tp=tp, pp=pp), space, fixed)


def _data_grids(rest: int, dims: ParallelDims, space: Space, fixed: Fixed) -> Iterator[ParallelDims]:
    """`rest` workers as replicas and shards."""
    eps = [n for n in _wanted(fixed, "parallel.ep") or _divisors(space.experts) if not space.experts % n]
    for shard in _wanted(fixed, "parallel.dp_shard") or _divisors(rest):
        if not rest % shard and fixed.get("parallel.dp_replicate") in (None, rest // shard):
            found = replace(dims, dp_replicate=rest // shard, dp_shard=shard)
            equal = [ep for ep in eps if dims.tp == 1 or space.by_tp % (dims.tp * ep) == 0]
            yield from (replace(found, ep=ep) for ep in equal if found.allows_experts(ep))


def _can_cut(space: Space, cp: int, tp: int, fixed: Fixed) -> bool:
    """Of a sequence's parts none is looked at that is shorter than LEAST_TOKENS, unless it is fixed."""
    if space.length is None or space.length % (2 * cp) or (space.sequence or 0) // cp % tp:
        return False
    return space.length // cp >= LEAST_TOKENS or "parallel.cp" in fixed


def _can_split(space: Space, tp: int, fixed: Fixed) -> bool:
    divides = not (space.heads or tp) % tp and not (space.sequence or tp) % tp
    return space.splits and divides and (tp <= space.per_node or "parallel.tp" in fixed)


def _is_plain(strategy: Strategy) -> bool:
    """Whether it is what its degrees say, and not a special way to have them."""
    return registry.by_degrees(*strategy.degrees) is strategy


def _strategies(dims: ParallelDims) -> list[Strategy]:
    """What data-parallel workers can do: what the degrees say, and special ways to have the same degrees."""
    own = {name for name in ("dp_replicate", "dp_shard") if getattr(dims, name) > 1}
    others = {name for name in MODEL_DEGREES if getattr(dims, name) > 1}
    found = [registry.by_degrees(*(name for name in ("dp_replicate", "dp_shard") if name in own))]
    if dims.cp > 1 and dims.dp_shard == 1:  # shards over the workers of a sequence alone
        found.append(registry.by_degrees("dp_shard"))
    for record in registry.STRATEGIES.values():
        usable = record.plannable and record.degrees and not record.splits_model and not record.alias_of
        if usable and not _is_plain(record) and set(record.degrees) <= own:
            found += [record] if own | others <= {*record.degrees, *record.combines_with} else []
    return found


def _name(strategy: Strategy, dims: ParallelDims) -> str:
    split = [registry.by_degrees(name).name for name in MODEL_DEGREES if getattr(dims, name) > 1]
    return "+".join([strategy.name, *split] if strategy.degrees or not split else split)


def schedules_of(pp: int, micro_batches: int, blocks: int, fixed: Fixed) -> list[tuple[str, int]]:
    """Schedules, and chunks per stage, that micro-batches of this number can feed."""
    if pp == 1:
        return [("", 1)]
    found = []
    wanted = _wanted(fixed, "parallel.chunks") or (1, 2, 4)
    for name in _wanted(fixed, "parallel.schedule") or schedules.SCHEDULES:
        for chunks in dict.fromkeys(schedules.chunks_per_stage(name, number) for number in wanted):
            try:
                schedules.require_schedule(name, stages=pp, micro_batches=micro_batches, chunks=chunks)
            except LayoutError:
                continue
            found += [(name, chunks)] if pp * chunks <= blocks else []
    return found


def _offloads(strategy: Strategy, dims: ParallelDims, space: Space, fixed: Fixed) -> tuple[bool, ...]:
    """State may be kept in host memory by those that shard, not in a pipeline; looked at for plain ones alone unless
    it is fixed."""
    able = strategy.is_sharded and dims.pp == 1
    if "parallel.offload" in fixed:
        return (fixed["parallel.offload"],) if able or not fixed["parallel.offload"] else ()
    return (False, True) if able and space.offload and _is_plain(strategy) else (False,)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def refuse(config: Config, fixed: Fixed, space: Space) -> None:
    """Raises the sentence that says why no layout is left."""
    degrees, batch = {name: fixed.get(f"parallel.{name}") for name in DEGREES}, space.global_batch
    layout = choose(fixed.get("strategy", "auto"), space.world, **degrees, devices_per_node=space.per_node)
    check(
        layout,
        strategy_options(config),
        global_batch_size=batch,
        heads=space.heads,
        blocks=space.blocks,
        sequence_length=space.sequence,
        micro_batches=max(1, batch // layout.dims.dp),
    )
    if layout.dims.cp > 1 and space.length is None:
        raise LayoutError(
            f"parallel.cp is {layout.dims.cp}, but the model has no sequence that can be split (strategies/context/"
            "apply.py says what a context_plan is)"
        )
    if layout.dims.cp > 1 and space.length is not None:
        check_length(space.length, layout.dims.cp, "ring")
    if layout.dims.tp > 1 and not space.splits:
        raise LayoutError(f"parallel.tp is {layout.dims.tp}, but the model has no layers that can be split")
    raise LayoutError(
        f"train.global_batch_size is {batch}, which {space.world} workers cannot share as their degrees are fixed: the "
        f"number of data-parallel workers must divide it (the largest that do: {_divisors(batch)[-4:]})"
    )
