"""What is wrong with a KubeRay manifest, without a Kubernetes cluster.

Its schema is KubeRay's own, made strict (an API server drops unknown fields silently; here they are problems), and
schemas/kubernetes.yaml for Kubernetes' own words; here is what holds between several values. Of what stands beside a
RayCluster, claims for storage are known here; the rest is for `kubectl apply` to check.
"""

import functools
import gzip
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from cluster import ClusterError
from cluster.document import (
    SCHEMAS,
    Document,
    Keys,
    Problem,
    load_yaml,
    mistaken,
    nearest,
    schema_problems,
    schemas,
    strict,
)
from cluster.kuberay import ANNOTATIONS, GPU_RESOURCES, RAY_KINDS, is_kubernetes, is_ray, quantity, shape
from cluster.pending import check_feasible
from cluster.ray_rules import plain
from cluster.shape import problem_with_fact

VERBS = ["train", "sweep", "scale", "runs", "watch", "profile", "report", "config", "parity", "export", "generate"]
VERBS += ["sync", "submit", "queue", "doctor", "plan", "calibrate", "cluster"]
COMMANDS = ("trireme", "python", "python3", "torchrun", "bash", "sh", "ray")
LIMITS = {"cpu": (1e-3, 4096), "memory": (2**20, 2**46), "sizeLimit": (2**20, 2**46)}
"""Between which amounts a quantity makes sense; below 1 MiB a unit was forgotten, or `m` (thousandths) written."""
Mistakes = Iterator[tuple[Keys, str]]


def problems(documents: list[Document], file: str) -> list[Problem]:
    """Everything that is wrong in a manifest."""
    found = [problem for document in documents for problem in _object(document, documents, file)]
    if not found and not any(is_ray(document) for document in documents):
        kinds = ", ".join(str(document.data["kind"]) for document in documents)
        message = f"this manifest does not make a Ray cluster: it has {kinds}, but no RayCluster or RayJob"
        return [documents[0].problem((), message)]
    return found


def _object(document: Document, documents: list[Document], file: str) -> list[Problem]:
    if not is_kubernetes(document):
        return [document.problem((), "this document of the manifest has no apiVersion and kind")]
    data, kind, words = document.data, str(document.data["kind"]), schemas("kubernetes.yaml")
    if kind == "PersistentVolumeClaim":
        return schema_problems(document, words["claim"], data)
    if kind not in RAY_KINDS:
        unknown = document.problem(("kind",), f"there is no kind {kind!r}{nearest(kind, RAY_KINDS)}")
        if str(data["apiVersion"]).startswith("ray.io/"):
            return [unknown]
        return schema_problems(document, words["kinds"], kind, ("kind",))
    if data["apiVersion"] != "ray.io/v1":
        return [document.problem(("apiVersion",), f"apiVersion is {data['apiVersion']!r}: write ray.io/v1")]
    if found := schema_problems(document, _schemas()[kind], data):
        return found
    found = schema_problems(document, words["metadata"], data["metadata"], ("metadata",))
    base: Keys = ("spec",) if kind == "RayCluster" else ("spec", "rayClusterSpec")
    if kind == "RayJob":
        found += schema_problems(document, words["job"], data["spec"], ("spec",))
        found += _runtime_env(document, data["spec"].get("runtimeEnvYAML") or "")
    cluster = data["spec"] if kind == "RayCluster" else data["spec"].get("rayClusterSpec")
    if cluster is None:
        if "clusterSelector" not in data["spec"]:
            found.append(document.problem(("spec",), "the RayJob has neither a rayClusterSpec nor a clusterSelector"))
        return found
    found += schema_problems(document, words["cluster"], cluster, base)
    groups: list[tuple[Keys, Any]] = [((*base, "headGroupSpec"), cluster["headGroupSpec"])]
    groups += [((*base, "workerGroupSpecs", n), g) for n, g in enumerate(cluster.get("workerGroupSpecs") or [])]
    for path, group in groups:
        found += _group_words(document, path, group)
    rules = [_groups(groups, documents)] + ([_job(data, groups, file)] if kind == "RayJob" else [])
    return found or [document.problem(path, sentence) for rule in rules for path, sentence in rule]


