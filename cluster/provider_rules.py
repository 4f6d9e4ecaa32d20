"""Typos inside `provider` and `node_config`, which Ray's own validation lets through, found without credentials."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.errors import Fault
from cluster.ray_file import instance_type
from cluster.source import Document, describe, nearest

# What Ray's node providers read of `provider` (ray/autoscaler/_private/{aws,gcp,_azure,local}); `type` is read by all.
COMMON = {"type", "use_internal_ips", "disable_node_updaters", "foreground_node_launch"}
PROVIDERS: dict[str, set[str]] = {
    "local": {"head_ip", "worker_ips", "coordinator_address", "external_head_ip"},
    "aws": {"region", "availability_zone", "cache_stopped_nodes", "key_pair", "security_group", "cloudwatch"}
    | {"aws_credentials", "use_external_head_ip"},
    "gcp": {"region", "availability_zone", "project_id", "gcp_credentials", "cache_stopped_nodes"},
    "azure": {"location", "resource_group", "subscription_id", "tags", "msi_name", "msi_resource_group", "unique_id"}
    | {"subnet_mask", "cache_stopped_nodes", "use_external_head_ip", "availability_zone"}
    | {"msi_identity_id", "msi_identity_principal_id", "subnet_id"},
}
REQUIRED = {"aws": ("region",), "gcp": ("region", "project_id"), "azure": ("location", "resource_group"), "local": ()}
EXTERNAL = {"external", "readonly", "fake_multinode", "fake_multinode_docker", "vsphere", "aliyun", "spark", "kuberay"}


def _fields(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


# https://cloud.google.com/compute/docs/reference/rest/v1/instances, the fields that can be written. None: any value.
GCP_NODE: dict[str, Any] = {
    "machineType": None,
    "minCpuPlatform": None,
    "description": None,
    "labels": None,
    "canIpForward": None,
    "deletionProtection": None,
    "sourceMachineImage": None,
    "resourcePolicies": None,
    "tags": {"items": None, "fingerprint": None},
    "metadata": {"items": {"key": None, "value": None}, "kind": None, "fingerprint": None},
    "guestAccelerators": {"acceleratorType": None, "acceleratorCount": None},
    "serviceAccounts": {"email": None, "scopes": None},
    "scheduling": _fields(
        "onHostMaintenance automaticRestart preemptible provisioningModel instanceTerminationAction "
        "maxRunDuration nodeAffinities minNodeCpus terminationTime"
    ),
    "disks": {
        **_fields("boot autoDelete type mode interface source deviceName index kind diskSizeGb"),
        "initializeParams": _fields(
            "sourceImage diskSizeGb diskType diskName labels provisionedIops provisionedThroughput"
        ),
    },
    "networkInterfaces": {
        **_fields("kind network subnetwork networkIP nicType stackType queueCount aliasIpRanges"),
        "accessConfigs": _fields("kind type name natIP networkTier setPublicPtr"),
    },
    "networkPerformanceConfig": {"totalEgressBandwidthTier": None},
    "shieldedInstanceConfig": _fields("enableSecureBoot enableVtpm enableIntegrityMonitoring"),
    "advancedMachineFeatures": None,
    "reservationAffinity": {"consumeReservationType": None, "key": None, "values": None},
    "acceleratorType": None,  # of a TPU
    "acceleratorConfig": None,
    "runtimeVersion": None,
    "networkConfig": None,
    "schedulingConfig": None,
}


def faults(document: Document) -> list[Fault]:
    """Every fault of `provider` and of each node type's `node_config`."""
    provider = document.data["provider"]
    kind = provider["type"]
    if kind in EXTERNAL:
        return []
    if kind not in PROVIDERS:
        known = sorted([*PROVIDERS, *EXTERNAL])
        return [document.fault(("provider", "type"), f"there is no provider {kind!r}{nearest(kind, known)}")]
    found = document.unknown_keys(("provider",), PROVIDERS[kind] | COMMON, f"provider {kind}")
    found += [
        document.fault(("provider",), f"provider {kind} lacks the key {key!r}")
        for key in REQUIRED[kind]
        if not provider.get(key)
    ]
    if kind == "local":
        return [*found, *_local(document)]
    if "available_node_types" not in document.data:
        return [*found, document.fault((), f"the provider {kind} needs available_node_types and head_node_type")]
    check = {"aws": aws_node, "gcp": _gcp_node, "azure": _azure_node}[kind]
    for name, spec in document.data["available_node_types"].items():
        path = ("available_node_types", name, "node_config")
        found += check(document, path, spec["node_config"])
        if not instance_type(spec) and not spec["node_config"].get("acceleratorType"):
            key = {"aws": "InstanceType", "gcp": "machineType", "azure": "azureArmParameters.vmSize"}[kind]
            found.append(document.fault(path, f"{name} does not say what machine it is: write {key}"))
    return found


def _local(document: Document) -> Iterator[Fault]:
    provider = document.data["provider"]
    if "coordinator_address" in provider:
        return
    if not provider.get("head_ip") or not isinstance(provider.get("worker_ips"), list):
        yield document.fault(("provider",), "provider local needs head_ip, and worker_ips as a list (it may be empty)")
        return
    seen: dict[str, str] = {}
    for number, host in enumerate([provider["head_ip"], *provider["worker_ips"]]):
        path = ("provider", "head_ip") if number == 0 else ("provider", "worker_ips", number - 1)
        if not isinstance(host, str) or not _is_host(host):
            yield document.fault(path, f"{host!r} is neither an address nor a host name")
        elif host in seen:
            yield document.fault(
                path,
                f"the host {host} is named twice: as {seen[host]}, and again here",
            )
        else:
            seen[host] = "head_ip" if number == 0 else f"worker_ips[{number - 1}]"
    for key in ("head_node", "worker_nodes", "available_node_types"):
        if document.data.get(key):
            yield document.fault((key,), f"an on-prem cluster has no {key}: its machines are head_ip and worker_ips")
    if "ssh_user" not in (document.data.get("auth") or {}):
        yield document.fault(("auth",), "auth lacks the key 'ssh_user': who may log in on the machines")


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        return bool(re.fullmatch(r"(?=.*[A-Za-z])[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", text))


