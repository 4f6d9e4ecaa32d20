"""What KubeRay and Kubernetes would refuse, or do otherwise than meant, with a Ray cluster's pods.

No schema says these, because each value alone is right. Every sentence begins with what would
happen. KubeRay's own refusals are those of its validation (ray-operator, v1.7).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.command_rules import interfaces, secrets_in, versions_of_image
from cluster.document import Keys, Mistakes
from cluster.hardware import HardwareError, find_gpu
from cluster.kuberay import GPU_RESOURCES, Group, quantity
from cluster.ray_commands import parse_scalar

AUTOSCALER_V2 = "RAY_enable_autoscaler_v2"
PROBES = {
    "livenessProbe": "the pod restarts for ever",
    "startupProbe": "the pod restarts for ever",
    "readinessProbe": "the pod is never ready",
}
"""What happens where a probe always fails."""
RAY_PORTS = {
    "port": 6379,
    "dashboard-port": 8265,
    "dashboard-agent-listen-port": 52365,
    "ray-client-server-port": 10001,
    "metrics-export-port": 8080,
}
"""Ports on which Ray listens in a pod, by the option that changes each; KubeRay's defaults."""
PORTS_OF_PATHS = {
    "/api/local_raylet_healthz": "dashboard-agent-listen-port",
    "/api/gcs_healthz": "dashboard-port",
}
"""The option whose port answers a path."""


def mistakes(path: Keys, cluster: Mapping[str, Any], groups: Sequence[Group]) -> Mistakes:
    """Mistakes in the pods of a Ray cluster.

    Args:
        path: Where the cluster's spec is.
        cluster: The cluster's spec.
        groups: Its groups, the head first.
    """
    yield from _autoscaler(path, cluster, groups)
    yield from _versions(path, cluster, groups)
    head_params = _start_params(groups[0])
    for group in groups:
        yield from _start(group)
        yield from _pod(group)
        yield from _tolerations(group)
        yield from _memory(group)
        yield from _gpus(group)
        yield from secrets_in((*group.path, "template", "metadata"), _labels(group))
        for container_path, container in _ray_containers(group):
            yield from _environment(container_path, container)
            yield from _probes(group, container_path, container, head_params)
            yield from _container(group, container_path, container)


def _labels(group: Group) -> dict[str, Any]:
    return {key: group.metadata.get(key) for key in ("labels", "annotations")}


def _start_params(group: Group) -> dict[str, Any]:
    """What Ray is started with in the pods of a group."""
    params = group.spec.get("rayStartParams") or {}
    return {key: parse_scalar(value) for key, value in params.items()}


def _ray_containers(group: Group) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    """The container that runs Ray, which is the first one of a pod."""
    yield (*group.pod_path, "containers", 0), group.pod["containers"][0]


