"""Why is it pending? From what is asked, what there is and what may come, the sentence that says what is in the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.errors import ClusterError
from cluster.shape import ClusterShape, NodeType

Resources = Mapping[str, float]


@dataclass(frozen=True)
class NodeState:
    """A living node, as Ray counts it."""

    name: str  # its address
    kind: str  # its node type's name; "" where it has none
    total: Resources
    available: Resources


@dataclass(frozen=True)
class Holder:
    """Somebody who holds resources, or will as soon as there are some."""

    who: str  # "job 02000000 (trireme train experiments/gpt.yaml)"
    resources: Resources


@dataclass(frozen=True)
class Growth:
    """What the autoscaler says. All empty where there is none."""

    active: bool = False
    starting: tuple[str, ...] = ()  # "a100 10.0.0.7: setting-up"
    refusals: tuple[str, ...] = ()  # the cloud's: "a100: InsufficientInstanceCapacity: …"


@dataclass(frozen=True)
class Diagnosis:
    """Why a group of bundles is not placed."""

    sentence: str
    placed: int  # bundles that could be placed now
    ever: bool  # whether waiting can help
    kinds: tuple[str, ...] = field(default=())  # node types that could hold the bundle


def diagnose(
    demand: Sequence[Resources],
    nodes: Sequence[NodeState],
    holders: Sequence[Holder] = (),
    shape: ClusterShape | None = None,
    growth: Growth = Growth(),
) -> Diagnosis | None:
    """What keeps `demand` (one mapping per bundle) from being placed on `nodes`; None if nothing does. Pure.

    Bundles are placed greedily, each on the fullest node that holds it, as a packing scheduler does.
    """
    placed, missing = place(demand, nodes)
    if missing is None:
        return None
    bundle = demand[missing]
    kinds = tuple(kind.name for kind in shape.types if holds(kind, bundle)) if shape else ()
    living = [node for node in nodes if _covers(node.total, bundle)]
    what = f"bundle {missing + 1} of {len(demand)} ({words(bundle)}) cannot be placed"
    unknown = shape is None and growth.active  # what may come, nobody here knows
    if not kinds and not living and not unknown:
        return Diagnosis(f"{what}: {_never(bundle, nodes, shape)}", placed, False)
    where = f"it could be on {_or(kinds or [node.name for node in living])}" if kinds or living else "no node has it"
    reason, ever = _obstacle(bundle, nodes, living, kinds, holders, shape, growth)
    return Diagnosis(f"{what}; {where}, but {reason}", placed, ever, kinds)


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


def holds(kind: NodeType, bundle: Resources) -> bool:
    """Whether one node of this type could hold the bundle; resources the file does not know are taken for granted."""
    known = {"GPU": float(kind.gpus), "CPU": kind.cpus}
    return all(known[name] + 1e-9 >= amount for name, amount in bundle.items() if name in known)


def words(bundle: Resources) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items() if amount) or "nothing"


def _or(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def _never(bundle: Resources, nodes: Sequence[NodeState], shape: ClusterShape | None) -> str:
    name = max(bundle, key=lambda key: key == "GPU")
    if shape and shape.path:
        known = [float(k.gpus) if name == "GPU" else k.cpus for k in shape.types]
        if name in ("GPU", "CPU"):
            return f"no node type of {shape.path} has it, the most is {name} {max(known):g}"
    most = max((node.total.get(name, 0.0) for node in nodes), default=0.0)
    return f"no node has it, the most is {name} {most:g}"


def _obstacle(
    bundle: Resources,
    nodes: Sequence[NodeState],
    living: Sequence[NodeState],
    kinds: tuple[str, ...],
    holders: Sequence[Holder],
    shape: ClusterShape | None,
    growth: Growth,
) -> tuple[str, bool]:
    """What stands in the way of one bundle, the most telling first, and whether it can go away by itself."""
    starting = [text for text in growth.starting if not kinds or text.split(" ")[0] in kinds]
    refused = [text for text in growth.refusals if not kinds or text.partition(":")[0] in kinds]
    if starting:
        return f"the node is still starting: {starting[0]}", True
    if refused:
        return f"the cloud gives no such node ({refused[0]})", True
    limit = _limit(nodes, kinds, shape)
    held = _held(bundle, living, holders)
    if limit and held:
        return f"{limit}, and {held}", True
    if held and not growth.active:
        return held, True
    if limit:
        return limit, False
    if growth.active:
        return "the autoscaler has not asked for one yet", True
    free = "; ".join(f"{node.name} has {words(_left(node, bundle))} free" for node in living[:3])
    return f"what is free lies on different nodes ({free})" if free else "no such node is up", bool(living)


def _left(node: NodeState, bundle: Resources) -> dict[str, float]:
    return {name: node.available.get(name, 0.0) for name in bundle}


def _limit(nodes: Sequence[NodeState], kinds: tuple[str, ...], shape: ClusterShape | None) -> str:
    """The limit of the file that keeps another node of the fitting types from coming; empty if none does."""
    if not shape or not kinds or not shape.path:
        return ""
    alive = {kind: sum(node.kind == kind for node in nodes) for kind in kinds}
    types = [kind for kind in shape.workers if kind.name in kinds]
    if types and all(alive[kind.name] >= kind.max_nodes for kind in types):
        said = " and ".join(f"{kind.name} is at its limit of {kind.max_nodes} nodes" for kind in types)
        return f"{said} ({shape.path})"
    workers = sum(node.kind in {kind.name for kind in shape.workers} for node in nodes)
    if shape.max_workers is not None and workers >= shape.max_workers:
        return f"the cluster is at its limit of {shape.max_workers} workers (max_workers in {shape.path})"
    return ""


def _held(bundle: Resources, living: Sequence[NodeState], holders: Sequence[Holder]) -> str:
    """Who holds the scarce resource of nodes that could take the bundle; empty if nobody holds any."""
    for name in sorted(bundle, key=lambda key: key != "GPU"):
        total = sum(node.total.get(name, 0.0) for node in living)
        used = total - sum(node.available.get(name, 0.0) for node in living)
        if used > 1e-9:
            who = [holder.who for holder in holders if holder.resources.get(name, 0.0) > 0] or [h.who for h in holders]
            by = f" by {' and '.join(dict.fromkeys(who))}" if who else ""
            return f"{used:g} of {total:g} {name} are held{by}"
    return ""


def check_ever(shape: ClusterShape, workers: str, per_worker: Resources) -> None:
    """Raises ClusterError if the cluster, grown as far as its file allows, could never hold the workers.

    per_worker: as the experiment writes it; where it is empty, whatever the cluster has will do.
    """
    if workers == "auto" or not per_worker:
        return
    known = [kind for kind in shape.types if kind.cpus or kind.gpus]
    if not known:
        return
    rows = sorted(((_per_node(kind, per_worker), kind.max_nodes) for kind in shape.workers), reverse=True)
    left = shape.max_workers if shape.max_workers is not None else sum(nodes for _, nodes in rows)
    room = _per_node(shape.head, per_worker)
    for count, nodes in rows:
        room, left = room + count * min(nodes, left), left - min(nodes, left)
    where = shape.path or shape.name
    if not room:
        largest = max(known, key=lambda kind: (kind.gpus, kind.cpus))
        raise ClusterError(
            f"no machine of {where} can ever hold a worker of {words(per_worker)}: the largest has "
            f"{largest.gpus} GPUs and {largest.cpus:g} CPUs"
        )
    if room < int(workers):
        raise ClusterError(
            f"{workers} workers of {words(per_worker)} each can never fit on {where}, which can "
            f"grow to room for {room}: write workers={room}, or raise its limits"
        )


def _per_node(kind: NodeType, bundle: Resources) -> int:
    known = {"GPU": float(kind.gpus), "CPU": kind.cpus}
    rooms = [int(known[name] / amount + 1e-9) for name, amount in bundle.items() if name in known and amount > 0]
    return min(rooms, default=10**6)
