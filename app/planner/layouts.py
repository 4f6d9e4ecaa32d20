"""Every layout that could run: degrees, strategy, batch, recomputation, precision, schedule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any, NamedTuple

from app.config import Config
from app.errors import UserError
from app.training.job import strategy_options
from strategies import registry
from strategies.context.apply import check_length
from strategies.dims import (
    DEGREES,
    MODEL_DEGREES,
    Layout,
    LayoutError,
    ParallelDims,
    checkpoint_every,
)
from strategies.layout import check, choose, require_sequence_parallel_for_async_tp
from strategies.pipeline import schedules
from strategies.strategy import Strategy

LEAST_TOKENS = 4096
"""Of a sequence on one worker. With fewer, activations are not what fills a device's memory."""
CHECKPOINTING = ("none", "selective", "full")
"""The modes of activation checkpointing that are planned, unless one is fixed."""
CHUNKS = (1, 2, 4)
"""The chunks per pipeline stage that are planned, unless a number is fixed."""
DATA_DEGREES = ("dp_replicate", "dp_shard")


class Candidate(NamedTuple):
    """A layout with everything else that a plan decides.

    Args:
        layout: The strategy and its degrees.
        micro_batch: Samples of a micro-batch on one data-parallel worker.
        micro_batches: How many of them a step has.
        checkpointing: The mode of activation checkpointing.
        precision: fp32, bf16, fp16 or fp8.
        schedule: Of a pipeline; "" without one.
        chunks: Of blocks, for each stage of a pipeline.
        offload: Whether state is kept in host memory.
        moves_activations: Whether what blocks save for backward is kept in host memory.
    """

    layout: Layout
    micro_batch: int
    micro_batches: int
    checkpointing: str
    precision: str
    schedule: str = ""
    chunks: int = 1
    offload: bool = False
    moves_activations: bool = False

    @property
    def dims(self) -> ParallelDims:
        """The degrees."""
        return self.layout.dims

    @property
    def strategy(self) -> Strategy:
        """What the data-parallel workers do."""
        return _data_strategy(self.layout, offload=self.offload)

    @property
    def parameter_dims(self) -> ParallelDims:
        """The degrees as parameters see them: the workers of a sequence hold copies or shards."""
        return _parameter_dims(self.layout, offload=self.offload)

    @property
    def family(self) -> str:
        """The strategy under which the layout is explained: the last in its name."""
        return self.layout.parts[-1]

    @property
    def model_split(self) -> str:
        """How the model is split, as plans of equal splits err alike: tp, cp+tp, pp, or data."""
        split = [name for name in ("cp", "tp", "pp") if getattr(self.dims, name) > 1]
        return "+".join(split) or "data"

    @property
    def key(self) -> str:
        """Names the layout with all that auto decides, but for how many blocks a stage has."""
        words = [str(self.layout), f"micro-batches of {self.micro_batch}"]
        if self.checkpointing != "none":
            words.append(f"checkpointing {self.checkpointing}")
        if self.offload:
            words.append("offload")
        if self.schedule:
            words.append(f"{self.schedule} with {self.chunks} chunks a stage")
        return ", ".join(words)

    @property
    def complexity(self) -> int:
        """A rank by how much a user has to understand.

        From low to high: one device, copies, shards, both; experts, tensor parallelism, state in
        host memory, context parallelism, a pipeline.
        """
        return _complexity(self.layout, offload=self.offload) + 20 * self.offload


# Thousands of candidates share a layout, so these are computed once for each.
_data_strategy = cache(registry.data_strategy)


@cache
def _parameter_dims(layout: Layout, *, offload: bool) -> ParallelDims:
    return layout.dims.for_parameters(_data_strategy(layout, offload=offload).is_sharded)


