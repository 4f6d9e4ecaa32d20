"""What is wrong with a file for Ray's launcher, without credentials or network.

Its schema is Ray's own (ray/autoscaler/ray-schema.json, which Ray ships); schemas/ray.yaml and schemas/providers.yaml
have what that leaves open; here is what holds between several values, and Ray lets through although it cannot work.
"""

import functools
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.document import Document, Keys, Problem, nearest, schema_problems, schemas, strict
from cluster.hardware import all_instances
from cluster.ray_file import ONPREM_HEAD, ONPREM_WORKER, hosts, instance_type, is_this_machine, own_metadata
from cluster.shape import problem_with_fact, instance_facts

TOKEN = "~/.ray/auth_token"
Mistakes = Iterator[tuple[Keys, str]]


def problems(document: Document) -> list[Problem]:
    """Everything that is wrong in a file for Ray's launcher."""
    data, provider = document.data, document.data.get("provider")
    # Ray takes this key of an on-prem file out before it looks at the schema.
    local = isinstance(provider, dict) and provider.get("type") == "local"
    found = schema_problems(document, _schema(), {k: v for k, v in data.items() if not (local and k == "min_workers")})
    if found:
        return found
    kind, known = data["provider"]["type"], _providers()
    if kind not in known:
        message = f"the provider {kind!r} is not supported{nearest(kind, known)}"
        return [document.problem(("provider", "type"), message)]
    found = schema_problems(document, known[kind], data) + schema_problems(document, schemas("ray.yaml")["file"], data)
    if found:
        return found
    found = [problem for start in starts(data) for problem in _start(document, start)]
    for key, commands in data.items():
        for number, command in enumerate(commands or ()) if key.endswith("_commands") else ():
            environment = schemas("ray.yaml")["environment"]
            found += schema_problems(document, environment, assignments(command), (key, number))
    rules = (_onprem if local else _cloud, _node_types, _written_facts, _commands)
    return found + [document.problem(path, sentence) for rule in rules for path, sentence in rule(data)]


@functools.cache
def _schema() -> dict[str, Any]:
    import ray.autoscaler

    return json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())


@functools.cache
def _providers() -> dict[str, Any]:
    return strict(schemas("providers.yaml"))


def missing_files(data: Mapping[str, Any]) -> Mistakes:
    """Files of this machine that `ray up` needs and that are not here. `trireme cluster up` makes the token."""
    auth = data.get("auth") or {}
    named: dict[Keys, Any] = {("auth", key): auth[key] for key in ("ssh_private_key", "ssh_public_key") if key in auth}
    named |= {("file_mounts", there): here for there, here in (data.get("file_mounts") or {}).items() if here != TOKEN}
    for path, file in named.items():
        if isinstance(file, str) and not os.path.exists(os.path.expanduser(file)):
            yield path, f"{path[0]}.{path[1]} is {file}, which is not on this machine: write a file that is there"


# --- machines ---------------------------------------------------------------------------------------------------------


def _onprem(data: Mapping[str, Any]) -> Mistakes:
    found = hosts(data)
    for number, host in enumerate(found):
        if host in found[:number]:
            yield ("provider", "worker_ips", number - 1), f"the host {host} is named twice"
    workers, most, least = len(found) - 1, data.get("max_workers", len(found) - 1), data.get("min_workers", 0)
    if most < workers:
        yield ("max_workers",), f"max_workers is {most}, but worker_ips names {workers} machines: write {workers}"
    if not isinstance(least, int) or not 0 <= least <= min(most, workers):
        yield ("min_workers",), f"min_workers is {least}: write a whole number of at most {min(most, workers)}"


def _cloud(data: Mapping[str, Any]) -> Mistakes:
    types, head, provider = data["available_node_types"], data["head_node_type"], data["provider"]
    if head not in types:
        yield ("head_node_type",), f"head_node_type is {head!r}{nearest(head, types)}"
    least = {name: spec.get("min_workers", 0) for name, spec in types.items() if name != head}
    most = data.get("max_workers", 2)
    if least and not most:
        yield ("max_workers",), "max_workers is 0, so no worker ever comes: write how many there may be at once"
    if sum(least.values()) > most:
        asked = f"the node types' min_workers add up to {sum(least.values())}"
        yield ("max_workers",), f"max_workers is {most}, but {asked}: write at least that"
    region, zones = provider.get("region", ""), provider.get("availability_zone") or ""
    for zone in [zone.strip() for zone in str(zones).split(",") if zone.strip()] if region else []:
        if not re.fullmatch(rf"{re.escape(region)}(-[a-z]+-\d+)?-?[a-z]", zone):
            dash = "" if provider["type"] == "aws" else "-"
            yield (
                ("provider", "availability_zone"),
                f"the zone {zone} is not of the region {region}: write {region}{dash}a",
            )
    for path, value in _texts(types, ("available_node_types",)):
        named = re.search(r"(?:^|/)(?:regions/([\w-]+)|zones/([\w-]+)-[a-z])/", value)
        if named and (other := named[1] or named[2]) != region:
            yield path, f"{value} is of the region {other}, but provider.region is {region}"


