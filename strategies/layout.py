"""From a strategy's name and a few degrees to a checked layout, before any process starts.

All functions here are pure. A name determines which degrees it chooses; the others are 1 unless
they are written. If exactly one of its own degrees is not written, it is the number of workers
divided by the other degrees. Names combine with a plus, as in `fsdp+tensor`, `ddp+tensor` and
`hsdp+tensor`; that is the same as the first name with `parallel.tp`.

The record of each name (strategy.py) says what it chooses, combines with and allows.
"""

import math
from typing import NoReturn

from strategies import registry
from strategies.dims import (
    DEGREES,
    MODEL_DEGREES,
    Layout,
    LayoutError,
    ParallelDims,
    checkpoint_every,
    require_one_of,
)
from strategies.options import (
    CONTEXT_METHODS,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    REDUCE_DTYPES,
    WEIGHT_DTYPES,
    Options,
)
from strategies.pipeline import partition, schedules
from strategies.strategy import Strategy

__all__ = ["DEGREES", "Layout", "LayoutError", "ParallelDims", "check", "choose"]


def choose(
    name: str, world_size: int, *, devices_per_node: int | None = None, **degrees: int | None
) -> Layout:
    """The layout that a strategy's name means for a number of workers.

    Args:
        name: A strategy, a combination, or auto: single with one worker, else what the degrees say,
            else ddp.
        world_size: Number of workers.
        devices_per_node: With hsdp: shard within a node and replicate across nodes. None: unknown.
        degrees: The degrees (of DEGREES) that are written.

    Raises:
        LayoutError: The name is unknown, it has no use for a degree, or the degrees do not multiply
            to the number of workers.
    """
    if world_size < 1:
        raise LayoutError(f"there are {world_size} workers, but training needs at least 1")
    written = dict.fromkeys(DEGREES) | degrees
    if name == "auto":
        strategies = [registry.automatic(world_size, written)]
    else:
        strategies = registry.records(name)
    complete = _complete_degrees(
        strategies, world_size, written=written, devices_per_node=devices_per_node
    )
    dims = ParallelDims(**complete)
    for degree in MODEL_DEGREES:
        model_strategy = registry.by_degrees(degree)
        if getattr(dims, degree) > 1 and model_strategy not in strategies:
            # `single` has no degrees: the model's strategy takes its place.
            strategies = [record for record in strategies if record.degrees] + [model_strategy]
    strategies.sort(key=_place_in_name)
    return Layout("+".join(record.name for record in strategies), dims)


def _place_in_name(record: Strategy) -> int:
    return MODEL_DEGREES.index(record.degrees[0]) if record.splits_model else -1


def _complete_degrees(
    strategies: list[Strategy],
    world_size: int,
    *,
    written: dict[str, int | None],
    devices_per_node: int | None,
) -> dict[str, int]:
    """All degrees: those that are written, and the others as the strategies choose them."""
    name = "+".join(record.name for record in strategies)
    chosen_by_name = {degree for record in strategies for degree in record.degrees}
    _require_useful(name, written, usable={*chosen_by_name, *strategies[0].combines_with})

    degrees = {degree: value for degree, value in written.items() if value is not None}
    # Raises unless each is at least 1; whether ep fits is known once all degrees are.
    ParallelDims(**{degree: value for degree, value in degrees.items() if degree != "ep"})
    ep = degrees.pop("ep", 1)  # no factor of the number of workers
    factors = [degree for degree in written if degree != "ep"]
    for degree in factors:
        if degree not in chosen_by_name:
            degrees.setdefault(degree, 1)
    open_degrees = [degree for degree in factors if degree not in degrees]

    workers_left = world_size // math.prod(degrees.values())
    if open_degrees == list(strategies[0].degrees) == ["dp_replicate", "dp_shard"]:
        per_node = (devices_per_node or 0) // (degrees["tp"] * degrees["cp"])
        degrees["dp_shard"] = _shards_per_node(name, workers_left, per_node)
        workers_left //= degrees["dp_shard"]
        open_degrees = ["dp_replicate"]
    if len(open_degrees) > 1:
        choices = " or ".join(f"parallel.{degree}" for degree in open_degrees)
        raise LayoutError(
            f"strategy {name} on {world_size} workers leaves more than one degree open: "
            f"write {choices}"
        )
    if open_degrees:
        degrees[open_degrees[0]] = max(1, workers_left)
    if math.prod(degrees.values()) != world_size:
        _refuse_world_size(strategies[0], name=name, world_size=world_size, degrees=degrees)
    return degrees | {"ep": ep}


