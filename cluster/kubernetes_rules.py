"""KubeRay manifests against KubeRay's own schema, made strict, and what no schema says.

schemas/kuberay-1.7.0.json.gz is `openAPIV3Schema` of RayCluster v1 and RayJob v1, descriptions removed, from the custom
resource definitions of KubeRay v1.7.0 (helm-chart/kuberay-operator/crds, Apache-2.0). An API server drops unknown
fields silently; here they are faults.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import kuberay
from cluster.errors import ClusterError, Fault
from cluster.source import Document, describe, nearest

SCHEMA = Path(__file__).parent / "schemas" / "kuberay-1.7.0.json.gz"
API = "ray.io/v1"

# Objects that stand beside a RayCluster in a manifest: their top-level keys, and those of their spec.
OBJECTS: dict[str, tuple[str, set[str], set[str]]] = {
    "Namespace": ("v1", {"spec"}, {"finalizers"}),
    "PersistentVolumeClaim": (
        "v1",
        {"spec"},
        {"accessModes", "resources", "storageClassName", "volumeMode", "volumeName", "selector", "dataSource"}
        | {"dataSourceRef", "volumeAttributesClassName"},
    ),
    "ConfigMap": ("v1", {"data", "binaryData", "immutable"}, set()),
    "Secret": ("v1", {"data", "stringData", "type", "immutable"}, set()),
    "ServiceAccount": ("v1", {"automountServiceAccountToken", "imagePullSecrets", "secrets"}, set()),
    "PriorityClass": (
        "scheduling.k8s.io/v1",
        {"value", "globalDefault", "description", "preemptionPolicy"},
        set(),
    ),
    "NetworkPolicy": (
        "networking.k8s.io/v1",
        {"spec"},
        {"podSelector", "policyTypes", "ingress", "egress"},
    ),
}
METADATA = {"name", "generateName", "namespace", "labels", "annotations", "finalizers", "ownerReferences"}
GPU_LABEL = "nvidia.com/gpu"


@functools.cache
def schemas() -> dict[str, Any]:
    """Strict JSON schemas by kind."""
    return {kind: strict(schema) for kind, schema in json.loads(gzip.decompress(SCHEMA.read_bytes())).items()}


def strict(schema: Any) -> Any:
    """A structural schema of Kubernetes as a JSON schema in which only named properties may appear."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {
        key: {name: strict(value) for name, value in part.items()} if key == "properties" else strict(part)
        for key, part in schema.items()
        if not key.startswith("x-kubernetes") and key not in ("nullable", "format")
    }
    if schema.get("x-kubernetes-int-or-string"):
        inner.pop("anyOf", None)
        inner["type"] = ["integer", "string"]
    elif "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    if schema.get("nullable") and isinstance(inner.get("type"), str):
        inner["type"] = [inner["type"], "null"]
    return inner


def faults(documents: list[Document]) -> list[Fault]:
    """Every fault of a manifest."""
    found: list[Fault] = []
    for document in documents:
        found += _object(document) if kuberay.is_kubernetes(document) else [_not_an_object(document)]
    if not found and not any(kuberay.is_ray(document) for document in documents):
        kinds = ", ".join(str(document.data["kind"]) for document in documents)
        found.append(
            documents[0].fault((), f"this manifest makes no Ray cluster: it has {kinds}, but no RayCluster or RayJob")
        )
    if not found:
        found += _references(documents)
    return found


def _not_an_object(document: Document) -> Fault:
    return document.fault((), "this document of the manifest has no apiVersion and kind")


def _object(document: Document) -> list[Fault]:
    kind, version = document.data["kind"], document.data["apiVersion"]
    metadata = document.data.get("metadata")
    if not isinstance(metadata, dict) or not (metadata.get("name") or metadata.get("generateName")):
        return [document.fault(("metadata",), f"the {kind} has no metadata.name")]
    found = document.unknown_keys(("metadata",), METADATA, "metadata")
    if kind in kuberay.RAY_KINDS:
        if version != API:
            return [*found, document.fault(("apiVersion",), f"apiVersion is {version}: write {API}")]
        found += _schema_faults(document)
        return found or list(_ray_object(document))
    if str(version).startswith("ray.io/"):
        return [*found, document.fault(("kind",), f"there is no kind {kind!r}{nearest(kind, kuberay.RAY_KINDS)}")]
    if kind in OBJECTS:
        wanted, keys, spec = OBJECTS[kind]
        if version != wanted:
            found.append(document.fault(("apiVersion",), f"apiVersion of a {kind} is {wanted}, not {version}"))
        found += document.unknown_keys((), keys | {"apiVersion", "kind", "metadata"}, f"a {kind}")
        if spec and "spec" in document.data:
            found += document.unknown_keys(("spec",), spec, f"spec of a {kind}")
    return found


