"""What a plan is for: a cluster's file, GPUs that exist only in thought, the connected cluster, this machine."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from app.errors import UserError
from app.planner.calibration import remembered
from app.planner.evaluate import Machine
from app.planner.rates import rates
from cluster.hardware import all_instances, cheapest
from cluster.hardware import gpu as known_gpu
from cluster.shape import ClusterShape, NodeType, link

UNKNOWN_NETWORK = 100e9 / 8
"""Bytes/s between nodes where nobody has said: 100 Gbit/s, common for GPU machines of clouds."""
HERE = "this machine's CPUs"
AT_ONCE = 4
"""Processes per core of this machine that a probe starts at most."""


@dataclass(frozen=True)
class Asked:
    """The command line's words for it."""

    cluster: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    per_node: int | None = None
    interconnect: str | None = None


def machine_of(shape: ClusterShape, world: int | None) -> Machine:
    """The cluster's GPUs as one kind: the GPU, and number of it to a node, that it has most of, its head's included.

    Raises:
        UserError: no GPUs; or fewer than `world`.
    """
    kinds: dict[tuple[str, int], list[NodeType]] = defaultdict(list)
    for node in shape.types:
        if node.gpus and node.max_nodes:
            kinds[node.gpu, node.gpus].append(node)
    if not kinds:
        raise UserError(
            f"the cluster {shape.name} has no GPUs: plan for GPUs that you could have with --gpus 8 --gpu a100-80gb, "
            "or for this machine's CPUs with --gpu cpu --gpus 2"
        )
    alike = max(kinds.values(), key=lambda nodes: _gpus(shape, nodes))
    node, most = alike[0], _gpus(shape, alike)
    if not node.gpu:
        raise UserError(
            f"the node type {node.name} of {shape.name} has {node.gpus} GPUs, but which is not known: say it with --gpu"
        )
    if world is not None and world > most:
        raise UserError(f"workers is {world}, but the cluster {shape.name} has at most {most} GPUs of type {node.gpu}")
    known = [n.link_across for n in alike if n.link_across is not None]
    return _machine(replace(node, link_across=min(known, default=None)), world or most, shape.name)


def _gpus(shape: ClusterShape, alike: list[NodeType]) -> int:
    """GPUs that so many alike node types come to, within the cluster's limit of nodes beside the head."""
    workers = sum(node.max_nodes for node in alike if node is not shape.head)
    if shape.max_workers is not None:
        workers = min(workers, shape.max_workers)
    return alike[0].gpus * (workers + sum(node.max_nodes for node in alike if node is shape.head))


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
    values: dict[str, Any] = dict(remembered(node.gpu))
    if node.link_within and "link_within" not in values:
        values["link_within"] = node.link_within
    if "link_across" in values and node.link_across is None:  # measured between nodes
        across, assumed = values["link_across"], ""
    if node.gpu == "cpu" and node.memory_bytes:
        values["memory_bytes"] = int(node.memory_bytes / node.gpus)
    return Machine(
        rates(node.gpu, values), world, node.gpus, across, price / node.gpus if price else None, name, assumed
    )


def _network_of(node: NodeType) -> float | None:
    found = all_instances().get(node.name)
    return found.link_across if found else None


def cpus(workers: int, per_node: int | None = None) -> Machine:
    """This machine's CPUs, one core each while there are enough; per_node: on several machines like it."""
    import psutil

    memory = psutil.virtual_memory().total
    node = NodeType("cpu", per_node or workers, "cpu", 1.0, memory, None, None, None, False, 1, 1)
    return _machine(node, workers, HERE)


def cpus_of(shape: ClusterShape, world: int | None, asked: bool = False) -> Machine:
    """A cluster's CPUs, one worker to each; asked: it is CPUs that are wanted, whatever GPUs there are.

    Raises:
        UserError: none of its nodes has a CPU.
    """
    nodes = [node for node in shape.types if node.cpus >= 1 and node.max_nodes]
    if not nodes:
        raise UserError(f"the cluster {shape.name} has neither GPUs nor CPUs: add a node to it")
    node = max(nodes, key=lambda n: n.cpus * n.max_nodes)
    total = int(sum(n.cpus * n.max_nodes for n in nodes))
    workers = world or 2  # as `train` does with workers=auto
    each = min(workers, int(node.cpus)) if sum(n.max_nodes for n in nodes) > 1 else workers
    found = _machine(replace(node, gpus=each, gpu="cpu", price_per_hour=None), workers, shape.name)
    said = "" if asked else f"this cluster has no GPUs: the plan is for its {total} CPUs"
    return replace(found, assumed="; ".join(filter(None, [said, found.assumed])))


def find(asked: Asked, workers: str) -> Machine:
    """The machine that a plan is for.

    Raises:
        UserError, ClusterError, HardwareError: one sentence.
    """
    from cluster.shape import cluster_file, read_cluster

    if asked.gpus is not None and asked.gpus < 1:
        raise UserError(f"--gpus is {asked.gpus}: write at least 1")
    if asked.per_node is not None and asked.per_node < 1:
        raise UserError(f"--gpus-per-node is {asked.per_node}: write at least 1")
    world = asked.gpus or (int(workers) if workers.isdigit() else None)
    if asked.cluster is None and (asked.gpus is not None or asked.gpu is not None):
        return _in_thought(asked, world or 1)
    file = cluster_file(asked.cluster)
    if file:
        return _of_cluster(read_cluster(file), asked, world)
    shape = connected_shape()
    if shape is not None:
        return _of_cluster(shape, asked, world)
    return this_machine(world, asked)


