"""What is wrong with a KubeRay manifest, without a Kubernetes cluster.

The schema is KubeRay's own, made strict: an API server drops unknown fields silently, and here they
are problems. schemas/kubernetes.yaml adds Kubernetes' own vocabularies. This file has rules between
several values. Of the objects beside a RayCluster, it knows claims for storage; `kubectl apply`
checks the others.
"""

import functools
import gzip
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cluster import ClusterError, job_rules, pod_rules
from cluster.document import (
    SCHEMAS,
    Document,
    Keys,
    Mistakes,
    Problem,
    load_yaml,
    mistaken,
    nearest,
    schema_problems,
    schemas,
    strict,
)
from cluster.kuberay import (
    ANNOTATIONS,
    GPU_RESOURCES,
    RAY_KINDS,
    Group,
    is_kubernetes,
    is_ray,
    quantity,
    shape,
)
from cluster.pending import check_feasible
from cluster.ray_commands import parse_scalar
from cluster.shape import problem_with_fact

VERBS = [
    *("train", "fork", "sweep", "scale", "runs", "watch", "compare", "profile", "report"),
    *("config", "fields", "parity", "coordinate-check"),
    *("export", "generate", "sync", "submit", "queue", "doctor", "plan", "calibrate", "cluster"),
]
"""The commands of `trireme`."""
COMMANDS = ("trireme", "python", "python3", "torchrun", "bash", "sh", "ray")
"""What an entrypoint usually starts."""
LIMITS = {"cpu": (1e-3, 4096), "memory": (2**20, 2**46), "sizeLimit": (2**20, 2**46)}
"""The least and the largest amount that makes sense.

A memory below 1 MiB lacks its unit, or has the unit `m`, which means thousandths.
"""
LASTING_VOLUMES = {"persistentVolumeClaim", "nfs", "csi", "hostPath", "cephfs"}
"""Kinds of volumes that outlive their pods."""


def problems(documents: list[Document], file: str) -> list[Problem]:
    """Everything that is wrong in a manifest.

    Args:
        documents: Its documents.
        file: Its path.
    """
    found_problems = []
    for document in documents:
        found_problems += _object_problems(document, documents, file)
    if not found_problems and not any(is_ray(document) for document in documents):
        kinds = ", ".join(str(document.data["kind"]) for document in documents)
        message = "this manifest does not make a Ray cluster"
        message += f": it has {kinds}, but no RayCluster or RayJob"
        return [documents[0].problem((), message)]
    return found_problems


def _object_problems(document: Document, documents: list[Document], file: str) -> list[Problem]:
    """Everything that is wrong with one object of the manifest."""
    if not is_kubernetes(document):
        message = "this document of the manifest has no apiVersion and kind"
        return [document.problem((), message)]
    data = document.data
    kind = str(data["kind"])
    kubernetes = schemas("kubernetes.yaml")
    if kind == "PersistentVolumeClaim":
        return schema_problems(document, kubernetes["claim"], data)
    if kind not in RAY_KINDS:
        if str(data["apiVersion"]).startswith("ray.io/"):
            message = f"there is no kind {kind!r}{nearest(kind, RAY_KINDS)}"
            return [document.problem(("kind",), message)]
        return schema_problems(document, kubernetes["kinds"], kind, at=("kind",))
    if data["apiVersion"] != "ray.io/v1":
        message = f"apiVersion is {data['apiVersion']!r}: write ray.io/v1"
        return [document.problem(("apiVersion",), message)]
    schema_errors = schema_problems(document, _kuberay_schemas()[kind], data)
    if schema_errors:
        return schema_errors
    return _ray_object_problems(document, documents, file)


