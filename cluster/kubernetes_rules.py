"""Rules for KubeRay manifests: KubeRay's own schema, made strict (an API server drops unknown fields silently; here
they are problems), schemas/objects.yaml for what stands beside a RayCluster, and what no schema says."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterator
from typing import Any

from cluster import kuberay
from cluster.document import Document, Keys, nearest
from cluster.errors import Problem
from cluster.rules import SCHEMAS, Message, Rules, check_fact, schema_problems, schemas

CLUSTER, TEMPLATE = Rules(), Rules()  # of a RayClusterSpec, of a pod template


def problems(documents: list[Document]) -> list[Problem]:
    """Everything that is wrong in a manifest."""
    found = [problem for document in documents for problem in _object(document)]
    if found:
        return found
    if not any(kuberay.is_ray(document) for document in documents):
        kinds = ", ".join(str(document.data["kind"]) for document in documents)
        message = f"this manifest does not make a Ray cluster: it has {kinds}, but no RayCluster or RayJob"
        return [documents[0].problem((), message)]
    return list(_references(documents))


def _object(document: Document) -> list[Problem]:
    if not kuberay.is_kubernetes(document):
        return [document.problem((), "this document of the manifest has no apiVersion and kind")]
    data, kind, known = document.data, str(document.data["kind"]), schemas("objects.yaml")
    if kind not in known and str(data["apiVersion"]).startswith("ray.io/"):
        return [document.problem(("kind",), f"there is no kind {kind!r}{nearest(kind, kuberay.RAY_KINDS)}")]
    found = schema_problems(document, known.get(kind, {}), data)
    if kind not in kuberay.RAY_KINDS or found:
        return found
    found = schema_problems(document, _kuberay()[kind], data)
    if found:
        return found
    base = "spec" if kind == "RayCluster" else "spec.rayClusterSpec"
    if kind == "RayJob" and not {"rayClusterSpec", "clusterSelector"} & set(data["spec"]):
        return [document.problem(("spec",), "the RayJob has neither a rayClusterSpec nor a clusterSelector")]
    templates = (f"{base}.headGroupSpec.template", f"{base}.workerGroupSpecs.*.template")
    return [*CLUSTER.problems(document, base), *(p for where in templates for p in TEMPLATE.problems(document, where))]


@functools.cache
def _kuberay() -> dict[str, Any]:
    """KubeRay's JSON schemas by kind."""
    return json.loads(gzip.decompress((SCHEMAS / "kuberay-1.7.0.json.gz").read_bytes()))


@CLUSTER.at("workerGroupSpecs.*")
def replicas(document: Document, path: Keys, group: Any) -> Iterator[Message]:
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
    count = group.get("replicas", least)
    if not least <= count <= most:
        between = f"not between {least} and {most} (minReplicas and maxReplicas)"
        yield "replicas", f"{group['groupName']} has replicas {count}, which is {between}"


@TEMPLATE.at("spec")
def pod(document: Document, path: Keys, spec: Any) -> Iterator[Message]:
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    for number, container in enumerate(spec["containers"]):
        for at, mount in enumerate(container.get("volumeMounts") or []):
            name = mount.get("name")
            if name not in volumes:
                message = f"the volume {name!r} is mounted, but not among the pod's volumes{nearest(name, volumes)}"
                yield "containers", number, "volumeMounts", at, message


@TEMPLATE.at("metadata.annotations.*")
def annotation(document: Document, path: Keys, value: Any) -> Iterator[Message]:
    key = path[-1]
    if key in kuberay.ANNOTATIONS:
        yield from check_fact(kuberay.ANNOTATIONS[key], value)
    elif key.startswith("trireme/"):
        yield f"there is no annotation {key!r}{nearest(key, kuberay.ANNOTATIONS)}"


def _references(documents: list[Document]) -> Iterator[Problem]:
    """Claims that a manifest both makes and uses must have one name; one that it only uses may exist already."""
    made = {d.data["metadata"].get("name") for d in documents if d.data["kind"] == "PersistentVolumeClaim"}
    for document in documents if made else ():
        for path, name in document.texts():
            if path[-2:] == ("persistentVolumeClaim", "claimName") and name not in made:
                yield document.problem(path, f"no PersistentVolumeClaim {name!r} is made here{nearest(name, made)}")
