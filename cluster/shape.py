"""What a cluster is made of, however it is defined: node types, GPUs, links, prices and limits.

The planner estimates layouts on a ClusterShape, `cluster.pending` explains with it which workers
can never be placed, and `app/run/cost.py` takes prices from it.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster import ClusterError, ray_internals
from cluster.hardware import HardwareError, all_instances, find_gpu

GB = 1_000_000_000
Resources = Mapping[str, float]
"""Amounts by name, in Ray's units."""


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """One kind of machine.

    Attributes:
        name: Its name in the cluster's file.
        gpus: GPUs per node.
        gpu: The GPU's name in cluster/hardware.yaml; "" without GPUs, or if it is not known.
        cpus: CPUs per node.
        memory_bytes: Host memory per node; 0 if it is not known.
        link_within: Bytes/s from a GPU to another GPU of the same node, one direction; None if it
            is not known.
        link_across: Bytes/s from a node to another node, one direction; None if it is not known.
        price_per_hour: US dollars for one node; None if it is not known.
        spot: Whether the cloud may take a node back at short notice.
        min_nodes: How many nodes there always are.
        max_nodes: How many nodes there can be.
        gpu_as_written: The GPU's name where it was read from; "" if that is not known.
    """

    name: str
    gpus: int
    gpu: str
    cpus: float
    memory_bytes: int
    link_within: float | None
    link_across: float | None
    price_per_hour: float | None
    spot: bool
    min_nodes: int
    max_nodes: int
    gpu_as_written: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """A cluster: its head, which is a node too, and the types of its workers.

    Attributes:
        name: The cluster's name.
        provider: "local", "aws", "gcp", "azure", "kuberay", …; "ray" for a cluster that is running,
            "hypothetical" for one that need not exist.
        head: The type of the head node.
        workers: The types of the worker nodes.
        path: The cluster's file; "" if the shape was not read from one.
        max_workers: The limit for all worker nodes together; None if only the types have limits.
    """

    name: str
    provider: str
    head: NodeType
    workers: tuple[NodeType, ...]
    path: str
    max_workers: int | None = None

    @property
    def types(self) -> tuple[NodeType, ...]:
        """The head's type, then the workers' types."""
        return (self.head, *self.workers)

    @property
    def max_gpus(self) -> int:
        """GPUs of the cluster when it has grown to its limits."""
        return self.head.gpus + int(self.max_on_workers(lambda node_type: node_type.gpus))

    @property
    def worker_limit(self) -> int:
        """How many worker nodes there can be."""
        if self.max_workers is not None:
            return self.max_workers
        return sum(node_type.max_nodes for node_type in self.workers)

    def max_on_workers(self, per_node: Callable[[NodeType], float]) -> float:
        """The largest amount of something that the workers can have together.

        Args:
            per_node: The amount on one node of a type.
        """
        amounts = [(per_node(node_type), node_type.max_nodes) for node_type in self.workers]
        nodes_left = self.worker_limit
        total = 0.0
        for amount, max_nodes in sorted(amounts, reverse=True):
            nodes = min(max_nodes, nodes_left)
            total += amount * nodes
            nodes_left -= nodes
        return total

    def price_of(self, kind: str, *, head: bool) -> float | None:
        """US dollars per hour for one node; None if the price is not known.

        Args:
            kind: The name of the node's type. If the shape has no such type, the node is taken for
                one of the only worker type, if there is only one.
            head: Whether it is the head.
        """
        if head:
            return self.head.price_per_hour
        candidates = [node_type for node_type in self.types if node_type.name == kind]
        candidates = candidates or list(self.workers)
        return candidates[0].price_per_hour if len(candidates) == 1 else None


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A living node, as Ray reports it.

    Attributes:
        address: Its IP address.
        kind: The name of its node type; "" if it has none.
        total: Its resources.
        available: Those of its resources that are free.
        id: Ray's id of the node.
        session: The folder on the node in which Ray keeps its files.
    """

    address: str
    kind: str
    total: Resources
    available: Resources
    id: str = ""
    session: str = ""

    @property
    def is_head(self) -> bool:
        return "node:__internal_head__" in self.total

    @property
    def gpu(self) -> str:
        """Ray's name of its GPUs; "" if it has none."""
        for name in self.total:
            if name.startswith("accelerator_type:"):
                return name.partition(":")[2]
        return ""


