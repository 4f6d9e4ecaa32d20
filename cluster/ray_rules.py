"""What is wrong with a file for Ray's launcher, without credentials or network.

The schema is Ray's own (ray/autoscaler/ray-schema.json, which is part of Ray). schemas/ray.yaml and
schemas/providers.yaml add what it leaves open. This file has rules between several values, which
Ray does not check although the cluster could not work.
"""

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster import cloud_rules, command_rules
from cluster.document import (
    Document,
    Keys,
    Mistakes,
    Problem,
    nearest,
    schema_problems,
    schemas,
    strict,
)
from cluster.hardware import all_instances
from cluster.ray_commands import RayStart, assignments, ray_starts
from cluster.ray_file import (
    ONPREM_HEAD,
    ONPREM_WORKER,
    hosts,
    instance_type,
    is_this_machine,
    own_metadata,
)
from cluster.shape import instance_facts, problem_with_fact

TOKEN = "~/.ray/auth_token"
"""The token of Ray's processes; `trireme cluster up` makes it."""
DEFAULT_MAX_WORKERS = 2
"""Ray's default of `max_workers`."""


def problems(document: Document) -> list[Problem]:
    """Everything that is wrong in a file for Ray's launcher."""
    data = document.data
    provider = data.get("provider")
    is_onprem = isinstance(provider, dict) and provider.get("type") == "local"
    data_for_schema = dict(data)
    if is_onprem:
        # Ray removes this key of an on-prem file before it checks the schema.
        data_for_schema.pop("min_workers", None)
    schema_errors = schema_problems(document, _ray_schema(), data_for_schema)
    if schema_errors:
        return schema_errors
    provider_type = data["provider"]["type"]
    provider_schemas = _provider_schemas()
    if provider_type not in provider_schemas:
        suggestion = nearest(provider_type, provider_schemas)
        message = f"the provider {provider_type!r} is not supported{suggestion}"
        return [document.problem(("provider", "type"), message)]
    schema_errors = schema_problems(document, provider_schemas[provider_type], data)
    schema_errors += schema_problems(document, schemas("ray.yaml")["file"], data)
    if schema_errors:
        return schema_errors
    found_problems = []
    for ray_start in ray_starts(data):
        found_problems += _problems_of_start(document, ray_start)
    found_problems += _environment_problems(document)
    rules = (
        _onprem_limits if is_onprem else _cloud_limits,
        _node_types,
        _metadata_facts,
        _start_commands,
        cloud_rules.mistakes,
        command_rules.mistakes,
    )
    for rule in rules:
        found_problems += [document.problem(path, sentence) for path, sentence in rule(data)]
    return found_problems


@functools.cache
def _ray_schema() -> dict[str, Any]:
    import ray.autoscaler

    path = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
    return json.loads(path.read_text())


@functools.cache
def _provider_schemas() -> dict[str, Any]:
    """Schemas by the provider's type."""
    return strict(schemas("providers.yaml"))


def missing_files(data: Mapping[str, Any]) -> Mistakes:
    """Files that `ray up` needs on this machine and that do not exist.

    The token is not among them, because `trireme cluster up` makes it.
    """
    auth = data.get("auth") or {}
    files: dict[Keys, Any] = {}
    for key in ("ssh_private_key", "ssh_public_key"):
        if key in auth:
            files["auth", key] = auth[key]
    for remote_path, local_path in (data.get("file_mounts") or {}).items():
        if local_path != TOKEN:
            files["file_mounts", remote_path] = local_path
    for (section, key), file in files.items():
        if isinstance(file, str) and not os.path.exists(os.path.expanduser(file)):
            problem = f"{section}.{key} is {file}, which is not on this machine"
            yield (section, key), f"{problem}: write a file that is there"


# --- machines -------------------------------------------------------------------------------------


def _onprem_limits(data: Mapping[str, Any]) -> Mistakes:
    """No machine twice, and numbers of workers that the named machines allow."""
    machines = hosts(data)
    for number, host in enumerate(machines):
        if host in machines[:number]:
            # The head is machine 0 and is not in worker_ips.
            yield ("provider", "worker_ips", number - 1), f"the host {host} is named twice"
    workers = len(machines) - 1
    max_workers = data.get("max_workers", workers)
    min_workers = data.get("min_workers", 0)
    if max_workers < workers:
        problem = f"max_workers is {max_workers}, but worker_ips names {workers} machines"
        yield ("max_workers",), f"{problem}: write {workers}"
    limit = min(max_workers, workers)
    if not isinstance(min_workers, int) or not 0 <= min_workers <= limit:
        problem = f"min_workers is {min_workers}"
        yield ("min_workers",), f"{problem}: write a whole number of at most {limit}"


