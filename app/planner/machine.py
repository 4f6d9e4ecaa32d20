"""The machine that a plan is for.

It is that of a cluster's file, GPUs that need not exist, the connected Ray cluster, or this
machine.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil
import torch

from app import names
from app.errors import UserError
from app.planner.assumptions import apply_assumptions
from app.planner.device import Device, device_named
from app.planner.measurements import measured_values
from cluster.files import cluster_file, read_cluster
from cluster.hardware import all_instances, cheapest, find_gpu, other_meanings
from cluster.shape import ClusterShape, NodeType, parse_link_speed, shape_of_gpus

UNKNOWN_NETWORK = 100e9 / 8
"""Bytes/s between nodes if neither they nor the GPU's usual systems are known: 100 Gbit/s."""
THIS_MACHINE = "this machine's CPUs"
GPUS_PER_NODE = 8
"""Of GPUs that need not exist, unless the user says otherwise."""
CPU_WORKERS = 2
"""As many as `train` starts with workers=auto on a machine without GPUs."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that a plan is for.

    Args:
        device: One of them; all are alike.
        world: The number of devices.
        per_node: Devices of a node.
        link_across: Bytes/s of a node to other nodes.
        price_per_hour: Of one device, in US dollars; None if it is not known.
        name: Of the cluster.
        host_bytes: Memory of a node's host; None if it is not known.
        assumption: Sentences on what is not known and assumed; "" for nothing.
        most_per_node: Devices of a node if there were more devices; None: `per_node`.
    """

    device: Device
    world: int
    per_node: int
    link_across: float
    price_per_hour: float | None = None
    name: str = ""
    host_bytes: float | None = None
    assumption: str = ""
    most_per_node: int | None = None

    @functools.cached_property
    def links(self) -> Links:
        """What connects the devices."""
        return Links(self)


class Route(NamedTuple):
    """What a collective of a group of ranks takes.

    Args:
        ring_per_byte: Seconds of a ring's slowest link for each byte of the tensor.
        tree_per_byte: The same of a tree over the nodes, with a ring inside each.
        exchange_within_per_byte: Seconds of a rank's link to others for each byte that it has for
            all of them together.
        exchange_across_per_byte: The same of the node's link to other nodes.
        nodes: On how many nodes the ranks are.
        ring_seconds: Of all hops of a ring.
        tree_seconds: Of all hops of a tree.
    """

    ring_per_byte: float
    tree_per_byte: float
    exchange_within_per_byte: float
    exchange_across_per_byte: float
    nodes: int
    ring_seconds: float
    tree_seconds: float


