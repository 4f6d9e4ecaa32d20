"""Gathers the facts of a cluster, from a probe on every node and all-reduces between the nodes.

All-reduce is measured within nodes, over all nodes and, if that is slow, between neighbours. To a
cluster that this machine is not part of, doctor goes as a job.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

from app.doctor import probe
from app.doctor.checks import ClusterFacts, GpuFacts, NodeFacts, RingFacts
from app.submit.client import Server, allow_token
from cluster.shape import NodeState, living_nodes

ANSWER_SECONDS = 40.0
MAX_REASON = 200  # characters of an error message
Key = TypeVar("Key", bound=Hashable)


class Rank(NamedTuple):
    """One rank of an all-reduce.

    Args:
        node: Its node.
        gpu: The driver's index of its GPU; None means the CPU.
    """

    node: NodeFacts
    gpu: int | None


def gather_facts(
    *, storage: str = "", link_expected: float | None = None, all_reduce: bool | None = None
) -> ClusterFacts:
    """The facts of the Ray cluster that this process is connected to.

    Args:
        storage: The folder or URL that every node should be able to write to; "" means that this is
            not checked.
        link_expected: Bytes/s from node to node by the cluster's file; None if that is not known.
        all_reduce: Whether all-reduce is measured, which takes seconds; None means if there are
            GPUs.
    """
    import ray

    ray.cloudpickle.register_pickle_by_value(probe)  # nodes need not have this module
    nodes = living_nodes()
    probes = {node.id: spawn(probe.Probe, node.id) for node in nodes}
    rank_actors: list[Any] = []
    try:
        facts = ClusterFacts(
            nodes=tuple(_probe_nodes(nodes, probes, storage)),
            storage=storage,
            link_expected=link_expected,
        )
        ranks = choose_ranks(facts)
        if all_reduce is None:
            all_reduce = any(node.gpus for node in facts.nodes)
        if all_reduce and len(ranks) > 1:
            for rank in ranks:
                actor = spawn(
                    probe.RingRank,
                    rank.node.node_id,
                    gpu=rank.gpu,
                    interface=rank.node.interface,
                )
                rank_actors.append(actor)
            facts = dataclasses.replace(facts, rings=measure_rings(facts, ranks, rank_actors))
    finally:
        for actor in (*probes.values(), *rank_actors):
            ray.kill(actor)
        ray.cloudpickle.unregister_pickle_by_value(probe)
    return facts


# --- actors ---


def spawn(actor_class: type, node_id: str, **arguments: Any) -> Any:
    """Start an actor on a node, even if all of the node's resources are taken.

    Args:
        actor_class: The class of the actor.
        node_id: Ray's id of the node.
        arguments: The arguments of the class.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without a CPU and a GPU of its own it runs on a full node too, and sees every GPU.
    options = {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    return ray.remote(actor_class).options(**options).remote(**arguments)


def collect(calls: Mapping[Key, Any]) -> dict[Key, Any]:
    """The results of calls of actors; for a call without one a string that says why.

    Args:
        calls: Ray's references of the calls, by any key.
    """
    import ray

    if not calls:
        return {}
    references = list(calls.values())
    ready, _ = ray.wait(references, num_returns=len(references), timeout=ANSWER_SECONDS)
    results: dict[Key, Any] = {}
    for key, reference in calls.items():
        if reference not in ready:
            results[key] = f"no answer within {ANSWER_SECONDS:.0f} s"
            continue
        try:
            results[key] = ray.get(reference)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            results[key] = lines[-1][:MAX_REASON]
    return results


# --- nodes ---


def _probe_nodes(
    nodes: list[NodeState], probes: Mapping[str, Any], storage: str
) -> list[NodeFacts]:
    """The facts of each node.

    Args:
        nodes: The nodes.
        probes: The probe on each node, by the node's id.
        storage: The storage; "" means that it is not checked.
    """
    prefix = f".trireme-doctor-{uuid.uuid4().hex[:8]}-"
    answers = collect(
        {
            node.id: probes[node.id].facts.remote(
                ray_gpus=node.total.get("GPU", 0.0),
                disk=node.session,
                storage=storage,
                mark=prefix + node.id,
            )
            for node in nodes
        }
    )
    peers: dict[str, tuple[str, int]] = {}
    for node in nodes:
        answer = answers[node.id]
        if isinstance(answer, dict):
            peers[node.id] = (node.address, answer.pop("port"))
    connections = {}
    for node_id in peers:
        others = {other: peer for other, peer in peers.items() if other != node_id}
        connections[node_id] = probes[node_id].unreachable.remote(others)
    unreachable = collect(connections)
    marks: dict[str, Any] = {}
    if storage:
        marks = collect(
            {node_id: probes[node_id].marks.remote(storage, prefix) for node_id in peers}
        )
        removals = {
            node_id: probes[node_id].remove_mark.remote(storage, prefix + node_id)
            for node_id in marks
        }
        collect(removals)
    return [
        _node_facts(
            node,
            answers[node.id],
            unreachable=unreachable.get(node.id),
            marks=marks.get(node.id),
        )
        for node in nodes
    ]


def _node_facts(node: NodeState, answer: Any, *, unreachable: Any, marks: Any) -> NodeFacts:
    """The facts of a node.

    Args:
        node: The node, as Ray sees it.
        answer: What its probe found out; a string says why it did not answer.
        unreachable: For each node that it cannot connect to, by id, why not; a string or None if it
            did not answer that.
        marks: Ids of the nodes whose marks it sees; a string or None if it did not answer that.
    """
    facts = NodeFacts(
        node_id=node.id,
        address=node.address,
        head=node.is_head,
        ray_gpus=node.total.get("GPU", 0.0),
    )
    if not isinstance(answer, dict):
        return dataclasses.replace(facts, problem=str(answer))
    gpus = tuple(GpuFacts(**row) for row in answer["gpus"])
    return dataclasses.replace(
        facts,
        **{**answer, "gpus": gpus},
        unreachable=unreachable if isinstance(unreachable, dict) else {},
        storage_seen=tuple(marks) if isinstance(marks, list) else None,
    )


# --- all-reduce ---


def measure_rings(
    facts: ClusterFacts, ranks: list[Rank], actors: list[Any]
) -> tuple[RingFacts, ...]:
    """Measure all-reduces and all-to-alls between ranks.

    Args:
        facts: The facts of the nodes.
        ranks: The ranks, node by node.
        actors: The actor of each rank.
    """
    ranks_of_node: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        ranks_of_node.setdefault(rank.node.node_id, []).append(number)
    nodes = tuple(ranks_of_node)
    backend, problem = _join(ranks, actors)
    if problem:
        return (RingFacts(nodes=nodes, ranks=len(ranks), backend="", problem=problem),)

    def measure(groups: list[list[int]]) -> list[RingFacts]:
        """Measure disjoint groups of ranks at the same time."""
        if not groups:
            return []
        rates = collect({number: actor.rate.remote(groups) for number, actor in enumerate(actors)})
        return [
            _ring_facts(
                facts,
                [ranks[number].node for number in group],
                backend,
                rates=[rates[number] for number in group],
            )
            for group in groups
        ]

    rings = measure([group for group in ranks_of_node.values() if len(group) > 1])
    if len(nodes) > 1:
        rings += measure([list(range(len(ranks)))])
    if len(nodes) > 2 and rings[-1].is_slow:
        first_ranks = [group[0] for group in ranks_of_node.values()]
        pairs = [[a, b] for a, b in zip(first_ranks, [*first_ranks[1:], first_ranks[0]])]
        for disjoint_pairs in (pairs[0:-1:2], pairs[1:-1:2], pairs[-1:]):
            rings += measure(disjoint_pairs)
    return tuple(rings)


def _join(ranks: list[Rank], actors: list[Any]) -> tuple[str, str]:
    """Form a process group of all ranks.

    Returns:
        (its backend, why it could not be formed or "")
    """
    store = collect({0: actors[0].open.remote(ranks[0].node.address)})[0]
    if isinstance(store, str):
        return "", store
    answers = collect(
        {
            number: actor.join.remote(rank=number, ranks=len(actors), store=store)
            for number, actor in enumerate(actors)
        }
    )
    for answer in answers.values():
        if answer not in probe.RING_BYTES:
            return "", answer
    return answers[0], ""


def _ring_facts(
    facts: ClusterFacts, members: list[NodeFacts], backend: str, *, rates: list[Any]
) -> RingFacts:
    """One all-reduce, whose rate is that of its slowest rank.

    Args:
        facts: The facts of the nodes.
        members: The node of each rank.
        backend: nccl or gloo.
        rates: For each rank its rates of an all-reduce and an all-to-all; a string says why it has
            none.
    """
    nodes = tuple(dict.fromkeys(node.node_id for node in members))
    problems = [str(rate) for rate in rates if not isinstance(rate, tuple)]
    rate = None
    exchange = None
    if not problems:
        rate = min(reduce_rate for reduce_rate, _ in rates)
        exchange = min(exchange_rate for _, exchange_rate in rates)
    return RingFacts(
        nodes=nodes,
        ranks=len(members),
        backend=backend,
        rate=rate,
        expected=expected_rate(facts, nodes, backend),
        problem=problems[0] if problems else "",
        exchange=exchange,
    )


def expected_rate(facts: ClusterFacts, nodes: tuple[str, ...], backend: str) -> float | None:
    """Bytes/s that should leave each rank of an all-reduce.

    Within a node that is by the catalogue of GPUs, across nodes by the cluster's file.

    Args:
        facts: The facts of the nodes.
        nodes: The ids of the nodes that take part.
        backend: nccl or gloo.

    Returns:
        The rate; None if it is not known, as on CPUs, which copy more slowly than any link.
    """
    from cluster.hardware import HardwareError, find_gpu

    if backend == "gloo":
        return None
    if len(nodes) > 1:
        return facts.link_expected
    try:
        return min(find_gpu(gpu_facts.name).link_within for gpu_facts in facts.node(nodes[0]).gpus)
    except HardwareError:
        return None


def choose_ranks(facts: ClusterFacts) -> list[Rank]:
    """The ranks of the all-reduces that are measured.

    They are the idle GPUs that torch sees in the driver's order; without any GPU in the cluster,
    one CPU for each node. Only nodes that can connect to one another take part.
    """
    cut_off: set[str] = set()
    for node in facts.answered:
        if node.unreachable:
            cut_off |= {node.node_id, *node.unreachable}
    nodes = [
        node
        for node in facts.answered
        if node.node_id not in cut_off and node.versions.get("torch")
    ]
    if not any(node.gpus for node in nodes):
        return [Rank(node, None) for node in nodes]
    return [
        Rank(node, gpu.index)
        for node in nodes
        if node.torch_gpus == len(node.gpus) and node.visible is None
        for gpu in node.gpus
        if not gpu.processes and not gpu.mig
    ]


# --- on a cluster that this machine is not part of ---


def remote_server(cluster: str | None) -> Server | None:
    """The job server of the cluster to look at; None if this machine can look at it itself.

    It is an http RAY_ADDRESS, or the head of a cluster file if that is another machine. The cluster
    file does not count if this machine is part of a running cluster, or if RAY_ADDRESS names one.

    Args:
        cluster: The cluster's file.
    """
    from cluster.connect import running_here
    from cluster.files import read_ray_file
    from cluster.ray_file import is_this_machine

    allow_token()  # before anything imports Ray
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("http://", "https://")):
        return Server(address)
    if not cluster or address or running_here():
        return None
    data, _ = read_ray_file(cluster)
    return None if is_this_machine(data) else Server(cluster=cluster)


def answer_in_log(log: str, *, prefix: str = "") -> str:
    """What doctor has printed into a job's log, without notes.

    Args:
        log: The log.
        prefix: Return only the last line that begins with this; "" means all lines.
    """
    lines = [line for line in log.splitlines() if not line.startswith("note: ")]
    if not prefix:
        return "\n".join(lines)
    return next((line for line in reversed(lines) if line.startswith(prefix)), "")