def _schema_faults(document: Document) -> list[Fault]:
    import jsonschema

    from cluster.ray_rules import schema_fault

    errors = jsonschema.Draft7Validator(schemas()[document.data["kind"]]).iter_errors(document.data)
    return [schema_fault(document, error) for error in errors]


def _ray_object(document: Document) -> Iterator[Fault]:
    """What the schema leaves open: pods' metadata, names, quantities, groups that can never be made."""
    base: tuple[Any, ...] = ("spec",) if document.data["kind"] == "RayCluster" else ("spec", "rayClusterSpec")
    spec = document.data["spec"] if len(base) == 1 else document.data["spec"].get("rayClusterSpec")
    if spec is None:
        if not document.data["spec"].get("clusterSelector"):
            yield document.fault(("spec",), "the RayJob has neither a rayClusterSpec nor a clusterSelector")
        return
    yield from _pod(document, (*base, "headGroupSpec", "template"))
    names: set[str] = set()
    for number, group in enumerate(spec.get("workerGroupSpecs") or []):
        path = (*base, "workerGroupSpecs", number)
        if group["groupName"] in names:
            yield document.fault((*path, "groupName"), f"two worker groups are called {group['groupName']!r}")
        names.add(group["groupName"])
        least, most = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        count = group.get("replicas", least)
        if not least <= count <= most:
            said = f"{group['groupName']} has replicas {count}, which is not between {least} and {most}"
            yield document.fault((*path, "replicas"), f"{said} (minReplicas and maxReplicas)")
        yield from _pod(document, (*path, "template"))


def _pod(document: Document, path: tuple[Any, ...]) -> Iterator[Fault]:
    template = document.at(path)
    if "metadata" in template:
        yield from document.unknown_keys((*path, "metadata"), METADATA, "metadata of the pod template")
        annotations = (template["metadata"] or {}).get("annotations") or {}
        for key, value in annotations.items():
            where = (*path, "metadata", "annotations", key)
            yield from _annotation(document, where, key, value)
    containers = (template.get("spec") or {}).get("containers") or []
    volumes = {volume.get("name") for volume in (template.get("spec") or {}).get("volumes") or []}
    for number, container in enumerate(containers):
        inside = (*path, "spec", "containers", number)
        for kind in ("limits", "requests"):
            for name, amount in ((container.get("resources") or {}).get(kind) or {}).items():
                try:
                    kuberay.quantity(amount)
                except ClusterError as error:
                    yield document.fault((*inside, "resources", kind, name), str(error))
        for at, mount in enumerate(container.get("volumeMounts") or []):
            if mount.get("name") not in volumes:
                said = f"the volume {mount.get('name')!r} is mounted, but not among the pod's volumes"
                yield document.fault((*inside, "volumeMounts", at), f"{said}{nearest(mount.get('name'), volumes)}")
    if not containers:
        yield document.fault((*path, "spec"), "the pod template has no containers")


def _annotation(document: Document, path: tuple[Any, ...], key: str, value: object) -> Iterator[Fault]:
    from cluster.hardware import HardwareError, gpu
    from cluster.shape import link

    if not isinstance(value, str):
        yield document.fault(path, f"the annotation {key} must be text: write {json.dumps(str(value))}")
        return
    if key.startswith("trireme/") and key not in kuberay.ANNOTATIONS:
        yield document.fault(path, f"there is no annotation {key!r}{nearest(key, kuberay.ANNOTATIONS)}")
        return
    try:
        if key == "trireme/gpu":
            gpu(value)
        elif key.startswith("trireme/link-"):
            link(value)
        elif key == "trireme/price-per-hour" and not re.fullmatch(r"\d+(\.\d+)?", value):
            raise ClusterError(f"trireme/price-per-hour must be a number of dollars, not {describe(value)}")
    except (ClusterError, HardwareError) as error:
        yield document.fault(path, str(error))


def _references(documents: list[Document]) -> Iterator[Fault]:
    """Claims that a manifest both makes and uses must have one name; one that it only uses may exist already."""
    made = {d.data["metadata"].get("name") for d in documents if d.data["kind"] == "PersistentVolumeClaim"}
    for document in documents if made else ():
        for path in document.lines:
            if path[-2:] == ("persistentVolumeClaim", "claimName"):
                name = document.at(path)
                if name not in made:
                    yield document.fault(path, f"no PersistentVolumeClaim {name!r} is made here{nearest(name, made)}")
