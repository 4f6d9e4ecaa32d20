"""What a plan is for: a cluster's file, GPUs that need not exist, the connected Ray cluster, or this machine."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from app.errors import UserError
from app.planner.device import Device, device
from app.planner.history import remembered
from cluster.hardware import all_instances, cheapest
from cluster.hardware import gpu as known_gpu
from cluster.shape import ClusterShape, NodeType, cluster_file, connected, link, of_gpus, read_cluster

UNKNOWN_NETWORK = 100e9 / 8
"""Bytes/s between nodes where it is not known: 100 Gbit/s, common for GPU machines of clouds."""
HERE = "this machine's CPUs"


@dataclass(frozen=True)
class Machine:
    """Where a plan is for."""

    device: Device
    world: int
    per_node: int  # devices of a node
    across: float  # bytes/s of a node to others
    price_per_hour: float | None = None  # of one device
    name: str = ""
    assumed: str = ""  # what was not known and is assumed, in words
    slowdown: float = 1.0  # of each worker, because workers share processors (CPUs)

    @property
    def capacity(self) -> float:
        """Bytes that tensors may take."""
        return self.device.gpu.memory_bytes - self.device.context


@dataclass(frozen=True)
class Asked:
    """What the command line says of it."""

    cluster: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    per_node: int | None = None
    interconnect: str | None = None


def find(asked: Asked, workers: str) -> Machine:
    """The machine that a plan is for. workers: of the configuration, a number or auto.

    Raises:
        UserError, ClusterError, HardwareError: one sentence.
    """
    for option, value in (("--gpus", asked.gpus), ("--gpus-per-node", asked.per_node)):
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}: write at least 1")
    world = asked.gpus or (int(workers) if workers.isdigit() else None)
    if asked.cluster is None and (asked.gpus is not None or asked.gpu is not None):
        return _devices(asked.gpu or _local_gpu(), world or 1, asked)
    file = cluster_file(asked.cluster)
    shape = read_cluster(file) if file else connected_shape()
    if shape is None:
        return _devices(_local_gpu(), world, asked)
    found = _of_cluster(shape, asked, world)
    if asked.per_node not in (None, found.per_node):
        raise UserError(
            f"--gpus-per-node is {asked.per_node}, but the nodes of {shape.name} have {found.per_node}: leave it out"
        )
    return found


def running(world: int, per_node: int | None = None) -> Machine:
    """What a run's workers are on: the Ray cluster that this process is connected to, else machines like this one.

    per_node: workers of one node, where the caller knows."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return _of_cluster(connected(), Asked(), world)
    gpu = _local_gpu()
    return cpus(world, per_node) if gpu == "cpu" else _devices(gpu, world, Asked(per_node=per_node))


def _devices(name: str, world: int | None, asked: Asked) -> Machine:
    """So many devices of that name; None: all of this machine."""
    import torch

    if name == "cpu":
        if asked.interconnect is not None or asked.per_node is not None:
            option = "--interconnect" if asked.interconnect is not None else "--gpus-per-node"
            raise UserError(f"{option} is for several nodes, but the plan is for this machine's CPUs: add --gpu")
        return cpus(world or 2)
    count = torch.cuda.device_count()
    world = world or count
    per_node = asked.per_node or min(world, 8 if asked.gpus or asked.gpu else count)
    return of_shape(of_gpus(world, name, per_node, asked.interconnect), world)


def cpus(workers: int, per_node: int | None = None) -> Machine:
    """This machine's CPUs, one core each while there are enough; per_node: on several machines like it."""
    import psutil

    here = min(per_node or workers, workers)
    node = NodeType("cpu", here, "cpu", 1.0, psutil.virtual_memory().total, None, None, None, False, 1, 1)
    return replace(_of_node(node, workers, HERE), slowdown=max(1.0, here / (os.cpu_count() or 1)))


def of_shape(shape: ClusterShape, world: int | None) -> Machine:
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
    most, alike = max(((_count(shape, nodes), nodes) for nodes in kinds.values()), key=lambda pair: pair[0])
    node = alike[0]
    if not node.gpu:
        raise UserError(
            f"the node type {node.name} of {shape.name} has {node.gpus} GPUs of an unknown kind: write it with --gpu"
        )
    if world is not None and world > most:
        raise UserError(f"workers is {world}, but the cluster {shape.name} has at most {most} GPUs of type {node.gpu}")
    across = min((n.link_across for n in alike if n.link_across is not None), default=None)
    return _of_node(replace(node, link_across=across), world or most, shape.name)