@functools.cache
def _schemas() -> dict[str, Any]:
    """KubeRay's JSON schemas by kind."""
    text = gzip.decompress((SCHEMAS / "kuberay-1.7.0.json.gz").read_bytes())
    return strict(json.loads(text, object_hook=_with_words))


def _with_words(schema: dict[str, Any]) -> dict[str, Any]:
    """What to write instead, where an amount does not match its pattern."""
    is_amount = "[numkMGTPE]" in str(schema.get("pattern", ""))
    return schema | {"write": "an amount such as 2, 500m or 16Gi"} if is_amount else schema


def _group_words(document: Document, path: Keys, group: Mapping[str, Any]) -> list[Problem]:
    """Words, numbers and names of one group and its pods."""
    words, ray, pod = schemas("kubernetes.yaml"), schemas("ray.yaml"), (*path, "template", "spec")
    found = schema_problems(document, words["head" if path[-1] == "headGroupSpec" else "worker"], group, path)
    found += schema_problems(document, words["pod"], group["template"]["spec"], pod)
    params = {key: plain(value) for key, value in (group.get("rayStartParams") or {}).items()}
    found += schema_problems(document, ray["start"], params, (*path, "rayStartParams"))
    metadata = group["template"].get("metadata") or {}
    found += schema_problems(document, words["metadata"], metadata, (*path, "template", "metadata"))
    for place, container in _containers(group):
        for number, variable in enumerate(container.get("env") or []):
            found += schema_problems(document, ray["variable"], variable, (*path, *place, "env", number))
    return found


def _containers(group: Mapping[str, Any]) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    spec = group["template"]["spec"]
    for key in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(key) or []):
            yield ("template", "spec", key, number), container


def _runtime_env(document: Document, text: str) -> list[Problem]:
    path = ("spec", "runtimeEnvYAML")
    try:
        found = load_yaml(text)
    except yaml.YAMLError:
        return [document.problem(path, "spec.runtimeEnvYAML is not YAML: write keys such as env_vars")]
    return schema_problems(document, schemas("ray.yaml")["runtime_env"], {} if found is None else found, path)


# --- groups of pods ---------------------------------------------------------------------------------------------------


def _groups(groups: list[tuple[Keys, Any]], documents: list[Document]) -> Mistakes:
    pods = [(group["template"].get("metadata") or {}).get("labels") or {} for _, group in groups]
    schema = schemas("kubernetes.yaml")["claim"]
    claims = {d.data["metadata"]["name"]: d.data["spec"] for d in documents if not schema_problems(d, schema, d.data)}
    yield from _shared_claims(groups, claims)
    for path, group in groups:
        yield from _annotations(path, group)
        yield from _replicas(path, group)
        yield from _volumes(path, group, claims)
        yield from _affinity(path, group, pods)
        for place, container in _containers(group):
            yield from _amounts((*path, *place), container)


def _annotations(path: Keys, group: Mapping[str, Any]) -> Mistakes:
    for key, value in ((group["template"].get("metadata") or {}).get("annotations") or {}).items():
        message = problem_with_fact(ANNOTATIONS[key], value) if key in ANNOTATIONS else ""
        if key not in ANNOTATIONS and (key.startswith("trireme/") or mistaken(key, ANNOTATIONS)):
            message = f"there is no annotation {key!r}{nearest(key, ANNOTATIONS)}"
        if message:
            yield (*path, "template", "metadata", "annotations", key), message
        if key == "trireme/gpu" and not _gpus(group):
            at = (*path, "template", "spec", "containers")
            write = f"write {GPU_RESOURCES[0]} under its limits and requests"
            yield at, f"the group says {key}: {value}, but its container has no GPU: {write}"


