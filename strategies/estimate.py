"""What a whole layout costs: the costs of its parts, put together in the order of compose.py.

Tensor parallelism divides the parameters first; sharding or replication then sees a smaller model. So the cost of
fsdp × tp is fsdp's cost function on what tensor's leaves, plus what tensor sends.
"""

from __future__ import annotations

from dataclasses import replace

from strategies import activation_checkpointing, data_parallel, ddp, fsdp, hsdp, model_parallel, single, zero
from strategies.costs import Cost, ModelSize
from strategies.layout import Layout
from strategies.options import Options
from strategies.tensor import cost as tensor_cost


def cost(
    layout: Layout,
    size: ModelSize,
    options: Options | None = None,
    *,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    pairs: int = 0,
    devices: int = 1,
) -> Cost:
    """Bytes on the fullest rank, and bytes it sends per optimizer step.

    size: with `split_dim` set on the parameters that tensor parallelism splits. pairs: of colwise and rowwise layers
    (for tensor). devices: per worker (for dp and model_parallel).
    """
    options = options or Options()
    part = tensor_cost.part(size, layout.dims.tp, options.sequence_parallel)
    common = {"micro_batches": micro_batches, "optimizer": optimizer}
    found = _data_cost(layout, part, options, devices, common)
    sent = found.sent | tensor_cost.sent(size, layout.dims.tp, pairs, micro_batches)
    blocks = len([unit for unit in size.units if unit])
    activations = activation_checkpointing.activation_bytes(part, options.activation_checkpointing, blocks)
    return replace(found, activations=activations, sent={key: value for key, value in sent.items() if value})


def _data_cost(layout: Layout, size: ModelSize, options: Options, devices: int, common: dict) -> Cost:
    dims, name = layout.dims, layout.parts[0]
    if name == "dp":
        return data_parallel.cost(size, devices, **common)
    if name == "model_parallel":
        return model_parallel.cost(size, devices, **common)
    if dims.dp_shard == 1:
        optimizer = common["optimizer"]
        return single.cost(size, optimizer) if dims.dp == 1 else ddp.cost(size, dims.dp, options, optimizer)
    if name in ("zero1", "zero2"):
        inside = zero.cost(size, dims.dp_shard, int(name[-1]), options, **common)
        return hsdp.across(inside, dims.dp_replicate, options)
    kept = options.reshard_after_forward is False
    inside = fsdp.cost(
        size,
        dims.dp_shard,
        options,
        reshard_after_forward=not kept,
        accumulate_sharded=bool(options.accumulate_sharded),
        **common,
    )
    return hsdp.across(inside, dims.dp_replicate, options)
