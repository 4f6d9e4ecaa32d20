"""What the commands, the login, the copied files and the container of a file for Ray would lead to.

No schema says these, because each value alone is right. Every sentence begins with what would
happen.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.document import Keys, Mistakes, schemas
from cluster.ray_commands import RayStart, ray_starts
from cluster.ray_file import (
    ONPREM_HEAD,
    ONPREM_WORKER,
    hosts,
    instance_type,
    is_this_machine,
    written_facts,
)
from cluster.shape import instance_facts

DEFAULT_PORTS = {"port": 6379, "dashboard-port": 8265, "ray-client-server-port": 10001}
"""The ports that Ray's head takes where nothing else is said."""
FIRST_WORKER_PORT = 10002
"""The first port that Ray gives to its workers where nothing else is said."""
LAST_WORKER_PORT = 19999
LEAST_SHARED_MEMORY = 2**30
"""Bytes at /dev/shm below which NCCL fails, or the object store gets slow."""


def mistakes(data: Mapping[str, Any]) -> Mistakes:
    """Mistakes outside the node types of a file for Ray's launcher."""
    starts = ray_starts(data)
    yield from _ports(starts)
    yield from _start_options(starts, data)
    yield from _gpus_of_starts(starts, data)
    yield from _shell(data)
    yield from _versions(data)
    yield from _login(data)
    yield from _addresses(data)
    yield from _mounts(data)
    yield from _container(data)
    yield from _secrets(data)
    for start in starts:
        yield from interfaces(start.path, start.environment)
    if data.get("idle_timeout_minutes") == 0:
        problem = "machines are ended before a run can use them: idle_timeout_minutes is 0"
        yield ("idle_timeout_minutes",), f"{problem}: write minutes, such as 5"


# --- ray start ------------------------------------------------------------------------------------


def _ports(starts: Sequence[RayStart]) -> Mistakes:
    """Every port of a `ray start` once, and enough for its workers."""
    for start in starts:
        ports = {key: value for key, value in start.options.items() if key.endswith("-port")}
        if start.is_head:
            ports = DEFAULT_PORTS | ports
        first = ports.pop("min-worker-port", FIRST_WORKER_PORT)
        last = ports.pop("max-worker-port", LAST_WORKER_PORT)
        if "worker-port-list" in start.options:
            first = last = 0
        names: dict[int, str] = {}
        for name, port in ports.items():
            if not isinstance(port, int) or port == 0:
                continue  # a shell variable, or any free port
            if port in names:
                problem = f"Ray does not start: --{name} and --{names[port]} are both {port}"
                yield start.path, f"{problem}: write another port"
            elif isinstance(first, int) and isinstance(last, int) and first <= port <= last:
                problem = f"Ray does not start: --{name} is {port}, among its workers' ports"
                yield start.path, f"{problem} {first} to {last}: write one outside"
            names[port] = name
        if isinstance(first, int) and isinstance(last, int) and 0 < last < first:
            problem = f"Ray does not start: its workers' ports are {first} to {last}"
            yield start.path, f"{problem}: write --min-worker-port below --max-worker-port"


def _start_options(starts: Sequence[RayStart], data: Mapping[str, Any]) -> Mistakes:
    """Options of `ray start` that end or hinder it."""
    for start in starts:
        options = start.options
        is_worker = start.path[0].startswith("worker")
        if options.get("block") not in (None, False):
            problem = "`ray up` never returns: --block keeps `ray start` in the foreground"
            yield start.path, f"{problem}: leave it out"
        if is_worker and options.get("num-cpus") == 0:
            problem = "no task is ever placed on a worker: --num-cpus is 0"
            yield start.path, f"{problem}: leave it out, and Ray counts them"
        folder = str(options.get("temp-dir", "/"))
        if not folder.startswith(("/", "$", "~")):
            problem = f"Ray does not start: --temp-dir is {folder}, and must begin at /"
            yield start.path, f"{problem}: write /{folder}"
        store = options.get("object-store-memory", 0)
        memory = _least_memory(data, is_worker)
        if isinstance(store, int) and memory and store > memory:
            problem = f"Ray does not start: --object-store-memory is {store / 1e9:.0f} GB"
            yield start.path, f"{problem} and the machine has {memory / 1e9:.0f}: write less"


