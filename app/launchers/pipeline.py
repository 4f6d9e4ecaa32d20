"""Launcher: pipeline stages, or the workers of any layout, on Ray actors.

Ray places, watches and replaces; tensors go from worker to worker directly.

Where each stage sits is decided by a pure function, `placement`; the rest is `actor_group.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.config import Config
from app.errors import UserError
from app.launchers.actor_group import ActorGroup
from app.launchers.room import nodes_now
from cluster.connect import Cluster
from cluster.pending import NodeState, place, words
from strategies.parallelize import Layout, ParallelDims

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
    dims: ParallelDims, per_stage: list[Resources], nodes: Sequence[NodeState], *, grows: bool = False
) -> Placement:
    """Keeps together what talks most: a whole copy of the model on one node where it fits, copies on different nodes;
    else a stage (its shards and tensor peers) on one node, the stages close; else every rank by itself, close.

    The coarsest of these for which there is room now; else for which there is once others have ended.

    per_stage: resources of one worker of each stage. grows: an autoscaler may add nodes to these.

    Raises:
        UserError: there is room for none, and no node will be added.
    """
    chosen = [_grouped(dims, per_stage, sides) for sides in GROUPINGS]
    emptied = [replace(node, available=node.total) for node in nodes]
    for state in (nodes, emptied):
        for found in chosen:
            if _missing(found.bundles, state) is None:
                return found
    if grows:
        return next((found for found in chosen if all(_missing([b], emptied) is None for b in found.bundles)), found)
    rank = _missing(found.bundles, emptied) or 0
    number = dims.coordinates(rank)["pp"]
    raise UserError(
        f"the {dims.world_size} workers do not fit on the nodes of this cluster: worker {rank} (stage {number} of "
        f"{dims.pp}) asks for {words(per_stage[number])}, for which the others leave no room on any node: ask for less "
        "in parallel.stage_resources or resources_per_worker, or use fewer workers"
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


def resources_of_stages(
    config: Config, dims: ParallelDims, per_worker: Resources, cluster: Cluster, nodes: Sequence[NodeState]
) -> list[Resources]:
    """What one worker of each stage asks for.

    Raises:
        UserError: as many entries as there are stages are wanted; a stage asks for what no node has, or all together
            for more than the cluster has.
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
    for number, stage in enumerate(per_stage):
        _require_node(number, stage, nodes, cluster.limits)
    total: Counter[str] = Counter()
    for stage in per_stage:
        total.update({name: amount * (dims.world_size // dims.pp) for name, amount in stage.items()})
    for name, amount in total.items():
        has = max(cluster.resources.get(name, 0.0), cluster.limits.get(name, 0.0))
        if amount > has:
            raise UserError(
                f"parallel.stage_resources asks for {amount:g} {name} in all, but this cluster has {has:g}: ask for "
                "less, or use fewer stages or copies"
            )
    return per_stage


def _require_node(number: int, stage: Resources, nodes: Sequence[NodeState], limits: Mapping[str, float]) -> None:
    """Raises UserError unless one node has all that a worker of the stage asks for, or may come with it."""
    for name, amount in stage.items():
        most = limits.get(name, max((node.total.get(name, 0.0) for node in nodes), default=0.0))
        if amount > most:
            raise UserError(
                f"parallel.stage_resources asks for {amount:g} {name} for each worker of stage {number}, but no "
                f"node of this cluster has more than {most:g}: ask for less, or `ray start` such a node"
            )
    fixed = {name: amount for name, amount in stage.items() if name not in limits}
    if not any(all(node.total.get(name, 0.0) >= amount for name, amount in fixed.items()) for node in nodes):
        raise UserError(
            f"parallel.stage_resources asks for {words(stage)} for each worker of stage {number}, but no one node of "
            "this cluster has all of that: ask for what one node has, or `ray start` such a node"
        )


def group(config: Config, layout: Layout, per_worker: Resources, cluster: Cluster) -> ActorGroup:
    """The actors that a layout runs on; not started yet.

    Raises: see `resources_of_stages` and `placement`.
    """
    dims = layout.dims
    nodes = nodes_now(config.cluster.exclude_nodes)
    per_stage = resources_of_stages(config, dims, per_worker, cluster, nodes)
    chosen = placement(dims, per_stage, nodes, grows=bool(cluster.limits))
    stages = [dims.coordinates(rank)["pp"] for rank in range(dims.world_size)]
    return ActorGroup(
        dims.world_size,
        [per_stage[stage] for stage in stages],
        bundles=chosen.bundles,
        bundle_of_rank=chosen.bundle_of_rank,
        strategy=chosen.strategy,
        spares=config.fault.spares,
        labels=[f"stage {stage} of {dims.pp}" if dims.pp > 1 else "" for stage in stages],
        avoid=config.cluster.exclude_nodes,
        grows=bool(cluster.limits),
    )