def _ray_object_problems(
    document: Document,
    documents: list[Document],
    file: str,
) -> list[Problem]:
    """What is wrong with a RayCluster or a RayJob that KubeRay's schema allows."""
    data = document.data
    spec = data["spec"]
    is_job = data["kind"] == "RayJob"
    kubernetes = schemas("kubernetes.yaml")
    errors = schema_problems(document, kubernetes["metadata"], data["metadata"], at=("metadata",))
    cluster = spec
    cluster_path: Keys = ("spec",)
    if is_job:
        cluster = spec.get("rayClusterSpec")
        cluster_path = ("spec", "rayClusterSpec")
        errors += schema_problems(document, kubernetes["job"], spec, at=("spec",))
        errors += _runtime_env_problems(document, spec.get("runtimeEnvYAML") or "")
    if cluster is None:
        if "clusterSelector" not in spec:
            message = "the RayJob has neither a rayClusterSpec nor a clusterSelector"
            errors.append(document.problem(("spec",), message))
        if not errors:
            errors += [document.problem(*mistake) for mistake in job_rules.mistakes(data)]
        return errors
    errors += schema_problems(document, kubernetes["cluster"], cluster, at=cluster_path)
    groups = [Group((*cluster_path, "headGroupSpec"), cluster["headGroupSpec"])]
    for number, group_spec in enumerate(cluster.get("workerGroupSpecs") or []):
        groups.append(Group((*cluster_path, "workerGroupSpecs", number), group_spec))
    for group in groups:
        errors += _vocabulary_problems(document, group)
    if errors:
        return errors
    mistakes = list(_groups(groups, documents))
    mistakes += job_rules.names(data)
    mistakes += pod_rules.mistakes(cluster_path, cluster, groups)
    if is_job:
        mistakes += _entrypoint(data, groups, file)
        mistakes += job_rules.mistakes(data)
    return [document.problem(path, sentence) for path, sentence in mistakes]


@functools.cache
def _kuberay_schemas() -> dict[str, Any]:
    """KubeRay's JSON schemas by kind."""
    text = gzip.decompress((SCHEMAS / "kuberay-1.7.0.json.gz").read_bytes())
    return strict(json.loads(text, object_hook=_with_example))


def _with_example(schema: dict[str, Any]) -> dict[str, Any]:
    """Adds to the schema of an amount what a message tells the user to write."""
    is_amount = "[numkMGTPE]" in str(schema.get("pattern", ""))
    if not is_amount:
        return schema
    return schema | {"write": "an amount such as 2, 500m or 16Gi"}


def _vocabulary_problems(document: Document, group: Group) -> list[Problem]:
    """Wrong words, numbers and names of one group and its pods."""
    kubernetes = schemas("kubernetes.yaml")
    ray = schemas("ray.yaml")
    group_schema = kubernetes["head" if group.is_head else "worker"]
    start_params = {}
    for key, value in (group.spec.get("rayStartParams") or {}).items():
        start_params[key] = parse_scalar(value)
    params_path = (*group.path, "rayStartParams")
    metadata_path = (*group.path, "template", "metadata")
    errors = schema_problems(document, group_schema, group.spec, at=group.path)
    errors += schema_problems(document, kubernetes["pod"], group.pod, at=group.pod_path)
    errors += schema_problems(document, ray["start"], start_params, at=params_path)
    errors += schema_problems(document, kubernetes["metadata"], group.metadata, at=metadata_path)
    for path, container in group.containers():
        for number, variable in enumerate(container.get("env") or []):
            at = (*path, "env", number)
            errors += schema_problems(document, ray["variable"], variable, at=at)
    return errors


def _runtime_env_problems(document: Document, text: str) -> list[Problem]:
    """What is wrong with a RayJob's runtime environment, which is YAML in a text."""
    path = ("spec", "runtimeEnvYAML")
    try:
        runtime_env = load_yaml(text)
    except yaml.YAMLError:
        message = "spec.runtimeEnvYAML is not YAML: write keys such as env_vars"
        return [document.problem(path, message)]
    if runtime_env is None:
        runtime_env = {}
    return schema_problems(document, schemas("ray.yaml")["runtime_env"], runtime_env, at=path)


# --- groups of pods -------------------------------------------------------------------------------


def _groups(groups: Sequence[Group], documents: list[Document]) -> Mistakes:
    pod_labels = [group.metadata.get("labels") or {} for group in groups]
    claim_schema = schemas("kubernetes.yaml")["claim"]
    claims = {}
    for document in documents:
        if not schema_problems(document, claim_schema, document.data):
            claims[document.data["metadata"]["name"]] = document.data["spec"]
    yield from _shared_claims(groups, claims)
    for group in groups:
        yield from _annotations(group)
        yield from _replicas(group)
        yield from _volumes(group, claims)
        yield from _affinity(group, pod_labels)
        for path, container in group.containers():
            yield from _resources(path, container)


def _annotations(group: Group) -> Mistakes:
    """Trireme's annotations: their names, their values, and a GPU that the pods have."""
    for key, value in (group.metadata.get("annotations") or {}).items():
        message = ""
        if key in ANNOTATIONS:
            message = problem_with_fact(ANNOTATIONS[key], value)
        elif key.startswith("trireme/") or mistaken(key, ANNOTATIONS):
            message = f"there is no annotation {key!r}{nearest(key, ANNOTATIONS)}"
        if message:
            yield (*group.path, "template", "metadata", "annotations", key), message
        if key == "trireme/gpu" and not group.gpus:
            problem = f"the group says {key}: {value}, but its container has no GPU"
            write = f"write {GPU_RESOURCES[0]} under its limits and requests"
            yield (*group.pod_path, "containers"), f"{problem}: {write}"