def _texts(value: Any, path: Keys) -> Iterator[tuple[Keys, str]]:
    """Every text in a value, and where it is."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from [((*path, key), each)] if isinstance(each, str) else _texts(each, (*path, key))


def _node_types(data: Mapping[str, Any]) -> Mistakes:
    for name, spec in (data.get("available_node_types") or {}).items():
        path, machine = ("available_node_types", name), instance_type(spec)
        least, most = spec.get("min_workers", 0), spec.get("max_workers", data.get("max_workers", 2))
        if least > most:
            yield (*path, "min_workers"), f"{name} has min_workers {least}, more than its max_workers {most}"
        known, written = instance_facts(machine), spec.get("resources") or {}
        if known and written.get("GPU") not in (None, known["gpus"]):
            has = f"a {machine} has {known['gpus']} ({known['gpu']})"
            yield (*path, "resources", "GPU"), f"{name} says GPU: {written['GPU']}, but {has}"
        if known and written.get("CPU", 0) > known["cpus"]:
            has = f"a {machine} has {known['cpus']}"
            yield (*path, "resources", "CPU"), f"{name} says CPU: {written['CPU']}, but {has}"
        yield from _network_cards(name, spec.get("node_config") or {}, machine)


def _network_cards(name: str, config: Mapping[str, Any], machine: str) -> Mistakes:
    path: Keys = ("available_node_types", name, "node_config", "NetworkInterfaces")
    cards, seen = all_instances()[machine].cards if machine in all_instances() else 0, set()
    for number, each in enumerate(config.get("NetworkInterfaces") or []):
        card, device = each.get("NetworkCardIndex", 0), each.get("DeviceIndex", 0)
        if cards and card >= cards:
            has = f"a {machine} has {cards} network card{'s' if cards > 1 else ''}"
            yield (*path, number), f"{name} names network card {card}, but {has}, counted from 0: leave it out"
        elif (card, device) in seen:
            yield (*path, number), f"{name} names device {device} of network card {card} twice"
        seen.add((card, device))


def _written_facts(data: Mapping[str, Any]) -> Mistakes:
    types = data.get("available_node_types") or {ONPREM_HEAD: {}, ONPREM_WORKER: {}}
    for name, facts in (own_metadata(data).get("nodes") or {}).items():
        path = ("metadata", "trireme", "nodes", name)
        if name not in types:
            yield path, f"there is no node type {name!r}{nearest(name, types)}"
        for key, value in facts.items():
            if message := problem_with_fact(key, value):
                yield (*path, key), message


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A `ray start` of the file: what it is given, and by which variables."""

    path: Keys
    options: dict[str, Any]
    environment: dict[str, str]


def starts(data: Mapping[str, Any]) -> list[Start]:
    """Every `ray start` of the head and of the workers."""
    found = []
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        for number, command in enumerate(data.get(key) or []):
            environment: dict[str, str] = {}
            for piece in re.split(r";|&&|\|\||\n", command):
                try:
                    words = shlex.split(piece)
                except ValueError:  # a quotation goes beyond this piece
                    words = piece.split()
                environment |= assignments(piece)
                if "ray start" in " ".join(words):
                    options = options_of(words[words.index("start") :])
                    found.append(Start((key, number), options, dict(environment)))
    return found


def assignments(command: str) -> dict[str, str]:
    """The variables that a command sets."""
    return dict(re.findall(r"(?:^|[\s;])([A-Za-z_]\w*)=([^\s;]*)", command))


def options_of(words: list[str]) -> dict[str, Any]:
    """The options among a command's words, by name without dashes. Values of variables are left out."""
    found: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "-"]):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = plain(value if equals else True if following.startswith("-") else following)
    return found


def plain(value: Any) -> Any:
    """A number or truth value that is written as a text, as itself."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return {"true": True, "false": False}.get(str(value).lower(), value)


def _start(document: Document, start: Start) -> list[Problem]:
    schema = schemas("ray.yaml")
    literal = {name: value for name, value in start.options.items() if "$" not in str(value)}
    found = schema_problems(document, schema["start"], literal, start.path)
    return found + schema_problems(document, schema["head"], literal, start.path)


def _commands(data: Mapping[str, Any]) -> Mistakes:
    """That the workers find the head, that the head starts them, and that both ask for the token."""
    found = starts(data)
    heads = [start for start in found if "head" in start.options]
    workers = [start for start in found if start.path[0].startswith("worker")]
    for key, of in (("head_start_ray_commands", heads), ("worker_start_ray_commands", workers)):
        if data.get(key) and not of:
            yield (key,), f"{key} has no `ray start{' --head' if of is heads else ''}`: write it, or leave the key out"
    port = heads[0].options.get("port", 6379) if heads else 6379
    for start in workers:
        address = str(start.options.get("address", "nothing"))
        if "head" in start.options or not re.fullmatch(rf"\$\{{?RAY_HEAD_IP\}}?:{port}", address):
            write = f"write --address=$RAY_HEAD_IP:{port}"
            yield start.path, f"a worker joins {address}, but the head listens on {port}: {write}"
    if is_this_machine(data):
        return
    may_grow = data.get("available_node_types") or len(hosts(data)) > 1
    for start in heads:
        if "autoscaling-config" not in start.options and may_grow:
            write = "write --autoscaling-config=~/ray_bootstrap_config.yaml"
            yield start.path, f"the head is not told of the workers: {write}"
    for start in (*heads, *workers):
        if start.environment.get("RAY_AUTH_MODE") != "token":
            write = "write export RAY_AUTH_MODE=token; before it"
            yield start.path, f"Ray is started without a token, and whoever reaches a port runs code: {write}"
    mounts = data.get("file_mounts") or {}
    if heads and not any(there.endswith("/.ray/auth_token") for there in mounts):
        yield ("file_mounts",), f'the machines do not get the token: write "{TOKEN}": "{TOKEN}" under file_mounts'
