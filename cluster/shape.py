"""What a cluster is made of, whichever way it is defined: node types, GPUs, links, prices and limits.

The planner adds up layouts over a ClusterShape; `pending` explains with it what can never come; `cost` counts with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster import ClusterError
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

    def named(self, name: str) -> NodeType | None:
        return next((t for t in self.types if t.name == name), None)


def node_type(name: str, sources: Sequence[Mapping[str, Any]], least: int, most: int) -> NodeType:
    """A node type from several sources of facts, the first that has one counting.

    Facts: gpu, gpus, cpus, memory_gb, link_within, link_across, price_per_hour, spot.
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


def check_fact(name: str, value: Any) -> Iterator[str]:
    """A message where what a file says of a machine (a fact of `node_type`) cannot be read."""
    try:
        if name == "gpu":
            known_gpu(str(value))
        elif name in ("link_within", "link_across"):
            link(value)
        elif name == "price_per_hour":
            float(value)
    except ClusterError as error:
        yield str(error)
    except ValueError:
        yield f"the price per hour must be a number of dollars, not {value!r}"


def of_gpus(gpus: int, gpu: str, gpus_per_node: int, interconnect: str | float | None = None) -> ClusterShape:
    """A hypothetical cluster: `gpus` GPUs, `gpus_per_node` to a node.

    interconnect: of one node to the others, as `link` reads it.
    Raises:
        ClusterError: the numbers do not make a cluster, or the interconnect cannot be read.
    """
    if gpus < 1 or gpus_per_node < 1:
        raise ClusterError(f"{gpus} GPUs, {gpus_per_node} to a node, do not make a cluster: write numbers above 0")
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


def of_nodes(nodes: Iterable[Mapping[str, Any]]) -> ClusterShape:
    """The shape of living nodes, as `ray.nodes()` lists them; alike nodes are one type, and no more will come."""
    head: NodeType | None = None
    kinds: Counter[NodeType] = Counter()
    for node in nodes:
        if "node:__internal_head__" in node["Resources"]:
            head = _of_node(node)
        else:
            kinds[_of_node(node)] += 1
    if head is None:
        raise ClusterError("this Ray cluster has no head node that is alive")
    workers = tuple(replace(kind, min_nodes=count, max_nodes=count) for kind, count in kinds.items())
    return ClusterShape("connected", "ray", head, workers, "", sum(kinds.values()))


def _of_node(node: Mapping[str, Any]) -> NodeType:
    resources, labels = node["Resources"], node.get("Labels") or {}
    gpus = int(resources.get("GPU", 0))
    name = next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), "")
    try:
        gpu = known_gpu(name).name if name else None
    except HardwareError:  # Ray knows a GPU that our list does not
        gpu = None
    memory = (resources.get("memory", 0) + resources.get("object_store_memory", 0)) / GB
    group = labels.get("ray.io/node-group") or (f"{gpus}-GPU node" if gpus else "CPU node")
    facts = {"gpu": gpu, "gpus": gpus, "cpus": resources.get("CPU"), "memory_gb": memory}
    found = node_type(group, [facts], 1, 1)
    return found if gpu or not gpus else replace(found, gpu=name)


def table(shape: ClusterShape) -> str:
    """Node types in rows: how many, what GPUs, how fast the links, what price."""
    rows: list[tuple[str, ...]] = [("node type", "nodes", "GPUs", "CPUs", "memory", "within", "across", "$/hour")]
    rows += [_row(kind) for kind in shape.types]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    most = shape.max_workers if shape.max_workers is not None else sum(kind.max_nodes for kind in shape.workers)
    head = f"{shape.name} ({shape.provider}): up to {shape.max_gpus} GPUs, the head and at most {most} workers"
    return "\n".join([head, "", *lines, "", "links: one direction, within a node per GPU, across nodes per node"])


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