def living_nodes(excluded: Collection[str] = ()) -> list[NodeState]:
    """The living nodes of the Ray cluster that this process is connected to.

    Args:
        excluded: Ids of nodes to leave out.
    """
    import ray

    available = ray_internals.available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        node_id = node["NodeID"]
        if not node["Alive"] or node_id in excluded:
            continue
        # The object store's socket is SESSION/sockets/plasma_store.
        session = os.path.dirname(os.path.dirname(node["ObjectStoreSocketName"]))
        labels = node.get("Labels") or {}
        state = NodeState(
            address=node["NodeManagerAddress"],
            kind=labels.get("ray.io/node-group", ""),
            total=node["Resources"],
            available=available.get(node_id, {}),
            id=node_id,
            session=session,
        )
        nodes.append(state)
    return nodes


def node_type(
    name: str,
    sources: Sequence[Mapping[str, Any]],
    min_nodes: int,
    max_nodes: int,
) -> NodeType:
    """A node type from several sources of facts.

    Args:
        name: The name of the type.
        sources: Mappings with any of gpu, gpus, cpus, memory_gb, link_within, link_across,
            price_per_hour and spot. For each fact, the first source that has it counts.
        min_nodes: How many nodes there always are.
        max_nodes: How many nodes there can be.

    Raises:
        ClusterError: A GPU is not in the catalogue, or a link cannot be read.
    """

    def fact(key: str, default: Any = None) -> Any:
        for source in sources:
            if source.get(key) is not None:
                return source[key]
        return default

    gpu_as_written = str(fact("gpu", ""))
    gpu = gpu_as_written
    gpus = int(fact("gpus", 0))
    link_within = fact("link_within")
    if gpu:
        catalogued = find_gpu(gpu)
        gpu = catalogued.name
        if link_within is None:
            link_within = catalogued.link_within
    return NodeType(
        name=name,
        gpus=gpus,
        gpu=gpu if gpus else "",
        cpus=float(fact("cpus", 0)),
        memory_bytes=round(float(fact("memory_gb", 0)) * GB),
        link_within=parse_link_speed(link_within) if gpus else None,
        link_across=parse_link_speed(fact("link_across")),
        price_per_hour=fact("price_per_hour"),
        spot=bool(fact("spot", False)),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        gpu_as_written=gpu_as_written,
    )


def instance_facts(name: str) -> dict[str, Any]:
    """The facts of a cloud's machine in cluster/hardware.yaml, by their names in `node_type`.

    The price of a spot machine changes by the hour, so that it has the list price here, which is
    higher.

    Returns:
        {} for a machine that the catalogue does not have, such as any without GPUs.
    """
    instance = all_instances().get(name)
    if instance is None:
        return {}
    return {
        "gpu": instance.gpu,
        "gpus": instance.gpus,
        "cpus": instance.cpus,
        "memory_gb": instance.memory_bytes / GB,
        "link_across": instance.link_across,
        "price_per_hour": instance.price_per_hour,
    }


_LINK_SPEED = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(b|bit|B)(?:it)?(?:/s|ps)?\s*")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTES_PER_BIT = 0.125


def parse_link_speed(value: str | float | None) -> float | None:
    """The speed of a link in bytes per second.

    Args:
        value: `400Gb`, `3200 Gb/s`, `400Gbps` (bits), `50GB/s` (bytes), or a number of bytes per
            second.

    Returns:
        None for None.

    Raises:
        ClusterError: The text is no such speed.
    """
    if value is None or isinstance(value, int | float):
        return value
    match = _LINK_SPEED.fullmatch(str(value))
    if not match or float(match[1]) <= 0:
        raise ClusterError(
            f"a link of {value!r} cannot be read: write for instance 400Gb (bits) or 50GB (bytes a "
            "second)"
        )
    amount = float(match[1]) * _PREFIXES[match[2]]
    return amount if match[3] == "B" else amount * _BYTES_PER_BIT


def problem_with_fact(name: str, value: Any) -> str:
    """Why a fact of `node_type` cannot be read as a cluster's file has it; "" if it can.

    Args:
        name: The fact.
        value: Its value in the file.
    """
    try:
        if name == "gpu":
            find_gpu(str(value))
        elif name in ("link_within", "link_across"):
            parse_link_speed(value)
        elif name == "price_per_hour":
            float(value)
    except ClusterError as error:
        return str(error)
    except ValueError:
        return f"the price per hour must be a number of dollars, not {value!r}"
    return ""


