"""What a plan is for: a cluster's file, GPUs that need not exist, the connected Ray cluster, or this machine."""

from __future__ import annotations

import functools
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from app import names
from app.errors import UserError
from app.planner.device import Device, assumed, device, remembered
from cluster.files import cluster_file, read_cluster
from cluster.hardware import all_instances, cheapest, find_gpu
from cluster.shape import ClusterShape, NodeType, parse_link_speed, shape_of_gpus

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
    host_bytes: float | None = None  # memory of a node's host
    assumed: str = ""  # what was not known and is assumed, a sentence

    @functools.cached_property
    def links(self) -> Links:
        return Links(self)


class Route(NamedTuple):
    """What a group of ranks waits for."""

    per_byte: float  # seconds
    hops: float  # seconds of all hops of a ring
    tree: float  # seconds of all hops of a tree


class Links:
    """What connects a machine's devices."""

    def __init__(self, machine: Machine) -> None:
        device = machine.device
        self.within = device.gpu.link_within * device.within  # bytes/s per device
        self.across = machine.across * device.across  # bytes/s per node
        self.per_node = min(machine.per_node, machine.world)  # devices of a node that are used
        self.hop_within, self.hop_across = device.latency_within, device.latency_across  # seconds
        self.route = functools.cache(self._route)

    def gather(self, size: float, ways: int, stride: int) -> float:
        """An all-gather to, or reduce-scatter from, `size` bytes over `ways` ranks that are `stride` apart."""
        route = self.route(ways, stride)
        return size * route.per_byte + route.hops

    def reduce(self, size: float, ways: int, stride: int) -> float:
        """An all-reduce of `size` bytes: a reduce-scatter and an all-gather; hops in a tree."""
        route = self.route(ways, stride)
        return 2 * (size * route.per_byte + route.tree)

    def send(self, size: float, stride: int) -> float:
        """From one stage to the next, `stride` ranks away; all of a node's devices send at once."""
        if stride >= self.per_node:
            return size * self.per_node / self.across + self.hop_across
        return size / self.within + self.hop_within

    def _route(self, ways: int, stride: int) -> Route:
        members = min(max(self.per_node // stride, 1), ways)  # per node
        members = members if ways % members == 0 else 1
        nodes = ways // members
        inside = (ways - 1) / ways / self.within
        outside = (nodes - 1) / nodes * max(1.0, self.per_node / members) / self.across
        return Route(
            max(inside, outside),
            (members - 1) * self.hop_within + (nodes - 1) * self.hop_across,
            math.log2(members) * self.hop_within + math.log2(nodes) * self.hop_across,
        )


@dataclass(frozen=True)
class Asked:
    """What the command line says of it."""

    cluster: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    per_node: int | None = None
    interconnect: str | None = None
    assume: tuple[str, ...] = ()


def find(asked: Asked, workers: str) -> Machine:
    """The machine that a plan is for, with what is assumed of it. workers: of the configuration, a number or auto.

    Raises:
        UserError, ClusterError, HardwareError: one sentence.
    """
    found = _found(asked, workers)
    return replace(found, device=assumed(found.device, asked.assume))


def _found(asked: Asked, workers: str) -> Machine:
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
        from cluster.connect import describe

        return _of_cluster(describe().shape, Asked(), world)
    return _devices(_local_gpu(), world, Asked(per_node=per_node))


def _devices(name: str, world: int | None, asked: Asked) -> Machine:
    """`world` devices of that name; None: all of this machine."""
    if name == "cpu":
        return cpus(world or 2, asked.per_node, parse_link_speed(asked.interconnect))
    count = torch.cuda.device_count()
    world = world or count
    per_node = asked.per_node or min(world, 8 if asked.gpus or asked.gpu else count)
    return of_shape(shape_of_gpus(world, name, per_node, asked.interconnect), world)


def cpus(workers: int, per_node: int | None = None, across: float | None = None) -> Machine:
    """CPUs like this machine's, one worker a core; per_node: on several machines."""
    import psutil

    here = min(per_node or workers, workers)
    node = NodeType(
        name="cpu",
        gpus=here,
        gpu="cpu",
        cpus=1.0,
        memory_bytes=psutil.virtual_memory().total,
        link_within=None,
        link_across=across,
        price_per_hour=None,
        spot=False,
        min_nodes=1,
        max_nodes=1,
    )
    return _of_node(node, workers, HERE)


def of_shape(shape: ClusterShape, world: int | None, gpu: str | None = None, across: float | None = None) -> Machine:
    """The cluster's GPUs as one kind: the GPU, and number of it to a node, that it has most of, its head's included.

    gpu: which, where the shape does not know or has several. across: bytes/s of a node, where it is not the shape's.
    Raises:
        UserError: no GPUs, or not that one; or fewer than `world`.
    """
    name, kinds = find_gpu(gpu).name if gpu else "", defaultdict[tuple[str, int], list[NodeType]](list)
    has = [node for node in shape.types if node.gpus and node.max_nodes]
    for node in has:
        if not name or node.gpu in ("", name):
            kinds[node.gpu or name, node.gpus].append(node)
    if not has:
        raise UserError(
            f"the cluster {shape.name} has no GPUs: plan for GPUs that you could have with --gpus 8 --gpu a100-80gb, "
            "or for this machine's CPUs with --gpu cpu --gpus 2"
        )
    if not kinds:
        raise UserError(
            f"--gpu is {name}, but the cluster {shape.name} has {', '.join(sorted({node.gpu for node in has}))}: leave "
            "--gpu out, or write --gpus instead of --cluster to plan for GPUs that need not exist"
        )
    (name, _), alike = max(kinds.items(), key=lambda kind: _count(shape, kind[1]))
    most, first = _count(shape, alike), alike[0]
    if not name:
        raise UserError(
            f"the node type {first.name} of {shape.name} has {first.gpus} GPUs of an unknown kind: name it with --gpu"
        )
    if world is not None and world > most:
        raise UserError(f"workers is {world}, but the cluster {shape.name} has at most {most} GPUs of type {name}")
    across = across or min((n.link_across for n in alike if n.link_across is not None), default=None)
    return _of_node(replace(first, gpu=name, link_across=across), world or most, shape.name)


def _count(shape: ClusterShape, alike: list[NodeType]) -> int:
    """GPUs of alike node types, within the cluster's limit of nodes beside the head."""
    head, *workers = (node if node in alike else replace(node, gpus=0) for node in shape.types)
    return replace(shape, head=head, workers=tuple(workers)).max_gpus


def _of_cluster(shape: ClusterShape, asked: Asked, world: int | None) -> Machine:
    """A file's or a connected cluster, with what the command line says of it beside."""
    across = parse_link_speed(asked.interconnect)
    if asked.gpu == "cpu" or (not shape.max_gpus and not asked.cluster and asked.gpu is None):
        node = max(shape.types, key=lambda n: n.cpus * n.max_nodes)
        found = cpus(world or 2, max(1, int(node.cpus)), across)  # two, as `train` does with workers=auto
        return replace(found, name=shape.name)
    return of_shape(shape, world, asked.gpu, across)


def _of_node(node: NodeType, world: int, name: str) -> Machine:
    values: dict[str, Any] = {} if ":" in node.gpu else dict(remembered(node.gpu))
    instance, price = all_instances().get(node.name), node.price_per_hour
    across = node.link_across or values.get("link_across") or (instance.link_across if instance else None)
    if price is None and node.gpu != "cpu" and (offer := cheapest(node.gpu)):
        price = offer.price_per_gpu_hour * node.gpus
    if node.link_within:
        values.setdefault("link_within", node.link_within)
    if node.gpu == "cpu":
        values["memory_bytes"] = int(node.memory_bytes / node.gpus)
    unknown = "The network between nodes is not known: the plan assumes 100 Gbit/s (set it with --interconnect)."
    return Machine(
        device(node.gpu, values),
        world,
        node.gpus,
        across or UNKNOWN_NETWORK,
        price / node.gpus if price else None,
        name,
        node.memory_bytes if node.gpu != "cpu" else None,
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
    return connect(worker_setup=names.worker_setup()).shape


def is_here(machine: Machine) -> bool:
    """Whether this machine has the devices that a plan is for."""
    if machine.name == HERE:
        return True
    return machine.world <= torch.cuda.device_count() and find_gpu(_local_gpu()).name == machine.device.gpu.name


def require_here(machine: Machine, option: str) -> None:
    """Raises UserError unless this machine has the devices that a plan is for."""
    name, count = machine.device.gpu.name, torch.cuda.device_count()
    if not is_here(machine):
        raise UserError(
            f"{option} runs layouts on this machine, which has {count} GPUs, but the plan is for {machine.world} × "
            f"{name} ({machine.name}): leave {option} out, or run it there"
        )


def _local_gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
