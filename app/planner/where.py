"""What a plan is for: a cluster's file, GPUs that exist only in thought, the connected cluster, this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from app.errors import UserError
from app.planner.calibration import remembered
from app.planner.evaluate import Machine
from app.planner.rates import rates
from cluster.hardware import all_instances, cheapest
from cluster.shape import ClusterShape, NodeType

UNKNOWN_NETWORK = 100e9 / 8
"""Bytes/s between nodes where nobody has said: 100 Gbit/s, common for GPU machines of clouds."""


@dataclass(frozen=True)
class Asked:
    """The command line's words for it."""

    cluster: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    per_node: int | None = None
    interconnect: str | None = None


def machine_of(shape: ClusterShape, world: int | None) -> Machine:
    """The cluster's GPUs as one kind: that of the worker type with most of them.

    Raises:
        UserError: no GPUs; or fewer than `world`.
    """
    with_gpus = [node for node in shape.types if node.gpus and node.max_nodes]
    if not with_gpus:
        raise UserError(
            f"the cluster {shape.name} has no GPUs: plan for GPUs that you could have with --gpus 8 --gpu a100-80gb, "
            "or for this machine's CPUs with --gpu cpu --gpus 2"
        )
    node = max(with_gpus, key=lambda n: n.gpus * n.max_nodes)
    if not node.gpu:
        raise UserError(
            f"the node type {node.name} of {shape.name} has {node.gpus} GPUs, but which is not known: say it with --gpu"
        )
    most = min(shape.max_gpus, node.gpus * node.max_nodes) or node.gpus
    if world is not None and world > most:
        raise UserError(f"workers is {world}, but the cluster {shape.name} has at most {most} GPUs of type {node.gpu}")
    return _machine(node, world or most, shape.name)


def _machine(node: NodeType, world: int, name: str) -> Machine:
    across, assumed = node.link_across, ""
    if across is None:
        across = _network_of(node)
        if across is None:
            across = UNKNOWN_NETWORK
            if world > node.gpus:
                assumed = "the network between nodes is not known and taken to be 100 Gbit/s (--interconnect says it)"
    price = node.price_per_hour
    if price is None:
        offer = cheapest(node.gpu) if node.gpu != "cpu" else None
        price = offer.price_per_gpu_hour * node.gpus if offer else None
    measured = remembered(node.gpu)
    values: dict[str, Any] = dict(measured)
    if node.link_within and "link_within" not in values:
        values["link_within"] = node.link_within
    if node.gpu == "cpu" and node.memory_bytes:
        values["memory_bytes"] = int(node.memory_bytes / node.gpus)
    return Machine(
        rates(node.gpu, values), world, node.gpus, across, price / node.gpus if price else None, name, assumed
    )


def _network_of(node: NodeType) -> float | None:
    found = all_instances().get(node.name)
    return found.link_across if found else None


def cpus(workers: int) -> Machine:
    """This machine's CPUs, one core each while there are enough."""
    import psutil

    memory = psutil.virtual_memory().total
    node = NodeType("cpu", workers, "cpu", 1.0, memory, None, None, None, False, 1, 1)
    return _machine(node, workers, "this machine's CPUs")


def find(asked: Asked, workers: str) -> Machine:
    """The machine that a plan is for.

    Raises:
        UserError, ClusterError, HardwareError: one sentence.
    """
    from cluster.shape import cluster_file, of_gpus, read_cluster

    world = int(workers) if workers.isdigit() else None
    if asked.gpus is not None or asked.gpu is not None:
        gpus = (world or 1) if asked.gpus is None else asked.gpus
        name = asked.gpu or _local_gpu()
        if gpus < 1:
            raise UserError(f"--gpus is {gpus}: write at least 1")
        if name == "cpu":
            return cpus(gpus)
        return machine_of(of_gpus(gpus, name, asked.per_node or min(gpus, 8), asked.interconnect), gpus)
    file = cluster_file(asked.cluster)
    if file:
        return machine_of(read_cluster(file), world)
    if os.environ.get("RAY_ADDRESS"):
        import ray

        from cluster.shape import connected

        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        shape = connected()
        return machine_of(shape, world) if shape.max_gpus else cpus(world or 2)
    return this_machine(world)


def running(world: int) -> Machine:
    """What a run's workers are on: the Ray cluster that this process is connected to, else this machine."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return this_machine(world)
    from cluster.shape import connected

    shape = connected()
    return machine_of(shape, world) if shape.max_gpus else cpus(world)


def this_machine(world: int | None) -> Machine:
    """This machine's GPUs, else its CPUs."""
    import torch

    if torch.cuda.is_available():
        from cluster.shape import of_gpus

        count = world or torch.cuda.device_count()
        return machine_of(of_gpus(count, _local_gpu(), torch.cuda.device_count()), count)
    return cpus(world or 2)


def _local_gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