def _environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container that are written as they are."""
    return {
        variable["name"]: str(variable["value"])
        for variable in container.get("env") or []
        if "value" in variable
    }


# --- the cluster ----------------------------------------------------------------------------------


def _autoscaler(path: Keys, cluster: Mapping[str, Any], groups: Sequence[Group]) -> Mistakes:
    """What the autoscaler, or a cluster without one, allows."""
    refuses = "KubeRay refuses the cluster"
    head = groups[0]
    variables = _environment_of(head.pod["containers"][0])
    has_variable = variables.get(AUTOSCALER_V2, "").lower() in ("1", "true")
    options = cluster.get("autoscalerOptions") or {}
    scales = bool(cluster.get("enableInTreeAutoscaling"))
    is_v2 = options.get("version") == "v2" or has_variable
    env_path = (*head.pod_path, "containers", 0, "env")
    if has_variable and not scales:
        problem = f"{refuses}: {AUTOSCALER_V2} is set, and there is no autoscaler"
        yield env_path, f"{problem}: write enableInTreeAutoscaling: true"
    if scales and "version" in options and AUTOSCALER_V2 in variables:
        problem = f"{refuses}: autoscalerOptions.version and {AUTOSCALER_V2} are both set"
        yield env_path, f"{problem}: leave the variable out"
    if options and not scales:
        problem = "no worker ever comes or goes: autoscalerOptions stands without an autoscaler"
        yield (*path, "autoscalerOptions"), f"{problem}: write enableInTreeAutoscaling: true"
    for group in groups:
        policy = group.pod.get("restartPolicy", "Never")
        if scales and is_v2 and policy != "Never":
            problem = f"{refuses}: with the autoscaler v2 restartPolicy is {policy}"
            yield (*group.pod_path, "restartPolicy"), f"{problem}: write Never"
    for group in groups[1:]:
        spec = group.spec
        if "idleTimeoutSeconds" in spec and not (is_v2 and scales):
            problem = f"{refuses}: a group's idleTimeoutSeconds needs the autoscaler v2"
            write = "write autoscalerOptions: {version: v2}, or leave it out"
            yield (*group.path, "idleTimeoutSeconds"), f"{problem}: {write}"
        if spec.get("suspend") and scales:
            problem = f"{refuses}: a group cannot be suspended where an autoscaler runs"
            yield (*group.path, "suspend"), f"{problem}: leave it out"
        replicas = spec.get("replicas", spec.get("minReplicas"))
        if not scales and replicas == 0:
            problem = f"no worker ever comes: replicas of {spec['groupName']} is 0"
            write = "write how many there are, or enableInTreeAutoscaling: true"
            yield group.path, f"{problem} and there is no autoscaler: {write}"


def _versions(path: Keys, cluster: Mapping[str, Any], groups: Sequence[Group]) -> Mistakes:
    """One version of Ray and of Python in all pods."""
    versions_of_head: dict[str, str] = {}
    for group in groups:
        for container_path, container in _ray_containers(group):
            versions = versions_of_image(container.get("image", ""))
            for package, version in versions.items():
                of_head = versions_of_head.setdefault(package, version)
                if version != of_head:
                    problem = f"the workers never join: their image has {package} {version}"
                    where = (*container_path, "image")
                    yield where, f"{problem} and the head's {of_head}: write the head's image"
    written = cluster.get("rayVersion", "")
    in_image = versions_of_head.get("Ray", written)
    if written and in_image != written:
        problem = f"KubeRay starts Ray {in_image} in the way of Ray {written}: so says rayVersion"
        yield (*path, "rayVersion"), f"{problem}, and the image has {in_image}: write {in_image}"


# --- Ray in a pod ---------------------------------------------------------------------------------


def _start(group: Group) -> Mistakes:
    """What Ray is started with."""
    params = group.spec.get("rayStartParams") or {}
    path = (*group.path, "rayStartParams")
    resources = group.spec.get("resources") or {}
    repeated = [key for key in ("num-cpus", "num-gpus", "memory", "resources") if key in params]
    if repeated and resources:
        problem = f"KubeRay refuses the cluster: {repeated[0]} stands beside the group's resources"
        yield (*path, repeated[0]), f"{problem}: write all in one of them"
    if "labels" in params:
        problem = "KubeRay refuses the cluster: rayStartParams has labels"
        yield (*path, "labels"), f"{problem}: write them as the group's labels"
    if str(params.get("dashboard-host", "")) in ("127.0.0.1", "localhost", "::1"):
        problem = "no job is ever submitted: dashboard-host is the pod's own loopback"
        yield (*path, "dashboard-host"), f"{problem}, where KubeRay cannot reach it: leave it out"
    if not group.is_head and str(params.get("num-cpus", "")) == "0":
        problem = "no task is ever placed on a worker: num-cpus is 0"
        yield (*path, "num-cpus"), f"{problem}: leave it out"
    for key in ("head", "address"):
        if key in params and (key == "head") != group.is_head:
            what = "a cluster of its own" if key == "head" else "another cluster's worker"
            problem = f"every pod of the group is {what}: rayStartParams has {key}"
            yield (*path, key), f"{problem}: leave it out, and KubeRay writes what is needed"


def _gpus(group: Group) -> Mistakes:
    """As many GPUs for Ray as the pod has.

    0 says that the pods take no part in training.
    """
    path = (*group.path, "rayStartParams", "num-gpus")
    wanted = _start_params(group).get("num-gpus")
    has = int(group.gpus)
    if isinstance(wanted, int) and 0 < wanted < has:
        problem = f"{has - wanted} GPUs of each pod are never used: num-gpus is {wanted}"
        yield path, f"{problem} and its limits say {has}: leave it out"
    if isinstance(wanted, int) and 0 < has < wanted:
        problem = f"workers get GPUs that their pod does not have: num-gpus is {wanted}"
        yield (
            path,
            f"{problem} and its limits say {has}: write limits: {{nvidia.com/gpu: {wanted}}}",
        )
    product = (group.pod.get("nodeSelector") or {}).get("nvidia.com/gpu.product")
    annotations = group.metadata.get("annotations") or {}
    written = annotations.get("trireme/gpu")
    if product and written:
        try:
            differs = find_gpu(product).base != find_gpu(written).base
        except HardwareError:
            return  # a name that is not in the catalogue
        if differs:
            problem = f"plans are made for another GPU: trireme/gpu is {written}"
            where = (*group.path, "template", "metadata", "annotations", "trireme/gpu")
            yield where, f"{problem}, and nodeSelector asks for {product}: write one for both"


def _environment(path: Keys, container: Mapping[str, Any]) -> Mistakes:
    """Variables that take GPUs away, or give those of others, and network cards that agree."""
    variables = _environment_of(container)
    yield from interfaces((*path, "env"), variables)
    for number, variable in enumerate(container.get("env") or []):
        name = variable["name"]
        value = variable.get("value")
        if name == "NVIDIA_VISIBLE_DEVICES" and value not in (None, "", "void"):
            problem = f"pods use GPUs that they were not given: {name} is {value}"
            yield (*path, "env", number), f"{problem}: leave it out, as the device plugin sets it"
        if name == "CUDA_VISIBLE_DEVICES" and value not in (None, ""):
            problem = f"GPUs of the pod are never used: {name} is {value}"
            yield (*path, "env", number), f"{problem}: leave it out"


# --- pods -----------------------------------------------------------------------------------------


def _pod(group: Group) -> Mistakes:
    """Names that are there once, and a network in which the head is found."""
    pod = group.pod
    for key in ("containers", "volumes"):
        counts = Counter(item["name"] for item in pod.get(key) or [])
        for name, count in counts.items():
            if count > 1:
                problem = f"Kubernetes refuses the pods: {count} {key} are called {name}"
                yield (*group.pod_path, key), f"{problem}: write another name"
    policy = pod.get("dnsPolicy", "ClusterFirst")
    if pod.get("hostNetwork") and policy != "ClusterFirstWithHostNet":
        problem = "the workers never find the head: with hostNetwork the names of services"
        write = "write dnsPolicy: ClusterFirstWithHostNet"
        yield (*group.pod_path, "hostNetwork"), f"{problem} are not known: {write}"
    if pod.get("terminationGracePeriodSeconds") == 0:
        problem = "a pod that is taken back saves nothing: terminationGracePeriodSeconds is 0"
        yield (*group.pod_path, "terminationGracePeriodSeconds"), f"{problem}: write 120"


def _tolerations(group: Group) -> Mistakes:
    """Tolerations that Kubernetes takes."""
    for number, toleration in enumerate(group.pod.get("tolerations") or []):
        path = (*group.pod_path, "tolerations", number)
        operator = toleration.get("operator", "Equal")
        refuses = "Kubernetes refuses the pods"
        if operator == "Exists" and toleration.get("value"):
            problem = f"{refuses}: a toleration that Exists has a value"
            yield path, f"{problem}: leave it out, or write operator: Equal"
        if operator != "Exists" and not toleration.get("key"):
            problem = f"{refuses}: a toleration without a key"
            yield path, f"{problem}: write one, or operator: Exists"
        if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
            problem = f"{refuses}: tolerationSeconds is for the effect NoExecute"
            yield path, f"{problem}: leave it out"


def _memory(group: Group) -> Mistakes:
    """Shared memory and an object store that the container's memory has room for."""
    container = group.pod["containers"][0]
    limits = (container.get("resources") or {}).get("limits") or {}
    if "memory" not in limits:
        return
    memory = quantity(limits["memory"])
    for number, volume in enumerate(group.volumes):
        empty_dir = volume.get("emptyDir") or {}
        size = empty_dir.get("sizeLimit")
        if empty_dir.get("medium") == "Memory" and size and quantity(size) > memory:
            problem = f"the pod is ended when the volume fills: {volume['name']} holds {size}"
            path = (*group.pod_path, "volumes", number)
            yield path, f"{problem} in memory, and the limit is {limits['memory']}: write less"
    store = _start_params(group).get("object-store-memory", 0)
    if isinstance(store, int) and store > memory:
        problem = f"the pod is ended for its memory: object-store-memory is {store / 1e9:.0f} GB"
        path = (*group.path, "rayStartParams", "object-store-memory")
        yield path, f"{problem} and the limit is {limits['memory']}: write less"


