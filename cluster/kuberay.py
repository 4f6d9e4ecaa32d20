"""KubeRay manifests (RayCluster and RayJob) as a ClusterShape.

What Kubernetes does not say stands in annotations of a group's pod template: `trireme/gpu`,
`trireme/link-within`, `trireme/link-across` and `trireme/price-per-hour` (of one node of the
group). What is wrong with a manifest: kuberay_rules.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster import ClusterError
from cluster.document import Document, Keys
from cluster.shape import ClusterShape, node_type

RAY_KINDS = ("RayCluster", "RayJob")
ANNOTATIONS = {
    "trireme/gpu": "gpu",
    "trireme/link-within": "link_within",
    "trireme/link-across": "link_across",
    "trireme/price-per-hour": "price_per_hour",
}
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True)
class Group:
    """The head's group of pods, or one of the workers' groups.

    Attributes:
        path: The keys and indices that lead to it.
        spec: Its values.
    """

    path: Keys
    spec: Mapping[str, Any]

    @property
    def is_head(self) -> bool:
        return self.path[-1] == "headGroupSpec"

    @property
    def pod(self) -> Mapping[str, Any]:
        """The spec of its pods."""
        return self.spec["template"]["spec"]

    @property
    def pod_path(self) -> Keys:
        """The keys and indices that lead to the spec of its pods."""
        return (*self.path, "template", "spec")

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of its pods."""
        return self.spec["template"].get("metadata") or {}

    @property
    def volumes(self) -> list[Mapping[str, Any]]:
        return self.pod.get("volumes") or []

    @property
    def gpus(self) -> float:
        """GPUs of one pod: its first container is Ray's."""
        limits = (self.pod["containers"][0].get("resources") or {}).get("limits") or {}
        return sum(quantity(limits.get(name, 0)) for name in GPU_RESOURCES)

    @property
    def max_pods(self) -> int:
        """How many pods there can be."""
        return self.spec.get("maxReplicas", 1) * self.spec.get("numOfHosts", 1)

    def containers(self) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
        """The containers of a pod, each with the keys and indices that lead to it."""
        for key in ("initContainers", "containers"):
            for number, container in enumerate(self.pod.get(key) or []):
                yield (*self.pod_path, key, number), container


def is_kubernetes(document: Document) -> bool:
    """Whether a document is an object of Kubernetes."""
    return isinstance(document.data, dict) and {"apiVersion", "kind"} <= document.data.keys()


def is_ray(document: Document) -> bool:
    """Whether a document is a RayCluster or a RayJob."""
    return is_kubernetes(document) and document.data["kind"] in RAY_KINDS


def shape(data: Mapping[str, Any], file: str) -> ClusterShape:
    """The shape of a valid RayCluster or RayJob.

    Raises:
        ClusterError: It is a RayJob that selects a cluster by its labels.
    """
    spec = data["spec"]
    if data["kind"] == "RayJob":
        spec = spec.get("rayClusterSpec")
    if spec is None:
        problem = f"{file} runs its job on a cluster that exists already"
        raise ClusterError(f"{problem}: name the file of that cluster")
    workers = []
    for group in spec.get("workerGroupSpecs") or []:
        hosts = group.get("numOfHosts", 1)  # a replica of the group is this many pods
        replicas = group.get("replicas", group.get("minReplicas", 0))
        least = most = replicas
        if spec.get("enableInTreeAutoscaling"):
            least = group.get("minReplicas", replicas)
            most = group.get("maxReplicas", replicas)
        workers.append(node_type(group["groupName"], _facts(group), least * hosts, most * hosts))
    metadata = data["metadata"]
    return ClusterShape(
        name=metadata.get("name") or metadata.get("generateName", ""),
        provider="kuberay",
        head=node_type("head", _facts(spec["headGroupSpec"]), 1, 1),
        workers=tuple(workers),
        path=file,
        max_workers=sum(kind.max_nodes for kind in workers),
    )


def _facts(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a group says of its machines, the more important facts first.

    What Ray is started with comes before what the first container of the pods has.
    """
    template = group["template"]
    start_params = group.get("rayStartParams") or {}
    started_with = {}
    for key, fact in (("num-cpus", "cpus"), ("num-gpus", "gpus")):
        if key in start_params:
            started_with[fact] = float(start_params[key])
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
    return [started_with, facts]


_FACTORS = {"n": 1e-9, "u": 1e-6, "m": 1e-3}
_FACTORS |= {prefix: 1000.0**power for power, prefix in enumerate("kMGTPE", start=1)}
_FACTORS |= {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)}


def quantity(value: Any) -> float:
    """A valid Kubernetes quantity (`500m`, `64Gi`, `8`) as a number."""
    match = re.fullmatch(r"(.*?)([numkMGTPE]?i?)", str(value))
    assert match is not None, "the pattern matches every text of one line"
    return float(match[1]) * _FACTORS.get(match[2], 1.0)