def _count(shape: ClusterShape, alike: list[NodeType]) -> int:
    """GPUs of alike node types, within the cluster's limit of nodes beside the head."""
    workers = sum(node.max_nodes for node in alike if node is not shape.head)
    if shape.max_workers is not None:
        workers = min(workers, shape.max_workers)
    return alike[0].gpus * (workers + sum(node.max_nodes for node in alike if node is shape.head))


def _of_cluster(shape: ClusterShape, asked: Asked, world: int | None) -> Machine:
    """A file's or a connected cluster, with what the command line says of it beside."""
    if asked.gpu == "cpu" or (not shape.max_gpus and not asked.cluster and asked.gpu is None):
        node = max(shape.types, key=lambda n: n.cpus * n.max_nodes)
        found = cpus(world or 2, max(1, int(node.cpus)))  # two, as `train` does with workers=auto
        said = "" if asked.gpu else "this cluster has no GPUs: the plan is for CPUs like this machine's"
        return replace(found, name=shape.name, assumed="; ".join(filter(None, [said, found.assumed])))
    name, across = known_gpu(asked.gpu).name if asked.gpu else None, link(asked.interconnect)

    def of(node: NodeType) -> NodeType:
        """With what was asked; without its GPUs, if they are others."""
        if name and node.gpu not in ("", name):
            node = replace(node, gpus=0, gpu="")
        elif name:
            node = replace(node, gpu=name, link_within=node.link_within or known_gpu(name).link_within)
        return node if across is None else replace(node, link_across=across)

    chosen = replace(shape, head=of(shape.head), workers=tuple(of(node) for node in shape.workers))
    if shape.max_gpus and not chosen.max_gpus:
        has = ", ".join(sorted({node.gpu for node in shape.types if node.gpus}))
        raise UserError(
            f"--gpu is {name}, but the cluster {shape.name} has {has}: leave --gpu out, or write --gpus instead of "
            "--cluster to plan for GPUs that need not exist"
        )
    return of_shape(chosen, world)


def _of_node(node: NodeType, world: int, name: str) -> Machine:
    values: dict[str, Any] = dict(remembered(node.gpu))
    instance, price = all_instances().get(node.name), node.price_per_hour
    across = node.link_across or values.get("link_across") or (instance.link_across if instance else None)
    if price is None and node.gpu != "cpu" and (offer := cheapest(node.gpu)):
        price = offer.price_per_gpu_hour * node.gpus
    if node.link_within:
        values.setdefault("link_within", node.link_within)
    if node.gpu == "cpu":
        values["memory_bytes"] = int(node.memory_bytes / node.gpus)
    unknown = "the network between nodes is not known and taken to be 100 Gbit/s (--interconnect says it)"
    return Machine(
        device(node.gpu, values),
        world,
        node.gpus,
        across or UNKNOWN_NETWORK,
        price / node.gpus if price else None,
        name,
        unknown if across is None and world > node.gpus else "",
    )


def connected_shape() -> ClusterShape | None:
    """The Ray cluster that `train` would use: RAY_ADDRESS's, else the one running here; None if there is none.

    Raises:
        ClusterError: there is an address, and no answer from it.
    """
    from cluster.connect import address, connect

    ray = sys.modules.get("ray")
    if not (ray is not None and ray.is_initialized()) and not address():
        return None
    connect()
    return connected()


def is_alone() -> bool:
    """Whether the Ray cluster that this process is connected to is this machine and no other."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    alive = [node for node in ray.nodes() if node["Alive"]]
    return len(alive) == 1 and alive[0]["NodeManagerAddress"] == ray.util.get_node_ip_address()


def require_here(machine: Machine, option: str) -> None:
    """Raises UserError unless this machine has the devices that a plan is for."""
    import torch

    name, count = machine.device.gpu.name, torch.cuda.device_count()
    has_gpus = machine.world <= count and known_gpu(_local_gpu()).name == name
    if not (has_gpus or (machine.device.is_cpu and (machine.name == HERE or is_alone()))):
        raise UserError(
            f"{option} runs layouts on this machine, which has {count} GPUs, but the plan is for {machine.world} × "
            f"{name} ({machine.name}): leave {option} out, or run it there"
        )


def _local_gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
