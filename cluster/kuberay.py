"""KubeRay manifests (RayCluster and RayJob): as a ClusterShape, and what is wrong with one.

What Kubernetes does not say stands in annotations of a group's pod template: `trireme/gpu`, `trireme/link-within`,
`trireme/link-across`, `trireme/price-per-hour` (of one node of the group) and `trireme/spot`.

A manifest's schema is KubeRay's own, made strict (an API server drops unknown fields silently; here they are problems),
and schemas/objects.yaml for what stands beside a RayCluster; here is what no schema says.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster import ClusterError
from cluster.document import (
    SCHEMAS,
    Document,
    Keys,
    Message,
    Problem,
    Rule,
    nearest,
    rule_problems,
    schema_problems,
    schemas,
)
from cluster.shape import ClusterShape, check_fact, node_type

RAY_KINDS = ("RayCluster", "RayJob")
ANNOTATIONS = {
    "trireme/gpu": "gpu",
    "trireme/link-within": "link_within",
    "trireme/link-across": "link_across",
    "trireme/price-per-hour": "price_per_hour",
    "trireme/spot": "spot",
}
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
SPOT_SELECTORS = {
    "cloud.google.com/gke-spot": "true",
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacitytype": "spot",
}


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
    """What a group says of its machines: first what Ray is told to believe, then what the pod has."""
    told = group.get("rayStartParams") or {}
    params = {fact: float(told[key]) for key, fact in (("num-cpus", "cpus"), ("num-gpus", "gpus")) if key in told}
    return [params, pod_facts(group["template"])]


def pod_facts(template: Mapping[str, Any]) -> dict[str, Any]:
    """What a pod template says of the machine that Ray gets: of its first container, as KubeRay reads it."""
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
    selected = {str(k).lower(): str(v).lower() for k, v in (template["spec"].get("nodeSelector") or {}).items()}
    spot = any(selected.get(key) == value for key, value in SPOT_SELECTORS.items())
    facts["spot"] = str(facts.get("spot", "")).lower() == "true" or spot
    return facts


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
    if found:
        return found
    if not any(is_ray(document) for document in documents):
        kinds = ", ".join(str(document.data["kind"]) for document in documents)
        message = f"this manifest does not make a Ray cluster: it has {kinds}, but no RayCluster or RayJob"
        return [documents[0].problem((), message)]
    return list(_references(documents))


def _object(document: Document) -> list[Problem]:
    if not is_kubernetes(document):
        return [document.problem((), "this document of the manifest has no apiVersion and kind")]
    data, kind, known = document.data, str(document.data["kind"]), schemas("objects.yaml")
    if kind not in known and str(data["apiVersion"]).startswith("ray.io/"):
        return [document.problem(("kind",), f"there is no kind {kind!r}{nearest(kind, RAY_KINDS)}")]
    found = schema_problems(document, known.get(kind, {}), data)
    if kind not in RAY_KINDS or found:
        return found
    found = schema_problems(document, _kuberay()[kind], data)
    if found:
        return found
    base = "spec" if kind == "RayCluster" else "spec.rayClusterSpec"
    if kind == "RayJob" and not {"rayClusterSpec", "clusterSelector"} & set(data["spec"]):
        return [document.problem(("spec",), "the RayJob has neither a rayClusterSpec nor a clusterSelector")]
    found = rule_problems(document, CLUSTER_RULES, base)
    for group in ("headGroupSpec", "workerGroupSpecs.*"):
        found += rule_problems(document, TEMPLATE_RULES, f"{base}.{group}.template")
    return found


@functools.cache
def _kuberay() -> dict[str, Any]:
    """KubeRay's JSON schemas by kind."""
    return json.loads(gzip.decompress((SCHEMAS / "kuberay-1.7.0.json.gz").read_bytes()))


def check_replicas(document: Document, path: Keys, group: Any) -> Iterator[Message]:
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
    count = group.get("replicas", least)
    if not least <= count <= most:
        between = f"not between {least} and {most} (minReplicas and maxReplicas)"
        yield "replicas", f"{group['groupName']} has replicas {count}, which is {between}"


def check_pod(document: Document, path: Keys, spec: Any) -> Iterator[Message]:
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    for number, container in enumerate(spec["containers"]):
        for at, mount in enumerate(container.get("volumeMounts") or []):
            name = mount.get("name")
            if name not in volumes:
                message = f"the volume {name!r} is mounted, but not among the pod's volumes{nearest(name, volumes)}"
                yield "containers", number, "volumeMounts", at, message


def check_annotation(document: Document, path: Keys, value: Any) -> Iterator[Message]:
    key = path[-1]
    if key in ANNOTATIONS:
        yield from check_fact(ANNOTATIONS[key], value)
    elif key.startswith("trireme/"):
        yield f"there is no annotation {key!r}{nearest(key, ANNOTATIONS)}"


def _references(documents: list[Document]) -> Iterator[Problem]:
    """Claims that a manifest both makes and uses must have one name; one that it only uses may exist already."""
    made = {d.data["metadata"].get("name") for d in documents if d.data["kind"] == "PersistentVolumeClaim"}
    for document in documents if made else ():
        for path, name in document.texts():
            if path[-2:] == ("persistentVolumeClaim", "claimName") and name not in made:
                yield document.problem(path, f"no PersistentVolumeClaim {name!r} is made here{nearest(name, made)}")


CLUSTER_RULES: tuple[Rule, ...] = (("workerGroupSpecs.*", check_replicas),)
TEMPLATE_RULES: tuple[Rule, ...] = (("spec", check_pod), ("metadata.annotations.*", check_annotation))
