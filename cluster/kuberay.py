"""KubeRay manifests (RayCluster and RayJob): as a ClusterShape, and what is wrong with one.

What Kubernetes does not say stands in annotations of a group's pod template: `trireme/gpu`, `trireme/link-within`,
`trireme/link-across` and `trireme/price-per-hour` (of one node of the group).

A manifest's schema is KubeRay's own, made strict (an API server drops unknown fields silently; here they are problems).
What stands beside a RayCluster is for `kubectl apply` to check.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster import ClusterError
from cluster.document import SCHEMAS, Document, Keys, Problem, nearest, schema_problems
from cluster.shape import ClusterShape, check_fact, node_type

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


# --- what is wrong with one -------------------------------------------------------------------------------------------


def problems(documents: list[Document]) -> list[Problem]:
    """Everything that is wrong in a manifest."""
    found = [problem for document in documents for problem in _object(document)]
    if not found and not any(is_ray(document) for document in documents):
        kinds = ", ".join(str(document.data["kind"]) for document in documents)
        message = f"this manifest does not make a Ray cluster: it has {kinds}, but no RayCluster or RayJob"
        return [documents[0].problem((), message)]
    return found


def _object(document: Document) -> list[Problem]:
    if not is_kubernetes(document):
        return [document.problem((), "this document of the manifest has no apiVersion and kind")]
    data, kind = document.data, str(document.data["kind"])
    if kind not in RAY_KINDS:
        unknown = document.problem(("kind",), f"there is no kind {kind!r}{nearest(kind, RAY_KINDS)}")
        return [unknown] if str(data["apiVersion"]).startswith("ray.io/") else []
    if found := schema_problems(document, _schemas()[kind], data):
        return found
    return [document.problem(path, sentence) for path, sentence in _mistakes(data)]


@functools.cache
def _schemas() -> dict[str, Any]:
    """KubeRay's JSON schemas by kind."""
    return json.loads(gzip.decompress((SCHEMAS / "kuberay-1.7.0.json.gz").read_bytes()))


def _mistakes(data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
    """Where no schema sees that something is wrong, and a sentence for it."""
    base: Keys = ("spec",) if data["kind"] == "RayCluster" else ("spec", "rayClusterSpec")
    cluster = data["spec"] if data["kind"] == "RayCluster" else data["spec"].get("rayClusterSpec")
    if cluster is None:
        if "clusterSelector" not in data["spec"]:
            yield ("spec",), "the RayJob has neither a rayClusterSpec nor a clusterSelector"
        return
    groups: list[tuple[Keys, Any]] = [(("headGroupSpec",), cluster["headGroupSpec"])]
    groups += [(("workerGroupSpecs", n), group) for n, group in enumerate(cluster.get("workerGroupSpecs") or [])]
    for where, group in groups:
        for key, value in ((group["template"].get("metadata") or {}).get("annotations") or {}).items():
            message = check_fact(ANNOTATIONS[key], value) if key in ANNOTATIONS else ""
            if key.startswith("trireme/") and key not in ANNOTATIONS:
                message = f"there is no annotation {key!r}{nearest(key, ANNOTATIONS)}"
            if message:
                yield (*base, *where, "template", "metadata", "annotations", key), message
