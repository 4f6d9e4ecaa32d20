"""Waits for a run's resources and says why they do not come: `cluster.pending` finds the reason, this asks Ray."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.config import Config
from app.console import Console
from cluster.errors import ClusterError
from cluster.pending import Diagnosis, Growth, Holder, NodeState, check_ever, diagnose, place
from cluster.shape import ClusterShape, cluster_file, read_cluster
from cluster.status import unavailable

if TYPE_CHECKING:
    from cluster.connect import Cluster

LOOK_SECONDS = 1.0
REPEAT_SECONDS = 60.0
FREE_SECONDS = 5.0  # until Ray's tables know of resources that were given back
GRACE_SECONDS = 3.0  # an earlier run's group may be just about to go


def selector(excluded: list[str]) -> dict[str, str] | None:
    """Ray's label selector that keeps workers off these nodes; None where there are none."""
    return {"ray.io/node-id": f"!in({','.join(excluded)})"} if excluded else None


@dataclass
class Reserved:
    """How many workers there will be, and what keeps their places, if anything does: nodes that stood idle while a run
    prepares would be taken away by the autoscaler just as the workers come."""

    workers: int
    group: Any = None
    free: Callable[[], bool] = lambda: True

    def give_back(self) -> None:
        """Frees the places, and waits a moment until Ray's tables say so: when the workers ask for their own."""
        import ray

        group, self.group = self.group, None
        if group is None:
            return
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(group)
            until = time.monotonic() + FREE_SECONDS
            while not self.free() and time.monotonic() < until:
                time.sleep(0.1)


def wait_for_room(
    config: Config, cluster: Cluster, workers: int, per_worker: dict[str, float], console: Console
) -> Reserved:
    """Waits until `workers` bundles of `per_worker` can be placed; returns how many there will be. On a cluster that
    grows and shrinks they are kept.

    While it waits the whole group is asked for, so that an autoscaling cluster grows to it. After
    `cluster.wait_seconds` it does what `cluster.when_pending` says: goes on waiting, shrinks, or ends.

    Raises:
        ClusterError: they can never come, or did not come in time; one sentence that says which and why.
    """
    file = cluster_file(config.cluster.file)
    shape = read_cluster(file) if file else None
    if shape:
        check_ever(shape, str(workers), per_worker)
    excluded = list(config.cluster.exclude_nodes)
    demand = [per_worker] * workers
    growing = bool(cluster.limits)
    if not growing and look(demand, shape, excluded, growing=False) is None:
        return Reserved(workers)
    return _wait(config, demand, shape, growing, console)


def _wait(
    config: Config, demand: list[dict[str, float]], shape: ClusterShape | None, growing: bool, console: Console
) -> Reserved:
    import ray

    excluded = list(config.cluster.exclude_nodes)
    wanted = selector(excluded)
    group = ray.util.placement_group(
        demand, strategy="PACK", bundle_label_selector=[wanted] * len(demand) if wanted else None
    )
    begun, said, said_at = time.monotonic(), "", 0.0
    kept = False

    def free() -> bool:
        return place(demand, nodes_now(excluded))[1] is None

    try:
        while True:
            if group.wait(LOOK_SECONDS):
                kept = growing
                return Reserved(len(demand), group if kept else None, free)
            found = look(demand, shape, excluded, growing=growing)
            now = time.monotonic()
            if found and now - begun > GRACE_SECONDS and (found.sentence != said or now - said_at > REPEAT_SECONDS):
                said, said_at = found.sentence, now
                console.say(f"waiting for resources: {said}")
            if found and now - begun > (config.cluster.wait_seconds if found.ever else GRACE_SECONDS):
                decided = decide(config, found, len(demand))
                if decided:
                    console.say(f"going on with {decided} of {len(demand)} workers: {found.sentence}")
                    return Reserved(decided)
    finally:
        if not kept:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)


def decide(config: Config, found: Diagnosis, workers: int) -> int:
    """What to do when the time is over: workers to go on with, or 0 to wait on. Pure.

    Raises:
        ClusterError: to end.
    """
    after = f"after {config.cluster.wait_seconds:g} s" if found.ever else "and waiting would not help"
    if config.cluster.when_pending == "shrink":
        batch = config.train.global_batch_size
        smaller = next((n for n in range(min(found.placed, workers - 1), 0, -1) if batch % n == 0), 0)
        if smaller >= config.cluster.min_workers:
            return smaller
        raise ClusterError(
            f"room for {found.placed} of {workers} workers {after}, fewer than cluster.min_workers="
            f"{config.cluster.min_workers} allows: {found.sentence}"
        )
    if config.cluster.when_pending == "wait" and found.ever:
        return 0
    raise ClusterError(f"{workers} workers have no room {after}: {found.sentence}")


