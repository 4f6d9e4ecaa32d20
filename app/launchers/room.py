"""What Ray says about the cluster's nodes: what is free, who holds the rest, which nodes live."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.launchers.recovery import Nodes, oom_kills
from cluster.pending import (
    AutoscalerReport,
    Diagnosis,
    Usage,
    diagnose,
    format_resources,
    place,
)
from cluster.shape import ClusterShape, living_nodes

ANSWER_SECONDS = 3.0
"""How long a node may take to answer."""
Resources = Mapping[str, float]


def node_selector(excluded: Sequence[str]) -> dict[str, str] | None:
    """Ray's label selector that keeps workers off these nodes; None without any."""
    if not excluded:
        return None
    return {"ray.io/node-id": f"!in({','.join(excluded)})"}


def reserve(bundles: Sequence[Resources], excluded: Sequence[str]) -> PlacementGroup:
    """Asks for a placement group; returns before it has its places.

    Args:
        bundles: What is kept together on a node, each.
        excluded: Ids of nodes that it must not use.
    """
    selector = node_selector(excluded)
    return placement_group(
        [dict(bundle) for bundle in bundles],
        bundle_label_selector=[selector] * len(bundles) if selector else None,
    )


def why_pending(
    demand: Sequence[Resources],
    shape: ClusterShape | None,
    excluded: Sequence[str],
    autoscaler: AutoscalerReport | None = None,
) -> Diagnosis | None:
    """Why a placement group cannot be placed just now; None if it can.

    Args:
        demand: Its bundles.
        shape: The cluster's file; None if it is not known.
        excluded: Ids of nodes that it must not use.
        autoscaler: What the autoscaler says; None if it was not asked.
    """
    nodes = living_nodes(excluded)
    if place(demand, nodes)[1] is None:
        return None
    return diagnose(
        demand,
        nodes,
        _other_jobs(),
        shape=shape,
        autoscaler=autoscaler or AutoscalerReport(),
    )


def not_placed_yet(demand: Sequence[Resources], excluded: Sequence[str]) -> str:
    """What to say of a placement group that Ray has not placed, though there seems to be room.

    Args:
        demand: Its bundles.
        excluded: Ids of nodes that it must not use.

    Returns:
        What is asked for, and what is free.
    """
    counts = Counter(format_resources(bundle) for bundle in demand)
    asked = " and ".join(f"{count} × ({bundle})" for bundle, count in counts.items())
    names = dict.fromkeys(name for bundle in demand for name in bundle)
    nodes = living_nodes(excluded)
    free = {name: sum(node.available.get(name, 0.0) for node in nodes) for name in names}
    return (
        f"{asked} are asked for, and {format_resources(free)} are free, but Ray has not placed "
        "them yet (`ray status` shows what it waits for)"
    )


def pending_places(excluded: Sequence[str]) -> str:
    """Why workers of this job have no places; "" if none wait for theirs.

    Args:
        excluded: Ids of nodes that they must not use.
    """
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for entry in _groups_of_this_job():
        if entry["state"] not in ("PENDING", "RESCHEDULING"):
            continue
        node_of_bundle = entry["bundles_to_node_id"]
        missing = [
            bundle
            for number, bundle in entry["bundles"].items()
            if node_of_bundle.get(number) not in living
        ]
        diagnosis = why_pending(missing, None, excluded)
        return diagnosis.sentence if diagnosis else not_placed_yet(missing, excluded)
    return ""


def _other_jobs() -> Usage:
    """Resources that other jobs hold, by their placement groups."""
    this_job = ray.get_runtime_context().get_job_id()
    usage: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group, entry in placement_group_table().items():
        job = group[-len(this_job) :]  # a group's id ends with its job's
        if job == this_job or entry["state"] != "CREATED":
            continue
        for bundle in entry["bundles"].values():
            for name, amount in bundle.items():
                usage[f"job {job}"][name] += amount
    return dict(usage)


def free_by_node(excluded: Sequence[str]) -> dict[str, Counter[str]]:
    """Resources of the nodes that may be used, free or held by this run itself.

    Args:
        excluded: Ids of nodes that may not be used.

    Returns:
        The resources by the node's id.
    """
    free = {node.id: Counter(node.available) for node in living_nodes(excluded)}
    for entry in _groups_of_this_job():
        if entry["state"] not in ("CREATED", "RESCHEDULING"):
            continue
        for number, bundle in entry["bundles"].items():
            node = entry["bundles_to_node_id"].get(number, "")
            if node in free:
                free[node].update(bundle)
    return free


def placed_nodes() -> list[str]:
    """Ids of the nodes on which the workers have their places; [] if they have none yet."""
    return list(
        dict.fromkeys(
            node
            for entry in _groups_of_this_job()
            if entry["state"] == "CREATED"
            for node in entry["bundles_to_node_id"].values()
        )
    )


def remove_groups_but(kept: Collection[str], per_worker: Resources) -> None:
    """Removes the placement groups that were made for workers, also those that wait for places.

    The maker of such a group was killed, and the group would take the places when they come. Other
    groups of the program stay.

    Args:
        kept: Ids of groups that stay.
        per_worker: Ray resources of one worker, by which its groups are recognised. They also have
            no name.
    """
    worker_resources = {name for name, amount in per_worker.items() if amount > 0}
    for entry in _groups_of_this_job():
        group = entry["placement_group_id"]
        if group in kept or entry["name"] or entry["state"] == "REMOVED":
            continue
        if all(bundle.keys() == worker_resources for bundle in entry["bundles"].values()):
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group)))


def groups_of_this_job() -> set[str]:
    """Ids of this job's placement groups."""
    return {entry["placement_group_id"] for entry in _groups_of_this_job()}


def _groups_of_this_job() -> list[dict[str, Any]]:
    job = ray.get_runtime_context().get_job_id()
    # A group's id ends with its job's.
    return [entry for group, entry in placement_group_table().items() if group.endswith(job)]


# --- one node -------------------------------------------------------------------------------------


def ray_nodes() -> Nodes:
    """What can be asked about the nodes of a Ray cluster."""
    return Nodes(
        lost=lambda nodes: set(nodes) - {node["NodeID"] for node in ray.nodes() if node["Alive"]},
        oom_kills=lambda node: on_node(node, oom_kills, seconds=ANSWER_SECONDS),
        pending=pending_places,
    )


def on_node(
    node: str, function: Callable[..., Any], *arguments: object, seconds: float = 0.0
) -> Any:
    """Calls a function on a node.

    Args:
        node: The node's id.
        function: What is called.
        arguments: Of the call.
        seconds: How long to wait for another node's answer; 0 does not wait.

    Returns:
        What the function returns; None if another node has not answered.
    """
    if node == ray.get_runtime_context().get_node_id():
        return function(*arguments)
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        remote_function = ray.remote(num_cpus=0)(function).options(scheduling_strategy=affinity)
        answer = remote_function.remote(*arguments)
        return ray.get(answer, timeout=seconds) if seconds else None
    except ray.exceptions.RayError:
        return None