def _cloud_limits(data: Mapping[str, Any]) -> Mistakes:
    """A head, numbers of workers, zones and regions that agree."""
    node_types = data["available_node_types"]
    head = data["head_node_type"]
    if head not in node_types:
        yield ("head_node_type",), f"head_node_type is {head!r}{nearest(head, node_types)}"
    worker_types = {name: spec for name, spec in node_types.items() if name != head}
    min_workers = sum(spec.get("min_workers", 0) for spec in worker_types.values())
    max_workers = data.get("max_workers", DEFAULT_MAX_WORKERS)
    if worker_types and not max_workers:
        problem = "max_workers is 0, so no worker ever comes"
        yield ("max_workers",), f"{problem}: write how many there may be at once"
    if min_workers > max_workers:
        total = f"the node types' min_workers add up to {min_workers}"
        yield ("max_workers",), f"max_workers is {max_workers}, but {total}: write at least that"
    yield from _zones(data["provider"])
    yield from _other_regions(node_types, data["provider"].get("region", ""))


def _zones(provider: Mapping[str, Any]) -> Mistakes:
    """The provider's zones, which must be in its region."""
    region = provider.get("region", "")
    if not region:
        return
    zones = str(provider.get("availability_zone") or "").split(",")
    for zone in filter(None, map(str.strip, zones)):
        # us-west-2a (AWS), us-west-2-lax-1a (AWS's local zones) or us-central1-a (Google Cloud).
        if not re.fullmatch(rf"{re.escape(region)}(-[a-z]+-\d+)?-?[a-z]", zone):
            dash = "" if provider["type"] == "aws" else "-"
            problem = f"the zone {zone} is not of the region {region}"
            yield ("provider", "availability_zone"), f"{problem}: write {region}{dash}a"


def _other_regions(node_types: Mapping[str, Any], region: str) -> Mistakes:
    """Resources of another region in Google Cloud's paths, such as a subnetwork."""
    for path, text in _texts(node_types, ("available_node_types",)):
        match = re.search(r"(?:^|/)(?:regions/([\w-]+)|zones/([\w-]+)-[a-z])/", text)
        other = match[1] or match[2] if match else region
        if other != region:
            yield path, f"{text} is of the region {other}, but provider.region is {region}"


