"""Ray's own cluster files (`ray up FILE`): what they say, as a ClusterShape, and what is wrong with one.

What a cloud's API or a machine room does not say stands in the file's `metadata`, which Ray hands on unread:

    metadata:
      trireme:
        nodes:
          NODE_TYPE: {gpu: H100-80GB, gpus: 8, cpus: 96, memory_gb: 1024, link_across: 400Gb, price_per_hour: 12.5}

What is wrong with one: ray_rules.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from cluster.shape import ClusterShape, NodeType, instance_facts, node_type

ONPREM_HEAD, ONPREM_WORKER = "head", "worker"  # names of the two node types of an on-prem cluster in `metadata`


def shape(data: Mapping[str, Any], file: str) -> ClusterShape:
    """The shape of a valid file."""
    provider, name = data["provider"]["type"], data["cluster_name"]
    if provider == "local":
        count = len(hosts(data)) - 1
        most = min(data.get("max_workers", count), count)
        least = min(data.get("min_workers", most), most)
        head = node_type(ONPREM_HEAD, [written_facts(data, ONPREM_HEAD)], 1, 1)
        worker = node_type(ONPREM_WORKER, [written_facts(data, ONPREM_WORKER)], least, most)
        return ClusterShape(name, provider, head, (worker,) if count else (), file, most)
    types, head_name, total = data["available_node_types"], data["head_node_type"], data.get("max_workers", 2)
    workers = [
        _node_type(kind, data, spec.get("min_workers", 0), min(spec.get("max_workers", total), total))
        for kind, spec in types.items()
        if kind != head_name
    ]
    return ClusterShape(name, provider, _node_type(head_name, data, 1, 1), tuple(workers), file, total)


def _node_type(name: str, data: Mapping[str, Any], least: int, most: int) -> NodeType:
    spec = data["available_node_types"][name]
    resources = spec.get("resources") or {}
    facts = {"cpus": resources.get("CPU"), "gpus": resources.get("GPU"), "spot": is_spot(spec) or None}
    return node_type(name, [facts, written_facts(data, name), instance_facts(instance_type(spec))], least, most)


def own_metadata(data: Mapping[str, Any]) -> dict[str, Any]:
    return ((data.get("metadata") or {}).get("trireme")) or {}


def written_facts(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    return (own_metadata(data).get("nodes") or {}).get(name) or {}


def instance_type(spec: Mapping[str, Any]) -> str:
    """What the cloud calls the machine; empty where the file does not say, or not as a text."""
    config = spec.get("node_config") or {}
    arm = config.get("azureArmParameters")
    azure = arm.get("vmSize") if isinstance(arm, dict) else None
    names = (config.get("InstanceType"), config.get("machineType"), azure)
    return next((name.rpartition("/")[2] for name in names if isinstance(name, str) and name), "")


def is_spot(spec: Mapping[str, Any]) -> bool:
    config = spec.get("node_config") or {}
    scheduling = config.get("scheduling") or {}
    if isinstance(scheduling, list):  # Ray's GCP examples write a list of one-key mappings
        scheduling = {key: value for item in scheduling for key, value in item.items()}
    arm = config.get("azureArmParameters")
    return (
        (config.get("InstanceMarketOptions") or {}).get("MarketType") == "spot"
        or bool(scheduling.get("preemptible"))
        or scheduling.get("provisioningModel") == "SPOT"
        or (isinstance(arm, dict) and arm.get("priority") == "Spot")
    )


def hosts(data: Mapping[str, Any]) -> list[str]:
    """Addresses of an on-prem cluster's machines, the head first."""
    provider = data["provider"]
    return [provider["head_ip"], *(provider.get("worker_ips") or [])]


def is_this_machine(data: Mapping[str, Any]) -> bool:
    """Whether the file describes Ray on this very machine, where no SSH is needed."""
    provider = data["provider"]
    here = provider.get("head_ip") in ("127.0.0.1", "localhost")
    return provider.get("type") == "local" and here and not provider.get("worker_ips")


def gcs_port(data: Mapping[str, Any]) -> int:
    return _port(data, "--port", 6379)


def dashboard_port(data: Mapping[str, Any]) -> int:
    return _port(data, "--dashboard-port", 8265)


def _port(data: Mapping[str, Any], flag: str, default: int) -> int:
    """A port in the command that starts the head."""
    match = re.search(rf"{flag}[= ](\d+)", " ".join(data.get("head_start_ray_commands") or []))
    return int(match[1]) if match else default
