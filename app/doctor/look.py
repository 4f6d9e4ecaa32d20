"""Sends a probe to every node at once and brings the facts together; measures all-reduce within nodes, across all, and,
where that is slow, between neighbours. Doctor goes to a cluster that this machine is not part of as a job.
"""

import dataclasses
import os
import uuid
from typing import Any

from app.doctor import probe
from app.doctor.checks import ClusterFacts, GpuFacts, NodeFacts, RingFacts
from app.submit.client import Server, allow_token
from cluster.shape import NodeState, living_nodes

ANSWER_SECONDS = 40.0
Rank = tuple[NodeFacts, int | None]  # its node, and the driver's index of its GPU; None: the CPU


def look(*, storage: str = "", link_expected: float | None = None, all_reduce: bool | None = None) -> ClusterFacts:
    """Facts of the Ray cluster that this process is connected to.

    storage: folder or URL that every node should be able to write to; "": not checked. link_expected: bytes/s from
    node to node by the cluster's file. all_reduce: whether that is measured, which takes seconds; None: where there
    are GPUs.
    """
    import ray

    ray.cloudpickle.register_pickle_by_value(probe)  # nodes need not have it
    nodes = living_nodes()
    probes = {node.id: spawn(probe.Probe, node.id) for node in nodes}
    ranks: list[Any] = []
    try:
        facts = ClusterFacts(tuple(_ask(nodes, probes, storage)), (), storage, link_expected)
        chosen = ranks_of(facts)
        if len(chosen) > 1 and (all_reduce or (all_reduce is None and any(node.gpus for node in facts.nodes))):
            ranks += [spawn(probe.RingRank, node.node_id, gpu, node.interface) for node, gpu in chosen]
            facts = dataclasses.replace(facts, rings=measure(facts, chosen, ranks))
    finally:
        for actor in (*probes.values(), *ranks):
            ray.kill(actor)
        ray.cloudpickle.unregister_pickle_by_value(probe)
    return facts


def spawn(actor: type, node_id: str, *arguments: Any) -> Any:
    """An actor on this node, whatever else is there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # No CPU and no GPU of its own: it comes to a full node too, and sees every GPU.
    return ray.remote(actor).options(num_cpus=0, num_gpus=0, scheduling_strategy=there).remote(*arguments)


def gather(calls: dict[Any, Any]) -> dict[Any, Any]:
    """Answers by name; a text says why there is none."""
    import ray

    ready = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_SECONDS)[0] if calls else []
    found: dict[Any, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = ray.get(call) if call in ready else f"no answer within {ANSWER_SECONDS:.0f} s"
        except Exception as error:
            found[name] = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
    return found


def _ask(nodes: list[NodeState], probes: dict[str, Any], storage: str) -> list[NodeFacts]:
    prefix = f".trireme-doctor-{uuid.uuid4().hex[:8]}-"
    asked = {node.id: (node.total.get("GPU", 0.0), node.session, storage, prefix + node.id) for node in nodes}
    answers = gather({name: probes[name].facts.remote(*words) for name, words in asked.items()})
    peers = {n.id: (n.address, answers[n.id].pop("port")) for n in nodes if isinstance(answers[n.id], dict)}
    others = {name: {other: peer for other, peer in peers.items() if other != name} for name in peers}
    cut = gather({name: probes[name].unreachable.remote(others[name]) for name in peers})
    marks = gather({name: probes[name].marks.remote(storage, prefix) for name in peers if storage})
    gather({name: probes[name].forget.remote(storage, prefix + name) for name in marks})
    return [_node(node, *(found.get(node.id) for found in (answers, cut, marks))) for node in nodes]


def _node(node: NodeState, answer: Any, cut: Any, marks: Any) -> NodeFacts:
    known = NodeFacts(node.id, node.address, head=node.is_head, ray_gpus=node.total.get("GPU", 0.0))
    if not isinstance(answer, dict):
        return dataclasses.replace(known, problem=str(answer))
    seen = tuple(marks) if isinstance(marks, list) else None
    answer["gpus"] = tuple(GpuFacts(**row) for row in answer["gpus"])
    return dataclasses.replace(known, **answer, unreachable=cut if isinstance(cut, dict) else {}, storage_seen=seen)


# --- all-reduce -------------------------------------------------------------------------------------------------------


def measure(facts: ClusterFacts, ranks: list[Rank], actors: list[Any]) -> tuple[RingFacts, ...]:
    """What all-reduce gives between the ranks, each of which is an actor; facts: of the look so far."""
    nodes = list(dict.fromkeys(node.node_id for node, _ in ranks))
    store = gather({0: actors[0].open.remote(ranks[0][0].address)})[0]
    if isinstance(store, str):
        return (RingFacts(tuple(nodes), len(ranks), "", problem=store),)
    joined = gather({rank: actor.join.remote(rank, len(actors), store) for rank, actor in enumerate(actors)})
    problem = next((answer for answer in joined.values() if answer not in probe.RING_BYTES), "")
    if problem:
        return (RingFacts(tuple(nodes), len(ranks), "", problem=problem),)

    def ring(groups: list[list[int]]) -> list[RingFacts]:
        rates = gather({rank: actor.rate.remote(groups) for rank, actor in enumerate(actors)}) if groups else {}
        return [_ring(facts, [ranks[r][0] for r in group], joined[0], [rates[r] for r in group]) for group in groups]

    per_node = [[rank for rank, (node, _) in enumerate(ranks) if node.node_id == name] for name in nodes]
    found = ring([group for group in per_node if len(group) > 1])
    if len(nodes) > 1:
        found += ring([list(range(len(ranks)))])
    if len(nodes) > 2 and found[-1].is_slow:
        pairs = [[per_node[i][0], per_node[(i + 1) % len(nodes)][0]] for i in range(len(nodes))]
        for disjoint in (pairs[0:-1:2], pairs[1:-1:2], pairs[-1:]):
            found += ring(disjoint)
    return tuple(found)


def _ring(facts: ClusterFacts, members: list[NodeFacts], backend: str, rates: list[Any]) -> RingFacts:
    """One ring's measurement beside what should come; the slowest rank's rate is the ring's."""
    nodes = tuple(dict.fromkeys(node.node_id for node in members))
    problem = next((str(rate) for rate in rates if not isinstance(rate, tuple)), "")
    reduces, exchanges = (None, None) if problem else (min(each) for each in zip(*rates))
    return RingFacts(nodes, len(members), backend, reduces, expected_rate(facts, nodes, backend), problem, exchanges)


