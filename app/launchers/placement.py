"""Where the ranks of a layout are placed: bundles of a Ray placement group, by pure functions.

What communicates most is kept together: a whole copy of the model on one node where it fits, copies on different nodes;
else a stage (its shards and tensor-parallel peers) on one node, the stages close; else each rank by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.config import Config
from app.errors import UserError
from cluster.pending import NodeState, format_resources, place
from strategies.layout import ParallelDims

Resources = dict[str, float]
GROUPINGS = (("dp_replicate",), ("dp_replicate", "pp"), ("dp_replicate", "pp", "dp_shard", "tp"))
"""What is kept on one node, from the coarsest: a copy of the model, a stage of it, a worker."""


@dataclass(frozen=True)
class Placement:
    """bundles: what Ray is to keep together on a node, each; bundle_of_rank: which one each rank is in."""

    bundles: list[Resources]
    bundle_of_rank: list[int]
    strategy: str


def placement(
    dims: ParallelDims,
    per_stage: list[Resources],
    nodes: Sequence[NodeState],
    limits: Mapping[str, float] | None = None,
) -> Placement:
    """The coarsest grouping for which there is room now; else for which there is once other jobs have ended.

    per_stage: resources of one worker of each stage. limits: what the cluster may grow to, where it grows.

    Raises:
        UserError: there is room for none, and no node will be added.
    """
    chosen = [_grouped(dims, per_stage, sides) for sides in GROUPINGS]
    emptied = [replace(node, available=node.total) for node in nodes]
    for state in (nodes, emptied):
        for found in chosen:
            if _missing(found.bundles, state) is None:
                return found
    if limits and all(amount <= limits.get(name, 0.0) for stage in per_stage for name, amount in stage.items()):
        whole = (found for found in chosen if all(_missing([b], emptied) is None for b in found.bundles))
        return next(whole, chosen[-1])
    rank = _missing(found.bundles, emptied) or 0
    number = dims.coordinates(rank)["pp"]
    raise UserError(
        f"the {dims.world_size} workers do not fit on the nodes of this cluster: worker {rank} (stage {number} of "
        f"{dims.pp}) asks for {format_resources(per_stage[number])}, for which no node has room beside the others: "
        "ask for less in parallel.stage_resources or resources_per_worker, or use fewer workers"
    )


def _grouped(dims: ParallelDims, per_stage: list[Resources], sides: tuple[str, ...]) -> Placement:
    """A bundle for all workers whose places on these sides of the grid are the same."""
    places = [dims.coordinates(rank) for rank in range(dims.world_size)]
    keys = [tuple(place[side] for side in sides) for place in places]
    order = list(dict.fromkeys(keys))
    bundles: list[Counter[str]] = [Counter() for _ in order]
    for where, own in zip(places, keys, strict=True):
        bundles[order.index(own)].update(per_stage[where["pp"]])
    # Copies of one worker each exchange whole gradients and nothing else: they, too, are best close.
    strategy = "SPREAD" if len(sides) == 1 and dims.pp > 1 else "PACK"
    return Placement([dict(bundle) for bundle in bundles], [order.index(own) for own in keys], strategy)


def _missing(bundles: Sequence[Resources], nodes: Sequence[NodeState]) -> int | None:
    """The first bundle that finds no room, in the order given and with the largest first; None: all find some."""
    order = sorted(range(len(bundles)), key=lambda i: -sum(bundles[i].values()))
    first = place([bundles[i] for i in order], nodes)[1]
    return None if first is None else place(bundles, nodes)[1]


def resources_of_stages(config: Config, dims: ParallelDims, per_worker: Resources) -> list[Resources]:
    """What one worker of each stage asks for.

    Raises:
        UserError: as many entries as there are stages are wanted, and one kind of device.
    """
    wanted = config.parallel.stage_resources
    if not wanted:
        return [dict(per_worker)] * dims.pp
    if len(wanted) != dims.pp:
        raise UserError(
            f"parallel.stage_resources has {len(wanted)} entries, but there are {dims.pp} stages: write one for each"
        )
    per_stage = [{"CPU": 1.0} | dict(stage) if not stage.get("GPU") else dict(stage) for stage in wanted]
    if len({bool(stage.get("GPU")) for stage in per_stage}) > 1:
        raise UserError(
            "parallel.stage_resources gives GPUs to some stages and none to others: all stages compute on one kind of "
            "device"
        )
    return per_stage