def _in_thought(asked: Asked, gpus: int) -> Machine:
    from cluster.shape import of_gpus

    name = asked.gpu or _local_gpu()
    if name == "cpu":
        return _local_cpus(gpus, asked)
    return machine_of(of_gpus(gpus, name, asked.per_node or min(gpus, 8), asked.interconnect), gpus)


def _of_cluster(shape: ClusterShape, asked: Asked, world: int | None) -> Machine:
    """A file's or a connected cluster, with what the command line says of it beside."""
    across = link(asked.interconnect)
    if across is not None:
        workers = tuple(replace(node, link_across=across) for node in shape.workers)
        shape = replace(shape, head=replace(shape.head, link_across=across), workers=workers)
    if asked.gpu == "cpu" or (not shape.max_gpus and not asked.cluster and asked.gpu is None):
        found = cpus_of(shape, world, asked=asked.gpu == "cpu")
    else:
        found = machine_of(_with_gpu(shape, known_gpu(asked.gpu).name) if asked.gpu else shape, world)
    if asked.per_node is not None and asked.per_node != found.per_node:
        raise UserError(
            f"--gpus-per-node is {asked.per_node}, but the nodes of {shape.name} have {found.per_node}: leave it out"
        )
    return found


def _with_gpu(shape: ClusterShape, name: str) -> ClusterShape:
    """The cluster's nodes of that GPU, and those whose GPU nobody has said, which are taken to have it.

    Raises:
        UserError: it has others.
    """

    def of(node: NodeType) -> NodeType:
        if not node.gpus or node.gpu == name:
            return node
        if node.gpu:
            return replace(node, gpus=0, gpu="")
        return replace(node, gpu=name, link_within=node.link_within or known_gpu(name).link_within)

    chosen = replace(shape, head=of(shape.head), workers=tuple(of(node) for node in shape.workers))
    if shape.max_gpus and not chosen.max_gpus:
        has = ", ".join(sorted({node.gpu for node in shape.types if node.gpus}))
        raise UserError(
            f"--gpu is {name}, but the cluster {shape.name} has {has}: leave --gpu out, or write --gpus instead of "
            "--cluster to plan for GPUs that need not exist"
        )
    return chosen


def connected_shape() -> ClusterShape | None:
    """The Ray cluster that `train` would use: RAY_ADDRESS's, else the one running here; None if there is none.

    Raises:
        ClusterError: there is an address, and nobody answers there.
    """
    from cluster.connect import address, connect
    from cluster.shape import connected

    ray = sys.modules.get("ray")
    if not (ray is not None and ray.is_initialized()) and not address():
        return None
    connect()
    return connected()


def running(world: int, per_node: int | None = None) -> Machine:
    """What a run's workers are on: the Ray cluster that this process is connected to, else machines like this one.

    per_node: workers of one node, where the one who asks knows."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return this_machine(world, Asked(per_node=per_node))
    from cluster.shape import connected

    shape = connected()
    return machine_of(shape, world) if shape.max_gpus else cpus_of(shape, world)


def this_machine(world: int | None, asked: Asked | None = None) -> Machine:
    """This machine's GPUs, else its CPUs."""
    import torch

    if torch.cuda.is_available():
        from cluster.shape import of_gpus

        count = world or torch.cuda.device_count()
        asked = asked or Asked()
        per_node = asked.per_node or torch.cuda.device_count()
        return machine_of(of_gpus(count, _local_gpu(), per_node, asked.interconnect), count)
    if asked is not None and asked.interconnect is None and asked.per_node and world and asked.per_node < world:
        return cpus(world, asked.per_node)  # torchrun on several nodes
    return _local_cpus(world or 2, replace(asked, per_node=None) if asked else None)


def _local_cpus(workers: int, asked: Asked | None) -> Machine:
    if asked is not None and (asked.interconnect is not None or asked.per_node is not None):
        option = "--interconnect" if asked.interconnect is not None else "--gpus-per-node"
        raise UserError(f"{option} says what several nodes have, but the plan is for this machine's CPUs: add --gpu")
    return cpus(workers)


def refuse_elsewhere(machine: Machine, option: str) -> None:
    """Raises UserError unless this machine has the devices that a plan is for: only those can be tried."""
    import torch

    world, name = machine.world, machine.device.gpu.name
    if name == "cpu":
        most = AT_ONCE * (os.cpu_count() or 1)
        if machine.name != HERE and not is_alone():
            raise UserError(f"{option} tries layouts on this machine, and the plan is for the cluster {machine.name}")
        if world > most:
            raise UserError(f"{option} starts one process per worker, and {world} are too many here: at most {most}")
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = known_gpu(_local_gpu()).name if count else "no GPU"
    if here != name or world > count:
        has = f"{count} × {here}" if count else "no GPU"
        raise UserError(
            f"{option} tries layouts on this machine, which has {has}, and the plan is for {world} × {name}: leave "
            f"{option} out, or run it there"
        )


def is_alone() -> bool:
    """Whether the Ray cluster that this process is connected to is this machine and no other."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    alive = [node for node in ray.nodes() if node["Alive"]]
    return len(alive) == 1 and alive[0]["NodeManagerAddress"] == ray.util.get_node_ip_address()


def _local_gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
