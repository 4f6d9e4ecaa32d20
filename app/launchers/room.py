"""What Ray says about the nodes of the cluster: what is free where, who holds the rest, whether a node lives."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.launchers.recovery import Nodes, oom_kills
from cluster.pending import AutoscalerReport, Diagnosis, Usage, diagnose, place
from cluster.shape import ClusterShape, living_nodes

ANSWER_SECONDS = 3.0
Resources = Mapping[str, float]


def node_selector(excluded: Sequence[str]) -> dict[str, str] | None:
    """Ray's label selector that keeps workers off these nodes; None where there are none."""
    return {"ray.io/node-id": f"!in({','.join(excluded)})"} if excluded else None


def reserve(bundles: Sequence[Resources], excluded: Sequence[str]) -> PlacementGroup:
    """Asks for a placement group off these nodes."""
    only = node_selector(excluded)
    return placement_group(
        [dict(bundle) for bundle in bundles],
        bundle_label_selector=[only] * len(bundles) if only else None,
    )


def why_pending(
    demand: Sequence[Resources],
    shape: ClusterShape | None,
    excluded: Sequence[str],
    autoscaler: AutoscalerReport | None = None,
) -> Diagnosis | None:
    """Why the group cannot be placed just now; None if it can."""
    nodes = living_nodes(excluded)
    if place(demand, nodes)[1] is None:
        return None
    return diagnose(demand, nodes, _holders(), shape, autoscaler or AutoscalerReport())


def _holders() -> Usage:
    """Other jobs that hold resources, by their placement groups, whose ids end with the job's."""
    own = ray.get_runtime_context().get_job_id()
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group, entry in placement_group_table().items():
        job = group[-len(own) :]
        if job != own and entry["state"] == "CREATED":
            for bundle in entry["bundles"].values():
                for name, amount in bundle.items():
                    held[job][name] += amount
    return {f"job {job}": amounts for job, amounts in held.items()}


def free_by_node(excluded: Sequence[str]) -> dict[str, Counter[str]]:
    """What is free on the nodes that may be used, and what this run itself holds there, by the node's id."""
    found = {node.id: Counter(node.available) for node in living_nodes(excluded)}
    for entry in _groups_of_this_job():
        for number, bundle in entry["bundles"].items() if entry["state"] in ("CREATED", "RESCHEDULING") else ():
            if (node := entry["bundles_to_node_id"].get(number, "")) in found:
                found[node].update(bundle)
    return found


def is_placed() -> bool:
    """Whether the workers' group has its places."""
    return any(entry["state"] == "CREATED" for entry in _groups_of_this_job())


def remove_groups_but(kept: Collection[str], per_worker: Resources) -> None:
    """Removes this job's groups of such workers, without a name, that are not these, also one that still waits for its
    places: its maker was killed, and it would take them when they come. A program's own other groups stay."""
    asked = {name for name, amount in per_worker.items() if amount > 0}
    for entry in _groups_of_this_job():
        group, bundles = entry["placement_group_id"], entry["bundles"].values()
        ours = group not in kept and not entry["name"] and all(bundle.keys() == asked for bundle in bundles)
        if ours and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group)))


def groups_of_this_job() -> set[str]:
    """Their ids."""
    return {entry["placement_group_id"] for entry in _groups_of_this_job()}


def _groups_of_this_job() -> list[dict[str, Any]]:
    """A group's id ends with its job's."""
    job = ray.get_runtime_context().get_job_id()
    return [entry for group, entry in placement_group_table().items() if group.endswith(job)]


# --- one node -----------------------------------------------------------------------------------------------------


def ray_nodes() -> Nodes:
    """What can be asked about the nodes of a Ray cluster."""
    return Nodes(
        lambda node: any(entry.id == node for entry in living_nodes()),
        lambda node: on_node(node, oom_kills, seconds=ANSWER_SECONDS),
    )


def on_node(node: str, function: Callable[..., Any], *arguments: Any, seconds: float = 0.0) -> Any:
    """Calls a function on a node; what it returns, None if it is elsewhere and does not answer within `seconds`."""
    if node == ray.get_runtime_context().get_node_id():
        return function(*arguments)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        asked = ray.remote(num_cpus=0)(function).options(scheduling_strategy=there).remote(*arguments)
        return ray.get(asked, timeout=seconds) if seconds else None
    except ray.exceptions.RayError:
        return None