def _gpus(group: Mapping[str, Any]) -> float:
    limits = (group["template"]["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    return sum(quantity(limits.get(name, 0)) for name in GPU_RESOURCES)


def _replicas(path: Keys, group: Mapping[str, Any]) -> Mistakes:
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", 2**31)
    now = group.get("replicas", least)
    if not least <= now <= most:
        key = "minReplicas" if least > most else "replicas"
        has = f"replicas is {now}, minReplicas {least} and maxReplicas {most}"
        yield (*path, key), f"{has}: write minReplicas the smallest and maxReplicas the largest"


def _volumes(path: Keys, group: Mapping[str, Any], claims: Mapping[str, Any]) -> Mistakes:
    spec = group["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}
    for place, container in _containers(group):
        for number, mount in enumerate(container.get("volumeMounts") or []):
            if mount["name"] not in volumes:
                at = (*path, *place, "volumeMounts", number)
                yield at, f"there is no volume {mount['name']!r}{nearest(mount['name'], volumes)}"
    main = spec["containers"][0]
    shm = next((m for m in main.get("volumeMounts") or [] if m["mountPath"] == "/dev/shm"), None)
    at = (*path, "template", "spec", "containers", 0)
    write = "mount a volume with emptyDir: {medium: Memory} there"
    if path[-1] != "headGroupSpec" and _gpus(group) and shm is None:
        yield at, f"the container has no mount at /dev/shm, where Kubernetes gives 64 MiB, on which NCCL fails: {write}"
    elif shm and (volumes.get(shm["name"], {}).get("emptyDir") or {"medium": "Memory"}).get("medium") != "Memory":
        yield at, f"/dev/shm of the container is not in memory: {write}"
    for number, volume in enumerate(spec.get("volumes") or []):
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
        at = (*path, "template", "spec", "volumes", number)
        if near := mistaken(claim, claims):
            yield at, f"the claim {claim!r} is not in this file: did you mean {near!r}?"
        if message := _amount("sizeLimit", (volume.get("emptyDir") or {}).get("sizeLimit", "1Gi")):
            yield at, message


def _shared_claims(groups: list[tuple[Keys, Any]], claims: Mapping[str, Any]) -> Mistakes:
    """A claim of this manifest that one node alone can mount, and several pods are to: those elsewhere never start."""
    pods = Counter[str]()
    for path, group in groups:
        for number, volume in enumerate(group["template"]["spec"].get("volumes") or []):
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
            pods[name] += group.get("maxReplicas", 1) * group.get("numOfHosts", 1)
            modes = claims.get(name, {}).get("accessModes", ["ReadWriteMany"])
            if pods[name] > 1 and not any(mode.endswith("Many") for mode in modes):
                at = (*path, "template", "spec", "volumes", number)
                yield at, f"{pods[name]} pods mount the claim {name!r}, which one node can: give it ReadWriteMany"


def _affinity(path: Keys, group: Mapping[str, Any], pods: list[Mapping[str, str]]) -> Mistakes:
    """A required neighbour that no pod of this manifest is: none of its pods would ever be placed."""
    where = ("affinity", "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    terms = group["template"]["spec"]
    for key in where:
        terms = terms.get(key) or {}
    for number, term in enumerate(terms):
        wanted = (term.get("labelSelector") or {}).get("matchLabels") or {}
        elsewhere = "namespaces" in term or "namespaceSelector" in term
        if not elsewhere and not any(wanted.items() <= labels.items() for labels in pods):
            write = "write those of the group's template, or the namespaces of other pods"
            yield (*path, "template", "spec", *where, number), f"no pod here has the labels {dict(wanted)}: {write}"


def _amounts(path: Keys, container: Mapping[str, Any]) -> Mistakes:
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name in {**limits, **requests}:
        for key, amounts in (("limits", limits), ("requests", requests)):
            if name in amounts and (message := _amount(name, amounts[name])):
                yield (*path, "resources", key, name), f"{key}.{message}"
        at = (*path, "resources", "requests", name)
        if name in limits and quantity(requests.get(name, 0)) > quantity(limits[name]):
            yield at, f"requests.{name} is {requests[name]}, above its limit of {limits[name]}: write at most that"
        if "/" in name and requests.get(name, limits.get(name)) != limits.get(name):
            yield at, f"requests.{name} is not limits.{name}, and of a device they must be the same: write one for both"


def _amount(name: str, value: Any) -> str:
    """Why an amount of something makes no sense; "" where it does."""
    least, most = LIMITS.get(name, (0, 2**62))
    try:
        found = quantity(value)
    except ValueError:
        return f"{name} is {value!r}: write a number with a unit such as 16Gi"
    if "/" in name and found != int(found):
        return f"{name} is {value!r}: write a whole number"
    write = "a number of CPUs" if name == "cpu" else "a number with a unit such as 16Gi"
    return "" if least <= found <= most else f"{name} is {value!r}, which is {found:g}: write {write}"


# --- a job ------------------------------------------------------------------------------------------------------------


def _job(data: Mapping[str, Any], groups: list[tuple[Keys, Any]], file: str) -> Mistakes:
    """What the entrypoint starts: a command that there is, that fits, and whose checkpoints outlive the pods."""
    path: Keys = ("spec", "entrypoint")
    try:
        words = shlex.split(data["spec"].get("entrypoint", ""))
    except ValueError:
        yield path, "the entrypoint has a quotation mark without its partner: write it"
        return
    if words and (near := mistaken(words[0], COMMANDS)):
        yield path, f"the entrypoint starts {words[0]!r}: did you mean {near!r}?"
    own = own_words(words)
    if own and own[0] not in VERBS:
        yield path, f"there is no command `trireme {own[0]}`{nearest(own[0], VERBS)}"
    given = {key: value for key, equals, value in (word.partition("=") for word in own) if equals}
    workers, unit = given.get("workers", "auto"), "GPU" if any(_gpus(group) for _, group in groups) else "CPU"
    try:
        check_feasible(shape(data, file), workers if workers == "auto" else int(workers), {unit: 1.0})
    except ValueError as error:  # ClusterError among them
        why = str(error) if isinstance(error, ClusterError) else f"workers is {workers!r}: write a number, or auto"
        yield path, why
    if own and own[0] in ("train", "sweep"):
        yield from _storage(path, given.get("run.storage", "runs"), [group for _, group in groups])


def own_words(words: list[str]) -> list[str]:
    """What an entrypoint gives `trireme`; [] where it starts something else."""
    return words[1:] if words[:1] == ["trireme"] else words[3:] if words[1:3] == ["-m", "app"] else []


def _storage(path: Keys, storage: str, groups: list[Mapping[str, Any]]) -> Mistakes:
    """That checkpoints are written where every pod reads them, and where they outlive the pods."""
    lasting = {"persistentVolumeClaim", "nfs", "csi", "hostPath", "cephfs"}
    shared: list[set[str]] = []
    for spec in (group["template"]["spec"] for group in groups):
        kept = {volume["name"] for volume in spec.get("volumes") or [] if lasting & volume.keys()}
        mounts = spec["containers"][0].get("volumeMounts") or []
        shared.append({mount["mountPath"].rstrip("/") for mount in mounts if mount["name"] in kept})
    common = set.intersection(*shared)
    if "://" not in storage and not any(f"{storage}/".startswith(f"{folder}/") for folder in common):
        write = f"run.storage={min(common)}/runs" if common else "run.storage=s3://…, or mount a shared volume in all"
        yield (
            path,
            f"run.storage is {storage}, on no volume that every pod shares, and goes with its pod: write {write}",
        )