def _container(group: Group, path: Keys, container: Mapping[str, Any]) -> Mistakes:
    """Mounts at different places, devices with a limit, and Ray started once."""
    counts = Counter(
        mount["mountPath"].rstrip("/") for mount in container.get("volumeMounts") or []
    )
    for place, count in counts.items():
        if count > 1:
            problem = f"Kubernetes refuses the pods: {count} volumes are mounted at {place}"
            yield (*path, "volumeMounts"), f"{problem}: write another mountPath"
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    for name in resources.get("requests") or {}:
        if name in GPU_RESOURCES and name not in limits:
            problem = f"Kubernetes refuses the pods: {name} is requested and has no limit"
            yield (*path, "resources"), f"{problem}: write it under limits too"
    annotations = group.metadata.get("annotations") or {}
    command = " ".join(
        str(word) for key in ("command", "args") for word in container.get(key) or []
    )
    if "ray start" in command and "ray.io/overwrite-container-cmd" not in annotations:
        problem = "Ray is started twice and the pod restarts for ever: the container's command"
        yield path, f"{problem} has `ray start`, which KubeRay writes: leave the command out"


def _probes(
    group: Group,
    path: Keys,
    container: Mapping[str, Any],
    head_params: Mapping[str, Any],
) -> Mistakes:
    """Probes that ask where Ray answers."""
    params = _start_params(group)
    ports = {key: params.get(key, port) for key, port in RAY_PORTS.items()}
    ports["port"] = head_params.get("port", RAY_PORTS["port"])
    written = container.get("ports") or []
    numbers = {port["containerPort"] for port in written} | set(ports.values())
    names = {port.get("name"): port["containerPort"] for port in written}
    for key, outcome in PROBES.items():
        probe = container.get(key) or {}
        where = (*path, key)
        if probe.get("successThreshold", 1) != 1 and key != "readinessProbe":
            problem = f"Kubernetes refuses the pods: successThreshold of a {key} is not 1"
            yield where, f"{problem}: leave it out"
        for kind in ("httpGet", "tcpSocket", "grpc"):
            asked = probe.get(kind)
            if asked is None:
                continue
            port = asked.get("port")
            if isinstance(port, str) and not port.isdigit():
                if port not in names:
                    problem = f"{outcome}: its {key} asks the port {port!r}, which has no such name"
                    yield where, f"{problem}: write a name or a number of its ports"
                    continue
                port = names[port]
            answers = PORTS_OF_PATHS.get(str(asked.get("path", "")).partition("?")[0])
            yield from _wrong_port(where, outcome, key, int(port), answers, ports, numbers)
        command = " ".join(map(str, (probe.get("exec") or {}).get("command") or []))
        yield from _wrong_command(where, outcome, key, command, ports, group)