def _replicas(group: Group) -> Mistakes:
    """Numbers of replicas in their order."""
    least = group.spec.get("minReplicas", 0)
    most = group.spec.get("maxReplicas", 2**31)
    replicas = group.spec.get("replicas", least)
    if not least <= replicas <= most:
        key = "minReplicas" if least > most else "replicas"
        problem = f"replicas is {replicas}, minReplicas {least} and maxReplicas {most}"
        write = "write minReplicas the smallest and maxReplicas the largest"
        yield (*group.path, key), f"{problem}: {write}"


def _volumes(group: Group, claims: Mapping[str, Any]) -> Mistakes:
    """Mounts of volumes that exist, shared memory for NCCL, claims and sizes."""
    volumes = {volume["name"]: volume for volume in group.volumes}
    for path, container in group.containers():
        for number, mount in enumerate(container.get("volumeMounts") or []):
            name = mount["name"]
            if name not in volumes:
                message = f"there is no volume {name!r}{nearest(name, volumes)}"
                yield (*path, "volumeMounts", number), message
    yield from _shared_memory(group, volumes)
    for number, volume in enumerate(group.volumes):
        path = (*group.pod_path, "volumes", number)
        claim = _claim_name(volume)
        similar = mistaken(claim, claims)
        if similar:
            yield path, f"the claim {claim!r} is not in this file: did you mean {similar!r}?"
        size_limit = (volume.get("emptyDir") or {}).get("sizeLimit", "1Gi")
        message = _problem_with_amount("sizeLimit", size_limit)
        if message:
            yield path, message


def _shared_memory(group: Group, volumes: Mapping[str, Mapping[str, Any]]) -> Mistakes:
    """Workers with GPUs have more than Kubernetes' 64 MiB at /dev/shm, and it is in memory."""
    path = (*group.pod_path, "containers", 0)
    write = "mount a volume with emptyDir: {medium: Memory} there"
    mounts = group.pod["containers"][0].get("volumeMounts") or []
    names = [mount["name"] for mount in mounts if mount["mountPath"] == "/dev/shm"]
    if not names:
        if group.gpus and not group.is_head:
            problem = "the container has no mount at /dev/shm, where Kubernetes gives 64 MiB"
            yield path, f"{problem}, on which NCCL fails: {write}"
        return
    empty_dir = volumes.get(names[0], {}).get("emptyDir")
    if empty_dir is not None and empty_dir.get("medium") != "Memory":
        yield path, f"/dev/shm of the container is not in memory: {write}"


def _claim_name(volume: Mapping[str, Any]) -> str:
    """The claim that a volume is of; "" if it is of none."""
    return (volume.get("persistentVolumeClaim") or {}).get("claimName", "")


def _shared_claims(groups: Sequence[Group], claims: Mapping[str, Any]) -> Mistakes:
    """Claims of this manifest that only one node can mount, although several pods are to.

    The pods on other nodes would never start.
    """
    pods = Counter[str]()
    for group in groups:
        for number, volume in enumerate(group.volumes):
            name = _claim_name(volume)
            pods[name] += group.max_pods
            modes = claims.get(name, {}).get("accessModes", ["ReadWriteMany"])
            if pods[name] > 1 and not any(mode.endswith("Many") for mode in modes):
                problem = f"{pods[name]} pods mount the claim {name!r}, which one node can"
                path = (*group.pod_path, "volumes", number)
                yield path, f"{problem}: give it ReadWriteMany"


