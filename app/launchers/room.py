"""Waits for a run's resources before its workers start, and says why they do not come: `cluster.pending` finds the
reason, this asks Ray.

While it waits, the whole group is asked for, so that an autoscaling cluster grows to it; there the group is kept until
the launcher asks for its own, since machines that stood idle while a run prepares would be taken away again.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from app.config import Config
from app.console import Console
from cluster import ClusterError
from cluster.connect import Cluster
from cluster.files import connected
from cluster.pending import AutoscalerReport, Diagnosis, JobUsage, NodeState, check_feasible, diagnose, place
from cluster.ray_internals import available_resources_per_node
from cluster.shape import ClusterShape
from cluster.status import autoscaler_now

LOOK_SECONDS = 1.0
ASK_AUTOSCALER_SECONDS = 10.0
"""Asking it is a process of a second or two."""
REPEAT_SECONDS = 60.0
FREE_SECONDS = 5.0
"""Until Ray's tables show resources that were given back."""
GRACE_SECONDS = 3.0
"""An earlier run's group may be about to go."""

Resources = Mapping[str, float]


def node_selector(excluded: Sequence[str]) -> dict[str, str] | None:
    """Ray's label selector that keeps workers off these nodes; None where there are none."""
    return {"ray.io/node-id": f"!in({','.join(excluded)})"} if excluded else None


@dataclass
class Reserved:
    """How many workers there will be, and the placement group that keeps their places, if there is one."""

    workers: int
    group: Any = None
    is_free: Callable[[], bool] = lambda: True

    def give_back(self) -> None:
        """Frees the places, and waits a moment until Ray's tables show it: when the workers ask for their own."""
        group, self.group = self.group, None
        if group is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(group)
            until = time.monotonic() + FREE_SECONDS
            while not self.is_free() and time.monotonic() < until:
                time.sleep(0.1)


def wait_for_room(config: Config, cluster: Cluster, workers: int, per_worker: Resources, console: Console) -> Reserved:
    """Waits until `workers` bundles of `per_worker` can be placed. After `cluster.wait_seconds` it does what
    `cluster.when_pending` says: waits on, shrinks, or ends.

    Raises:
        ClusterError: they can never come, or did not come in time; one sentence that says which and why.
    """
    known = connected(config.cluster.file, private=cluster.started_here)
    check_feasible(known, workers, per_worker)
    shape = known if known.path else None
    demand = [dict(per_worker)] * workers
    if not cluster.max_resources and why_pending(demand, shape, config.cluster.exclude_nodes) is None:
        return Reserved(workers)
    return _Wait(config, demand, shape, bool(cluster.max_resources), console).until_placed()


class _Wait:
    def __init__(
        self,
        config: Config,
        demand: list[dict[str, float]],
        shape: ClusterShape | None,
        autoscaling: bool,
        console: Console,
    ) -> None:
        self.config, self.demand, self.shape, self.autoscaling, self.console = (
            config,
            demand,
            shape,
            autoscaling,
            console,
        )
        self.began = time.monotonic()
        self.said, self.said_at = "", 0.0
        self.report, self.asked_at = AutoscalerReport(), -ASK_AUTOSCALER_SECONDS

    def until_placed(self) -> Reserved:
        demand, only = self.demand, node_selector(self.config.cluster.exclude_nodes)
        selectors = [only] * len(demand) if only else None
        group = placement_group(demand, strategy="PACK", bundle_label_selector=selectors)
        kept = False
        try:
            while True:
                if group.wait(LOOK_SECONDS):
                    kept = self.autoscaling
                    return Reserved(len(demand), group if kept else None, self._is_free)
                if (fewer := self._look()) is not None:
                    return Reserved(fewer)
        finally:
            if not kept:
                with contextlib.suppress(ray.exceptions.RayError):
                    remove_placement_group(group)

    def _is_free(self) -> bool:
        return place(self.demand, nodes_now(self.config.cluster.exclude_nodes))[1] is None

    def _look(self) -> int | None:
        """Says why it waits; the number of workers to continue with, once it is decided that it is another."""
        waited = time.monotonic() - self.began
        if waited < GRACE_SECONDS:
            return None
        now = time.monotonic()
        if self.autoscaling and now - self.asked_at > ASK_AUTOSCALER_SECONDS:
            self.report, self.asked_at = autoscaler_now(), now
        found = why_pending(self.demand, self.shape, self.config.cluster.exclude_nodes, self.report)
        if found is None:
            return None
        if found.sentence != self.said or now - self.said_at > REPEAT_SECONDS:
            self.said, self.said_at = found.sentence, now
            self.console.say(f"waiting for resources: {found.sentence}")
        over = waited > self.config.cluster.wait_seconds or not found.ever
        fewer = when_over(self.config, found, len(self.demand)) if over else 0
        if fewer:
            self.console.say(f"continuing with {fewer} of {len(self.demand)} workers: {found.sentence}")
        return fewer or None


def when_over(config: Config, found: Diagnosis, workers: int) -> int:
    """What to do when the time is over: workers to continue with, or 0 to wait on.

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
            f"there is room for {found.placed} of {workers} workers {after}, fewer than cluster.min_workers="
            f"{config.cluster.min_workers} allows: {found.sentence}"
        )
    if config.cluster.when_pending == "wait" and found.ever:
        return 0
    raise ClusterError(f"there is no room for {workers} workers {after}: {found.sentence}")


def why_pending(
    demand: Sequence[Resources],
    shape: ClusterShape | None,
    excluded: Sequence[str],
    autoscaler: AutoscalerReport | None = None,
) -> Diagnosis | None:
    """Why the group cannot be placed just now; None if it can."""
    nodes = nodes_now(excluded)
    if place(demand, nodes)[1] is None:
        return None
    return diagnose(demand, nodes, _holders(), shape, autoscaler or AutoscalerReport())


def nodes_now(excluded: Sequence[str]) -> list[NodeState]:
    """Living nodes but the excluded ones, with what is free."""
    free = available_resources_per_node()
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


def _holders() -> list[JobUsage]:
    """Other jobs that hold resources, by their placement groups, whose ids end with the job's."""
    own = ray.get_runtime_context().get_job_id()
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group, entry in placement_group_table().items():
        job = group[-len(own) :]
        if job != own and entry["state"] == "CREATED":
            for bundle in entry["bundles"].values():
                for name, amount in bundle.items():
                    held[job][name] += amount
    names = _job_names() if held else {}
    return [JobUsage(f"job {job}{names.get(job, '')}", dict(amounts)) for job, amounts in held.items()]


def _job_names() -> dict[str, str]:
    """What a job runs, in parentheses, by its id; empty where Ray's dashboard does not run."""
    with contextlib.suppress(Exception):
        from ray.util.state import list_jobs

        jobs = list_jobs(limit=10_000, timeout=5)
        return {job.job_id: f" ({job.entrypoint[:120]})" for job in jobs if job.job_id and job.entrypoint}
    return {}
