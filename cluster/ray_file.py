"""Ray's own cluster files (`ray up FILE`) as a ClusterShape. What is wrong with one: ray_rules.py.

What neither a cloud's API nor a machine room tells stands in the file's `metadata`, which Ray does
not read:

    metadata:
      trireme:
        nodes:
          NODE_TYPE: {gpu: H100-80GB, gpus: 8, cpus: 96, memory_gb: 1024, link_across: 400Gb,
                      price_per_hour: 12.5}
"""

import re
from collections.abc import Mapping
from typing import Any

from cluster.shape import ClusterShape, NodeType, instance_facts, node_type

ONPREM_HEAD = "head"
"""The name of an on-prem cluster's head in `metadata`."""
ONPREM_WORKER = "worker"
"""The name of an on-prem cluster's workers in `metadata`."""


def shape(data: Mapping[str, Any], file: str) -> ClusterShape:
    """The shape of a valid file."""
    if data["provider"]["type"] == "local":
        return _onprem_shape(data, file)
    max_workers = data.get("max_workers", 2)
    head_name = data["head_node_type"]
    workers = []
    for name, spec in data["available_node_types"].items():
        if name != head_name:
            least = spec.get("min_workers", 0)
            most = min(spec.get("max_workers", max_workers), max_workers)
            workers.append(_node_type(name, data, least, most))
    return ClusterShape(
        name=data["cluster_name"],
        provider=data["provider"]["type"],
        head=_node_type(head_name, data, 1, 1),
        workers=tuple(workers),
        path=file,
        max_workers=max_workers,
    )


def _onprem_shape(data: Mapping[str, Any], file: str) -> ClusterShape:
    count = len(hosts(data)) - 1
    most = min(data.get("max_workers", count), count)
    least = min(data.get("min_workers", most), most)
    worker = node_type(ONPREM_WORKER, [written_facts(data, ONPREM_WORKER)], least, most)
    return ClusterShape(
        name=data["cluster_name"],
        provider=data["provider"]["type"],
        head=node_type(ONPREM_HEAD, [written_facts(data, ONPREM_HEAD)], 1, 1),
        workers=(worker,) if count else (),
        path=file,
        max_workers=most,
    )


def _node_type(name: str, data: Mapping[str, Any], least: int, most: int) -> NodeType:
    spec = data["available_node_types"][name]
    resources = spec.get("resources") or {}
    facts_for_ray = {
        "cpus": resources.get("CPU"),
        "gpus": resources.get("GPU"),
        "spot": is_spot(spec) or None,
    }
    facts_of_instance = instance_facts(instance_type(spec))
    sources = [facts_for_ray, written_facts(data, name), facts_of_instance]
    return node_type(name, sources, least, most)


def own_metadata(data: Mapping[str, Any]) -> dict[str, Any]:
    """What stands under `metadata.trireme`; empty where nothing does."""
    return ((data.get("metadata") or {}).get("trireme")) or {}


def written_facts(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The facts of a node type under `metadata.trireme.nodes`; empty where there are none."""
    return (own_metadata(data).get("nodes") or {}).get(name) or {}


def instance_type(spec: Mapping[str, Any]) -> str:
    """The cloud's name of the machine; "" where the file has none, or it is not a text."""
    config = spec.get("node_config") or {}
    arm = config.get("azure_arm_parameters")
    azure = arm.get("vmSize") if isinstance(arm, dict) else None
    names = (config.get("InstanceType"), config.get("machineType"), azure)
    return next((name.rpartition("/")[2] for name in names if isinstance(name, str) and name), "")


def is_spot(spec: Mapping[str, Any]) -> bool:
    """Whether a node type is of spot machines, on AWS, GCP or Azure."""
    config = spec.get("node_config") or {}
    scheduling = config.get("scheduling") or {}
    if isinstance(scheduling, list):  # Ray's GCP examples write a list of one-key mappings
        scheduling = {key: value for item in scheduling for key, value in item.items()}
    arm = config.get("azure_arm_parameters")
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
    """The port of Ray's head."""
    return _port(data, "--port", 6379)


def dashboard_port(data: Mapping[str, Any]) -> int:
    """The port of the dashboard and the job server."""
    return _port(data, "--dashboard-port", 8265)


def _port(data: Mapping[str, Any], flag: str, default: int) -> int:
    """A port in the command that starts the head."""
    match = re.search(rf"{flag}[= ](\d+)", " ".join(data.get("head_start_ray_commands") or []))
    return int(match[1]) if match else default
