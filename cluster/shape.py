"""What a cluster is made of, whichever way it is defined: node types, GPUs, links, prices and limits.

The planner adds up layouts over a ClusterShape; `pending` explains with it what can never come; `cost` counts with it.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster import ClusterError, ray_internals
from cluster.hardware import HardwareError, all_instances
from cluster.hardware import gpu as known_gpu

GB = 1_000_000_000


@dataclass(frozen=True)
class NodeType:
    """One kind of machine. None where it is not known."""

    name: str
    gpus: int  # per node
    gpu: str  # name in cluster/hardware.yaml; "" without GPUs or where it is not known
    cpus: float  # per node
    memory_bytes: int  # of the host, per node; 0 where it is not known
    link_within: float | None  # bytes/s per GPU to a GPU of the same node, one direction
    link_across: float | None  # bytes/s per node to another node, one direction
    price_per_hour: float | None  # of one node, in US dollars
    spot: bool  # may be taken away at short notice
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True)
class ClusterShape:
    """A cluster: its head (which is a node too) and its workers' types."""

    name: str
    provider: str  # local, aws, gcp, azure, kuberay, …, or ray for one that runs already
    head: NodeType
    workers: tuple[NodeType, ...]
    path: str  # of the file; "" for a cluster that was not read from one
    max_workers: int | None = None  # of all worker types together

    @property
    def types(self) -> tuple[NodeType, ...]:
        return (self.head, *self.workers)

    @property
    def max_gpus(self) -> int:
        """GPUs when every node that may come has come."""
        return self.head.gpus + int(self.max_on_workers(lambda kind: kind.gpus))

    def max_on_workers(self, per_node: Callable[[NodeType], float]) -> float:
        """The most of something that the workers can have together. per_node: how much a node of a type has."""
        rows = sorted(((per_node(kind), kind.max_nodes) for kind in self.workers), reverse=True)
        left = self.max_workers if self.max_workers is not None else sum(nodes for _, nodes in rows)
        total = 0.0
        for amount, nodes in rows:
            total, left = total + amount * min(nodes, left), left - min(nodes, left)
        return total

    def price_of(self, kind: str, *, head: bool) -> float | None:
        """Dollars an hour of one node: of its type's name, else of the only worker type there is."""
        named = [self.head] if head else [t for t in self.types if t.name == kind] or list(self.workers)
        return named[0].price_per_hour if len(named) == 1 else None


Resources = Mapping[str, float]  # amounts by name, in Ray's units


@dataclass(frozen=True)
class NodeState:
    """A living node, as Ray counts it."""

    address: str
    kind: str  # its node type's name; "" where it has none
    total: Resources
    available: Resources
    id: str = ""
    session: str = ""  # folder on it in which Ray works

    @property
    def is_head(self) -> bool:
        return "node:__internal_head__" in self.total

    @property
    def gpu(self) -> str:
        """Ray's name of its GPUs; "" where it has none."""
        return next((name.partition(":")[2] for name in self.total if name.startswith("accelerator_type:")), "")


def living_nodes(excluded: Collection[str] = ()) -> list[NodeState]:
    """The nodes of the Ray cluster that this process is connected to, but those whose ids are excluded."""
    import ray

    free = ray_internals.available_resources_per_node()
    return [
        NodeState(
            node["NodeManagerAddress"],
            (node.get("Labels") or {}).get("ray.io/node-group", ""),
            node["Resources"],
            free.get(node["NodeID"], {}),
            node["NodeID"],
            os.path.dirname(os.path.dirname(node["ObjectStoreSocketName"])),
        )
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in excluded
    ]


def node_type(name: str, sources: Sequence[Mapping[str, Any]], least: int, most: int) -> NodeType:
    """A node type from several sources of facts, the first that has one counting.

    Facts: gpu, gpus, cpus, memory_gb, link_within, link_across, price_per_hour, spot (as a cloud's file says it).
    """

    def fact(key: str, default: Any = None) -> Any:
        return next((source[key] for source in sources if source.get(key) is not None), default)

    gpu, gpus, within = str(fact("gpu", "")), int(fact("gpus", 0)), fact("link_within")
    if gpu:
        found = known_gpu(gpu)
        gpu, within = found.name, found.link_within if within is None else within
    return NodeType(
        name=name,
        gpus=gpus,
        gpu=gpu if gpus else "",
        cpus=float(fact("cpus", 0)),
        memory_bytes=round(float(fact("memory_gb", 0)) * GB),
        link_within=link(within) if gpus else None,
        link_across=link(fact("link_across")),
        price_per_hour=fact("price_per_hour"),
        spot=bool(fact("spot", False)),
        min_nodes=least,
        max_nodes=most,
    )


def instance_facts(name: str) -> dict[str, Any]:
    """What cluster/hardware.yaml knows of a cloud's machine; empty for one it does not have, such as any without GPUs.

    A spot machine has its list price here, which is more than it costs: what it costs changes by the hour.
    """
    instance = all_instances().get(name)
    if instance is None:
        return {}
    memory = {"memory_gb": instance.memory_bytes / GB}
    names = ("gpu", "gpus", "cpus", "link_across", "price_per_hour")
    return memory | {name: getattr(instance, name) for name in names}


