"""Says why workers are pending, from the demand, the living nodes and the nodes that may come."""

import heapq
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
"""What each job uses, by the job's name in messages, such as "job 02000000"."""


@dataclass(frozen=True)
class AutoscalerReport:
    """What the autoscaler reports; inactive and empty where there is none.

    Attributes:
        active: Whether there is an autoscaler.
        starting: A line for each node that starts, such as "10.0.0.7: a100, setting-up".
        failed: A line for each failure, such as
            "a100: InsufficientInstanceCapacity (latest_attempt: 14:02:11) - …".
    """

    active: bool = False
    starting: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def autoscaler_now() -> AutoscalerReport:
    """What the autoscaler of the connected cluster reports; takes a second or two."""
    import ray

    command = ["ray", "status", "-v", f"--address={ray.get_runtime_context().gcs_address}"]
    try:
        status = subprocess.run(
            command,
            env=ray_environment(),
            capture_output=True,
            text=True,
            timeout=30,
        )
        return autoscaler_report(status.stdout)
    except (OSError, subprocess.TimeoutExpired):
        return AutoscalerReport(True)


def ray_environment() -> dict[str, str]:
    """This environment with this Python's folder first on PATH, so that `ray` is its command."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return os.environ | {"PATH": os.pathsep.join(folders)}


def autoscaler_report(text: str) -> AutoscalerReport:
    """The report in the output of `ray status -v`, for both versions of the autoscaler. Pure."""
    sections: dict[str, list[str]] = {"Pending:": [], "Recent failures:": []}
    section = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            section = line.strip()
        elif section in sections and not line.strip().startswith("(no "):
            sections[section].append(line.strip())
    return AutoscalerReport(
        active=True,
        starting=tuple(sections["Pending:"]),
        failed=tuple(sections["Recent failures:"]),
    )


@dataclass(frozen=True)
class Diagnosis:
    """Why a group of bundles is not placed.

    Attributes:
        sentence: The reason, for the user.
        placed: How many bundles could be placed now.
        ever: Whether waiting can help.
    """

    sentence: str
    placed: int
    ever: bool


def diagnose(
    demand: Sequence[Resources],
    nodes: Sequence[NodeState],
    usage: Usage,
    shape: ClusterShape | None,
    autoscaler: AutoscalerReport,
) -> Diagnosis | None:
    """What keeps bundles from being placed on nodes. Pure.

    Bundles are placed greedily, each on the fullest node with room for it, as a packing scheduler
    does.

    Args:
        demand: The resources of each bundle.
        nodes: The living nodes.
        usage: What each job uses.
        shape: The cluster with the limits of its file; None where they are not known.
        autoscaler: What the autoscaler reports.

    Returns:
        None if all bundles can be placed.
    """
    placed, missing = place(demand, nodes)
    if missing is None:
        return None
    bundle = demand[missing]
    kinds = tuple(kind.name for kind in shape.types if _per_node(kind, bundle)) if shape else ()
    living = [node for node in nodes if _covers(node.total, bundle)]
    what = f"bundle {missing + 1} of {len(demand)} ({format_resources(bundle)}) cannot be placed"
    may_grow_unknown = shape is None and autoscaler.active
    if not kinds and not living and not may_grow_unknown:
        name = "GPU" if "GPU" in bundle else next(iter(bundle))
        most = max((node.total.get(name, 0.0) for node in nodes), default=0.0)
        sentence = f"{what}: no node has it, the most is {name} {most:g}"
        return Diagnosis(sentence, placed, ever=False)
    fitting = " or ".join(dict.fromkeys(kinds or [node.address for node in living]))
    where = f"it could be on {fitting}" if fitting else "no node has it"
    reason, ever = _obstacle(
        bundle,
        nodes=nodes,
        living=living,
        kinds=kinds,
        usage=usage,
        shape=shape,
        autoscaler=autoscaler,
    )
    return Diagnosis(f"{what}; {where}, but {reason}", placed, ever)


def place(demand: Sequence[Resources], nodes: Sequence[NodeState]) -> tuple[int, int | None]:
    """How many bundles find room, and the number of the first that does not."""
    # Nodes that have the same room of what is asked for are alike. Of a large cluster there are
    # few kinds, so that placing takes as long as there are bundles, not bundles times nodes.
    names = tuple(dict.fromkeys(name for bundle in demand for name in bundle))
    nodes_by_room: dict[_Room, list[int]] = {}
    for position, node in enumerate(nodes):
        room = tuple(node.available.get(name, 0.0) for name in names)
        nodes_by_room.setdefault(room, []).append(position)
    placed = 0
    first_missing = None
    for number, bundle in enumerate(demand):
        amounts = [bundle.get(name) for name in names]
        fitting = [room for room in nodes_by_room if _has_room(room, amounts)]
        if not fitting:
            if first_missing is None:
                first_missing = number
            continue
        # The fullest, and of equally full nodes the first.
        room = min(fitting, key=lambda r: (_total(r, amounts), nodes_by_room[r][0]))
        position = heapq.heappop(nodes_by_room[room])
        if not nodes_by_room[room]:
            del nodes_by_room[room]
        less_room = tuple(free - (amount or 0.0) for free, amount in zip(room, amounts))
        heapq.heappush(nodes_by_room.setdefault(less_room, []), position)
        placed += 1
    return placed, first_missing


_Room = tuple[float, ...]
"""What is free on a node of each resource that is asked for."""


def _has_room(room: _Room, amounts: Sequence[float | None]) -> bool:
    """Whether a bundle fits; its amounts are None where it does not ask for a resource."""
    return all(
        amount is None or free + 1e-9 >= amount for free, amount in zip(room, amounts, strict=True)
    )


def _total(room: _Room, amounts: Sequence[float | None]) -> float:
    """The free resources of the kinds that a bundle asks for."""
    return sum(free for free, amount in zip(room, amounts, strict=True) if amount is not None)


def _covers(room: Resources, bundle: Resources) -> bool:
    return all(room.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items())


def format_resources(bundle: Resources) -> str:
    """Resources in words, such as "GPU 1, CPU 8"."""
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items() if amount) or "nothing"


def _obstacle(
    bundle: Resources,
    *,
    nodes: Sequence[NodeState],
    living: Sequence[NodeState],
    kinds: tuple[str, ...],
    usage: Usage,
    shape: ClusterShape | None,
    autoscaler: AutoscalerReport,
) -> tuple[str, bool]:
    """What keeps one bundle from being placed, the most telling reason first.

    Args:
        bundle: Its resources.
        nodes: The living nodes.
        living: The living nodes that could have room for it if they were empty.
        kinds: The names of the node types that could.
        usage: See `diagnose`.
        shape: See `diagnose`.
        autoscaler: See `diagnose`.

    Returns:
        The reason, and whether it can go away by itself.
    """
    starting = _of_kinds(autoscaler.starting, kinds)
    failed = _of_kinds(autoscaler.failed, kinds)
    if starting:
        return f"the node is still starting: {starting[0]}", True
    if failed:
        return f"the cloud did not provide such a node ({failed[0]})", True
    limit = _limit(nodes, kinds, shape)
    in_use = _in_use(bundle, living, usage)
    if limit and in_use:
        return f"{limit}, and {in_use}", True
    if in_use and not autoscaler.active:
        return in_use, True
    if limit:
        return limit, False
    if autoscaler.active:
        return "the autoscaler has not asked for one yet", True
    if not living:
        return "no such node is up", False
    rooms = []
    for node in living[:3]:
        room = {name: node.available.get(name, 0.0) for name in bundle}
        rooms.append(f"{node.address} has {format_resources(room)} free")
    return f"what is free lies on different nodes ({'; '.join(rooms)})", True


def _of_kinds(lines: Iterable[str], kinds: tuple[str, ...]) -> list[str]:
    """The lines that name one of the node types; all lines where there are no node types."""
    return [line for line in lines if not kinds or set(kinds) & set(re.split(r"[ :,]+", line))]


def _limit(nodes: Sequence[NodeState], kinds: tuple[str, ...], shape: ClusterShape | None) -> str:
    """The limit of the cluster's file that allows no further node of these types, or ""."""
    if not shape or not kinds or not shape.path:
        return ""
    alive = {kind: sum(node.kind == kind for node in nodes) for kind in kinds}
    types = [kind for kind in shape.workers if kind.name in kinds]
    if types and all(alive[kind.name] >= kind.max_nodes for kind in types):
        limits = [f"{kind.name} is at its limit of {kind.max_nodes} nodes" for kind in types]
        return f"{' and '.join(limits)} ({shape.path})"
    worker_types = {kind.name for kind in shape.workers}
    workers = sum(node.kind in worker_types for node in nodes)
    if shape.max_workers is not None and workers >= shape.max_workers:
        limit = f"its limit of {shape.max_workers} workers"
        return f"the cluster is at {limit} (max_workers in {shape.path})"
    return ""