def look(
    demand: list[dict[str, float]], shape: ClusterShape | None, excluded: list[str], *, growing: bool
) -> Diagnosis | None:
    """Why the group cannot be placed just now; None if it can."""
    nodes = nodes_now(excluded)
    if place(demand, nodes)[1] is None:
        return None
    return diagnose(demand, nodes, holders_now(), shape, growth_now() if growing else Growth())


def nodes_now(excluded: list[str]) -> list[NodeState]:
    """Living nodes but the excluded ones, with what is free."""
    import ray

    free = ray._private.state.available_resources_per_node()
    return [
        NodeState(
            node["NodeManagerAddress"],
            (node.get("Labels") or {}).get("ray.io/node-group", ""),
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in excluded
    ]


def holders_now() -> list[Holder]:
    """Jobs other than this one that hold resources, by their living actors and placement groups."""
    import ray

    mine = ray.get_runtime_context().get_job_id()
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with contextlib.suppress(Exception):  # private ways into Ray's tables: without them nobody is named
        gcs_pb2, accessor = _tables()
        for row in accessor.get_placement_group_table():
            group = gcs_pb2.PlacementGroupTableData.FromString(row)
            if group.state == gcs_pb2.PlacementGroupTableData.CREATED:
                for bundle in group.bundles:
                    _add(held[group.creator_job_id.hex()], bundle.unit_resources)
        for row in accessor.get_actor_table(None, None):
            actor = gcs_pb2.ActorTableData.FromString(row)
            if actor.state == gcs_pb2.ActorTableData.ALIVE and not actor.placement_group_id.strip(b"\xff"):
                _add(held[actor.job_id.hex()], actor.required_resources)
    names = _job_names()
    return [
        Holder(f"job {job_id}{names.get(job_id, '')}", dict(amounts))
        for job_id, amounts in held.items()
        if job_id != mine and any(amounts.values())
    ]


def held_by(job_id: str) -> list[tuple[str, dict[str, float]]]:
    """The bundles of a job's placement groups that have a place: the id of each one's node, and its resources."""
    gcs_pb2, accessor = _tables()
    found = []
    for row in accessor.get_placement_group_table():
        group = gcs_pb2.PlacementGroupTableData.FromString(row)
        if group.creator_job_id.hex() == job_id and group.state in (
            gcs_pb2.PlacementGroupTableData.CREATED,
            gcs_pb2.PlacementGroupTableData.RESCHEDULING,
        ):
            found += [(bundle.node_id.hex(), dict(bundle.unit_resources)) for bundle in group.bundles]
    return found


def _tables() -> tuple[Any, Any]:
    """The classes of Ray's own tables, and what reads them. Private to Ray."""
    import ray

    gcs_pb2: Any = importlib.import_module("ray.core.generated.gcs_pb2")
    return gcs_pb2, ray._private.state.state._connect_and_get_accessor()


def _add(total: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        total[name] += amount


def _job_names() -> dict[str, str]:
    """What a job runs, in parentheses, by its id."""
    import ray

    found = {}
    for job in ray._private.state.jobs():
        entry = job.get("Entrypoint") or ""
        found[job["JobID"]] = f" ({entry[:120]})" if entry else ""
    return found


def growth_now() -> Growth:
    """What the autoscaler is starting and what the cloud refused it, by version 2 or 1, whichever runs."""
    starting: list[str] = []
    refused: list[str] = []
    with contextlib.suppress(Exception):  # no autoscaler, or one that has not reported yet
        import ray
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        starting += [
            f"{n.ray_node_type_name} {n.ip_address}: {n.details or n.node_status}" for n in status.pending_nodes
        ]
        starting += [f"{n.ray_node_type_name} × {n.count}: asked for" for n in status.pending_launches]
        refused += [f"{n.ray_node_type_name}: {n.details or 'launch failed'}" for n in status.failed_launches]
    if not starting and not refused:
        report = _first_version()
        starting += [f"{row[1]} {row[0]}: {row[2]}" for row in report.get("pending_nodes") or []]
        starting += [f"{kind} × {count}: asked for" for kind, count in (report.get("pending_launches") or {}).items()]
        refused += unavailable(report)
    return Growth(True, tuple(starting), tuple(refused))


def _first_version() -> dict[str, Any]:
    """The report of autoscaler version 1, from Ray's tables."""
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    with contextlib.suppress(Exception):
        raw = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
        return json.loads(raw).get("autoscaler_report") or {}
    return {}
