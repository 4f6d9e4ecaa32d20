"""What a cluster is made of, whichever way it is defined: node types, GPUs, links, prices and limits.

The planner adds up layouts over a ClusterShape; `pending` explains with it what can never come; `cost` counts with it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError, refuse
from cluster.source import Document, read_documents

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class NodeType:
    """One kind of machine. None where nobody has said."""

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
        rows = sorted(((t.gpus, t.max_nodes) for t in self.workers), reverse=True)
        left = self.max_workers if self.max_workers is not None else sum(nodes for _, nodes in rows)
        total = self.head.gpus
        for gpus, nodes in rows:
            taken = min(nodes, left)
            total, left = total + gpus * taken, left - taken
        return total

    def named(self, name: str) -> NodeType | None:
        return next((t for t in self.types if t.name == name), None)


def read_cluster(path: str | Path) -> ClusterShape:
    """A cluster file: one for Ray's launcher, or a KubeRay manifest.

    path: a file, or the name of one of Trireme's own (`aws`, `kuberay-job`, …).
    Raises:
        ClusterError: it is not a cluster's, or something in it is wrong; one sentence with file and line.
    """
    file = find(path)
    documents = read_documents(file)
    from cluster.validate import faults_of

    refuse(faults_of(documents, file))
    return shape_of(documents, file)


def shape_of(documents: list[Document], file: str) -> ClusterShape:
    """The shape of a file that has been found valid."""
    from cluster import kuberay, ray_file

    ray_objects = [d for d in documents if kuberay.is_ray(d)]
    if ray_objects:
        return kuberay.shape(ray_objects[0], file)
    return ray_file.shape(documents[0], file)


def find(path: str | Path) -> str:
    """The file itself, or the one of that name in cluster/."""
    written = Path(path).expanduser()
    if not written.exists() and written.parent == Path("."):
        own = FOLDER / f"{written.name.removesuffix('.yaml')}.yaml"
        if own.name in own_files():
            return str(own)
    return str(written)


def own_files() -> dict[str, Path]:
    """The cluster files that come with Trireme."""
    return {p.name: p for p in sorted(FOLDER.glob("*.yaml")) if p.name != "hardware.yaml"}


def of_gpus(gpus: int, gpu: str, gpus_per_node: int, interconnect: str | float | None = None) -> ClusterShape:
    """A cluster that exists only in thought: `gpus` GPUs, `gpus_per_node` to a node.

    interconnect: of one node to the others, as text ("400Gb" or "3200 Gb/s" bits, "50GB" bytes per second) or bytes/s.
    Raises:
        ClusterError: the numbers make no cluster, or the interconnect cannot be read.
    """
    from cluster.hardware import gpu as known_gpu

    if gpus < 1 or gpus_per_node < 1:
        raise ClusterError(f"{gpus} GPUs, {gpus_per_node} to a node, make no cluster: write numbers above 0")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ClusterError(
            f"{gpus} GPUs do not fill nodes of {gpus_per_node}: write a multiple of {gpus_per_node}, or another number "
            "of GPUs per node"
        )
    found = known_gpu(gpu)
    per_node = min(gpus, gpus_per_node)
    nodes = gpus // per_node
    across = interconnect if isinstance(interconnect, int | float) else link(interconnect)
    node = NodeType(
        f"{per_node}x{found.name}", per_node, found.name, 0, 0, found.link_within, across, None, False, 0, nodes
    )
    head = replace(node, name="head", gpus=0, gpu="", link_within=None, max_nodes=1, min_nodes=1)
    return ClusterShape(f"{gpus}x{found.name}", "thought", head, (node,), "", nodes)


_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(b|bit|B)(?:it)?(?:/s|ps)?\s*")
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def link(text: str | None) -> float | None:
    """`400Gb`, `3200 Gb/s`, `400Gbps` (bits) or `50GB/s` (bytes) in bytes per second.

    Raises:
        ClusterError: it is none of these.
    """
    if text is None:
        return None
    match = _RATE.fullmatch(str(text))
    if not match or float(match[1]) <= 0:
        raise ClusterError(
            f"a link of {text!r} cannot be read: write for instance 400Gb (bits) or 50GB (bytes a second)"
        )
    return float(match[1]) * _SCALE[match[2]] * (1.0 if match[3] == "B" else 0.125)


def connected() -> ClusterShape:
    """The Ray cluster that this process is connected to.

    With TRIREME_CLUSTER naming the file that the cluster was made from (`trireme cluster up` puts it on the head), the
    shape is the file's, with its limits and prices. Otherwise it is what is alive now, and no more will come.
    """
    import ray

    file = cluster_file()
    if file:
        return read_cluster(file)
    return of_nodes([node for node in ray.nodes() if node["Alive"]])


def cluster_file(chosen: str | None = None) -> str | None:
    """The file of the cluster in use: what was chosen, else TRIREME_CLUSTER, else none."""
    return chosen or os.environ.get("TRIREME_CLUSTER") or None


def of_nodes(nodes: Iterable[Mapping[str, Any]]) -> ClusterShape:
    """The shape of living nodes, as `ray.nodes()` lists them; alike nodes are one type."""
    head: NodeType | None = None
    kinds: Counter[NodeType] = Counter()
    for node in nodes:
        resources = node["Resources"]
        if "node:__internal_head__" in resources:
            head = _of_node(node)
        else:
            kinds[_of_node(node)] += 1
    if head is None:
        raise ClusterError("this Ray cluster has no head node that is alive")
    workers = tuple(replace(kind, min_nodes=count, max_nodes=count) for kind, count in kinds.items())
    return ClusterShape("connected", "ray", head, workers, "", sum(kinds.values()))


def _of_node(node: Mapping[str, Any]) -> NodeType:
    from cluster.hardware import HardwareError
    from cluster.hardware import gpu as known_gpu

    resources, labels = node["Resources"], node.get("Labels") or {}
    written = next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), "")
    gpus = int(resources.get("GPU", 0))
    within = None
    name = written
    if gpus and written:
        try:
            found = known_gpu(written)
            name, within = found.name, found.link_within
        except HardwareError:  # Ray knows a GPU that our list does not
            pass
    memory = int(resources.get("memory", 0) + resources.get("object_store_memory", 0))
    group = labels.get("ray.io/node-group") or (f"{gpus}-GPU node" if gpus else "CPU node")
    return NodeType(
        group, gpus, name if gpus else "", resources.get("CPU", 0.0), memory, within, None, None, False, 1, 1
    )