def _in_use(bundle: Resources, living: Sequence[NodeState], usage: Usage) -> str:
    """Which jobs use the scarce resource of nodes that could have room, or "" if none do."""
    for name in sorted(bundle, key=lambda key: key != "GPU"):
        total = sum(node.total.get(name, 0.0) for node in living)
        used = total - sum(node.available.get(name, 0.0) for node in living)
        if used > 1e-9:
            jobs = [job for job, amounts in usage.items() if amounts.get(name, 0.0) > 0]
            by = f" by {' and '.join(jobs)}" if jobs else ""
            return f"{used:g} of {total:g} {name} are held{by}"
    return ""


def check_feasible(shape: ClusterShape, workers: str | int, per_worker: Resources) -> None:
    """Checks that the cluster, empty and grown as far as its file allows, has room for the workers.

    Resources other than CPUs and GPUs are taken for granted; `diagnose` reports those that are
    missing.

    Args:
        shape: The cluster.
        workers: Their number, or "auto".
        per_worker: Resources of a worker as the experiment writes them; where they are empty,
            whatever the cluster has will do.

    Raises:
        ClusterError: The cluster can never have room for them.
    """
    known = [kind for kind in shape.types if kind.cpus or kind.gpus]
    if workers == "auto" or not per_worker or not known:
        return
    on_head = _per_node(shape.head, per_worker)
    on_workers = shape.max_on_workers(lambda kind: _per_node(kind, per_worker))
    room = on_head + int(on_workers)
    where = shape.path or "this cluster"
    each = format_resources(per_worker)
    if not room:
        largest = max(known, key=lambda kind: (kind.gpus, kind.cpus))
        problem = f"no machine of {where} can ever hold a worker of {each}"
        has = f"{largest.gpus} GPUs and {largest.cpus:g} CPUs"
        raise ClusterError(f"{problem}: the largest has {has}")
    if room < int(workers):
        raise ClusterError(
            f"{workers} workers of {each} each do not fit on {where}, which has room for {room} at "
            f"most: write workers={room}, a smaller resources_per_worker, or raise the cluster's "
            "limits"
        )


def _per_node(kind: NodeType, bundle: Resources) -> int:
    """How many bundles a node of this type has room for; the file tells of CPUs and GPUs only."""
    known = {"GPU": float(kind.gpus), "CPU": kind.cpus}
    counts = []
    for name, amount in bundle.items():
        if name in known and amount > 0:
            counts.append(int(known[name] / amount + 1e-9))
    return min(counts, default=10**6)