def shape_of_gpus(
    gpus: int,
    gpu: str,
    gpus_per_node: int,
    interconnect: str | float | None = None,
) -> ClusterShape:
    """The shape of a hypothetical cluster.

    Args:
        gpus: The number of GPUs, at least 1.
        gpu: Their name.
        gpus_per_node: GPUs of one node, at least 1.
        interconnect: The speed of a node's link to the other nodes, as `parse_link_speed` reads it.

    Raises:
        ClusterError: The GPUs do not fill nodes, the GPU is not in the catalogue, or the
            interconnect cannot be read.
    """
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ClusterError(
            f"{gpus} GPUs do not fill nodes of {gpus_per_node}: write a multiple of "
            f"{gpus_per_node}, or another number of GPUs per node"
        )
    per_node = min(gpus, gpus_per_node)
    nodes = gpus // per_node
    facts = {"gpu": gpu, "gpus": per_node, "link_across": interconnect}
    worker = node_type(f"{per_node}x{find_gpu(gpu).name}", [facts], 0, nodes)
    return ClusterShape(
        name=f"{gpus}x{worker.gpu}",
        provider="hypothetical",
        head=node_type("head", [{"link_across": interconnect}], 1, 1),
        workers=(worker,),
        path="",
        max_workers=nodes,
    )


def shape_of_nodes(nodes: Sequence[NodeState]) -> ClusterShape:
    """The shape of living nodes, to which no others will be added.

    Nodes that have the same hardware become one type.

    Raises:
        ClusterError: No node is the head.
    """
    heads = [_type_of(node) for node in nodes if node.is_head]
    if not heads:
        raise ClusterError("this Ray cluster has no head node that is alive")
    counts = Counter(_type_of(node) for node in nodes if not node.is_head)
    workers = [
        replace(worker, min_nodes=count, max_nodes=count) for worker, count in counts.items()
    ]
    return ClusterShape(
        name="connected",
        provider="ray",
        head=heads[0],
        workers=tuple(workers),
        path="",
        max_workers=counts.total(),
    )


def _type_of(node: NodeState) -> NodeType:
    gpus = int(node.total.get("GPU", 0))
    gpu = None
    if node.gpu:
        try:
            gpu = find_gpu(node.gpu).name
        except HardwareError:
            pass  # Ray has a name for a GPU that is not in the catalogue
    # Ray takes the object store's part out of a node's memory.
    memory = node.total.get("memory", 0) + node.total.get("object_store_memory", 0)
    facts = {
        "gpu": gpu,
        "gpus": gpus,
        "cpus": node.total.get("CPU"),
        "memory_gb": memory / GB,
    }
    default_name = f"{gpus}-GPU node" if gpus else "CPU node"
    type_of_node = node_type(node.kind or default_name, [facts], 1, 1)
    if gpus and not gpu:
        return replace(type_of_node, gpu=node.gpu)
    return type_of_node


def align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table, each column as wide as its widest cell."""
    columns = range(len(rows[0]))
    widths = [max(len(row[column]) for row in rows) for column in columns]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells).rstrip())
    return lines


def shape_table(shape: ClusterShape) -> str:
    """A cluster for a person: its node types, how many nodes, GPUs, links and prices."""
    header = ("node type", "nodes", "GPUs", "CPUs", "memory", "within", "across", "$/hour")
    rows = [header, *map(_row, shape.types)]
    lines = [
        f"{shape.name} ({shape.provider}): up to {shape.max_gpus} GPUs, the head and at most "
        f"{shape.worker_limit} workers",
        "",
        *align_columns(rows),
        "",
        "links: one direction, within a node per GPU, across nodes per node",
    ]
    return "\n".join(lines)


def _row(node_type: NodeType) -> tuple[str, ...]:
    nodes = f"{node_type.min_nodes} to {node_type.max_nodes}"
    if node_type.min_nodes == node_type.max_nodes:
        nodes = str(node_type.max_nodes)
    gpus = f"{node_type.gpus} x {node_type.gpu or 'GPU'}" if node_type.gpus else "none"
    memory = f"{node_type.memory_bytes / GB:,.0f} GB" if node_type.memory_bytes else "?"
    price = f"{node_type.price_per_hour:.2f}" if node_type.price_per_hour is not None else "?"
    return (
        f"{node_type.name} (spot)" if node_type.spot else node_type.name,
        nodes,
        gpus,
        f"{node_type.cpus:g}",
        memory,
        _format_link(node_type.link_within),
        _format_link(node_type.link_across),
        price,
    )


def _format_link(bytes_per_second: float | None) -> str:
    return f"{bytes_per_second / GB:,.4g} GB/s" if bytes_per_second else "?"
