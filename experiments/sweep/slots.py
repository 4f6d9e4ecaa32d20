"""How many trials run at once: decided by pure functions from what each needs and what the cluster has.

A trial takes its workers' places all at once, in one placement group, and its driver takes none, so trials cannot hold
parts of what others wait for. A trial is begun when its workers fit beside those that run; what can never fit is
refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.errors import UserError

Resources = dict[str, float]
DRIVER: Resources = {"CPU": 0.0, "memory": 2.0**20}
"""What the process that drives a trial asks Ray for: it waits nearly all the time. Asking for nothing is refused by
Tune, and with a thousandth of a CPU the workers of a trial that takes all CPUs would wait for ever."""


@dataclass(frozen=True)
class Need:
    """What a trial takes: `workers` times `per_worker`."""

    workers: int
    per_worker: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, workers: int, per_worker: Resources) -> Need:
        return cls(workers, tuple(sorted((k, v) for k, v in per_worker.items() if v > 0)))

    def __str__(self) -> str:
        what = " and ".join(f"{amount:g} {name}" for name, amount in self.per_worker)
        return f"{self.workers} worker{'s' if self.workers > 1 else ''} of {what} each"


def place(nodes: Sequence[Resources], needs: Sequence[Need]) -> bool:
    """Whether all of `needs` fit on `nodes` at once, each worker whole on one node; first fit, the largest first."""
    free = [dict(node) for node in nodes]
    workers = [need.per_worker for need in needs for _ in range(need.workers)]
    for worker in sorted(workers, key=lambda w: sum(amount for _, amount in w), reverse=True):
        for node in free:
            if all(node.get(name, 0.0) >= amount - 1e-9 for name, amount in worker):
                for name, amount in worker:
                    node[name] -= amount
                break
        else:
            return False
    return True


def at_once(nodes: Sequence[Resources], need: Need, most: int = 10_000) -> int:
    """How many such trials fit together."""
    count = 0
    while count < most and place(nodes, [need] * (count + 1)):
        count += 1
    return count


def refuse_what_never_fits(nodes: Sequence[Resources], limits: Resources, needs: Sequence[Need]) -> None:
    """Raises UserError for the first trial that the cluster could not run even with nothing else on it.

    limits: what an autoscaler may grow the cluster to ({} without one).
    """
    for need in needs:
        if place(nodes, [need]):
            continue
        if limits and all(limits.get(name, 0.0) >= amount * need.workers for name, amount in need.per_worker):
            continue
        largest: Resources = {}
        for node in nodes:
            for name, _ in need.per_worker:
                largest[name] = largest.get(name, 0.0) + node.get(name, 0.0)
        has = ", ".join(f"{amount:g} {name}" for name, amount in largest.items())
        raise UserError(
            f"a trial needs {need}, and the cluster has {has} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}: it "
            "could never start; write fewer workers or a smaller resources_per_worker"
        )


def nodes_now() -> list[Resources]:
    """What each living node of the connected cluster has, used or not."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def remove_leftovers() -> int:
    """Removes placement groups of sweeps that are over: one that was killed may leave some, which hold what new trials
    need. Those of other people's jobs are left alone. Called at the start of a sweep, which it also registers.

    Returns how many were removed.
    """
    import ray
    from ray._private.state import state
    from ray._raylet import PlacementGroupID
    from ray.experimental import internal_kv
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    over = {job["JobID"] for job in state.job_table() if job["IsDead"]}
    ours = {key.removeprefix(_REGISTER).decode() for key in internal_kv._internal_kv_list(_REGISTER)}
    removed = 0
    for group, entry in placement_group_table().items():
        if entry["state"] != "REMOVED" and group[-_JOB_CHARACTERS:] in ours & over:
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))
            removed += 1
    internal_kv._internal_kv_put(_REGISTER + ray.get_runtime_context().get_job_id().encode(), b"")
    return removed


_REGISTER = b"trireme/sweep/"
"""Prefix of keys in the cluster's own store that name the jobs of sweeps."""
_JOB_CHARACTERS = 8
"""A placement group's id ends with the id of its job."""