# --- AWS --------------------------------------------------------------------------------------------------------------


def botocore_is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("botocore") is not None


def aws_node(document: Document, path: tuple[Any, ...], config: dict[str, Any]) -> list[Fault]:
    """Against EC2's own description of RunInstances, as far as botocore is installed, and Ray's rules for EFA."""
    found = list(_aws_interfaces(document, path, config))
    if not botocore_is_installed():
        return found
    from botocore.loaders import Loader
    from botocore.model import ServiceModel
    from botocore.validate import ParamValidator

    service = _run_instances(Loader, ServiceModel)
    given = {key: value for key, value in config.items() if key not in ("SubnetIds", "MinCount", "MaxCount")}
    report = ParamValidator().validate(given | {"MinCount": 1, "MaxCount": 1}, service)
    kind, kinds = config.get("InstanceType"), service.members["InstanceType"].enum
    if isinstance(kind, str) and kind not in kinds:
        said = f"EC2 has no instance type {kind!r} that botocore knows{nearest(kind, kinds)}"
        found.append(document.fault((*path, "InstanceType"), f"{said} (a newer one: pip install --upgrade boto3)"))
    for reason, name, more in report._errors:
        inner = _aws_path(name)
        where = (*path, *inner)
        if reason == "unknown field":
            unknown, known = more["unknown_param"], [str(name) for name in more["valid_names"]]
            found.append(document.fault((*where, unknown), f"EC2 knows no {unknown!r} here{nearest(unknown, known)}"))
        elif reason == "invalid type":
            wanted = " or ".join(kind.split("'")[1] for kind in map(str, more["valid_types"]) if "'" in kind)
            said = f"must be {wanted or 'of another type'}, not {describe(more['param'])}"
            found.append(document.fault(where, f"{'.'.join(map(str, inner))} {said}"))
        else:
            missing = more.get("required_name", "")
            found.append(
                document.fault(where, f"{'.'.join(map(str, inner)) or 'node_config'}: {reason} {missing}".rstrip())
            )
    return found


_MODEL: list[Any] = []


def _run_instances(loader: Any, model: Any) -> Any:
    if not _MODEL:  # reading EC2's description takes a third of a second
        description = loader().load_service_model("ec2", "service-2")
        _MODEL.append(model(description).operation_model("RunInstances").input_shape)
    return _MODEL[0]


def _aws_path(name: str) -> tuple[Any, ...]:
    parts = re.findall(r"[^.\[\]]+", name)
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _aws_interfaces(document: Document, path: tuple[Any, ...], config: dict[str, Any]) -> Iterator[Fault]:
    interfaces = config.get("NetworkInterfaces")
    if not isinstance(interfaces, list):
        return
    for key in ("SubnetId", "SubnetIds", "SecurityGroupIds"):
        if key in config:
            yield document.fault(
                (*path, key), f"with NetworkInterfaces Ray refuses {key} beside them: write SubnetId and Groups in each"
            )
    for number, interface in enumerate(interfaces):
        for key in ("SubnetId", "Groups"):
            if isinstance(interface, dict) and key not in interface:
                yield document.fault(
                    (*path, "NetworkInterfaces", number), f"NetworkInterfaces[{number}] lacks {key}, which Ray demands"
                )


# --- GCP and Azure ----------------------------------------------------------------------------------------------------


def _gcp_node(document: Document, path: tuple[Any, ...], config: dict[str, Any]) -> list[Fault]:
    found = list(_tree(document, path, config, GCP_NODE))
    gpus = config.get("guestAccelerators") or re.match(r"(.*/)?(a[234]|g2)-", str(config.get("machineType", "")))
    scheduling = config.get("scheduling") or {}
    items = scheduling if isinstance(scheduling, list) else [scheduling]
    if gpus and not any(isinstance(item, dict) and item.get("onHostMaintenance") == "TERMINATE" for item in items):
        found.append(
            document.fault(
                (*path, "scheduling") if scheduling else path,
                "a machine with GPUs cannot be migrated: write scheduling.onHostMaintenance: TERMINATE",
            )
        )
    return found


def _tree(document: Document, path: tuple[Any, ...], value: Any, allowed: dict[str, Any]) -> Iterator[Fault]:
    """Unknown keys of a mapping, or of each mapping of a list, against a tree of known ones."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _tree(document, (*path, number), item, allowed)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in allowed:
                yield document.fault((*path, key), f"{path[-1]} has no field {key!r}{nearest(key, allowed)}")
            elif allowed[key] is not None:
                yield from _tree(document, (*path, key), inner, allowed[key])


def _azure_node(document: Document, path: tuple[Any, ...], config: dict[str, Any]) -> list[Fault]:
    import ray.autoscaler._private as private

    template = Path(str(next(iter(private.__path__)))) / "_azure" / "azure-vm-template.json"
    known = set(json.loads(template.read_text())["parameters"])
    found = document.unknown_keys(path, ("azureArmParameters",), "node_config")
    if "azureArmParameters" in config:
        inner = (*path, "azureArmParameters")
        found += document.unknown_keys(inner, known, "azureArmParameters")
    return found
