"""The cost of a layout by the functions of its strategies, added up as app/planner does."""

from collections import defaultdict

from strategies import registry
from strategies.costs import Cost, ParameterSize, StepShape, part_of, rank_size, unit_size
from strategies.layout import Layout
from strategies.options import Options

RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How many times n·(k-1)/k bytes each of k ranks sends for a tensor of n bytes."""


def layout_cost(
    layout: Layout,
    parameters: tuple[ParameterSize, ...],
    options: Options | None = None,
    micro_batches: int = 1,
) -> tuple[Cost, dict[str, int]]:
    """The memory of a rank on CPUs, and the bytes that it sends per step by collective."""
    options = options or Options()
    strategy = registry.data_strategy(layout)
    dims = layout.dims
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
        reduce_scatter_each_microbatch=strategy.reduces_each_microbatch(
            options.accumulate_sharded, False
        ),
    )
    groups = defaultdict(list)
    for parameter in parameters:
        groups[parameter.unit].append(part_of(parameter, dims.tp, dims.ep))
    expert_shards = dims.for_experts().dp_shard if dims.ep > 1 else None
    units = [
        unit_size(tuple(group), dims.dp_shard, is_root=name == "", expert_shards=expert_shards)
        for name, group in groups.items()
    ]
    sent: dict[str, int] = defaultdict(int)
    for collective in (
        collective for unit in units for collective in strategy.collectives(unit, step)
    ):
        if not hasattr(dims, collective.over):  # between the devices of one process
            continue
        ranks = getattr(dims, collective.over)
        sent[collective.name] += (
            RING[collective.name] * collective.bytes * collective.times * (ranks - 1) // ranks
        )
    return strategy.cost(rank_size(units), step), {
        name: count for name, count in sent.items() if count
    }
