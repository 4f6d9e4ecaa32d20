"""KubeRay manifests (RayCluster and RayJob) as a ClusterShape.

What Kubernetes does not say stands in annotations of a group's pod template: `trireme/gpu`, `trireme/link-within`,
`trireme/link-across`, `trireme/price-per-hour` (of one node of the group) and `trireme/spot`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cluster.errors import ClusterError
from cluster.shape import ClusterShape, NodeType
from cluster.source import Document

RAY_KINDS = ("RayCluster", "RayJob")
ANNOTATIONS = {
    "trireme/gpu": "gpu",
    "trireme/link-within": "link_within",
    "trireme/link-across": "link_across",
    "trireme/price-per-hour": "price_per_hour",
    "trireme/spot": "spot",
}
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


def is_kubernetes(document: Document) -> bool:
    return isinstance(document.data, dict) and "apiVersion" in document.data and "kind" in document.data


def is_ray(document: Document) -> bool:
    return is_kubernetes(document) and document.data["kind"] in RAY_KINDS


def shape(document: Document, file: str) -> ClusterShape:
    """The shape of a valid RayCluster or RayJob."""
    from cluster.ray_file import node_type

    data = document.data
    spec = data["spec"] if data["kind"] == "RayCluster" else data["spec"].get("rayClusterSpec")
    if spec is None:
        raise ClusterError(f"{file} runs its job on a cluster that exists already: name the file of that cluster")
    head = node_type("head", [start_params(spec["headGroupSpec"]), pod_facts(spec["headGroupSpec"]["template"])], 1, 1)
    workers: list[NodeType] = []
    for group in spec.get("workerGroupSpecs") or []:
        hosts = group.get("numOfHosts", 1)  # a replica of the group is this many pods
        count = group.get("replicas", group.get("minReplicas", 0))
        least = group.get("minReplicas", count) if spec.get("enableInTreeAutoscaling") else count
        most = group.get("maxReplicas", count) if spec.get("enableInTreeAutoscaling") else count
        facts = [start_params(group), pod_facts(group["template"])]
        workers.append(node_type(group["groupName"], facts, least * hosts, most * hosts))
    name = data["metadata"].get("name") or data["metadata"].get("generateName", "")
    return ClusterShape(name, "kuberay", head, tuple(workers), file, sum(w.max_nodes for w in workers))


def start_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """What Ray is told to believe, whatever the pod has."""
    given = group.get("rayStartParams") or {}
    return {fact: float(given[key]) for key, fact in (("num-cpus", "cpus"), ("num-gpus", "gpus")) if key in given}


def pod_facts(template: Mapping[str, Any]) -> dict[str, Any]:
    """What a pod template says of the machine that Ray gets: of its first container, as KubeRay reads it."""
    container = template["spec"]["containers"][0]
    resources = container.get("resources") or {}
    amounts = (resources.get("requests") or {}) | (resources.get("limits") or {})
    facts: dict[str, Any] = {
        "cpus": quantity(amounts.get("cpu", 0)),
        "memory_gb": quantity(amounts.get("memory", 0)) / 1e9,
        "gpus": int(sum(quantity(amounts.get(name, 0)) for name in GPU_RESOURCES)),
    }
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    for key, fact in ANNOTATIONS.items():
        if key in annotations:
            facts[fact] = annotations[key]
    if "price_per_hour" in facts:
        facts["price_per_hour"] = float(facts["price_per_hour"])
    facts["spot"] = str(facts.get("spot", "")).lower() == "true" or _tolerates_spot(template)
    return facts


def _tolerates_spot(template: Mapping[str, Any]) -> bool:
    wanted = template["spec"].get("nodeSelector") or {}
    signs = {
        "cloud.google.com/gke-spot": "true",
        "karpenter.sh/capacity-type": "spot",
        "eks.amazonaws.com/capacityType": "SPOT",
    }
    return any(str(wanted.get(key)).lower() == value.lower() for key, value in signs.items())


_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_FACTORS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_FACTORS |= {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTP", start=1)}


def quantity(value: Any) -> float:
    """A Kubernetes quantity (`500m`, `64Gi`, `8`) as a number.

    Raises:
        ClusterError: it is none.
    """
    match = _QUANTITY.fullmatch(str(value).strip())
    if not match:
        raise ClusterError(f"{value!r} is no Kubernetes quantity: write for instance 8, 500m or 64Gi")
    return float(match[1]) * _FACTORS.get(match[2] or "", 1.0)
