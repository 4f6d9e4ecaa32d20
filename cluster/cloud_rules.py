"""What a cloud would refuse, or do otherwise than meant, with the machines of a file for Ray.

No schema says these, because each value alone is right. Every sentence begins with what would
happen.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.document import Keys, Mistakes
from cluster.hardware import all_instances
from cluster.ray_file import instance_type, is_spot

GPU_MACHINES = re.compile(r"(a[234]|g[24])-")
"""Machines of Google that have GPUs."""
MACHINES_WITHOUT_GPUS = {
    "aws": re.compile(r"(a1|[cmrtxz]\d\w*|[di]\d\w*|h1)\."),
    "gcp": re.compile(r"(n2d?|n4|e2|c[234]d?|t2[ad]|m[123])-"),
    "azure": re.compile(r"Standard_[ABDEFL]s?\d"),
}
"""Machines that have no GPU and take none, by provider."""
SMALL_MACHINE = re.compile(r"\.(nano|micro|small|medium|large|xlarge)$")
"""Sizes of AWS that have no EFA."""


def mistakes(data: Mapping[str, Any]) -> Mistakes:
    """Mistakes in the node types of a file for a cloud."""
    node_types = data.get("available_node_types") or {}
    provider = data["provider"]
    kind = provider["type"]
    for name, spec in node_types.items():
        path: Keys = ("available_node_types", name)
        yield from _gpus(name, spec, kind, path)
        config = spec.get("node_config") or {}
        config_path = (*path, "node_config")
        if kind == "aws":
            yield from _aws_machine(name, config, config_path)
            yield from _aws_network(name, config, config_path)
        if kind == "gcp":
            yield from _gcp_scheduling(name, spec, config_path)
            yield from _gcp_machine(name, config, config_path)
            yield from _gcp_driver(name, config, config_path, _commands(data))
        if kind == "azure":
            yield from _azure_machine(name, config, config_path)
    workers = {name: spec for name, spec in node_types.items() if name != data["head_node_type"]}
    if workers and all(spec.get("max_workers") == 0 for spec in workers.values()):
        problem = "no worker ever comes: every node type has max_workers: 0"
        path = ("available_node_types", min(workers), "max_workers")
        yield path, f"{problem}: write how many there may be"
    if kind == "aws":
        yield from _aws_keys(data)
        yield from _aws_groups(data)
        yield from _aws_public_head(data)
    if kind == "azure":
        yield from _azure_keys(data.get("auth") or {})


def _commands(data: Mapping[str, Any]) -> str:
    """All commands that prepare a worker."""
    keys = ("initialization_commands", "setup_commands", "worker_setup_commands")
    return "\n".join(command for key in keys for command in data.get(key) or [])


def _gpus(name: str, spec: Mapping[str, Any], kind: str, path: Keys) -> Mistakes:
    """Resources and machines that agree on whether there are GPUs."""
    machine = instance_type(spec)
    resources = spec.get("resources") or {}
    gpus = resources.get("GPU", 0)
    attached = _attached_gpus(spec)
    without = MACHINES_WITHOUT_GPUS.get(kind)
    if gpus and not attached and without and without.match(machine):
        problem = f"machines are started in vain: {name} promises GPU: {gpus}, and a {machine}"
        yield (*path, "resources", "GPU"), f"{problem} has none: write a machine with GPUs"
    if attached and gpus not in (0, attached):
        problem = f"{name} says GPU: {gpus}, but guestAccelerators attaches {attached}"
        yield (*path, "resources", "GPU"), f"workers wait for ever: {problem}: write {attached}"
    # On AWS, Ray looks the GPUs of a machine up.
    instance = all_instances().get(machine)
    has = attached or (instance.gpus if instance is not None else 0)
    if kind in ("gcp", "azure") and has and "GPU" not in resources and "CPU" in resources:
        problem = f"no {name} is ever started for a run: its resources do not name the {has} GPUs"
        yield (*path, "resources"), f"{problem} of its machine: write GPU: {has}"


def _attached_gpus(spec: Mapping[str, Any]) -> int:
    """GPUs that a node type of Google Cloud attaches to its machine."""
    accelerators = (spec.get("node_config") or {}).get("guestAccelerators") or []
    return sum(accelerator.get("acceleratorCount", 1) for accelerator in accelerators)


# --- AWS ------------------------------------------------------------------------------------------


def _aws_machine(name: str, config: Mapping[str, Any], path: Keys) -> Mistakes:
    """Spot requests that end with their machine, disks and profiles that EC2 takes."""
    spot = (config.get("InstanceMarketOptions") or {}).get("SpotOptions") or {}
    spot_path = (*path, "InstanceMarketOptions", "SpotOptions")
    is_persistent = spot.get("SpotInstanceType") == "persistent"
    if is_persistent:
        problem = (
            f"{name} comes back after `ray down` and keeps costing money: a persistent spot request"
        )
        yield spot_path, f"{problem} starts it again: write SpotInstanceType: one-time"
    behavior = spot.get("InstanceInterruptionBehavior", "terminate")
    if behavior != "terminate" and not is_persistent:
        problem = f"AWS refuses {name}: a one-time spot request cannot {behavior}"
        yield spot_path, f"{problem}: write InstanceInterruptionBehavior: terminate"
    profile = config.get("IamInstanceProfile") or {}
    if {"Arn", "Name"} <= profile.keys():
        problem = f"AWS refuses {name}: IamInstanceProfile has an Arn and a Name"
        yield (*path, "IamInstanceProfile"), f"{problem}: write one of them"
    for number, mapping in enumerate(config.get("BlockDeviceMappings") or []):
        disk = mapping.get("Ebs") or {}
        volume_type = disk.get("VolumeType", "gp2")
        reason = ""
        if volume_type in ("gp2", "st1", "sc1", "standard") and "Iops" in disk:
            reason = f"a {volume_type} disk takes no Iops: write VolumeType: gp3"
        elif volume_type != "gp3" and "Throughput" in disk:
            reason = f"a {volume_type} disk takes no Throughput: write VolumeType: gp3"
        elif volume_type in ("io1", "io2") and "Iops" not in disk:
            reason = f"a {volume_type} disk needs Iops: write them"
        if reason:
            yield (*path, "BlockDeviceMappings", number), f"AWS refuses {name}: {reason}"


def _aws_network(name: str, config: Mapping[str, Any], path: Keys) -> Mistakes:
    """Subnets and groups in one place, and cards that the machine can have."""
    interfaces = config.get("NetworkInterfaces") or []
    if not interfaces:
        return
    for key in ("SubnetId", "SubnetIds", "SecurityGroupIds", "SecurityGroups"):
        if key in config:
            problem = f"Ray exits before it starts {name}: {key} stands beside NetworkInterfaces"
            yield (*path, key), f"{problem}, which have their own: leave it out"
    machine = config.get("InstanceType", "")
    for number, interface in enumerate(interfaces):
        interface_path = (*path, "NetworkInterfaces", number)
        if len(interfaces) > 1 and interface.get("AssociatePublicIpAddress"):
            problem = f"AWS refuses {name}: with several NetworkInterfaces none may have"
            yield interface_path, f"{problem} AssociatePublicIpAddress: leave it out"
        has_efa = str(interface.get("InterfaceType", "")).startswith("efa")
        if has_efa and SMALL_MACHINE.search(machine):
            problem = f"AWS refuses {name}: a {machine} has no EFA"
            yield interface_path, f"{problem}: leave InterfaceType out"


def _aws_keys(data: Mapping[str, Any]) -> Mistakes:
    """The key of `auth` is known to every machine."""
    if "ssh_private_key" not in (data.get("auth") or {}):
        return
    for name, spec in data["available_node_types"].items():
        config = spec.get("node_config") or {}
        if not {"KeyName", "UserData"} & config.keys():
            problem = f"Ray exits before it starts {name}: auth has an ssh_private_key and {name}"
            path = ("available_node_types", name, "node_config")
            yield path, f"{problem} no KeyName: write the key pair's name at AWS"


def _aws_groups(data: Mapping[str, Any]) -> Mistakes:
    """Either all node types name security groups or none does.

    Ray puts those that name none into a group of its own, which lets in only its members.
    """
    if "security_group" in data["provider"]:
        return
    has_groups = {}
    for name, spec in data["available_node_types"].items():
        config = spec.get("node_config") or {}
        keys = {"SecurityGroupIds", "SecurityGroups", "NetworkInterfaces", "LaunchTemplate"}
        has_groups[name] = bool(keys & config.keys())
    if not any(has_groups.values()):
        return
    for name, has in has_groups.items():
        if not has:
            problem = f"the workers never join: {name} has no SecurityGroupIds and gets Ray's own"
            path = ("available_node_types", name, "node_config")
            yield path, f"{problem} group, which the others are not in: write theirs"


def _aws_public_head(data: Mapping[str, Any]) -> Mistakes:
    """A head that this machine can reach: with several network cards it has no public address."""
    name = data["head_node_type"]
    spec = data["available_node_types"].get(name) or {}
    interfaces = (spec.get("node_config") or {}).get("NetworkInterfaces") or []
    provider = data["provider"]
    if len(interfaces) > 1 and not provider.get("use_internal_ips"):
        problem = "`ray up` waits for ever: a head with several NetworkInterfaces gets no public"
        path = ("available_node_types", name, "node_config", "NetworkInterfaces")
        yield path, f"{problem} address: leave one, or write use_internal_ips: true"


# --- Google Cloud ---------------------------------------------------------------------------------


def _gcp_scheduling(name: str, spec: Mapping[str, Any], path: Keys) -> Mistakes:
    """Scheduling that spot machines and machines with GPUs can have."""
    config = spec.get("node_config") or {}
    scheduling = config.get("scheduling") or {}
    if isinstance(scheduling, list):  # Ray's examples write a list of mappings
        scheduling = {key: value for item in scheduling for key, value in item.items()}
    path = (*path, "scheduling")
    refuses = f"Google refuses {name}"
    model = scheduling.get("provisioningModel")
    if is_spot(spec) and scheduling.get("automaticRestart"):
        problem = f"{refuses}: a spot machine cannot have automaticRestart"
        yield path, f"{problem}: write automaticRestart: false"
    if model == "SPOT" and scheduling.get("preemptible") is False:
        problem = f"{refuses}: provisioningModel: SPOT is preemptible"
        yield path, f"{problem}: write preemptible: true"
    if model == "STANDARD" and scheduling.get("preemptible"):
        problem = f"{refuses}: provisioningModel: STANDARD is not preemptible"
        yield path, f"{problem}: write provisioningModel: SPOT"
    is_ended = is_spot(spec) or bool({"maxRunDuration", "terminationTime"} & scheduling.keys())
    if "instanceTerminationAction" in scheduling and not is_ended:
        problem = f"{refuses}: instanceTerminationAction is for spot machines"
        yield path, f"{problem}: leave it out, or write provisioningModel: SPOT"
    machine = instance_type(spec)
    maintenance = scheduling.get("onHostMaintenance")
    has_gpus = bool(_attached_gpus(spec)) or bool(GPU_MACHINES.match(machine))
    if maintenance == "MIGRATE" and (has_gpus or is_spot(spec)):
        what = "with GPUs" if has_gpus else "of the spot market"
        problem = f"{refuses}: a machine {what} cannot be moved while it runs"
        yield path, f"{problem}: write onHostMaintenance: TERMINATE"
    if _attached_gpus(spec) and maintenance is None and not is_spot(spec):
        problem = f"{refuses}: a machine with GPUs cannot be moved, which is the default"
        yield path, f"{problem}: write scheduling: {{onHostMaintenance: TERMINATE}}"


def _gcp_machine(name: str, config: Mapping[str, Any], path: Keys) -> Mistakes:
    """Disks, GPUs and network that the machine can have."""
    refuses = f"Google refuses {name}"
    disks = config.get("disks")
    if disks and not any(disk.get("boot") for disk in disks):
        yield (*path, "disks"), f"{refuses}: no disk is to boot from: write boot: true"
    machine = str(config.get("machineType", "")).rpartition("/")[2]
    can_have_gpus = re.match(r"n1-|custom-|$", machine) or GPU_MACHINES.match(machine)
    if config.get("guestAccelerators") and not can_have_gpus:
        problem = f"{refuses}: GPUs can be attached to n1 machines, not to a {machine}"
        yield (*path, "guestAccelerators"), f"{problem}: write machineType: n1-…"
    tier = (config.get("networkPerformanceConfig") or {}).get("totalEgressBandwidthTier")
    interfaces = config.get("networkInterfaces") or []
    if tier == "TIER_1" and not all(card.get("nicType") == "GVNIC" for card in interfaces):
        problem = f"{refuses}: TIER_1 is for gVNIC cards"
        yield (*path, "networkPerformanceConfig"), f"{problem}: write nicType: GVNIC"


def _gcp_driver(
    name: str,
    config: Mapping[str, Any],
    path: Keys,
    commands: str,
) -> Mistakes:
    """Google's machines with GPUs get NVIDIA's driver from somewhere."""
    machine = str(config.get("machineType", "")).rpartition("/")[2]
    if not (config.get("guestAccelerators") or GPU_MACHINES.match(machine)):
        return
    items = (config.get("metadata") or {}).get("items") or []
    keys = {item.get("key") for item in items}
    if keys & {"install-nvidia-driver", "startup-script"} or "nvidia" in commands:
        return
    for number, disk in enumerate(config.get("disks") or []):
        image = str((disk.get("initializeParams") or {}).get("sourceImage", ""))
        is_bare = re.search(r"images/(family/)?(ubuntu|debian|rocky|common-cpu|tf-.*cpu)", image)
        is_deep_learning = "deeplearning-platform-release" in image and "cu" in image
        if is_bare or (is_deep_learning and "nvidia" not in image):
            problem = f"torch sees no GPU on {name}: nothing installs NVIDIA's driver"
            write = "write metadata: {items: [{key: install-nvidia-driver, value: 'True'}]}"
            if is_bare:
                write = "write an image with it, or commands that install it"
            yield (*path, "disks", number), f"{problem}: {write}"


# --- Azure ----------------------------------------------------------------------------------------


def _azure_machine(name: str, config: Mapping[str, Any], path: Keys) -> Mistakes:
    """Options of spot machines on spot machines only."""
    parameters = config.get("azure_arm_parameters") or {}
    if parameters.get("priority", "Regular") != "Regular":
        return
    for key in ("evictionPolicy", "billingProfile"):
        if key in parameters:
            problem = f"Azure refuses {name}: {key} is for spot machines"
            write = "write priority: Spot, or leave it out"
            yield (*path, "azure_arm_parameters", key), f"{problem}: {write}"


def _azure_keys(auth: Mapping[str, Any]) -> Mistakes:
    """Both halves of the key or none."""
    halves: Sequence[str] = ("ssh_private_key", "ssh_public_key")
    missing = [key for key in halves if key not in auth]
    if len(missing) == 1:
        problem = f"Ray exits before it starts a machine: auth has no {missing[0]}"
        yield ("auth",), f"{problem}: write it, or leave both out"