def _require_useful(name: str, written: dict[str, int | None], usable: set[str]) -> None:
    """Raises LayoutError for a degree that the strategy has no use for."""
    for degree in sorted(set(written) - usable):
        if (written[degree] or 1) > 1:
            raise LayoutError(
                f"strategy {name} has no use for parallel.{degree}={written[degree]}: leave it "
                "out, or write strategy=auto, which goes by the degrees"
            )


def _shards_per_node(name: str, workers: int, per_node: int) -> int:
    """The dp_shard of a strategy that shards within a node.

    Args:
        name: The strategy, for the message.
        workers: dp_replicate · dp_shard.
        per_node: How many of these are on a node; 0: unknown.
    """
    if per_node > 1 and workers % per_node == 0:
        return per_node
    raise LayoutError(
        f"strategy {name} needs parallel.dp_shard (the workers that one copy is sharded over, "
        f"usually those of a node): write a divisor of {workers} greater than 1"
    )


def _refuse_world_size(
    strategy: Strategy, *, name: str, world_size: int, degrees: dict[str, int]
) -> NoReturn:
    if strategy.one_process and strategy.several_devices:
        raise LayoutError(
            f"there are {world_size} workers, but {name} is one process: write workers=1"
        )
    if strategy.one_process:
        replicas = registry.by_degrees("dp_replicate").name
        raise LayoutError(
            f"there are {world_size} workers, but {name} is one device: write workers=1, "
            f"or strategy={replicas}"
        )
    product = math.prod(degrees.values())
    factors = " × ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1) or "1"
    raise LayoutError(
        f"strategy {name}: {factors} = {product}, but there are {world_size} workers: "
        f"write degrees whose product is {world_size}, or workers={product}"
    )


# --- checks ---------------------------------------------------------------------------------------


def check(
    layout: Layout,
    options: Options | None = None,
    *,
    global_batch_size: int | None = None,
    heads: int | None = None,
    blocks: int | None = None,
    sequence_length: int | None = None,
    micro_batches: int | None = None,
) -> None:
    """Checks everything about a layout that can be known before a process starts.

    Args:
        layout: What to check; None of the following means that it is unknown, and not checked.
        options: How the layout behaves.
        global_batch_size: Samples per step.
        heads: The model's attention heads.
        blocks: The model's repeating blocks.
        sequence_length: Tokens per sample.
        micro_batches: Micro-batches per step of a worker.

    Raises:
        LayoutError: Something does not work; the message says what to write instead.
    """
    dims = layout.dims
    strategies = registry.records(layout.name)
    if any("pp" in record.degrees for record in strategies) and dims.pp < 2:
        raise LayoutError(
            "strategy pipeline needs at least 2 stages: write parallel.pp=2 and as many workers, "
            "or single"
        )
    if any("ep" in record.degrees for record in strategies) and dims.ep < 2:
        raise LayoutError(
            "strategy expert needs experts on at least 2 workers: write parallel.ep=2, or leave it "
            "out"
        )
    if heads is not None:
        _check_heads(dims, options, heads)
    if dims.pp > 1:
        _check_pipeline(dims, options or Options(), blocks=blocks, micro_batches=micro_batches)
    if global_batch_size is not None and global_batch_size < dims.dp:
        raise LayoutError(
            f"train.global_batch_size is {global_batch_size}, but it is split over {dims.dp} "
            f"data-parallel workers: write at least {dims.dp}, or fewer workers"
        )
    if sequence_length is not None and options is not None and options.sequence_parallel:
        length_on_a_worker = sequence_length // dims.cp
        if length_on_a_worker % dims.tp:
            raise LayoutError(
                f"parallel.tp is {dims.tp}, which does not divide the sequence of "
                f"{length_on_a_worker}: write a length it divides, or "
                "parallel.sequence_parallel=false"
            )
    if options is not None:
        _check_options(layout, strategies, options)


