"""Sends a probe to every node at once and brings the facts together."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

from app.doctor import gpu_probe, probe, ring_probe, rings
from app.doctor.facts import ClusterFacts, GpuFacts, LinkFacts, NodeFacts

BY_VALUE = (probe, gpu_probe, ring_probe)  # nodes need not have them
ANSWER_SECONDS = 30.0
ALL_PAIRS = 16  # up to this many nodes every pair is measured, beyond it each node with two others


def look(
    *, storage: str = "", mlflow: str = "", link_expected: float | None = None, all_reduce: bool | None = None
) -> ClusterFacts:
    """Facts of the Ray cluster that this process is connected to.

    storage: folder or URL that every node should write to; mlflow: tracking URI; "" for not looked at.
    link_expected: bytes/s from node to node by the cluster's file. all_reduce: whether that is measured too, which
    takes seconds; None: where there are GPUs.
    """
    import ray

    begun = time.perf_counter()
    for module in BY_VALUE:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        probes = {node["NodeID"]: spawn(probe.Probe, node["NodeID"]) for node in nodes}
        try:
            found = _ask(nodes, probes, storage, mlflow)
            links = _links([node for node in found if not node.problem], probes)
        finally:
            for actor in probes.values():
                ray.kill(actor)
        facts = ClusterFacts(tuple(found), tuple(links), storage, mlflow, link_expected)
        if all_reduce or (all_reduce is None and any(node.gpus for node in found)):
            facts = dataclasses.replace(facts, rings=rings.measure(facts))
    finally:
        for module in BY_VALUE:
            ray.cloudpickle.unregister_pickle_by_value(module)
    return dataclasses.replace(facts, seconds=time.perf_counter() - begun)


def spawn(actor: type, node_id: str, *arguments: Any) -> Any:
    """An actor on this node, whatever else is there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # No CPU and no GPU of its own: it comes to a full node too, and sees every GPU.
    return ray.remote(actor).options(num_cpus=0, num_gpus=0, scheduling_strategy=where).remote(*arguments)


def _ask(nodes: list[dict[str, Any]], probes: dict[str, Any], storage: str, mlflow: str) -> list[NodeFacts]:
    prefix = f".trireme-doctor-{uuid.uuid4().hex[:8]}-"
    disk = _session_folder()
    calls = {
        node["NodeID"]: probes[node["NodeID"]].facts.remote(
            node["Resources"].get("GPU", 0.0), disk, mlflow, storage, prefix + node["NodeID"]
        )
        for node in nodes
    }
    answers = gather(calls)
    there = {node_id: probes[node_id] for node_id, answer in answers.items() if isinstance(answer, dict)}
    marks = gather({node_id: actor.marks.remote(storage, prefix) for node_id, actor in there.items()})
    skews = _skews(there)
    gather({node_id: actor.forget.remote(storage, prefix + node_id) for node_id, actor in there.items()})
    return [_node(node, answers[node["NodeID"]], marks.get(node["NodeID"]), skews) for node in nodes]


def _session_folder() -> str:
    import ray

    node = ray._private.worker._global_node
    return node.get_session_dir_path() if node else "/tmp/ray"


def gather(calls: dict[str, Any]) -> dict[str, Any]:
    """Answers by node; a text says why there is none."""
    import ray

    if not calls:
        return {}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_SECONDS)
    found: dict[str, Any] = {}
    for node_id, call in calls.items():
        if call not in ready:
            found[node_id] = f"nothing came back within {ANSWER_SECONDS:.0f} s"
            continue
        try:
            found[node_id] = ray.get(call)
        except Exception as error:
            found[node_id] = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
    return found


def _skews(probes: dict[str, Any]) -> dict[str, float]:
    """Seconds that each node's clock is ahead of ours; half of the call's duration is not known, and left out."""
    import ray

    found: dict[str, float] = {}
    for node_id, actor in probes.items():
        for _ in range(2):
            before = time.time()
            try:
                there = ray.get(actor.now.remote(), timeout=5)
            except Exception:
                break
            skew = max(0.0, there - time.time()) or min(0.0, there - before)
            found[node_id] = min(found.get(node_id, skew), skew, key=abs)
    return found


def _node(node: dict[str, Any], answer: Any, marks: Any, skews: dict[str, float]) -> NodeFacts:
    node_id, resources = node["NodeID"], node["Resources"]
    known: dict[str, Any] = {
        "node_id": node_id,
        "address": node["NodeManagerAddress"],
        "head": "node:__internal_head__" in resources,
        "ray_gpus": resources.get("GPU", 0.0),
    }
    if not isinstance(answer, dict):
        return NodeFacts(**known, problem=str(answer))
    fields = {field.name for field in dataclasses.fields(NodeFacts)}
    said = {key: value for key, value in answer.items() if key in fields and key != "gpus"}
    rows = tuple(_gpu(row) for row in answer["gpus"])
    seen = tuple(marks) if isinstance(marks, list) else None
    return NodeFacts(**known, **said, gpus=rows, skew=skews.get(node_id, 0.0), storage_seen=seen)


def _gpu(row: dict[str, Any]) -> GpuFacts:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return GpuFacts(**values)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of nodes that are measured together: in a round every node sends to one and hears from one."""
    shifts = range(1, count) if count <= ALL_PAIRS else (1, count // 2)
    return [[(node, (node + shift) % count) for node in range(count)] for shift in shifts]


def _links(nodes: list[NodeFacts], probes: dict[str, Any]) -> list[LinkFacts]:
    found: list[LinkFacts] = []
    ports = gather({node.node_id: probes[node.node_id].listen.remote() for node in nodes})
    nodes = [node for node in nodes if isinstance(ports[node.node_id], int)]
    for pairs in rounds(len(nodes)) if len(nodes) > 1 else ():
        calls = {}
        for source, target in pairs:
            a, b = nodes[source], nodes[target]
            calls[f"{a.node_id} {b.node_id}"] = probes[a.node_id].send.remote(b.address, ports[b.node_id])
        for key, answer in gather(calls).items():
            source_id, target_id = key.split()
            rate, problem = answer if isinstance(answer, tuple) else (None, str(answer))
            found.append(LinkFacts(source_id, target_id, rate, problem))
    several = {node.node_id: probes[node.node_id].gpu_links.remote() for node in nodes if (node.torch_gpus or 0) > 1}
    for node_id, answer in gather(several).items():
        for source, target, rate in answer if isinstance(answer, list) else ():
            found.append(LinkFacts(node_id, node_id, rate, gpus=(source, target)))
    return found
