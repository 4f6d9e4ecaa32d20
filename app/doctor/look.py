"""Sends a probe to every node at once and brings the facts together."""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from typing import Any

from app.doctor import probe, rings
from app.doctor.facts import ClusterFacts, GpuFacts, NodeFacts

BY_VALUE = (probe, rings)  # the modules of the actors: nodes need not have them
ANSWER_SECONDS = 40.0


def look(*, storage: str = "", link_expected: float | None = None, all_reduce: bool | None = None) -> ClusterFacts:
    """Facts of the Ray cluster that this process is connected to.

    storage: folder or URL that every node should be able to write to; "": not checked. link_expected: bytes/s from
    node to node by the cluster's file. all_reduce: whether that is measured, which takes seconds; None: where there
    are GPUs.
    """
    import ray

    begun = time.perf_counter()
    for module in BY_VALUE:
        ray.cloudpickle.register_pickle_by_value(module)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    probes = {node["NodeID"]: spawn(probe.Probe, node["NodeID"]) for node in nodes}
    ranks: list[Any] = []
    try:
        facts = ClusterFacts(tuple(_ask(nodes, probes, storage)), (), storage, link_expected)
        chosen = rings.ranks_of(facts)
        if len(chosen) > 1 and (all_reduce or (all_reduce is None and any(node.gpus for node in facts.nodes))):
            ranks += [spawn(rings.RingRank, node.node_id, gpu, node.interface) for node, gpu in chosen]
            facts = dataclasses.replace(facts, rings=rings.measure(facts, chosen, ranks, gather))
    finally:
        for actor in (*probes.values(), *ranks):
            ray.kill(actor)
        for module in BY_VALUE:
            ray.cloudpickle.unregister_pickle_by_value(module)
    return dataclasses.replace(facts, seconds=time.perf_counter() - begun)


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


def _ask(nodes: list[dict[str, Any]], probes: dict[str, Any], storage: str) -> list[NodeFacts]:
    prefix = f".trireme-doctor-{uuid.uuid4().hex[:8]}-"
    calls = {}
    for node in nodes:
        node_id, resources = node["NodeID"], node["Resources"]
        session = os.path.dirname(os.path.dirname(node["ObjectStoreSocketName"]))
        calls[node_id] = probes[node_id].facts.remote(resources.get("GPU", 0.0), session, storage, prefix + node_id)
    answers = gather(calls)
    there = {node_id: probes[node_id] for node_id, answer in answers.items() if isinstance(answer, dict)}
    ports = gather({node_id: actor.listen.remote() for node_id, actor in there.items()})
    peers = {n["NodeID"]: (n["NodeManagerAddress"], ports[n["NodeID"]]) for n in nodes if n["NodeID"] in there}
    others = {node_id: {name: peer for name, peer in peers.items() if name != node_id} for node_id in there}
    cut = gather({node_id: actor.unreachable.remote(others[node_id]) for node_id, actor in there.items()})
    marks = gather({node_id: actor.marks.remote(storage, prefix) for node_id, actor in there.items() if storage})
    gather({node_id: actor.forget.remote(storage, prefix + node_id) for node_id, actor in there.items() if storage})
    return [_node(node, *(found.get(node["NodeID"]) for found in (answers, cut, marks))) for node in nodes]


def _node(node: dict[str, Any], answer: Any, cut: Any, marks: Any) -> NodeFacts:
    resources = node["Resources"]
    known: dict[str, Any] = {
        "node_id": node["NodeID"],
        "address": node["NodeManagerAddress"],
        "head": "node:__internal_head__" in resources,
        "ray_gpus": resources.get("GPU", 0.0),
    }
    if not isinstance(answer, dict):
        return NodeFacts(**known, problem=str(answer))
    seen = tuple(marks) if isinstance(marks, list) else None
    answer["gpus"] = tuple(GpuFacts(**row) for row in answer["gpus"])
    return NodeFacts(**known | answer, unreachable=cut if isinstance(cut, dict) else {}, storage_seen=seen)