def _texts(value: Any, path: Keys) -> Iterator[tuple[Keys, str]]:
    """Every text inside a value, with the keys and indices that lead to it."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    for key, child in children:
        if isinstance(child, str):
            yield (*path, key), child
        else:
            yield from _texts(child, (*path, key))


def _node_types(data: Mapping[str, Any]) -> Mistakes:
    """Limits and resources of each node type, and its network cards."""
    default_max_workers = data.get("max_workers", DEFAULT_MAX_WORKERS)
    for name, spec in (data.get("available_node_types") or {}).items():
        path = ("available_node_types", name)
        min_workers = spec.get("min_workers", 0)
        max_workers = spec.get("max_workers", default_max_workers)
        if min_workers > max_workers:
            problem = f"{name} has min_workers {min_workers}, more than its max_workers"
            yield (*path, "min_workers"), f"{problem} {max_workers}"
        machine = instance_type(spec)
        facts = instance_facts(machine)
        resources = spec.get("resources") or {}
        if facts and resources.get("GPU") not in (None, facts["gpus"]):
            has = f"a {machine} has {facts['gpus']} ({facts['gpu']})"
            problem = f"{name} says GPU: {resources['GPU']}, but {has}"
            yield (*path, "resources", "GPU"), problem
        if facts and resources.get("CPU", 0) > facts["cpus"]:
            has = f"a {machine} has {facts['cpus']}"
            problem = f"{name} says CPU: {resources['CPU']}, but {has}"
            yield (*path, "resources", "CPU"), problem
        yield from _network_cards(name, spec.get("node_config") or {}, machine)


def _network_cards(name: str, config: Mapping[str, Any], machine: str) -> Mistakes:
    """Network cards that the machine has, each device of them once."""
    path: Keys = ("available_node_types", name, "node_config", "NetworkInterfaces")
    instances = all_instances()
    cards = instances[machine].cards if machine in instances else 0
    seen = set()
    for number, interface in enumerate(config.get("NetworkInterfaces") or []):
        card = interface.get("NetworkCardIndex", 0)
        device = interface.get("DeviceIndex", 0)
        if cards and card >= cards:
            has = f"a {machine} has {cards} network card{'s' if cards > 1 else ''}"
            problem = f"{name} names network card {card}, but {has}, counted from 0"
            yield (*path, number), f"{problem}: leave it out"
        elif (card, device) in seen:
            yield (*path, number), f"{name} names device {device} of network card {card} twice"
        seen.add((card, device))


def _metadata_facts(data: Mapping[str, Any]) -> Mistakes:
    """The facts of node types under `metadata.trireme.nodes`."""
    node_types = data.get("available_node_types") or {ONPREM_HEAD: {}, ONPREM_WORKER: {}}
    for name, facts in (own_metadata(data).get("nodes") or {}).items():
        path = ("metadata", "trireme", "nodes", name)
        if name not in node_types:
            yield path, f"there is no node type {name!r}{nearest(name, node_types)}"
        for key, value in facts.items():
            problem = problem_with_fact(key, value)
            if problem:
                yield (*path, key), problem


# --- commands -------------------------------------------------------------------------------------


def _problems_of_start(document: Document, start: RayStart) -> list[Problem]:
    """Options that `ray start` does not have, and wrong values.

    The values of shell variables are not known here.
    """
    options = {name: value for name, value in start.options.items() if "$" not in str(value)}
    schema = schemas("ray.yaml")
    errors = schema_problems(document, schema["start"], options, at=start.path)
    errors += schema_problems(document, schema["head"], options, at=start.path)
    return errors


def _environment_problems(document: Document) -> list[Problem]:
    """Wrong environment variables that commands set."""
    schema = schemas("ray.yaml")["environment"]
    errors = []
    for key, commands in document.data.items():
        if key.endswith("_commands"):
            for number, command in enumerate(commands or ()):
                variables = assignments(command)
                errors += schema_problems(document, schema, variables, at=(key, number))
    return errors


def _start_commands(data: Mapping[str, Any]) -> Mistakes:
    """The workers find the head, the head starts the workers, and all of them ask for the token."""
    starts = ray_starts(data)
    heads = [start for start in starts if start.is_head]
    workers = [start for start in starts if start.path[0].startswith("worker")]
    if data.get("head_start_ray_commands") and not heads:
        key = "head_start_ray_commands"
        yield (key,), f"{key} has no `ray start --head`: write it, or leave the key out"
    if data.get("worker_start_ray_commands") and not workers:
        key = "worker_start_ray_commands"
        yield (key,), f"{key} has no `ray start`: write it, or leave the key out"
    port = heads[0].options.get("port", 6379) if heads else 6379
    for start in workers:
        if start.is_head:
            problem = "every worker starts a cluster of its own and joins none: it has --head"
            yield start.path, f"{problem}: write --address=$RAY_HEAD_IP:{port}"
            continue
        address = str(start.options.get("address", "nothing"))
        if not re.fullmatch(rf"\$\{{?RAY_HEAD_IP\}}?:{port}", address):
            problem = f"a worker joins {address}, but the head listens on {port}"
            yield start.path, f"{problem}: write --address=$RAY_HEAD_IP:{port}"
    if is_this_machine(data):
        return  # no other machine joins, and no other machine reaches its ports
    may_grow = bool(data.get("available_node_types")) or len(hosts(data)) > 1
    for start in heads:
        if "autoscaling-config" not in start.options and may_grow:
            write = "write --autoscaling-config=~/ray_bootstrap_config.yaml"
            yield start.path, f"the head is not told of the workers: {write}"
    for start in (*heads, *workers):
        if start.environment.get("RAY_AUTH_MODE") != "token":
            problem = "Ray is started without a token, and whoever reaches a port runs code"
            yield start.path, f"{problem}: write export RAY_AUTH_MODE=token; before it"
    mounts = data.get("file_mounts") or {}
    if heads and not any(remote_path.endswith("/.ray/auth_token") for remote_path in mounts):
        write = f'write "{TOKEN}": "{TOKEN}" under file_mounts'
        yield ("file_mounts",), f"the machines do not get the token: {write}"
