"""Ray's own cluster files (`ray up FILE`) as a ClusterShape.

What a cloud's API or a machine room does not say stands in the file's `metadata`, which Ray hands on unread:

    metadata:
      trireme:
        nodes:
          NODE_TYPE: {gpu: H100-80GB, gpus: 8, cpus: 96, memory_gb: 1024, link_across: 400Gb, price_per_hour: 12.5}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.shape import ClusterShape, NodeType, link
from cluster.source import Document

ONPREM_HEAD, ONPREM_WORKER = "head", "worker"  # names of the two node types of an on-prem cluster in `metadata`
FACTS = ("gpu", "gpus", "cpus", "memory_gb", "link_within", "link_across", "price_per_hour", "spot")
GB = 1_000_000_000


def shape(document: Document, file: str) -> ClusterShape:
    """The shape of a valid file."""
    data = document.data
    provider = data["provider"]["type"]
    if provider == "local":
        return _onprem(data, file)
    types = data["available_node_types"]
    head_name = data["head_node_type"]
    total = data.get("max_workers", 2)
    head = _node_type(head_name, types[head_name], data, 1, 1)
    workers = [
        _node_type(name, spec, data, spec.get("min_workers", 0), min(spec.get("max_workers", total), total))
        for name, spec in types.items()
        if name != head_name
    ]
    return ClusterShape(data["cluster_name"], provider, head, tuple(workers), file, total)


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
    return (
        (config.get("InstanceMarketOptions") or {}).get("MarketType") == "spot"
        or bool(scheduling.get("preemptible"))
        or scheduling.get("provisioningModel") == "SPOT"
        or (isinstance(arm := config.get("azureArmParameters"), dict) and arm.get("priority") == "Spot")
    )


def _node_type(name: str, spec: Mapping[str, Any], data: Mapping[str, Any], least: int, most: int) -> NodeType:
    resources = spec.get("resources") or {}
    facts = {"cpus": resources.get("CPU"), "gpus": resources.get("GPU"), "spot": is_spot(spec) or None}
    known = catalogued(instance_type(spec))
    return node_type(name, [facts, written_facts(data, name), known], least, most)


def node_type(name: str, sources: Sequence[Mapping[str, Any]], least: int, most: int) -> NodeType:
    """A node type from several sources of facts, the first that has one counting."""

    def fact(key: str, default: Any = None) -> Any:
        return next((source[key] for source in sources if source.get(key) is not None), default)

    gpu_name, within = str(fact("gpu", "")), fact("link_within")
    if gpu_name:
        from cluster.hardware import gpu

        found = gpu(gpu_name)
        gpu_name, within = found.name, within if within is not None else found.link_within
    gpus = int(fact("gpus", 0))
    return NodeType(
        name,
        gpus,
        gpu_name if gpus else "",
        float(fact("cpus", 0)),
        round(float(fact("memory_gb", 0)) * GB),
        _rate(within) if gpus else None,
        _rate(fact("link_across")),
        fact("price_per_hour"),
        bool(fact("spot", False)),
        least,
        most,
    )


def _rate(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else link(value)


def catalogued(name: str) -> dict[str, Any]:
    """What cluster/hardware.yaml knows of a cloud's machine; empty for one it does not have, such as any without GPUs.

    A spot machine has its list price here, which is more than it costs: what it costs changes by the hour.
    """
    from cluster.hardware import all_instances

    instance = all_instances().get(name)
    if instance is None:
        return {}
    return {
        "gpu": instance.gpu,
        "gpus": instance.gpus,
        "cpus": instance.cpus,
        "memory_gb": instance.memory_bytes / GB,
        "link_across": instance.link_across,
        "price_per_hour": instance.price_per_hour,
    }


def _onprem(data: Mapping[str, Any], file: str) -> ClusterShape:
    provider = data["provider"]
    count = len(provider.get("worker_ips") or [])
    head = node_type(ONPREM_HEAD, [written_facts(data, ONPREM_HEAD)], 1, 1)
    most = min(data.get("max_workers", count), count)
    least = min(data.get("min_workers", most), most)
    worker = node_type(ONPREM_WORKER, [written_facts(data, ONPREM_WORKER)], least, most)
    return ClusterShape(data["cluster_name"], "local", head, (worker,) if count else (), file, most)


def hosts(data: Mapping[str, Any]) -> list[str]:
    """Addresses of an on-prem cluster's machines, the head first."""
    provider = data["provider"]
    return [provider["head_ip"], *(provider.get("worker_ips") or [])]


def is_this_machine(data: Mapping[str, Any]) -> bool:
    """Whether the file describes Ray on this very machine, where no SSH is needed."""
    provider = data["provider"]
    return (
        provider.get("type") == "local"
        and provider.get("head_ip") in ("127.0.0.1", "localhost")
        and not provider.get("worker_ips")
    )