def _check_heads(dims: ParallelDims, options: Options | None, heads: int) -> None:
    if heads % dims.tp:
        divisors = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise LayoutError(
            f"parallel.tp is {dims.tp}, which does not divide the model's {heads} heads: "
            f"write {divisors}"
        )
    ways = dims.tp * dims.cp
    if options is not None and options.context == "ulysses" and heads % ways:
        raise LayoutError(
            f"parallel.context=ulysses splits the model's {heads} heads over parallel.tp × cp = "
            f"{ways} workers, which do not divide them: write parallel.context=ring"
        )


def _check_pipeline(
    dims: ParallelDims, options: Options, *, blocks: int | None, micro_batches: int | None
) -> None:
    require_one_of("parallel.schedule", options.schedule, PIPELINE_SCHEDULES)
    schedules.require_schedule(
        options.schedule,
        stages=dims.pp,
        micro_batches=micro_batches,
        chunks=options.chunks,
    )
    chunks = schedules.chunks_per_stage(options.schedule, options.chunks)
    if blocks is not None:
        partition.require_blocks(blocks, dims.pp, chunks)
    if options.stages is not None:
        count = blocks if blocks is not None else sum(options.stages)
        partition.require_sizes(options.stages, count, dims.pp * chunks)
    if options.offload:
        raise LayoutError(
            "parallel.offload does not work in a pipeline: leave it out, or write strategy=fsdp"
        )


def require_sequence_parallel_for_async_tp(options: Options) -> None:
    """Checks that asynchronous tensor parallelism has pieces of a sequence to send.

    Raises:
        LayoutError: The sequence is not split.
    """
    if options.async_tp and not options.sequence_parallel:
        raise LayoutError(
            "parallel.async_tp sends pieces of a split sequence: leave out "
            "sequence_parallel=false, or async_tp"
        )


def _check_options(layout: Layout, strategies: list[Strategy], options: Options) -> None:
    require_one_of("train.precision", options.precision, PRECISIONS)
    require_one_of("parallel.context", options.context, ("auto", *CONTEXT_METHODS))
    require_one_of("parallel.reduce_dtype", options.reduce_dtype, REDUCE_DTYPES)
    require_one_of("train.weight_dtype", options.weight_dtype, WEIGHT_DTYPES)
    checkpoint_every(options.activation_checkpointing)
    if any(options.precision not in record.precisions for record in strategies):
        raise LayoutError(
            f"train.precision={options.precision} does not work with strategy {layout.name}: "
            "write train.precision=bf16, or strategy=fsdp"
        )
    if options.weight_dtype != "fp32" and options.precision not in ("bf16", "fp8"):
        raise LayoutError(
            f"train.weight_dtype={options.weight_dtype} needs products in bfloat16, but "
            f"train.precision is {options.precision}: write train.precision=bf16"
        )
    for record in strategies:
        if record.check_options is not None:
            record.check_options(options)
    require_sequence_parallel_for_async_tp(options)
    if options.bucket_mb <= 0:
        raise LayoutError(
            f"parallel.bucket_mb is {options.bucket_mb:g}: write a size in MiB, such as 25"
        )
    if options.offload and not any(record.is_sharded for record in strategies):
        raise LayoutError(
            f"parallel.offload needs sharded parameters, but the strategy is {layout.name}: "
            "write fsdp"
        )
    if options.reduce_dtype != "fp32":
        for record in strategies:
            if record.reduce_dtype_refusal:
                reason = record.reduce_dtype_refusal
                raise LayoutError(f"parallel.reduce_dtype={options.reduce_dtype} {reason}")
