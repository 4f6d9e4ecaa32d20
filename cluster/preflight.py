"""Checks every machine of an on-prem cluster before Ray is started there: Ray's launcher says little when one does not
come up."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.ray_file import hosts, own_metadata
from cluster.remote import Result, last_line, login_of, run_on_all

PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}  # looked at on the head; workers choose theirs
SKEW_SECONDS = 5.0
DISK_BYTES = 5_000_000_000
PACKAGES = ("ray", "torch", "mlflow", "numpy", "trireme")

# Runs on the other machine, with its Python and nothing but the standard library.
PROBE = r"""
import json, os, platform, shutil, socket, time
from importlib.metadata import PackageNotFoundError, version
facts = {"time": time.time(), "python": platform.python_version(), "packages": {}}
for name in PACKAGES:
    try: facts["packages"][name] = version(name)
    except PackageNotFoundError: facts["packages"][name] = None
host = socket.gethostname()
try: facts["resolves_to"] = socket.gethostbyname(host)
except OSError: facts["resolves_to"] = None
facts["busy_ports"] = []
for port in PORTS:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try: s.bind(("0.0.0.0", port))
        except OSError: facts["busy_ports"].append(port)
facts["disk_free"] = shutil.disk_usage("/tmp").free
facts["rsync"] = shutil.which("rsync") is not None
facts["ray_running"] = False
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try: command = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")[0]
        except OSError: continue
        facts["ray_running"] |= command.endswith((b"/raylet", b"/gcs_server"))
facts["storage_problem"] = None
if STORAGE.startswith("/"):
    try:
        os.makedirs(STORAGE, exist_ok=True)
        mark = os.path.join(STORAGE, f".trireme-{host}-{os.getpid()}")
        open(mark, "w").close(); os.remove(mark)
    except OSError as error: facts["storage_problem"] = str(error)
print("TRIREME" + json.dumps(facts))
"""


@dataclass(frozen=True)
class HostFacts:
    """What one machine reports of itself. `problem` is all there is when it could not be asked."""

    host: str
    problem: str = ""
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    skew: float = 0.0  # seconds its clock is ahead of ours
    resolves_to: str | None = None
    busy_ports: tuple[int, ...] = ()
    disk_free: int = 10**12
    rsync: bool = True
    ray_running: bool = False
    storage_problem: str | None = None


def probe(data: Mapping[str, Any]) -> list[HostFacts]:
    """Asks every machine of the file at once, the head first."""
    storage = str(own_metadata(data).get("storage") or "")
    script = f"PACKAGES={PACKAGES!r}\nPORTS={tuple(PORTS)!r}\nSTORAGE={storage!r}\n{PROBE}"
    before = time.time()
    results = run_on_all(login_of(data), hosts(data), "python -", stdin=script)
    return [read(result, before, time.time()) for result in results]


def read(result: Result, before: float, after: float) -> HostFacts:
    """A machine's output as facts. Its clock was read some time between `before` and `after`."""
    if result.problem:
        return HostFacts(result.host, result.problem)
    match = re.search(r"^TRIREME(\{.*\})$", result.out, re.MULTILINE)
    if not match:
        return HostFacts(result.host, f"{result.host} has no usable `python` in a login shell: {last_line(result.err)}")
    found = json.loads(match[1])
    clock = found.pop("time")
    skew = max(0.0, clock - after) or min(0.0, clock - before)
    return HostFacts(result.host, skew=skew, **found | {"busy_ports": tuple(found["busy_ports"])})


def problems(facts: list[HostFacts]) -> list[str]:
    """What is wrong with the machines, the head first among them; each a sentence with what to do. Pure."""
    there, head = [host for host in facts if not host.problem], facts[0]
    found = [
        f"Ray is running on {host.host} already: `trireme cluster down` ends it, or `ray stop` there"
        for host in there
        if host.ray_running
    ]
    found += [host.problem for host in facts if host.problem]
    for host in there:
        found += _of_clock_and_versions(host, there[0])
    for host in there:
        found += _of_host(host, has_peers=len(facts) > 1)
    if not head.problem and not head.ray_running:
        found += [
            f"port {port} of {head.host} is taken, and {PORTS[port]} needs it: end what listens there "
            f"(`ss -ltnp sport = :{port}`)"
            for port in head.busy_ports
        ]
    return found


def _of_clock_and_versions(host: HostFacts, reference: HostFacts) -> Iterator[str]:
    if abs(host.skew) > SKEW_SECONDS:
        late = f"{abs(host.skew):.0f} s {'ahead' if host.skew > 0 else 'behind'}"
        yield f"{host.host} has the clock {late}: run chrony or systemd-timesyncd on it"
    if host.python != reference.python:
        other = f"{reference.host} has {reference.python}"
        yield f"{host.host} has Python {host.python}, and {other}: Ray needs the same everywhere"
    for name, wanted in reference.packages.items():
        has = host.packages.get(name)
        if has != wanted:
            here = f"{host.host} has {name} {has}" if has else f"{host.host} has no {name}"
            there = f"{reference.host} has {wanted}" if wanted else f"{reference.host} has none"
            yield f"{here}, and {there}: install with the same constraints.txt on both"
    if host is reference and "ray" in host.packages and host.packages["ray"] is None:
        yield f"{host.host} has no Ray: `pip install --constraint constraints.txt .` there"


def _of_host(host: HostFacts, *, has_peers: bool) -> Iterator[str]:
    if has_peers and (host.resolves_to is None or host.resolves_to.startswith("127.")):
        has = f"resolves to {host.resolves_to}" if host.resolves_to else "does not resolve"
        yield (
            f"the host name of {host.host} {has} there, where its peers cannot reach it: write its address beside the "
            "name in /etc/hosts"
        )
    if host.disk_free < DISK_BYTES:
        yield f"{host.host} has {host.disk_free / 1e9:.1f} GB free in /tmp, where Ray works: make room"
    if not host.rsync:
        yield f"{host.host} has no rsync, with which Ray copies files: install it"
    if host.storage_problem:
        yield f"{host.host} cannot write to the shared storage: {host.storage_problem}"
