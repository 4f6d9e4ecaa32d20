"""KubeRay manifests (RayCluster and RayJob) as a ClusterShape. What is wrong with one: kuberay_rules.py.

What Kubernetes does not say stands in annotations of a group's pod template: `trireme/gpu`, `trireme/link-within`,
`trireme/link-across` and `trireme/price-per-hour` (of one node of the group).
"""

import re
from collections.abc import Mapping
from typing import Any

from cluster import ClusterError
from cluster.document import Document
from cluster.shape import ClusterShape, node_type

RAY_KINDS = ("RayCluster", "RayJob")
ANNOTATIONS = {
    "trireme/gpu": "gpu",
    "trireme/link-within": "link_within",
    "trireme/link-across": "link_across",
    "trireme/price-per-hour": "price_per_hour",
}
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


def is_kubernetes(document: Document) -> bool:
    return isinstance(document.data, dict) and "apiVersion" in document.data and "kind" in document.data


def is_ray(document: Document) -> bool:
    return is_kubernetes(document) and document.data["kind"] in RAY_KINDS


def shape(data: Mapping[str, Any], file: str) -> ClusterShape:
    """The shape of a valid RayCluster or RayJob."""
    spec = data["spec"] if data["kind"] == "RayCluster" else data["spec"].get("rayClusterSpec")
    if spec is None:
        raise ClusterError(f"{file} runs its job on a cluster that exists already: name the file of that cluster")
    head = node_type("head", _facts(spec["headGroupSpec"]), 1, 1)
    workers = []
    for group in spec.get("workerGroupSpecs") or []:
        hosts = group.get("numOfHosts", 1)  # a replica of the group is this many pods
        least = most = group.get("replicas", group.get("minReplicas", 0))
        if spec.get("enableInTreeAutoscaling"):
            least, most = group.get("minReplicas", least), group.get("maxReplicas", most)
        workers.append(node_type(group["groupName"], _facts(group), least * hosts, most * hosts))
    name = data["metadata"].get("name") or data["metadata"].get("generateName", "")
    return ClusterShape(name, "kuberay", head, tuple(workers), file, sum(w.max_nodes for w in workers))


def _facts(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a group says of its machines: first what Ray is told to believe, then what its pods' first container has."""
    told, template = group.get("rayStartParams") or {}, group["template"]
    params = {fact: float(told[key]) for key, fact in (("num-cpus", "cpus"), ("num-gpus", "gpus")) if key in told}
    resources = template["spec"]["containers"][0].get("resources") or {}
    amounts = (resources.get("requests") or {}) | (resources.get("limits") or {})
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    facts: dict[str, Any] = {
        "cpus": quantity(amounts.get("cpu", 0)),
        "memory_gb": quantity(amounts.get("memory", 0)) / 1e9,
        "gpus": int(sum(quantity(amounts.get(name, 0)) for name in GPU_RESOURCES)),
        **{fact: annotations[key] for key, fact in ANNOTATIONS.items() if key in annotations},
    }
    if "price_per_hour" in facts:
        facts["price_per_hour"] = float(facts["price_per_hour"])
    return [params, facts]


_FACTORS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_FACTORS |= {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)}


def quantity(value: Any) -> float:
    """A valid Kubernetes quantity (`500m`, `64Gi`, `8`) as a number."""
    number, suffix = re.fullmatch(r"(.*?)([numkMGTPE]?i?)", str(value)).groups()  # type: ignore[union-attr]
    return float(number) * _FACTORS.get(suffix, 1.0)