_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(b|bit|B)(?:it)?(?:/s|ps)?\s*")
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def link(value: str | float | None) -> float | None:
    """`400Gb`, `3200 Gb/s`, `400Gbps` (bits) or `50GB/s` (bytes) in bytes per second; a number is taken for those.

    Raises:
        ClusterError: it is none of these.
    """
    if value is None or isinstance(value, int | float):
        return value
    match = _RATE.fullmatch(str(value))
    if not match or float(match[1]) <= 0:
        raise ClusterError(
            f"a link of {value!r} cannot be read: write for instance 400Gb (bits) or 50GB (bytes a second)"
        )
    return float(match[1]) * _SCALE[match[2]] * (1.0 if match[3] == "B" else 0.125)


def check_fact(name: str, value: Any) -> str:
    """Why what a file says of a machine (a fact of `node_type`) cannot be read; "" where it can."""
    try:
        if name == "gpu":
            known_gpu(str(value))
        elif name in ("link_within", "link_across"):
            link(value)
        elif name == "price_per_hour":
            float(value)
    except ClusterError as error:
        return str(error)
    except ValueError:
        return f"the price per hour must be a number of dollars, not {value!r}"
    return ""


def of_gpus(gpus: int, gpu: str, gpus_per_node: int, interconnect: str | float | None = None) -> ClusterShape:
    """A hypothetical cluster: `gpus` GPUs, `gpus_per_node` to a node, both at least 1.

    interconnect: of one node to the others, as `link` reads it.
    Raises:
        ClusterError: the GPUs do not fill nodes, or the interconnect cannot be read.
    """
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ClusterError(
            f"{gpus} GPUs do not fill nodes of {gpus_per_node}: write a multiple of {gpus_per_node}, or another number "
            "of GPUs per node"
        )
    per_node = min(gpus, gpus_per_node)
    nodes = gpus // per_node
    facts = {"gpu": gpu, "gpus": per_node, "link_across": interconnect}
    node = node_type(f"{per_node}x{known_gpu(gpu).name}", [facts], 0, nodes)
    head = node_type("head", [{"link_across": interconnect}], 1, 1)
    return ClusterShape(f"{gpus}x{node.gpu}", "hypothetical", head, (node,), "", nodes)


def of_nodes(nodes: Sequence[NodeState]) -> ClusterShape:
    """The shape of living nodes; alike nodes are one type, and no more will come."""
    heads = [_of_node(node) for node in nodes if node.is_head]
    kinds = Counter(_of_node(node) for node in nodes if not node.is_head)
    if not heads:
        raise ClusterError("this Ray cluster has no head node that is alive")
    workers = tuple(replace(kind, min_nodes=count, max_nodes=count) for kind, count in kinds.items())
    return ClusterShape("connected", "ray", heads[0], workers, "", sum(kinds.values()))


def _of_node(node: NodeState) -> NodeType:
    gpus = int(node.total.get("GPU", 0))
    try:
        gpu = known_gpu(node.gpu).name if node.gpu else None
    except HardwareError:  # Ray knows a GPU that our list does not
        gpu = None
    memory = (node.total.get("memory", 0) + node.total.get("object_store_memory", 0)) / GB
    facts = {"gpu": gpu, "gpus": gpus, "cpus": node.total.get("CPU"), "memory_gb": memory}
    found = node_type(node.kind or (f"{gpus}-GPU node" if gpus else "CPU node"), [facts], 1, 1)
    return found if gpu or not gpus else replace(found, gpu=node.gpu)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def table(shape: ClusterShape) -> str:
    """Node types in rows: how many, what GPUs, how fast the links, what price."""
    rows: list[tuple[str, ...]] = [("node type", "nodes", "GPUs", "CPUs", "memory", "within", "across", "$/hour")]
    rows += [_row(kind) for kind in shape.types]
    most = shape.max_workers if shape.max_workers is not None else sum(kind.max_nodes for kind in shape.workers)
    head = f"{shape.name} ({shape.provider}): up to {shape.max_gpus} GPUs, the head and at most {most} workers"
    return "\n".join(
        [head, "", *aligned(rows), "", "links: one direction, within a node per GPU, across nodes per node"]
    )


def _row(kind: NodeType) -> tuple[str, ...]:
    return (
        f"{kind.name} (spot)" if kind.spot else kind.name,
        f"{kind.min_nodes}" if kind.min_nodes == kind.max_nodes else f"{kind.min_nodes} to {kind.max_nodes}",
        f"{kind.gpus} x {kind.gpu or 'GPU'}" if kind.gpus else "none",
        f"{kind.cpus:g}",
        f"{kind.memory_bytes / GB:,.0f} GB" if kind.memory_bytes else "?",
        *(f"{rate / GB:,.4g} GB/s" if rate else "?" for rate in (kind.link_within, kind.link_across)),
        f"{kind.price_per_hour:.2f}" if kind.price_per_hour is not None else "?",
    )