@cache
def _complexity(layout: Layout, *, offload: bool) -> int:
    dims = layout.dims
    strategy = _data_strategy(layout, offload=offload)
    is_special = bool(strategy.degrees) and not _is_plain(strategy)
    return (
        (dims.dp_replicate > 1)
        + 2 * (dims.dp_shard > 1)
        + 2 * is_special
        + 5 * (dims.ep > 1)
        + 10 * (dims.tp > 1)
        + 30 * (dims.cp > 1)
        + 100 * (dims.pp > 1)
    )


Fixed = dict[str, Any]
"""What the user has fixed: key of the configuration → value. A key that is missing is free."""
MOVES_ACTIVATIONS = "train.activation_offloading"
"""A key that plans do not vary: its value is fixed, or that of the configuration."""
KEYS = (
    "strategy",
    *(f"parallel.{name}" for name in DEGREES),
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.precision",
    "parallel.schedule",
    "parallel.chunks",
    "parallel.offload",
)
"""The keys that can be fixed."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The workers, the batch and the model for which layouts are enumerated.

    Args:
        world: The number of workers.
        per_node: Workers of a node.
        global_batch: Samples of a step; of the largest if they differ.
        blocks: The model's repeating blocks.
        heads: Its attention heads; None if it does not say.
        tp_sequence: The length of a sequence that tensor parallelism splits; None if it does not.
        splits_layers: Whether tensor parallelism can split the model.
        precisions: Those that are planned.
        offloads: Whether state in host memory is planned.
        moves_activations: Whether activations are in host memory, if that is not fixed.
        pipelines: Whether pipelines are planned.
        cp_sequence: The length of a sequence that context parallelism can split; None if it cannot.
        experts: A number that ep must divide.
        tp_experts: The experts that tensor parallelism splits too, which tp · ep must divide; 0 for
            none.
        common_divisor: Of the batches of train.batch_schedule, of which `global_batch` is the
            largest; None if all steps have one batch.
    """

    world: int
    per_node: int
    global_batch: int
    blocks: int
    heads: int | None
    tp_sequence: int | None
    splits_layers: bool
    precisions: tuple[str, ...]
    offloads: bool = False
    moves_activations: bool = False
    pipelines: bool = True
    cp_sequence: int | None = None
    experts: int = 1
    tp_experts: int = 0
    common_divisor: int | None = None

    @property
    def shared_batch(self) -> int:
        """What the number of data-parallel workers must divide."""
        return self.common_divisor or self.global_batch