def _affinity(group: Group, pod_labels: Sequence[Mapping[str, str]]) -> Mistakes:
    """Required neighbours that no pod of this manifest is: such a group's pods are never placed."""
    keys = ("affinity", "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    terms: Any = group.pod
    for key in keys:
        terms = terms.get(key) or {}
    for number, term in enumerate(terms):
        wanted = (term.get("labelSelector") or {}).get("matchLabels") or {}
        is_of_this_namespace = "namespaces" not in term and "namespaceSelector" not in term
        has_neighbour = any(wanted.items() <= labels.items() for labels in pod_labels)
        if is_of_this_namespace and not has_neighbour:
            write = "write those of the group's template, or the namespaces of other pods"
            message = f"no pod here has the labels {dict(wanted)}: {write}"
            yield (*group.pod_path, *keys, number), message


def _resources(path: Keys, container: Mapping[str, Any]) -> Mistakes:
    """Amounts that make sense, and requests within their limits."""
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    requests = resources.get("requests") or {}
    for name in {**limits, **requests}:
        for key, amounts in (("limits", limits), ("requests", requests)):
            message = _problem_with_amount(name, amounts[name]) if name in amounts else ""
            if message:
                yield (*path, "resources", key, name), f"{key}.{message}"
        request_path = (*path, "resources", "requests", name)
        if name in limits and quantity(requests.get(name, 0)) > quantity(limits[name]):
            problem = f"requests.{name} is {requests[name]}, above its limit of {limits[name]}"
            yield request_path, f"{problem}: write at most that"
        is_device = "/" in name
        if is_device and requests.get(name, limits.get(name)) != limits.get(name):
            problem = f"requests.{name} is not limits.{name}, and of a device they must be the same"
            yield request_path, f"{problem}: write one for both"


def _problem_with_amount(name: str, value: Any) -> str:
    """Why an amount of a resource makes no sense; "" if it does."""
    least, most = LIMITS.get(name, (0, 2**62))
    try:
        amount = quantity(value)
    except ValueError:
        return f"{name} is {value!r}: write a number with a unit such as 16Gi"
    if "/" in name and amount != int(amount):
        return f"{name} is {value!r}: write a whole number"
    if least <= amount <= most:
        return ""
    write = "a number of CPUs" if name == "cpu" else "a number with a unit such as 16Gi"
    return f"{name} is {value!r}, which is {amount:g}: write {write}"


# --- a job ----------------------------------------------------------------------------------------


def _entrypoint(data: Mapping[str, Any], groups: Sequence[Group], file: str) -> Mistakes:
    """A command that exists and fits on the cluster, and whose checkpoints outlive the pods."""
    path: Keys = ("spec", "entrypoint")
    try:
        words = shlex.split(data["spec"].get("entrypoint", ""))
    except ValueError:
        yield path, "the entrypoint has a quotation mark without its partner: write it"
        return
    similar = mistaken(words[0], COMMANDS) if words else ""
    if similar:
        yield path, f"the entrypoint starts {words[0]!r}: did you mean {similar!r}?"
    arguments = trireme_arguments(words)
    if arguments and arguments[0] not in VERBS:
        verb = arguments[0]
        yield path, f"there is no command `trireme {verb}`{nearest(verb, VERBS)}"
    settings = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if equals:
            settings[key] = value
    message = _problem_with_workers(settings.get("workers", "auto"), data, groups, file=file)
    if message:
        yield path, message
    if arguments and arguments[0] in ("train", "sweep"):
        yield from _storage(path, settings.get("run.storage", "runs"), groups)


def _problem_with_workers(
    workers: str,
    data: Mapping[str, Any],
    groups: Sequence[Group],
    *,
    file: str,
) -> str:
    """Why a number of workers cannot run on the cluster of this manifest; "" if it can."""
    resource = "GPU" if any(group.gpus for group in groups) else "CPU"
    try:
        count = workers if workers == "auto" else int(workers)
        check_feasible(shape(data, file), count, {resource: 1.0})
    except ClusterError as error:
        return str(error)
    except ValueError:
        return f"workers is {workers!r}: write a number, or auto"
    return ""


def trireme_arguments(words: list[str]) -> list[str]:
    """The arguments that an entrypoint passes to `trireme`; [] if it starts something else."""
    if words[:1] == ["trireme"]:
        return words[1:]
    if words[1:3] == ["-m", "app"]:  # python -m app
        return words[3:]
    return []


def _storage(path: Keys, storage: str, groups: Sequence[Group]) -> Mistakes:
    """Checkpoints are on a volume that every pod mounts and that outlives the pods."""
    if "://" in storage:
        return
    folders_of_groups = []
    for group in groups:
        lasting = {volume["name"] for volume in group.volumes if LASTING_VOLUMES & volume.keys()}
        mounts = group.pod["containers"][0].get("volumeMounts") or []
        folders = {mount["mountPath"].rstrip("/") for mount in mounts if mount["name"] in lasting}
        folders_of_groups.append(folders)
    shared_folders = set.intersection(*folders_of_groups)
    if any(f"{storage}/".startswith(f"{folder}/") for folder in shared_folders):
        return
    write = "run.storage=s3://…, or mount a shared volume in all"
    if shared_folders:
        write = f"run.storage={min(shared_folders)}/runs"
    problem = f"run.storage is {storage}, on no volume that every pod shares, and goes with its pod"
    yield path, f"{problem}: write {write}"