def _machines(data: Mapping[str, Any], is_worker: bool) -> dict[str, Mapping[str, Any]]:
    """What is known of the machines that the head's or the workers' commands run on, by name."""
    node_types = data.get("available_node_types")
    if node_types is None:
        name = ONPREM_WORKER if is_worker else ONPREM_HEAD
        return {name: written_facts(data, name)}
    machines: dict[str, Mapping[str, Any]] = {}
    for name, spec in node_types.items():
        if (name != data.get("head_node_type")) == is_worker:
            facts = instance_facts(instance_type(spec)) | written_facts(data, name)
            gpus = (spec.get("resources") or {}).get("GPU")
            machines[name] = facts if gpus is None else facts | {"gpus": gpus}
    return machines


def _least_memory(data: Mapping[str, Any], is_worker: bool) -> float:
    """Bytes of memory of the smallest machine that the commands run on; 0 if it is not known."""
    amounts = [facts.get("memory_gb", 0) for facts in _machines(data, is_worker).values()]
    return min(amounts, default=0) * 1e9


def _gpus_of_starts(starts: Sequence[RayStart], data: Mapping[str, Any]) -> Mistakes:
    """As many GPUs as the machines have.

    0 says that a machine takes no part in training.
    """
    for start in starts:
        wanted = start.options.get("num-gpus")
        visible = start.environment.get("CUDA_VISIBLE_DEVICES", "").strip("\"'")
        for name, facts in _machines(data, start.path[0].startswith("worker")).items():
            gpus = facts.get("gpus", 0)
            if not gpus:
                continue
            if isinstance(wanted, int) and 0 < wanted < gpus:
                problem = f"{gpus - wanted} GPUs of {name} are never used: --num-gpus is {wanted}"
                yield start.path, f"{problem} and it has {gpus}: leave it out, and Ray counts them"
            if isinstance(wanted, int) and wanted > gpus:
                problem = f"workers get GPUs that {name} does not have: --num-gpus is {wanted}"
                yield start.path, f"{problem} and it has {gpus}: leave it out, and Ray counts them"
            count = len(visible.split(","))
            if re.fullmatch(r"[\d,]+", visible) and count < gpus:
                problem = f"{gpus - count} GPUs of {name} are never used: CUDA_VISIBLE_DEVICES is"
                yield start.path, f"{problem} {visible} before `ray start`: leave it out"


def interfaces(path: Keys, variables: Mapping[str, str]) -> Mistakes:
    """NCCL and gloo are given the same network cards, in the way in which each reads them.

    Args:
        path: Where the variables are.
        variables: Their values.
    """
    nccl = variables.get("NCCL_SOCKET_IFNAME", "").strip("\"'")
    gloo = variables.get("GLOO_SOCKET_IFNAME", "").strip("\"'")
    if "$" in gloo or "(" in gloo:
        gloo = ""  # a command finds it
    if gloo.startswith(("^", "=")):
        problem = f"gloo fails to start: GLOO_SOCKET_IFNAME is {gloo}, and gloo takes names only"
        yield path, f"{problem}: write one such as eth0"
        return
    for name, value in (("NCCL", nccl), ("GLOO", gloo)):
        if value == "lo":
            problem = f"workers of two machines never meet: {name}_SOCKET_IFNAME is lo"
            yield path, f"{problem}: write the card that the machines reach each other by"
    if not nccl or not gloo or "$" in nccl:
        return
    names = nccl.lstrip("^=").split(",")
    if nccl.startswith("="):
        agree = gloo in names
    else:
        agree = any(gloo.startswith(name) for name in names if name) != nccl.startswith("^")
    if not agree:
        problem = f"NCCL and gloo use different networks: NCCL_SOCKET_IFNAME is {nccl}"
        yield path, f"{problem} and GLOO_SOCKET_IFNAME is {gloo}: write one card for both"


# --- other commands -------------------------------------------------------------------------------


def _shell(data: Mapping[str, Any]) -> Mistakes:
    """Commands that ask a question, or whose effect ends with them."""
    for path, command in _setup_commands(data):
        for part in re.split(r";|&&|\|\||\n", command):
            words = part.split()
            is_install = re.search(r"\b(apt|apt-get|yum|dnf|conda)\s.*\binstall\b", part)
            is_silent = any(re.fullmatch(r"-[a-zA-Z]*y[a-zA-Z]*|--yes|-qq", word) for word in words)
            if is_install and not is_silent and "yes |" not in command:
                problem = f"`ray up` waits for an answer for ever: `{part.strip()}` asks"
                yield path, f"{problem}: write -y"
        if re.fullmatch(r"\s*(conda activate \S+|(source|\.) \S+/activate|cd \S+)\s*", command):
            problem = f"`{command.strip()}` has no effect: every command has a shell of its own"
            yield path, f"{problem}: write it and the next command as one, joined by &&"
        elif re.fullmatch(r"\s*export \w+=\S+\s*", command):
            problem = f"`{command.strip()}` has no effect: every command has a shell of its own"
            yield path, f"{problem}: write it before the command that needs it"