def fixed_by(config: Config, fixed_keys: frozenset[str]) -> Fixed:
    """What the user has fixed.

    Args:
        config: The configuration.
        fixed_keys: Keys of it whose values stay.

    Raises:
        UserError: The strategy is one that is not planned.
        LayoutError: A value is not possible.
    """
    checkpoint_every(config.train.activation_checkpointing)  # raises if it is not a mode
    require_sequence_parallel_for_async_tp(strategy_options(config))
    fixed: Fixed = {}
    for key in KEYS:
        value = reduce(getattr, key.split("."), config)
        if key in fixed_keys and value not in (None, "auto"):
            fixed[key] = value
    strategy = registry.records(fixed.get("strategy", "single"))[0]
    if not strategy.plannable:
        raise UserError(
            f"strategy={config.strategy} is not planned: write {registry.INSTEAD[strategy.name]}, "
            "which does the same for less, or auto"
        )
    parallel = config.parallel
    if "parallel.stages" in fixed_keys and parallel.stages:
        # Their number says how many stages there are.
        chunks = schedules.chunks_per_stage(parallel.schedule, parallel.chunks)
        fixed["parallel.schedule"] = parallel.schedule
        fixed["parallel.chunks"] = chunks
        fixed["parallel.pp"] = parallel.pp or max(1, len(parallel.stages) // chunks)
    return fixed


def enumerate_layouts(space: Space, fixed: Fixed, family: str | None = None) -> list[Candidate]:
    """All layouts that are possible; of those with other micro-batches only, the smaller first.

    Args:
        space: The workers, the batch and the model.
        fixed: What the user has fixed.
        family: Only layouts of this strategy (`Candidate.family`); None for all.
    """
    candidates: list[Candidate] = []
    for dims in _possible_dims(space, fixed):
        samples = space.global_batch // dims.dp
        if space.shared_batch % dims.dp:
            continue
        for strategy in _possible_strategies(dims, space, fixed):
            layout = Layout(_layout_name(strategy, dims), dims)
            is_of_family = family in (None, layout.parts[-1])
            if is_of_family and _has_fixed_strategy(layout, fixed):
                candidates += _candidates_of(layout, strategy, samples, space=space, fixed=fixed)
    return candidates


def _has_fixed_strategy(layout: Layout, fixed: Fixed) -> bool:
    """Whether a layout is of the strategy that is fixed.

    A part such as +tensor does not matter if its degree is fixed by itself.
    """
    if "strategy" not in fixed:
        return True
    free = {
        record.name
        for record in registry.STRATEGIES.values()
        if record.splits_model and f"parallel.{record.degrees[0]}" in fixed
    }
    records = registry.records(fixed["strategy"])
    wanted = {record.alias_of or record.name for record in records}
    return set(layout.parts) - free == wanted - free


def _candidates_of(
    layout: Layout, strategy: Strategy, samples: int, *, space: Space, fixed: Fixed
) -> Iterator[Candidate]:
    """A layout with every micro-batch, schedule, mode and precision that it can have.

    Args:
        layout: The layout.
        strategy: What its data-parallel workers do.
        samples: Of a step, on one data-parallel worker.
        space: The workers, the batch and the model.
        fixed: What the user has fixed.
    """
    dims = layout.dims
    sizes = _divisors(samples)
    if "train.micro_batch_size" in fixed:
        sizes = [min(fixed["train.micro_batch_size"], samples)]
    modes = _fixed_or(fixed, "train.activation_checkpointing", CHECKPOINTING)
    records = registry.records(layout.name)
    precisions = [
        precision
        for precision in _fixed_or(fixed, "train.precision", space.precisions)
        if all(precision in record.precisions for record in records)
    ]
    for size in sizes:
        micro_batches = -(-samples // size)
        for schedule, chunks in schedules_of(dims.pp, micro_batches, space.blocks, fixed):
            for offload in _offloads(strategy, dims, space, fixed):
                for mode in modes:
                    for precision in precisions:
                        yield Candidate(
                            layout=layout,
                            micro_batch=size,
                            micro_batches=micro_batches,
                            checkpointing=mode,
                            precision=precision,
                            schedule=schedule,
                            chunks=chunks,
                            offload=offload,
                            moves_activations=fixed.get(MOVES_ACTIVATIONS, space.moves_activations),
                        )


def _fixed_or(fixed: Fixed, key: str, choices: Any) -> Any:
    """The value that is fixed, as the only choice, or all choices."""
    return [fixed[key]] if key in fixed else choices


def _possible_dims(space: Space, fixed: Fixed) -> Iterator[ParallelDims]:
    for tp in _fixed_or(fixed, "parallel.tp", _divisors(space.world)):
        if space.world % tp or (tp > 1 and not _can_split_layers(space, tp, fixed)):
            continue
        workers_of_tp = space.world // tp
        for pp in _fixed_or(fixed, "parallel.pp", _divisors(workers_of_tp)):
            if workers_of_tp % pp or pp > max(1, space.blocks):
                continue
            if pp > 1 and not space.pipelines:
                continue
            workers_of_stage = workers_of_tp // pp
            for cp in _fixed_or(fixed, "parallel.cp", _divisors(workers_of_stage)):
                if workers_of_stage % cp:
                    continue
                if cp == 1 or _can_split_sequence(space, cp, tp, fixed):
                    model_dims = ParallelDims(cp=cp, tp=tp, pp=pp)
                    yield from _with_data_dims(model_dims, workers_of_stage // cp, space, fixed)


def _with_data_dims(
    model_dims: ParallelDims, workers: int, space: Space, fixed: Fixed
) -> Iterator[ParallelDims]:
    """The degrees with the data-parallel workers as replicas and shards, and split experts."""
    expert_degrees = [
        ep
        for ep in _fixed_or(fixed, "parallel.ep", _divisors(space.experts))
        if space.experts % ep == 0
        and (model_dims.tp == 1 or space.tp_experts % (model_dims.tp * ep) == 0)
    ]
    for dp_shard in _fixed_or(fixed, "parallel.dp_shard", _divisors(workers)):
        dp_replicate = workers // dp_shard
        if workers % dp_shard:
            continue
        if fixed.get("parallel.dp_replicate") not in (None, dp_replicate):
            continue
        dims = replace(model_dims, dp_replicate=dp_replicate, dp_shard=dp_shard)
        for ep in expert_degrees:
            if dims.allows_experts(ep):
                yield replace(dims, ep=ep)


def _can_split_sequence(space: Space, cp: int, tp: int, fixed: Fixed) -> bool:
    """Whether context parallelism can split sequences; into short parts only if cp is fixed."""
    if space.cp_sequence is None or space.cp_sequence % (2 * cp):
        return False
    if (space.tp_sequence or 0) // cp % tp:
        return False
    return space.cp_sequence // cp >= LEAST_TOKENS or "parallel.cp" in fixed


def _can_split_layers(space: Space, tp: int, fixed: Fixed) -> bool:
    """Whether tensor parallelism can split the model; beyond a node only if tp is fixed."""
    divides_heads = (space.heads or tp) % tp == 0
    divides_sequence = (space.tp_sequence or tp) % tp == 0
    is_allowed = tp <= space.per_node or "parallel.tp" in fixed
    return space.splits_layers and divides_heads and divides_sequence and is_allowed


def _is_plain(strategy: Strategy) -> bool:
    """Whether it is the usual strategy for its degrees, such as fsdp but not zero1."""
    return registry.by_degrees(*strategy.degrees) is strategy


def _possible_strategies(dims: ParallelDims, space: Space, fixed: Fixed) -> list[Strategy]:
    """What data-parallel workers can do: the usual strategy for the degrees, and special ones.

    One worker alone can have the strategy that is fixed, and shard to keep state in host memory.
    """
    if dims.world_size == 1:
        strategies = [registry.by_degrees()]
        if "strategy" in fixed:
            named = registry.records(fixed["strategy"])[0]
            if named.degrees and not named.splits_model:
                strategies.append(registry.find(named.alias_of or named.name))
        elif space.offloads or fixed.get("parallel.offload"):
            strategies.append(registry.by_degrees("dp_shard"))
        return strategies
    data_degrees = [name for name in DATA_DEGREES if getattr(dims, name) > 1]
    model_degrees = [name for name in MODEL_DEGREES if getattr(dims, name) > 1]
    strategies = [registry.by_degrees(*data_degrees)]
    if dims.cp > 1 and dims.dp_shard == 1:  # shards over only the workers of a sequence
        strategies.append(registry.by_degrees("dp_shard"))
    for record in registry.STRATEGIES.values():
        is_data_strategy = bool(record.degrees) and not record.splits_model
        if not is_data_strategy or not record.plannable or record.alias_of or _is_plain(record):
            continue
        has_degrees = set(record.degrees) <= set(data_degrees)
        combines = {*data_degrees, *model_degrees} <= {*record.degrees, *record.combines_with}
        if has_degrees and combines:
            strategies.append(record)
    return strategies


def _layout_name(strategy: Strategy, dims: ParallelDims) -> str:
    split = [registry.by_degrees(name).name for name in MODEL_DEGREES if getattr(dims, name) > 1]
    if split and not strategy.degrees:
        return "+".join(split)
    return "+".join([strategy.name, *split])


def schedules_of(pp: int, micro_batches: int, blocks: int, fixed: Fixed) -> list[tuple[str, int]]:
    """The schedules, with chunks per stage, that a pipeline can have; ("", 1) without a pipeline.

    Args:
        pp: The number of stages.
        micro_batches: Of a step; a schedule may need more.
        blocks: Of the model; every chunk needs one.
        fixed: What the user has fixed.
    """
    if pp == 1:
        return [("", 1)]
    possible = []
    for name in _fixed_or(fixed, "parallel.schedule", schedules.SCHEDULES):
        numbers = _fixed_or(fixed, "parallel.chunks", CHUNKS)
        for chunks in dict.fromkeys(schedules.chunks_per_stage(name, number) for number in numbers):
            try:
                schedules.require_schedule(
                    name, stages=pp, micro_batches=micro_batches, chunks=chunks
                )
            except LayoutError:
                continue
            if pp * chunks <= blocks:
                possible.append((name, chunks))
    return possible


def _offloads(
    strategy: Strategy, dims: ParallelDims, space: Space, fixed: Fixed
) -> tuple[bool, ...]:
    """Whether state may be in host memory: of sharded strategies without a pipeline.

    It is planned for the usual strategies only, unless it is fixed.
    """
    can_offload = strategy.is_sharded and dims.pp == 1
    if can_offload and dims.world_size == 1 and "strategy" not in fixed:
        # Without offloading it would be the same as one device.
        return (True,) if fixed.get("parallel.offload", space.offloads) else ()
    if "parallel.offload" in fixed:
        offload = fixed["parallel.offload"]
        return (offload,) if can_offload or not offload else ()
    if can_offload and space.offloads and _is_plain(strategy):
        return (False, True)
    return (False,)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _require_experts(dims: ParallelDims, space: Space) -> None:
    """Check that the experts can be split as the degrees have it.

    Raises:
        LayoutError: They cannot.
    """
    if dims.ep > 1 and space.experts % dims.ep:
        raise LayoutError(
            f"parallel.ep is {dims.ep}, which does not divide the {space.experts} experts: "
            f"write one of {', '.join(map(str, _divisors(space.experts)))}"
        )
    split_ways = dims.tp * dims.ep
    if dims.tp > 1 and space.tp_experts % split_ways:
        divided, rest = divmod(space.tp_experts, dims.tp)
        degrees = [] if rest else [ep for ep in _divisors(divided) if dims.allows_experts(ep)]
        instead = f"parallel.ep={degrees[-1]}" if degrees else "a smaller parallel.tp"
        raise LayoutError(
            f"parallel.tp · parallel.ep is {split_ways}, which does not divide the "
            f"{space.tp_experts} experts; tensor parallelism splits them too: write {instead}"
        )


def refuse(config: Config, fixed: Fixed, space: Space) -> None:
    """Say why no layout is possible.

    Raises:
        LayoutError: Always.
    """
    degrees = {name: fixed.get(f"parallel.{name}") for name in DEGREES}
    layout = choose(
        fixed.get("strategy", "auto"),
        space.world,
        **degrees,
        devices_per_node=space.per_node,
    )
    check(
        layout,
        strategy_options(config),
        global_batch_size=space.global_batch,
        heads=space.heads,
        blocks=space.blocks,
        sequence_length=space.tp_sequence,
        micro_batches=max(1, space.global_batch // layout.dims.dp),
    )
    if layout.dims.cp > 1:
        if space.cp_sequence is None:
            raise LayoutError(
                f"parallel.cp is {layout.dims.cp}, but the model has no sequence that can be split "
                "(strategies/context/apply.py says what a context_plan is)"
            )
        check_length(space.cp_sequence, layout.dims.cp, "ring")
    if layout.dims.tp > 1 and not space.splits_layers:
        raise LayoutError(
            f"parallel.tp is {layout.dims.tp}, but the model has no layers that can be split"
        )
    _require_experts(layout.dims, space)
    raise LayoutError(
        f"train.global_batch_size is {space.shared_batch}, which {space.world} workers cannot "
        "share as their degrees are fixed: the number of data-parallel workers must divide it "
        f"(the largest that do: {_divisors(space.shared_batch)[-4:]})"
    )