class Links:
    """The links between the devices of a machine, and the time of collectives over them.

    Attributes:
        within: Bytes/s of a device to the others of its node.
        across: Bytes/s of a node to others.
        per_node: Devices of a node that are used.
        hop_within: Seconds of a hop inside a node.
        hop_across: Seconds of a hop between nodes.
    """

    def __init__(self, machine: Machine) -> None:
        device = machine.device
        self.within = device.gpu.link_within * device.within
        self.across = machine.link_across * device.across
        self.per_node = min(machine.per_node, machine.world)
        self.hop_within = device.latency_within
        self.hop_across = device.latency_across
        self._route = functools.cache(self._find_route)

    def gather(self, size: float, ways: int, stride: int) -> float:
        """Seconds of an all-gather to, or a reduce-scatter from, a tensor: a ring.

        Args:
            size: Bytes of the whole tensor.
            ways: The number of ranks.
            stride: The distance between neighbouring ranks.
        """
        route = self._route(ways, stride)
        return size * route.ring_per_byte + route.ring_seconds

    def reduce(self, size: float, ways: int, stride: int) -> float:
        """Seconds of an all-reduce: a tree over the nodes, up and down.

        Args:
            size: Bytes of the tensor.
            ways: The number of ranks.
            stride: The distance between neighbouring ranks.
        """
        route = self._route(ways, stride)
        return 2 * (size * route.tree_per_byte + route.tree_seconds)

    def exchange(
        self,
        size: float,
        ways: int,
        stride: int,
        *,
        share_within: float = 1.0,
        share_across: float = 1.0,
    ) -> float:
        """Seconds of an all-to-all, in which each rank sends every other one an equal part.

        Args:
            size: Bytes of one rank, its own part included.
            ways: The number of ranks.
            stride: The distance between neighbouring ranks.
            share_within: Share of the bytes that the links inside a node pass on.
            share_across: Share of those for other nodes that is sent to them.
        """
        route = self._route(ways, stride)
        within = share_within * route.exchange_within_per_byte
        across = share_across * route.exchange_across_per_byte
        return size * max(within, across) + route.ring_seconds

    def nodes(self, ways: int, stride: int) -> int:
        """On how many nodes a group of ranks is.

        Args:
            ways: The number of ranks.
            stride: The distance between neighbouring ranks.
        """
        return self._route(ways, stride).nodes

    def send(self, size: float, stride: int) -> float:
        """Seconds from one pipeline stage to the next; all devices of a node send at once.

        Args:
            size: Bytes of the tensor.
            stride: The distance between the ranks of the stages.
        """
        if stride >= self.per_node:
            return size * self.per_node / self.across + self.hop_across
        return size / self.within + self.hop_within

    def _find_route(self, ways: int, stride: int) -> Route:
        members = min(max(self.per_node // stride, 1), ways)  # of the group, in one node
        if ways % members:
            members = 1
        nodes = ways // members
        within = (ways - 1) / ways / self.within
        # The other ranks of a node are in groups like this one, and share its link.
        groups_of_node = max(1.0, self.per_node / members)
        # A ring leaves each node once, over a link that passes on all parts but one, also those
        # that began in the node behind it. A tree sends a node's sum up and the total down.
        ring_across = (ways - 1) / ways * groups_of_node / self.across if nodes > 1 else 0.0
        tree_across = (nodes - 1) / nodes * groups_of_node / self.across
        # Each rank of a node sends its parts for the ranks of other nodes.
        exchange_across = (nodes - 1) / nodes * self.per_node / self.across
        return Route(
            ring_per_byte=max(within, ring_across),
            tree_per_byte=max(within, tree_across),
            exchange_within_per_byte=within,
            exchange_across_per_byte=exchange_across,
            nodes=nodes,
            ring_seconds=(members - 1) * self.hop_within + (nodes - 1) * self.hop_across,
            tree_seconds=math.log2(members) * self.hop_within + math.log2(nodes) * self.hop_across,
        )


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """What the command line says of the machine.

    Args:
        cluster: The file of a cluster, or the name of one of Trireme's own.
        gpus: The number of GPUs.
        gpu: The GPU's name.
        per_node: GPUs of a node.
        interconnect: The rate between nodes, with its unit.
        assume: NAME=VALUE for each constant of the device that is changed.
    """

    cluster: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    per_node: int | None = None
    interconnect: str | None = None
    assume: tuple[str, ...] = ()


def find_machine(options: MachineOptions, workers: str) -> Machine:
    """The machine that a plan is for, with the constants that the command line changes.

    Args:
        options: Of the command line.
        workers: Of the configuration: a number, or auto.

    Raises:
        UserError: The options contradict one another or the cluster.
        ClusterError: The cluster's file is wrong, or a cluster does not answer.
        HardwareError: The GPU is not in the catalogue.
    """
    machine = _find_machine(options, workers)
    device = apply_assumptions(machine.device, options.assume)
    is_described = bool(options.cluster or options.gpus or options.gpu)
    if is_described and not is_here(machine):
        device = replace(device, corrections=[])  # which were measured on this machine
    return replace(machine, device=device)


def _find_machine(options: MachineOptions, workers: str) -> Machine:
    for option, value in (("--gpus", options.gpus), ("--gpus-per-node", options.per_node)):
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}: write at least 1")
    world = options.gpus
    if world is None and workers.isdigit():
        world = int(workers)
    if options.cluster is None and (options.gpus is not None or options.gpu is not None):
        return _machine_of_devices(options.gpu or _local_gpu(), world or 1, options)
    file = cluster_file(options.cluster)
    shape = read_cluster(file) if file else connected_shape()
    if shape is None:
        return _machine_of_devices(_local_gpu(), world, options)
    machine = _machine_of_cluster(shape, options, world)
    if options.per_node not in (None, machine.per_node):
        raise UserError(
            f"--gpus-per-node is {options.per_node}, but the nodes of {shape.name} have "
            f"{machine.per_node}: leave it out"
        )
    return machine


def machine_of_run(world: int, per_node: int | None = None) -> Machine:
    """The machine of a run: the Ray cluster that this process is connected to, or this machine.

    Args:
        world: The number of workers.
        per_node: Workers of a node, if the caller knows.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        from cluster.connect import describe

        return _machine_of_cluster(describe().shape, MachineOptions(), world)
    return _machine_of_devices(_local_gpu(), world, MachineOptions(per_node=per_node))


def _machine_of_devices(name: str, world: int | None, options: MachineOptions) -> Machine:
    """Devices of that name. With `world` None it is all of this machine."""
    if name == "cpu":
        return cpus(world or CPU_WORKERS, options.per_node, parse_link_speed(options.interconnect))
    local_gpus = torch.cuda.device_count()
    world = world or local_gpus
    is_hypothetical = bool(options.gpus or options.gpu)
    usual_per_node = GPUS_PER_NODE if is_hypothetical else local_gpus
    per_node = options.per_node or min(world, usual_per_node)
    machine = of_shape(shape_of_gpus(world, name, per_node, options.interconnect), world)
    if is_hypothetical:
        return replace(machine, most_per_node=options.per_node or GPUS_PER_NODE)
    return replace(machine, host_bytes=float(psutil.virtual_memory().total))


def cpus(workers: int, per_node: int | None = None, link_across: float | None = None) -> Machine:
    """CPUs like those of this machine, with one worker on each core.

    Args:
        workers: The number of workers.
        per_node: Workers of a node, if there are several nodes.
        link_across: Bytes/s between nodes, if known.
    """
    node = NodeType(
        name="cpu",
        gpus=min(per_node or workers, workers),
        gpu="cpu",
        cpus=1.0,
        memory_bytes=psutil.virtual_memory().total,
        link_within=None,
        link_across=link_across,
        price_per_hour=None,
        spot=False,
        min_nodes=1,
        max_nodes=1,
    )
    return _machine_of_node(node, workers, THIS_MACHINE)


def of_shape(
    shape: ClusterShape,
    world: int | None,
    gpu: str | None = None,
    link_across: float | None = None,
) -> Machine:
    """A cluster as equal GPUs: of the kind, and number to a node, of which it has the most.

    Args:
        shape: The cluster; its head's GPUs count too.
        world: The number of GPUs to use; None for all.
        gpu: Which GPU, if the shape does not say or has several.
        link_across: Bytes/s of a node, instead of the shape's.

    Raises:
        UserError: The cluster has no GPUs, not that one, or fewer than `world`.
    """
    wanted = find_gpu(gpu).name if gpu else ""
    kinds: dict[tuple[str, int], list[NodeType]] = defaultdict(list)
    gpu_nodes = [node for node in shape.types if node.gpus and node.max_nodes]
    for node in gpu_nodes:
        if not wanted or node.gpu in ("", wanted):
            kinds[node.gpu or wanted, node.gpus].append(node)
    if not gpu_nodes:
        raise UserError(
            f"the cluster {shape.name} has no GPUs: plan for GPUs that you could have with "
            "--gpus 8 --gpu a100-80gb, or for this machine's CPUs with --gpu cpu --gpus 2"
        )
    if not kinds:
        present = ", ".join(sorted({node.gpu for node in gpu_nodes}))
        raise UserError(
            f"--gpu is {wanted}, but the cluster {shape.name} has {present}: leave --gpu out, or "
            "write --gpus instead of --cluster to plan for GPUs that need not exist"
        )
    (name, _), nodes = max(kinds.items(), key=lambda kind: _max_gpus(shape, kind[1]))
    max_gpus = _max_gpus(shape, nodes)
    first = nodes[0]
    if not name:
        raise UserError(
            f"the node type {first.name} of {shape.name} has {first.gpus} GPUs of an unknown kind: "
            "name it with --gpu"
        )
    if world is not None and world > max_gpus:
        raise UserError(
            f"workers is {world}, but the cluster {shape.name} has at most {max_gpus} GPUs of "
            f"type {name}"
        )
    if not link_across:
        known = [node.link_across for node in nodes if node.link_across is not None]
        link_across = min(known, default=None)
    node = replace(
        first, gpu=name, link_across=link_across, gpu_as_written=gpu or first.gpu_as_written
    )
    return _machine_of_node(node, world or max_gpus, shape.name)


def _max_gpus(shape: ClusterShape, nodes: list[NodeType]) -> int:
    """GPUs of some node types, within the cluster's limit of nodes beside the head."""
    head, *workers = (node if node in nodes else replace(node, gpus=0) for node in shape.types)
    return replace(shape, head=head, workers=tuple(workers)).max_gpus


def _machine_of_cluster(shape: ClusterShape, options: MachineOptions, world: int | None) -> Machine:
    """A cluster of a file or a connected one, with what the command line says of it."""
    link_across = parse_link_speed(options.interconnect)
    is_connected_without_gpus = not shape.max_gpus and not options.cluster and options.gpu is None
    if options.gpu == "cpu" or is_connected_without_gpus:
        node = max(shape.types, key=lambda node: node.cpus * node.max_nodes)
        machine = cpus(world or CPU_WORKERS, max(1, int(node.cpus)), link_across)
        return replace(machine, name=shape.name)
    return of_shape(shape, world, options.gpu, link_across)


def _machine_of_node(node: NodeType, world: int, name: str) -> Machine:
    is_variant = ":" in node.gpu  # such as h100-80gb:power=500W, which was not measured
    is_cpu = node.gpu == "cpu"
    values: dict[str, Any] = {} if is_variant else dict(measured_values(node.gpu))
    instance = all_instances().get(node.name)
    link_across = node.link_across or values.get("link_across")
    if not link_across and instance is not None:
        link_across = instance.link_across
    price = node.price_per_hour
    if price is None and not is_cpu:
        offer = cheapest(node.gpu)
        if offer is not None:
            price = offer.price_per_gpu_hour * node.gpus
    if node.link_within:
        values.setdefault("link_within", node.link_within)
    if is_cpu:
        values["memory_bytes"] = int(node.memory_bytes / node.gpus)
    assumptions = []
    others = other_meanings(node.gpu_as_written) if node.gpu_as_written else []
    if others:
        *but_last, last = others
        choices = f"{', '.join(but_last)} or {last}" if but_last else last
        assumptions.append(
            f"{node.gpu_as_written} is taken for {node.gpu}: write {choices} for another."
        )
    if not link_across:
        usual = find_gpu(node.gpu).link_across
        link_across = usual * node.gpus if usual else UNKNOWN_NETWORK
        if world > node.gpus:
            whose = ", as its maker's own systems have" if usual else ""
            assumptions.append(
                f"The network between nodes is not known: the plan assumes "
                f"{link_across * 8 / 1e9:,.0f} Gbit/s{whose} (set it with --interconnect)."
            )
    return Machine(
        device=device_named(node.gpu, values),
        world=world,
        per_node=node.gpus,
        link_across=link_across,
        price_per_hour=price / node.gpus if price else None,
        name=name,
        host_bytes=None if is_cpu else node.memory_bytes,
        assumption=" ".join(assumptions),
    )


def connected_shape() -> ClusterShape | None:
    """The Ray cluster that `train` would use: RAY_ADDRESS's, or the one that runs here.

    Returns:
        The cluster; None if there is none.

    Raises:
        ClusterError: There is an address, but it does not answer.
    """
    from cluster.connect import address, connect

    ray = sys.modules.get("ray")
    is_connected = ray is not None and ray.is_initialized()
    if not is_connected and not address():
        return None
    return connect(worker_setup=names.worker_setup()).shape


def is_here(machine: Machine) -> bool:
    """Whether this machine has the devices that a plan is for."""
    if machine.name == THIS_MACHINE:
        return True
    has_enough = machine.world <= torch.cuda.device_count()
    return has_enough and find_gpu(_local_gpu()).name == machine.device.gpu.name


def require_here(machine: Machine, option: str) -> None:
    """Check that this machine has the devices that a plan is for.

    Args:
        machine: The plan's machine.
        option: Of the command line, which needs them.

    Raises:
        UserError: This machine does not have them.
    """
    if not is_here(machine):
        raise UserError(
            f"{option} runs layouts on this machine, which has {torch.cuda.device_count()} GPUs, "
            f"but the plan is for {machine.world} × {machine.device.gpu.name} ({machine.name}): "
            f"leave {option} out, or run it there"
        )


def _local_gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
