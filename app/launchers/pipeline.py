"""Launcher: pipeline stages, or the workers of any layout, on Ray actors.

Ray places, watches and replaces; tensors go from worker to worker directly.

Where each stage sits is decided by a pure function, `placement`; the rest is `actor_group.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from app.config import Config
from app.errors import UserError
from app.launchers.actor_group import ActorGroup
from cluster.connect import Cluster
from strategies.compose import Layout, ParallelDims

Resources = dict[str, float]


@dataclass(frozen=True)
class Placement:
    """bundles: what Ray is to keep together on a node, each; bundle_of_rank: which one each rank is in."""

    bundles: list[Resources]
    bundle_of_rank: list[int]
    strategy: str


def placement(dims: ParallelDims, per_stage: list[Resources], largest: Mapping[str, float]) -> Placement:
    """Keeps together what talks most: a whole copy of the model on one node where it fits, copies on different nodes;
    else a stage (its shards and tensor peers) on one node, the stages close; else every rank by itself, close.

    per_stage: resources of one worker of each stage. largest: the most of each resource that one node has.
    """

    def grouped(key: tuple[str, ...]) -> tuple[list[Resources], list[int]]:
        places = [dims.coordinates(rank) for rank in range(dims.world_size)]
        keys = [tuple(place[side] for side in key) for place in places]
        order = list(dict.fromkeys(keys))
        bundles: list[Counter[str]] = [Counter() for _ in order]
        for place, own in zip(places, keys, strict=True):
            bundles[order.index(own)].update(per_stage[place["pp"]])
        return [dict(bundle) for bundle in bundles], [order.index(own) for own in keys]

    def fits(bundles: list[Resources]) -> bool:
        return all(largest.get(name, 0.0) >= amount for bundle in bundles for name, amount in bundle.items())

    copies, copy_of_rank = grouped(("dp_replicate",))
    if fits(copies):
        # Copies of one worker each exchange whole gradients and nothing else: they, too, are best close.
        return Placement(copies, copy_of_rank, "SPREAD" if dims.pp > 1 else "PACK")
    stages, stage_of_rank = grouped(("dp_replicate", "pp"))
    if fits(stages):
        return Placement(stages, stage_of_rank, "PACK")
    single, bundle_of_rank = grouped(("dp_replicate", "pp", "dp_shard", "tp"))
    return Placement(single, bundle_of_rank, "PACK")


def resources_of_stages(config: Config, dims: ParallelDims, per_worker: Resources, cluster: Cluster) -> list[Resources]:
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
    total: dict[str, float] = {}
    for number, stage in enumerate(per_stage):
        for name, amount in stage.items():
            most = cluster.limits.get(name, cluster.largest.get(name, 0.0))
            if amount > most:
                raise UserError(
                    f"parallel.stage_resources asks for {amount:g} {name} for each worker of stage {number}, but no "
                    f"node of this cluster has more than {most:g}: ask for less, or `ray start` such a node"
                )
            total[name] = total.get(name, 0.0) + amount * (dims.world_size // dims.pp)
    for name, amount in total.items():
        has = max(cluster.resources.get(name, 0.0), cluster.limits.get(name, 0.0))
        if amount > has:
            raise UserError(
                f"parallel.stage_resources asks for {amount:g} {name} in all, but this cluster has {has:g}: ask for "
                "less, or use fewer stages or copies"
            )
    return per_stage


def group(config: Config, layout: Layout, per_worker: Resources, cluster: Cluster) -> ActorGroup:
    """The actors that a layout runs on; not started yet.

    Raises: see `resources_of_stages`.
    """
    dims = layout.dims
    per_stage = resources_of_stages(config, dims, per_worker, cluster)
    chosen = placement(dims, per_stage, cluster.largest)
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
    )
