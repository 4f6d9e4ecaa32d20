"""Why is it pending? From what is asked, what there is and what may come, the sentence that says what is in the way."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import ClusterError
from cluster.shape import ClusterShape, NodeState, NodeType, Resources

Usage = Mapping[str, Resources]
"""What each job holds, by words for it: "job 02000000"."""


@dataclass(frozen=True)
class AutoscalerReport:
    """What the autoscaler reports, each a line with the node type's name. All empty where there is none."""

    active: bool = False
    starting: tuple[str, ...] = ()  # "10.0.0.7: a100, setting-up"
    failed: tuple[str, ...] = ()  # "a100: InsufficientInstanceCapacity (latest_attempt: 14:02:11) - …"


def autoscaler_now() -> AutoscalerReport:
    """What the autoscaler of the connected cluster reports, as far as it answers. Takes a second or two."""
    import ray

    command = ["ray", "status", "-v", f"--address={ray.get_runtime_context().gcs_address}"]
    try:
        done = subprocess.run(command, env=ray_environment(), capture_output=True, text=True, timeout=30)
        return autoscaler_report(done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        return AutoscalerReport(True)


def ray_environment() -> dict[str, str]:
    """This environment with the Python of ours first, so that `ray` is its Ray."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def autoscaler_report(text: str) -> AutoscalerReport:
    """The same from what `ray status -v` prints of an autoscaler of either version. Pure."""
    found: dict[str, list[str]] = {"Pending:": [], "Recent failures:": []}
    section = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            section = line.strip()
        elif section in found and not line.strip().startswith("(no "):
            found[section].append(line.strip())
    return AutoscalerReport(True, tuple(found["Pending:"]), tuple(found["Recent failures:"]))


@dataclass(frozen=True)
class Diagnosis:
    """Why a group of bundles is not placed."""

    sentence: str
    placed: int  # bundles that could be placed now
    ever: bool  # whether waiting can help


def diagnose(
    demand: Sequence[Resources],
    nodes: Sequence[NodeState],
    usage: Usage,
    shape: ClusterShape | None,
    autoscaler: AutoscalerReport,
) -> Diagnosis | None:
    """What keeps `demand` (one mapping per bundle) from being placed on `nodes`; None if nothing does. Pure.

    Bundles are placed greedily, each on the fullest node that holds it, as a packing scheduler does.
    """
    placed, missing = place(demand, nodes)
    if missing is None:
        return None
    bundle = demand[missing]
    kinds = tuple(kind.name for kind in shape.types if _per_node(kind, bundle)) if shape else ()
    living = [node for node in nodes if _covers(node.total, bundle)]
    what = f"bundle {missing + 1} of {len(demand)} ({format_resources(bundle)}) cannot be placed"
    unknown = shape is None and autoscaler.active  # what may come is not known here
    if not kinds and not living and not unknown:
        name = "GPU" if "GPU" in bundle else next(iter(bundle))
        most = max((node.total.get(name, 0.0) for node in nodes), default=0.0)
        return Diagnosis(f"{what}: no node has it, the most is {name} {most:g}", placed, False)
    fitting = " or ".join(dict.fromkeys(kinds or [node.address for node in living]))
    where = f"it could be on {fitting}" if fitting else "no node has it"
    reason, ever = _obstacle(bundle, nodes, living, kinds, usage, shape, autoscaler)
    return Diagnosis(f"{what}; {where}, but {reason}", placed, ever)


def place(demand: Sequence[Resources], nodes: Sequence[NodeState]) -> tuple[int, int | None]:
    """How many bundles find room, and the first that does not."""
    free = [dict(node.available) for node in nodes]
    placed, first = 0, None
    for number, bundle in enumerate(demand):
        fitting = [room for room in free if _covers(room, bundle)]
        if not fitting:
            first = number if first is None else first
            continue
        room = min(fitting, key=lambda r: sum(r.get(name, 0.0) for name in bundle))
        for name, amount in bundle.items():
            room[name] = room.get(name, 0.0) - amount
        placed += 1
    return placed, first


def _covers(room: Resources, bundle: Resources) -> bool:
    return all(room.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items())


def format_resources(bundle: Resources) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items() if amount) or "nothing"


def _obstacle(
    bundle: Resources,
    nodes: Sequence[NodeState],
    living: Sequence[NodeState],
    kinds: tuple[str, ...],
    usage: Usage,
    shape: ClusterShape | None,
    autoscaler: AutoscalerReport,
) -> tuple[str, bool]:
    """What stands in the way of one bundle, the most telling first, and whether it can go away by itself."""
    starting, failed = _of_kinds(autoscaler.starting, kinds), _of_kinds(autoscaler.failed, kinds)
    if starting:
        return f"the node is still starting: {starting[0]}", True
    if failed:
        return f"the cloud did not provide such a node ({failed[0]})", True
    limit = _limit(nodes, kinds, shape)
    held = _held(bundle, living, usage)
    if limit and held:
        return f"{limit}, and {held}", True
    if held and not autoscaler.active:
        return held, True
    if limit:
        return limit, False
    if autoscaler.active:
        return "the autoscaler has not asked for one yet", True
    left = [(node.address, {name: node.available.get(name, 0.0) for name in bundle}) for node in living[:3]]
    free = "; ".join(f"{name} has {format_resources(room)} free" for name, room in left)
    return f"what is free lies on different nodes ({free})" if free else "no such node is up", bool(living)


def _of_kinds(lines: Iterable[str], kinds: tuple[str, ...]) -> list[str]:
    return [line for line in lines if not kinds or set(kinds) & set(re.split(r"[ :,]+", line))]


def _limit(nodes: Sequence[NodeState], kinds: tuple[str, ...], shape: ClusterShape | None) -> str:
    """The limit of the file that keeps another node of the fitting types from coming; empty if none does."""
    if not shape or not kinds or not shape.path:
        return ""
    alive = {kind: sum(node.kind == kind for node in nodes) for kind in kinds}
    types = [kind for kind in shape.workers if kind.name in kinds]
    if types and all(alive[kind.name] >= kind.max_nodes for kind in types):
        limits = " and ".join(f"{kind.name} is at its limit of {kind.max_nodes} nodes" for kind in types)
        return f"{limits} ({shape.path})"
    workers = sum(node.kind in {kind.name for kind in shape.workers} for node in nodes)
    if shape.max_workers is not None and workers >= shape.max_workers:
        return f"the cluster is at its limit of {shape.max_workers} workers (max_workers in {shape.path})"
    return ""


def _held(bundle: Resources, living: Sequence[NodeState], usage: Usage) -> str:
    """Which jobs hold the scarce resource of nodes that could take the bundle; empty if none of it is held."""
    for name in sorted(bundle, key=lambda key: key != "GPU"):
        total = sum(node.total.get(name, 0.0) for node in living)
        used = total - sum(node.available.get(name, 0.0) for node in living)
        if used > 1e-9:
            jobs = [job for job, amounts in usage.items() if amounts.get(name, 0.0) > 0]
            by = f" by {' and '.join(jobs)}" if jobs else ""
            return f"{used:g} of {total:g} {name} are held{by}"
    return ""


def check_feasible(shape: ClusterShape, workers: str | int, per_worker: Resources) -> None:
    """Raises ClusterError if the cluster, empty and grown as far as its file allows, could never hold the workers.

    workers: a number, or "auto". per_worker: as the experiment writes it; where it is empty, whatever the cluster has
    will do. Resources other than CPUs and GPUs are taken for granted: `diagnose` finds them missing.
    """
    known = [kind for kind in shape.types if kind.cpus or kind.gpus]
    if workers == "auto" or not per_worker or not known:
        return
    room = _per_node(shape.head, per_worker) + int(shape.max_on_workers(lambda kind: _per_node(kind, per_worker)))
    where = shape.path or "this cluster"
    if not room:
        largest = max(known, key=lambda kind: (kind.gpus, kind.cpus))
        raise ClusterError(
            f"no machine of {where} can ever hold a worker of {format_resources(per_worker)}: the largest has "
            f"{largest.gpus} GPUs and {largest.cpus:g} CPUs"
        )
    if room < int(workers):
        raise ClusterError(
            f"{workers} workers of {format_resources(per_worker)} each do not fit on {where}, which has room for "
            f"{room} at most: write workers={room}, a smaller resources_per_worker, or raise the cluster's limits"
        )


def _per_node(kind: NodeType, bundle: Resources) -> int:
    """How many bundles one node of this type holds; resources the file does not know are taken for granted."""
    known = {"GPU": float(kind.gpus), "CPU": kind.cpus}
    rooms = [int(known[name] / amount + 1e-9) for name, amount in bundle.items() if name in known and amount > 0]
    return min(rooms, default=10**6)