def _wrong_port(
    path: Keys,
    outcome: str,
    probe: str,
    port: int,
    option: str | None,
    ports: Mapping[str, int],
    numbers: set[int],
) -> Mistakes:
    """A port on which nothing, or something else, answers.

    Args:
        path: Where the probe is.
        outcome: What happens where it fails.
        probe: The probe's name.
        port: What it asks.
        option: The option of Ray whose port would answer; None if any port can.
        ports: Ray's ports by option.
        numbers: All ports on which the pod listens.
    """
    if option is not None and port != ports[option]:
        problem = f"{outcome}: its {probe} asks port {port}"
        yield path, f"{problem}, and {ports[option]} answers: write {ports[option]}"
    if option is None and port not in numbers:
        listening = ", ".join(map(str, sorted(numbers)))
        problem = f"{outcome}: its {probe} asks port {port}, where nothing listens"
        yield path, f"{problem}: write one of {listening}"


def _wrong_command(
    path: Keys,
    outcome: str,
    probe: str,
    command: str,
    ports: Mapping[str, int],
    group: Group,
) -> Mistakes:
    """A probe's command that asks Ray at a wrong port.

    Args:
        path: Where the probe is.
        outcome: What happens where it fails.
        probe: The probe's name.
        command: The command.
        ports: Ray's ports by option.
        group: The group of its pod.
    """
    for port, place in re.findall(r"(?:localhost|127\.0\.0\.1):(\d+)(/[\w/]+)", command):
        option = PORTS_OF_PATHS.get(place)
        if option is not None and int(port) != ports[option]:
            problem = f"{outcome}: its {probe} asks port {port}, and {ports[option]} answers"
            yield path, f"{problem}: write {ports[option]}"
    health = re.search(r"ray health-check .*--address[ =][^\s:]+:(\d+)", command)
    if health is not None and group.is_head and int(health[1]) != ports["port"]:
        problem = f"{outcome}: its {probe} asks port {health[1]}, and {ports['port']} answers"
        yield path, f"{problem}: write {ports['port']}"
