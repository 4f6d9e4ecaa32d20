"""What Trireme needs of Ray's internals, because Ray documents no way to it. No other file touches them.

Each entry says why there is no public way and what happens where the name is missing (another Ray version): the program
goes on, slower or with less information. tests/cluster/test_ray_internals.py takes each name away.
"""

from __future__ import annotations

from typing import Any


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Free resources of each living node by its id, in Ray's units.

    Why: `ray.available_resources()` is the sum over all nodes, from which it does not follow whether any one node can
    hold a bundle. Missing: exact on one node; otherwise each node's total less what placement groups hold there, so
    that actors and tasks outside of a group are not seen.
    """
    import ray

    try:
        from ray._private.state import available_resources_per_node

        return available_resources_per_node()
    except (ImportError, AttributeError):
        free: dict[str, dict[str, float]] = {n["NodeID"]: dict(n["Resources"]) for n in ray.nodes() if n["Alive"]}
    if len(free) == 1:
        return {node: dict(ray.available_resources()) for node in free}
    for group in ray.util.placement_group_table().values():
        for number, bundle in group["bundles"].items() if group["state"] == "CREATED" else ():
            room = free.get(group["bundles_to_node_id"][number], {})
            for name, amount in bundle.items():
                room[name] = room.get(name, 0.0) - amount
    return free


def draining_nodes() -> dict[str, float]:
    """Ids of the nodes that Ray drains, each with the Unix time at which it ends; 0 where no time was given.

    Why: no documented call says that a node is drained before it is dead. Missing: none is known to be drained; a
    machine that its cloud takes back is still heard of from the cloud (`cluster/preemption.py`).
    """
    try:
        from ray._private.state import state

        return {node: deadline / 1000 for node, deadline in state.get_draining_nodes().items()}
    except (ImportError, AttributeError):
        return {}


def start_lean_head(object_store_bytes: int, settings: dict[str, Any]) -> Any:
    """Starts a Ray head on this machine of a GCS server and a raylet with its agents only: no API server, no monitor of
    an autoscaler, no monitor of log files. Returns an object with `gcs_address` and `kill_all_processes()`; its
    processes end with this one, however it ends.

    Why: `ray.init` and `ray start` start all of them, and wait a second and a half for the API server first. Missing:
    raises ImportError or AttributeError, and `cluster/fast_start` leaves it to `ray.init`.

    settings: Ray's system settings, by their names.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        def start_api_server(self, **options: Any) -> None:
            self._webui_url = ""

    parts: dict[str, Any] = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    params = RayParams(
        object_store_memory=object_store_bytes,
        **parts,
        _system_config=settings,
    )
    return LeanNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