def expected_rate(facts: ClusterFacts, nodes: tuple[str, ...], backend: str) -> float | None:
    """Bytes/s that should leave each rank: within a node by the catalogue of GPUs, across nodes by the cluster's file.
    None where that is not known, as on CPUs, which copy more slowly than any link."""
    from cluster.hardware import HardwareError, find_gpu

    if backend == "gloo":
        return None
    if len(nodes) > 1:
        return facts.link_expected
    try:
        return min(find_gpu(each.name).link_within for each in facts.node(nodes[0]).gpus)
    except HardwareError:
        return None


def ranks_of(facts: ClusterFacts) -> list[Rank]:
    """Idle GPUs that torch sees in the driver's order; without any GPU in the cluster, a CPU per node. Only nodes that
    can connect to one another take part."""
    cut_off = {name for node in facts.answered if node.unreachable for name in (*node.unreachable, node.node_id)}
    nodes = [node for node in facts.answered if node.node_id not in cut_off and node.versions.get("torch")]
    if not any(node.gpus for node in nodes):
        return [(node, None) for node in nodes]
    usable = [node for node in nodes if node.torch_gpus == len(node.gpus) and node.visible is None]
    return [(node, gpu.index) for node in usable for gpu in node.gpus if not gpu.processes and not gpu.mig]


# --- on a cluster that this machine is not part of -------------------------------------------------------------------


def server_of(cluster: str | None) -> Server | None:
    """The job server to ask; None where the cluster can be asked from here.

    That is an http RAY_ADDRESS; or the head of a cluster file that is another machine, unless this one is of a running
    cluster, or RAY_ADDRESS says which one is meant.
    """
    from cluster.connect import running_here
    from cluster.files import read_ray_file
    from cluster.ray_file import is_this_machine

    allow_token()  # before anything imports Ray
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("http://", "https://")):
        return Server(address)
    if not cluster or address or running_here() or is_this_machine(read_ray_file(cluster)[0]):
        return None
    return Server(cluster=cluster)


def result(printed: str, *, only: str = "") -> str:
    """Doctor's own words in a job's log. only: the beginning of the one line that is wanted."""
    lines = [line for line in printed.splitlines() if not line.startswith("note: ")]
    return next((line for line in reversed(lines) if line.startswith(only)), "") if only else "\n".join(lines)
