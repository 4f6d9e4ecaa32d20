"""From a name and a few degrees to a layout, checked: pure functions that answer before any process starts.

A name fixes which degrees are its own to choose; the rest are 1 unless written. If exactly one of its own is left
open it is the number of workers divided by the others. Names combine with a plus: `fsdp+tensor`, `ddp+tensor`,
`hsdp+tensor`; that is the same as writing the first name and `parallel.tp`.

What each name chooses, combines with and allows is asked of its record (strategy.py).
"""

import math

from strategies import registry
from strategies.activation_checkpointing import checkpoint_every
from strategies.dims import (
    BESIDE_DATA,
    DEGREES,
    Layout,
    LayoutError,
    ParallelDims,
    one_of,
)
from strategies.options import CONTEXT_METHODS, PIPELINE_SCHEDULES, PRECISIONS, REDUCE_DTYPES, Options
from strategies.pipeline import partition, schedules
from strategies.strategy import Strategy

__all__ = ["DEGREES", "Layout", "LayoutError", "ParallelDims", "check", "choose"]


def choose(name: str, world_size: int, *, devices_per_node: int | None = None, **degrees: int | None) -> Layout:
    """The layout that `name` means for `world_size` workers.

    degrees: of DEGREES, those that are written. auto is single with one worker, else what the degrees say, else ddp.
    hsdp shards within a node and replicates across nodes when `devices_per_node` is known.

    Raises:
        LayoutError: an unknown name; degrees that do not multiply to the workers, or that the name has no use for.
    """
    if world_size < 1:
        raise LayoutError(f"there are {world_size} workers, but training needs at least 1")
    given = dict.fromkeys(DEGREES) | degrees
    found = [registry.automatic(world_size, given)] if name == "auto" else registry.records(name)
    dims = ParallelDims(**_degrees(found, world_size, given, devices_per_node))
    for degree in BESIDE_DATA:
        if getattr(dims, degree) > 1 and (model := registry.by_degrees(degree)) not in found:
            found = [record for record in found if record.degrees] + [model]
    found.sort(key=lambda record: BESIDE_DATA.index(record.degrees[0]) if record.splits_model else -1)
    return Layout("+".join(record.name for record in found), dims)


def _degrees(
    found: list[Strategy], world_size: int, given: dict[str, int | None], devices_per_node: int | None
) -> dict[str, int]:
    name, own = "+".join(record.name for record in found), {degree for record in found for degree in record.degrees}
    for degree in sorted(set(given) - own - set(found[0].also)):
        if (given[degree] or 1) > 1:
            raise LayoutError(
                f"strategy {name} has no use for parallel.{degree}={given[degree]}: leave it out, or write "
                "strategy=auto, which goes by the degrees"
            )
    degrees = {degree: value for degree, value in given.items() if value is not None}
    ParallelDims(**{degree: value for degree, value in degrees.items() if degree != "ep"})  # each at least 1
    inside = {"ep": degrees.pop("ep", 1)}  # no factor of the workers
    given = {degree: value for degree, value in given.items() if degree not in inside}
    degrees |= {degree: 1 for degree in given if degree not in own and degree not in degrees}
    left = [degree for degree in given if degree not in degrees]
    rest = world_size // math.prod(degrees.values())
    if left == list(found[0].degrees) == ["dp_replicate", "dp_shard"]:
        degrees["dp_shard"] = _shards_per_node(name, rest, devices_per_node, degrees)
        rest, left = rest // degrees["dp_shard"], ["dp_replicate"]
    if len(left) > 1:
        asked = " or ".join(f"parallel.{degree}" for degree in left)
        raise LayoutError(f"strategy {name} on {world_size} workers leaves more than one degree open: write {asked}")
    if left:
        degrees[left[0]] = max(1, rest)
    if math.prod(degrees.values()) != world_size:
        _refuse(name, found, world_size, degrees)
    return degrees | inside


def _shards_per_node(name: str, rest: int, devices_per_node: int | None, degrees: dict[str, int]) -> int:
    per_node = (devices_per_node or 0) // (degrees["tp"] * degrees["cp"])
    if per_node > 1 and rest % per_node == 0:
        return per_node
    raise LayoutError(
        f"strategy {name} needs parallel.dp_shard (the workers that one copy is sharded over, usually those of a "
        f"node): write a divisor of {rest} greater than 1"
    )


