"""`trireme calibrate` on a Ray cluster: one node of every kind of device, and the link between two nodes of it."""

from __future__ import annotations

import os
import socket
from typing import Any

from app.errors import RunFailed
from app.planner.calibrate import calibrate

PATIENCE = 240.0
"""Seconds for all of it, waiting for devices that others use included."""


def calibrate_cluster(shapes: list[list[float]], workers: int | None = None) -> list[dict[str, Any]]:
    """What was found of each kind of device in the cluster that this process is connected to.

    workers: of one node; else all its GPUs, or four CPUs. Kinds are measured at the same time.
    Raises:
        RunFailed: a node failed, or its devices were not free.
    """
    import ray

    kinds = kinds_of([node for node in ray.nodes() if node["Alive"]])
    started = {kind: _on_a_node(nodes[0], shapes, workers) for kind, nodes in kinds.items()}
    found = {kind: _got(reference) for kind, reference in started.items()}
    for kind, nodes in kinds.items():
        if len(nodes) > 1:
            found[kind] |= _between(nodes[0], nodes[1])
    return list(found.values())


def kinds_of(nodes: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Nodes by kind of device, (accelerator, GPUs); those with CPUs alone only where no node has a GPU."""
    kinds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for node in nodes:
        resources = node["Resources"]
        kind = next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), "")
        if resources.get("GPU", 0) >= 1:
            kinds.setdefault((kind, int(resources["GPU"])), []).append(node)
        elif resources.get("CPU", 0) >= 1:
            kinds.setdefault(("cpu", 0), []).append(node)
    with_gpus = {kind: own for kind, own in kinds.items() if kind[1]}
    largest: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for kind, own in sorted(with_gpus.items(), key=lambda pair: -pair[0][1]):  # of one GPU the largest nodes are enough
        if not any(kind[0] and kind[0] == other[0] for other in largest):
            largest[kind] = own
    return largest or kinds


def _demand(node: dict[str, Any], count: int) -> dict[str, Any]:
    """Ray options for `count` of a node's devices, there and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    has_gpus = node["Resources"].get("GPU", 0) >= 1
    return {
        "num_gpus" if has_gpus else "num_cpus": count,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        "max_retries": 0,
    } | ({"num_cpus": 0} if has_gpus else {})


def _on_a_node(node: dict[str, Any], shapes: list[list[float]], workers: int | None) -> Any:
    import ray

    gpus, cpus = int(node["Resources"].get("GPU", 0)), int(node["Resources"].get("CPU", 0))
    count = min(workers or gpus, gpus) if gpus else min(workers or 4, cpus)
    return ray.remote(calibrate).options(**_demand(node, count)).remote(count, shapes)


def _between(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Bytes/s and seconds per hop between two nodes, with one process on each."""
    import ray

    address = f"{one['NodeManagerAddress']}:{_got(ray.remote(_free_port).options(**_demand(one, 1)).remote())}"
    started = [
        ray.remote(_link).options(**_demand(node, 1)).remote(rank, address) for rank, node in enumerate((one, other))
    ]
    found, _ = (_got(reference) for reference in started)
    return {"link_across": found["bandwidth"], "latency_across": found["latency"], "across": 1.0}


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("", 0))
        return int(opened.getsockname()[1])


def _link(rank: int, address: str) -> dict[str, float]:
    """On each of two nodes."""
    import torch
    import torch.distributed as dist

    from app.planner.gauge import links, timer

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    try:
        return links(device, dist.group.WORLD, 2, timer(device, dist.group.WORLD))
    finally:
        dist.destroy_process_group()


def _got(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=PATIENCE)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reference, force=True)
        raise RunFailed(
            f"calibration waited {PATIENCE:.0f} s for a node of the cluster: its devices are in use, or it hangs"
        ) from None
    except ray.exceptions.RayTaskError as error:
        last = str(error.cause).strip().splitlines() or [type(error.cause).__name__]
        raise RunFailed(f"calibration failed on a node of the cluster: {last[0]}") from None
    except ray.exceptions.RayError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunFailed(f"calibration lost a node of the cluster: {first}") from None
