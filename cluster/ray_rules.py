"""Rules for the files of Ray's launcher.

The file's schema is Ray's own (ray/autoscaler/ray-schema.json, which Ray ships); schemas/providers.yaml has what that
leaves open; here is what no schema says, much of which Ray lets through although it cannot work.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.document import Document, Keys, nearest
from cluster.errors import Problem
from cluster.ray_file import ONPREM_HEAD, ONPREM_WORKER, instance_type
from cluster.rules import Message, Rules, check_fact, dotted, schema_problems, schemas
from cluster.shape import instance_facts

UNCHECKED = {"external", "readonly", "fake_multinode", "fake_multinode_docker", "vsphere", "aliyun", "spark", "kuberay"}
RULES = Rules()


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
        names = sorted({*known, *UNCHECKED} - {"facts"})
        unknown = document.problem(("provider", "type"), f"there is no provider {kind!r}{nearest(kind, names)}")
        return [] if kind in UNCHECKED else [unknown]
    return schema_problems(document, known[kind], data) + RULES.problems(document)


@functools.cache
def _schema() -> dict[str, Any]:
    import ray.autoscaler

    return json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())


@RULES.at("")
def onprem(document: Document, path: Keys, data: Any) -> Iterator[Message]:
    if data["provider"]["type"] != "local":
        return
    for key in ("head_node", "worker_nodes", "available_node_types"):
        if data.get(key):
            yield key, f"an on-prem cluster does not have {key}: its machines are head_ip and worker_ips"
    if "ssh_user" not in (data.get("auth") or {}):
        yield "auth", "auth lacks the key 'ssh_user': who may log in on the machines"


@RULES.at("provider")
def hosts(document: Document, path: Keys, given: Any) -> Iterator[Message]:
    rows: list[tuple[Keys, Any]] = [(("head_ip",), given["head_ip"])] if "head_ip" in given else []
    rows += [(("worker_ips", number), host) for number, host in enumerate(given.get("worker_ips") or ())]
    named: dict[str, str] = {}
    for keys, host in rows:
        if not isinstance(host, str) or not _is_host(host):
            yield (*keys, f"{host!r} is neither an address nor a host name")
        elif host in named:
            yield (*keys, f"the host {host} is named twice: as {named[host]}, and again here")
        else:
            named[host] = dotted(keys)


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        return bool(re.fullmatch(r"(?=.*[A-Za-z])[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", text))


@RULES.at("head_node_type")
def head_node_type(document: Document, path: Keys, head: Any) -> Iterator[Message]:
    types = document.data.get("available_node_types") or ()
    if head not in types:
        yield f"head_node_type is {head!r}{nearest(head, types)}"


@RULES.at("available_node_types")
def node_types(document: Document, path: Keys, types: Any) -> Iterator[Message]:
    least, most = sum(kind.get("min_workers", 0) for kind in types.values()), document.data.get("max_workers", 2)
    if least > most:
        yield f"the min_workers of the node types come to {least}, more than the cluster's max_workers {most}"


@RULES.at("available_node_types.*")
def node_type(document: Document, path: Keys, spec: Any) -> Iterator[Message]:
    name, machine = path[-1], instance_type(spec)
    least, most = spec.get("min_workers", 0), spec.get("max_workers", document.data.get("max_workers", 2))
    if least > most:
        yield "min_workers", f"{name} has min_workers {least}, more than its max_workers {most}"
    known, written = instance_facts(machine), (spec.get("resources") or {}).get("GPU")
    if known and written is not None and written != known["gpus"]:
        has = f"a {machine} has {known['gpus']} ({known['gpu']})"
        yield "resources", "GPU", f"{name} says GPU: {written}, but {has}"


@RULES.at("available_node_types.*.node_config")
def gcp_gpus(document: Document, path: Keys, config: Any) -> Iterator[Message]:
    machine, scheduling = str(config.get("machineType", "")), config.get("scheduling") or {}
    gpus = config.get("guestAccelerators") or re.match(r"(.*/)?(a[234]|g2)-", machine)
    items = scheduling if isinstance(scheduling, list) else [scheduling]  # Ray's examples write a list of mappings
    if gpus and not any(isinstance(item, dict) and item.get("onHostMaintenance") == "TERMINATE" for item in items):
        where = ("scheduling",) if scheduling else ()
        yield (*where, "a machine with GPUs cannot be migrated: write scheduling.onHostMaintenance: TERMINATE")


@RULES.at("metadata.trireme.nodes")
def described_types(document: Document, path: Keys, nodes: Any) -> Iterator[Message]:
    onprem = document.data["provider"]["type"] == "local"
    types = (ONPREM_HEAD, ONPREM_WORKER) if onprem else tuple(document.data.get("available_node_types") or ())
    for name in nodes if isinstance(nodes, dict) else ():
        if name not in types:
            yield name, f"there is no node type {name!r}{nearest(name, types)}"


@RULES.at("metadata.trireme.nodes.*.*")
def fact(document: Document, path: Keys, value: Any) -> Iterator[Message]:
    return check_fact(path[-1], value)