def _refuse(name: str, found: list[Strategy], world_size: int, degrees: dict[str, int]) -> None:
    if found[0].one_process:
        one = "one process: write workers=1" if found[0].several_devices else "one device: write workers=1"
        many = "" if found[0].several_devices else f", or strategy={registry.by_degrees('dp_replicate').name}"
        raise LayoutError(f"there are {world_size} workers, but {name} is {one}{many}")
    product = math.prod(degrees.values())
    written = " × ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1) or "1"
    raise LayoutError(
        f"strategy {name}: {written} = {product}, but there are {world_size} workers: write degrees whose product is "
        f"{world_size}, or workers={product}"
    )


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
    """Everything about a layout that can be known before a process starts; what is None is not checked.

    Raises:
        LayoutError: one sentence.
    """
    dims = layout.dims
    found = registry.records(layout.name)
    if any("pp" in record.degrees for record in found) and dims.pp < 2:
        raise LayoutError(
            "strategy pipeline needs at least 2 stages: write parallel.pp=2 and as many workers, or single"
        )
    if any("ep" in record.degrees for record in found) and dims.ep < 2:
        raise LayoutError("strategy expert needs experts on at least 2 workers: write parallel.ep=2, or leave it out")
    if heads is not None and heads % dims.tp:
        divisors = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise LayoutError(
            f"parallel.tp is {dims.tp}, which does not divide the model's {heads} heads: write {divisors}"
        )
    if heads is not None and options and options.context == "ulysses" and heads % (dims.tp * dims.cp):
        raise LayoutError(
            f"parallel.context=ulysses splits the model's {heads} heads over parallel.tp × cp = {dims.tp * dims.cp} "
            "workers, which do not divide them: write parallel.context=ring"
        )
    if dims.pp > 1:
        _check_pipeline(layout, options or Options(), blocks, micro_batches)
    if global_batch_size is not None and global_batch_size < dims.dp:
        raise LayoutError(
            f"train.global_batch_size is {global_batch_size}, but it is split over {dims.dp} data-parallel workers: "
            f"write at least {dims.dp}, or fewer workers"
        )
    length = None if sequence_length is None else sequence_length // dims.cp  # on one worker, before tp divides it
    if length is not None and options and options.sequence_parallel and length % dims.tp:
        raise LayoutError(
            f"parallel.tp is {dims.tp}, which does not divide the sequence of {length}: write a length it "
            "divides, or parallel.sequence_parallel=false"
        )
    if options is not None:
        _check_options(layout, found, options)


def _check_pipeline(layout: Layout, options: Options, blocks: int | None, micro_batches: int | None) -> None:
    stages = layout.dims.pp
    one_of("parallel.schedule", options.schedule, PIPELINE_SCHEDULES)
    schedules.require_schedule(options.schedule, stages=stages, micro_batches=micro_batches, chunks=options.chunks)
    chunks = schedules.chunks_per_stage(options.schedule, options.chunks)
    if blocks is not None:
        partition.require_blocks(blocks, stages, chunks)
    if options.stages is not None:
        count = blocks if blocks is not None else sum(options.stages)
        partition.require_sizes(options.stages, count, stages * chunks)
    if options.offload:
        raise LayoutError("parallel.offload does not work in a pipeline: leave it out, or write strategy=fsdp")


def require_pieces(options: Options) -> None:
    """Raises LayoutError if asynchronous tensor parallelism has nothing to cut."""
    if options.async_tp and not options.sequence_parallel:
        raise LayoutError(
            "parallel.async_tp sends pieces of a split sequence: leave out sequence_parallel=false, or async_tp"
        )


def _check_options(layout: Layout, found: list[Strategy], options: Options) -> None:
    one_of("train.precision", options.precision, PRECISIONS)
    one_of("parallel.context", options.context, ("auto", *CONTEXT_METHODS))
    one_of("parallel.reduce_dtype", options.reduce_dtype, REDUCE_DTYPES)
    checkpoint_every(options.activation_checkpointing)
    if any(options.precision not in record.precisions for record in found):
        raise LayoutError(
            f"train.precision={options.precision} does not work with strategy {layout.name}: write "
            "train.precision=bf16, or strategy=fsdp"
        )
    for record in found:
        if record.check is not None:
            record.check(options)
    require_pieces(options)
    if options.bucket_mb <= 0:
        raise LayoutError(f"parallel.bucket_mb is {options.bucket_mb:g}: write a size in MiB, such as 25")
    if options.offload and not any(record.is_sharded for record in found):
        raise LayoutError(f"parallel.offload needs sharded parameters, but the strategy is {layout.name}: write fsdp")
    reason = next((record.reduce_dtype for record in found if record.reduce_dtype), "")
    if options.reduce_dtype != "fp32" and reason:
        raise LayoutError(f"parallel.reduce_dtype={options.reduce_dtype} {reason}")
