"""What a layout as a whole costs: the records of its parts, put together in the order of parallelize.py.

Tensor parallelism divides the parameters first; sharding or replication then sees a smaller model. So the cost of
fsdp × tp is fsdp's cost function on what tensor's leaves, plus what tensor sends.
"""

from __future__ import annotations

from dataclasses import replace

from strategies import activation_checkpointing, registry
from strategies.costs import Cost, ModelSize, StepShape, rank_size, unit_size
from strategies.dims import Layout
from strategies.options import Options
from strategies.tensor import cost as tensor_cost


def step_shape(layout: Layout, options: Options, micro_batches: int = 1, optimizer: str = "adamw") -> StepShape:
    """A step of the layout on a CPU, where what memory decides is decided for less of it."""
    strategy, dims = registry.data_strategy(layout), layout.dims
    return StepShape(
        dims.dp_replicate,
        dims.dp_shard,
        dims.tp,
        dims.pp,
        micro_batches,
        compute_itemsize=4 if options.precision == "fp32" else 2,
        reduce_itemsize=2 if "bf16" in (options.reduce_dtype, options.compression) else 4,
        reshard_after_forward=strategy.reshards(options.reshard_after_forward, True),
        reduce_scatter_each_microbatch=strategy.reduces_each(options.accumulate_sharded, False),
        optimizer=optimizer,
    )


def cost(
    layout: Layout,
    size: ModelSize,
    options: Options | None = None,
    *,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    pairs: int = 0,
) -> Cost:
    """Bytes on the rank that holds most, and bytes it sends per optimizer step.

    size: with `split_dim` set on the parameters that tensor parallelism splits. pairs: of colwise and rowwise layers
    (for tensor).
    """
    options, dims = options or Options(), layout.dims
    strategy, step = registry.data_strategy(layout), step_shape(layout, options, micro_batches, optimizer)
    sliced = tensor_cost.sliced(size, dims.tp, options.sequence_parallel)
    units = [unit_size(own, dims.dp_shard, is_root=name == "") for name, own in sliced.units.items()]
    sent = tensor_cost.sent(size, dims.tp, pairs, micro_batches)
    for collective in (c for unit in units for c in strategy.collectives(unit, step) if hasattr(dims, c.over)):
        sent[collective.name] = sent.get(collective.name, 0) + collective.sent(getattr(dims, collective.over))
    blocks = sum(not unit.is_root for unit in units)
    return replace(
        strategy.cost(rank_size(units, size.buffer_bytes), step),
        activations=activation_checkpointing.activation_bytes(sliced, options.activation_checkpointing, blocks),
        sent={key: value for key, value in sent.items() if value},
    )
