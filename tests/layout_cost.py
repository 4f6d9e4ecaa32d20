"""A whole layout's cost from its strategy's own functions, as app/planner puts them together, for tests of either."""

from collections import defaultdict

from strategies import registry
from strategies.costs import Cost, ParameterSize, StepShape, part_of, rank_size, unit_size
from strategies.layout import Layout
from strategies.options import Options

RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Times n·(k-1)/k bytes that one of k ranks sends of a tensor of n."""


def layout_cost(
    layout: Layout, parameters: tuple[ParameterSize, ...], options: Options | None = None, micro_batches: int = 1
) -> tuple[Cost, dict[str, int]]:
    """Bytes on a rank of CPUs, and bytes that it sends per step, by collective."""
    options, strategy, dims = options or Options(), registry.data_strategy(layout), layout.dims
    dims = dims.for_parameters(strategy.is_sharded)
    step = StepShape(
        dp_replicate=dims.dp_replicate,
        dp_shard=dims.dp_shard,
        tp=dims.tp,
        pp=dims.pp,
        micro_batches=micro_batches,
        compute_itemsize=4 if options.precision == "fp32" else 2,
        reduce_itemsize=2 if options.reduce_dtype == "bf16" else 4,
        reshard_after_forward=strategy.reshards_after_forward(options.reshard_after_forward, True),
        reduce_scatter_each_microbatch=strategy.reduces_each_microbatch(options.accumulate_sharded, False),
    )
    groups = defaultdict(list)
    for p in parameters:
        groups[p.unit].append(part_of(p, dims.tp, dims.ep))
    expert_shards = dims.for_experts().dp_shard if dims.ep > 1 else None
    units = [
        unit_size(tuple(group), dims.dp_shard, is_root=name == "", expert_shards=expert_shards)
        for name, group in groups.items()
    ]
    sent: dict[str, int] = defaultdict(int)
    for each in (each for unit in units for each in strategy.collectives(unit, step)):
        if not hasattr(dims, each.over):  # between the devices of one process
            continue
        ways = getattr(dims, each.over)
        sent[each.name] += RING[each.name] * each.bytes * each.times * (ways - 1) // ways
    return strategy.cost(rank_size(units), step), {name: count for name, count in sent.items() if count}
