"""All-reduce bandwidth as training has it: within nodes, across all, and, where that is low, pair by pair.

Every usable GPU is a rank (where no node has one, every node's CPU is). Only nodes that reach one another take part.
"""

from __future__ import annotations

from typing import Any

from app.doctor import ring_probe
from app.doctor.facts import ClusterFacts, NodeFacts, RingFacts

SHARE = {"nccl": 0.5, "gloo": 0.25}  # of what the hardware gives: below it something is wrong, and not only untuned
GLOO_MOST = 1e9  # bytes/s: copying through the CPU gives no more on any link
Seat = tuple[NodeFacts, int | None]


def measure(facts: ClusterFacts) -> tuple[RingFacts, ...]:
    """What all-reduce gives on the cluster that this process is connected to; facts: of the look so far."""
    from app.doctor.look import spawn

    seats = seats_of(facts)
    if len(seats) < 2:
        return ()
    actors = [spawn(ring_probe.Ring, node.node_id, gpu, interface_of(node)) for node, gpu in seats]
    try:
        return _measure(facts, seats, actors)
    finally:
        import ray

        for actor in actors:
            ray.kill(actor)


def _measure(facts: ClusterFacts, seats: list[Seat], actors: list[Any]) -> tuple[RingFacts, ...]:
    from app.doctor.look import gather

    def all_of(method: str, *arguments: Any) -> list[Any]:
        answers = gather({str(rank): getattr(actor, method).remote(*arguments) for rank, actor in enumerate(actors)})
        return [answers[str(rank)] for rank in range(len(actors))]

    nodes = list(dict.fromkeys(node.node_id for node, _ in seats))
    store = gather({"0": actors[0].open.remote(seats[0][0].address)})["0"]
    joined: Any = {}
    if isinstance(store, tuple):
        joined = gather({str(r): actor.join.remote(r, len(actors), store) for r, actor in enumerate(actors)})
    problem = next((str(answer) for answer in joined.values() if answer not in ("nccl", "gloo")), "")
    if problem or not joined:
        return (RingFacts(tuple(nodes), len(seats), "", problem=problem or str(store)),)
    backend, found = joined["0"], list[RingFacts]()
    per_node = [[rank for rank, (node, _) in enumerate(seats) if node.node_id == node_id] for node_id in nodes]

    def ring(groups: list[list[int]]) -> list[RingFacts]:
        rates = all_of("rate", groups)
        return [ring_facts(facts, seats, group, backend, [rates[rank] for rank in group]) for group in groups]

    if any(len(group) > 1 for group in per_node):
        found += ring([group for group in per_node if len(group) > 1])
    if len(nodes) > 1:
        found += ring([list(range(len(seats)))])
        if found[-1].low and len(nodes) > 2:
            for pairs in disjoint_pairs(len(nodes)):
                found += ring([[per_node[a][0], per_node[b][0]] for a, b in pairs])
    return tuple(found)


def ring_facts(facts: ClusterFacts, seats: list[Seat], group: list[int], backend: str, rates: list[Any]) -> RingFacts:
    """One ring's measurement beside what should come; the slowest rank's rate is the ring's."""
    members = list(dict.fromkeys(seats[rank][0].node_id for rank in group))
    bad = next((str(rate) for rate in rates if not isinstance(rate, float)), "")
    expected = (within if len(members) == 1 else across)(facts, members, backend)
    rate = None if bad else min(rates)
    return RingFacts(tuple(members), len(group), backend, rate, expected, SHARE[backend], bad)


def across(facts: ClusterFacts, members: list[str], backend: str) -> float | None:
    """Bytes/s that should leave each node: the file's figure, else the slowest card's; None where nobody knows."""
    cards = [card for member in members if (card := card_of(facts.node(member)))]
    promised = facts.link_expected or (min(cards) if len(cards) == len(members) else None)
    return min(promised, GLOO_MOST) if promised and backend == "gloo" else promised


def within(facts: ClusterFacts, members: list[str], backend: str) -> float | None:
    """Bytes/s that should leave each GPU of a node, by the catalogue."""
    from cluster.hardware import HardwareError
    from cluster.hardware import gpu as known

    if backend == "gloo":
        return None
    try:
        return min(known(gpu.name).link_within for gpu in facts.node(members[0]).gpus)
    except HardwareError:
        return None


def seats_of(facts: ClusterFacts) -> list[Seat]:
    """The ranks: idle GPUs that torch sees in the driver's order; without any GPU in the cluster, a CPU per node."""
    dead = {
        name for link in facts.links if link.gpus is None and link.rate is None for name in (link.source, link.target)
    }
    nodes = [node for node in facts.answered if node.node_id not in dead and node.packages.get("torch")]
    gpus: list[Seat] = [
        (node, gpu.index)
        for node in nodes
        if node.torch_gpus == len(node.gpus) and node.visible is None
        for gpu in node.gpus
        if not gpu.processes and not gpu.mig
    ]
    if gpus or any(node.gpus for node in nodes):
        return gpus
    return [(node, None) for node in nodes]


def interface_of(node: NodeFacts) -> str:
    """Name of the network interface that has the node's address."""
    return next((name for name, address in node.interfaces.items() if address == node.address), "")


def card_of(node: NodeFacts) -> float | None:
    """Bytes/s that the card with the node's address says it does."""
    return node.speeds.get(interface_of(node))


def disjoint_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Rounds in which nobody is in two pairs, until every pair was in one; by turning a circle with one seat fixed."""
    circle: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(a, b) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