def _setup_commands(data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
    """Every command that prepares machines, with where it is."""
    for key in data:
        if key.endswith("_commands") and not key.endswith("_start_ray_commands"):
            for number, command in enumerate(data[key] or []):
                yield (key, number), command


def versions_of_image(image: str) -> dict[str, str]:
    """The versions of Ray and of Python that a container image's name tells."""
    repository, _, tag = image.partition("@")[0].rpartition(":")
    versions = {}
    ray = re.search(r"ray-?(\d+\.\d+\.\d+)", tag)
    if ray is None and re.search(r"(^|/)ray(-ml|-llm)?$", repository):
        ray = re.match(r"(\d+\.\d+\.\d+)", tag)
    python = re.search(r"(?:^|[-_.])py(?:thon)?-?(\d)\.?(\d+)", tag)
    if ray is not None:
        versions["Ray"] = ray[1]
    if python is not None:
        versions["Python"] = f"{python[1]}.{python[2]}"
    return versions


def _versions(data: Mapping[str, Any]) -> Mistakes:
    """One version of Ray and of Python on all machines."""
    named: list[tuple[Keys, dict[str, str]]] = []
    docker = data.get("docker") or {}
    for key in ("image", "head_image", "worker_image"):
        named.append((("docker", key), versions_of_image(docker.get(key) or "")))
    for name, spec in (data.get("available_node_types") or {}).items():
        for key, image in (spec.get("docker") or {}).items():
            if key.endswith("image"):
                path = ("available_node_types", name, "docker", key)
                named.append((path, versions_of_image(image)))
    for path, command in _setup_commands(data):
        pin = re.search(r"\bray(?:\[[\w,-]+\])?==(\d+\.\d+\.\d+)", command)
        if pin is not None:
            named.append((path, {"Ray": pin[1]}))
    for package in ("Ray", "Python"):
        of_package = [(path, versions[package]) for path, versions in named if package in versions]
        for path, version in of_package[1:]:
            first = of_package[0][1]
            if version != first:
                problem = f"the workers never join: {package} is {first} here and {version} there"
                yield path, f"{problem}: write the same for head and workers"


# --- login, files and container -------------------------------------------------------------------


def _login(data: Mapping[str, Any]) -> Mistakes:
    """A user without a host, and the right half of the key."""
    auth = data.get("auth") or {}
    user = auth.get("ssh_user", "")
    if "@" in user:
        name = user.partition("@")[0]
        problem = f"no machine is ever reached: SSH would log in as {user}@ADDRESS"
        yield ("auth", "ssh_user"), f"{problem}: write {name}"
    key = str(auth.get("ssh_private_key", ""))
    if key.endswith(".pub"):
        problem = f"no machine is ever reached: {key} is the public half of the key"
        yield ("auth", "ssh_private_key"), f"{problem}: write {key.removesuffix('.pub')}"
    public = str(auth.get("ssh_public_key", key or ".pub"))
    if "ssh_public_key" in auth and not public.endswith(".pub"):
        problem = f"{public} goes to the cloud: it is not the public half of the key"
        yield ("auth", "ssh_public_key"), f"{problem}: write {public}.pub"


def _addresses(data: Mapping[str, Any]) -> Mistakes:
    """Machines by addresses that mean the same machine everywhere."""
    if data["provider"]["type"] != "local" or is_this_machine(data):
        return
    for number, host in enumerate(hosts(data)):
        if re.fullmatch(r"localhost|127\.[\d.]+|::1|0\.0\.0\.0", host):
            path: Keys = (
                ("provider", "worker_ips", number - 1) if number else ("provider", "head_ip")
            )
            problem = f"the machines never find each other: {host} is on each the machine itself"
            yield path, f"{problem}: write its address in the network"


def _mounts(data: Mapping[str, Any]) -> Mistakes:
    """Copied folders that do not replace a home, and that hold no keys."""
    for remote, local in (data.get("file_mounts") or {}).items():
        path: Keys = ("file_mounts", remote)
        if re.fullmatch(r"(~|/root|/home/[^/]+|/home|/)/*", remote):
            problem = f"{remote} of every machine is written over, with its .ssh and .bashrc"
            yield path, f"{problem}: write a folder in it, such as {remote.rstrip('/')}/code"
        elif re.fullmatch(r"(~|/root|/home/[^/]+)/\.ssh(/authorized_keys)?/*", remote):
            problem = f"nobody can log in to the machines any more: {remote} is written over"
            yield path, f"{problem}: write another place"
        if re.fullmatch(r"(~|/root|/home/[^/]+|/home|/)/*", str(local)):
            problem = f"your whole home with its keys goes to every machine: {remote} is {local}"
            yield path, f"{problem}: write the folder of your code"


def _container(data: Mapping[str, Any]) -> Mistakes:
    """A container that sees the GPUs, with enough shared memory."""
    docker = data.get("docker") or {}
    if not any(docker.get(key) for key in ("image", "head_image", "worker_image")):
        return
    options = [
        str(option) for key in docker if key.endswith("run_options") for option in docker[key]
    ]
    text = " ".join(options)
    machines = _machines(data, is_worker=False) | _machines(data, is_worker=True)
    has_gpus = any(facts.get("gpus") for facts in machines.values())
    sees_gpus = re.search(r"--gpus|--runtime|nvidia|--device", text)
    if has_gpus and docker.get("disable_automatic_runtime_detection") and not sees_gpus:
        problem = "torch sees no GPU: the container has no GPU runtime"
        yield ("docker",), f"{problem}: write run_options: [--gpus=all]"
    size = re.search(r"--shm-size[= ]['\"]?(\d+)([bkmg]?)", text, re.IGNORECASE)
    is_hosts = "--ipc=host" in text or "--ipc host" in text
    if size is not None:
        factor = {"k": 2**10, "m": 2**20, "g": 2**30}.get(size[2].lower(), 1)
        if int(size[1]) * factor < LEAST_SHARED_MEMORY and not is_hosts:
            problem = (
                f"NCCL fails and Ray is slow: the container has {size[1]}{size[2]} at /dev/shm"
            )
            yield ("docker",), f"{problem}: write --shm-size=16g or more"
    elif docker.get("disable_shm_size_detection") and not is_hosts:
        problem = "NCCL fails and Ray is slow: the container has Docker's 64 MB at /dev/shm"
        yield ("docker",), f"{problem}: write run_options: [--shm-size=16g]"


# --- secrets --------------------------------------------------------------------------------------


def _secrets(data: Mapping[str, Any]) -> Mistakes:
    """No secret in what a cloud shows to all who may list machines."""
    yield from secrets_in(("metadata",), data.get("metadata") or {})
    for name, spec in (data.get("available_node_types") or {}).items():
        config = spec.get("node_config") or {}
        for key in ("metadata", "labels", "TagSpecifications", "UserData"):
            yield from secrets_in(
                ("available_node_types", name, "node_config", key), config.get(key)
            )


def secrets_in(path: Keys, value: Any) -> Mistakes:
    """Texts inside a value that are secrets, by their name or by how they look.

    Args:
        path: Where the value is.
        value: A text, or mappings and lists of texts.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from secrets_in((*path, number), item)
    if isinstance(value, dict):
        # Clouds write labels as {key: …, value: …} too.
        name = value.get("key", value.get("Key"))
        for key, child in value.items():
            named = name if isinstance(name, str) and key in ("value", "Value") else key
            yield from _secret((*path, key), str(named), child)
            yield from secrets_in((*path, key), child)
    if isinstance(value, str):
        yield from _secret(path, "", value)


def _secret(path: Keys, name: str, value: Any) -> Mistakes:
    """A text that is a secret, by its name or by how it looks."""
    if not isinstance(value, str) or not value:
        return
    rules = schemas("ray.yaml")
    # A name may also say where a secret is, such as the name of a Kubernetes Secret.
    is_named = re.search(rules["secret"], name) and not re.search(
        r"(?i)(name|ref|path|file)$", name
    )
    looks_so = re.search(
        r"://[^/\s:@]+:[^/\s@]+@|\b((hf_|ghp_|glpat-|AKIA)[A-Za-z0-9_-]{12,}|sk-[A-Za-z0-9_-]{20,})",
        value,
    )
    if (is_named and not value.startswith("$")) or looks_so:
        problem = f"everyone who may list the machines can read a secret: {path[-1]} holds one"
        yield path, f"{problem}: write a variable that `trireme submit` sends, or a secret's name"
