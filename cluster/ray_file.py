"""Ray's own cluster files (`ray up FILE`): what they say, as a ClusterShape, and what is wrong with one.

What a cloud's API or a machine room does not say stands in the file's `metadata`, which Ray hands on unread:

    metadata:
      trireme:
        nodes:
          NODE_TYPE: {gpu: H100-80GB, gpus: 8, cpus: 96, memory_gb: 1024, link_across: 400Gb, price_per_hour: 12.5}

A file's schema is Ray's own (ray/autoscaler/ray-schema.json, which Ray ships); schemas/providers.yaml has what that
leaves open; here is what no schema says, and Ray lets through although it cannot work.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.document import Document, Keys, Problem, nearest, schema_problems, schemas
from cluster.shape import ClusterShape, NodeType, check_fact, instance_facts, node_type

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


# --- what is wrong with one -------------------------------------------------------------------------------------------


def problems(document: Document) -> list[Problem]:
    """Everything that is wrong in a file for Ray's launcher."""
    data, provider = document.data, document.data.get("provider")
    # Ray takes this key of an on-prem file out before it looks at the schema.
    local = isinstance(provider, dict) and provider.get("type") == "local"
    found = schema_problems(document, _schema(), {k: v for k, v in data.items() if not (local and k == "min_workers")})
    if found:
        return found
    kind, known = data["provider"]["type"], schemas("providers.yaml")
    if kind not in known:
        message = f"the provider {kind!r} is not supported{nearest(kind, known.keys() - {'facts'})}"
        return [document.problem(("provider", "type"), message)]
    found = schema_problems(document, known[kind], data)
    return found or [document.problem(path, sentence) for path, sentence in _mistakes(data)]


@functools.cache
def _schema() -> dict[str, Any]:
    import ray.autoscaler

    return json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())


def _mistakes(data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
    """Where no schema sees that something is wrong, and a sentence for it."""
    types: Mapping[str, Any] = data.get("available_node_types") or {}
    if data["provider"]["type"] == "local":
        types, found = {ONPREM_HEAD: {}, ONPREM_WORKER: {}}, hosts(data)
        for number, host in enumerate(found):
            if host in found[:number]:
                yield ("provider", "worker_ips", number - 1), f"the host {host} is named twice"
    elif data["head_node_type"] not in types:
        yield (
            ("head_node_type",),
            f"head_node_type is {data['head_node_type']!r}{nearest(data['head_node_type'], types)}",
        )
    for name, spec in types.items():
        path, machine = ("available_node_types", name), instance_type(spec)
        least, most = spec.get("min_workers", 0), spec.get("max_workers", data.get("max_workers", 2))
        if least > most:
            yield (*path, "min_workers"), f"{name} has min_workers {least}, more than its max_workers {most}"
        known, written = instance_facts(machine), (spec.get("resources") or {}).get("GPU")
        if known and written is not None and written != known["gpus"]:
            has = f"a {machine} has {known['gpus']} ({known['gpu']})"
            yield (*path, "resources", "GPU"), f"{name} says GPU: {written}, but {has}"
    for name, facts in (own_metadata(data).get("nodes") or {}).items():
        if name not in types:
            yield ("metadata", "trireme", "nodes", name), f"there is no node type {name!r}{nearest(name, types)}"
        for key, value in facts.items():
            if message := check_fact(key, value):
                yield ("metadata", "trireme", "nodes", name, key), message
