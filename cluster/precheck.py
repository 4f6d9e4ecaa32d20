"""Looks at every machine of an on-prem cluster before Ray is started there: Ray's launcher says little when one does
not come up."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.ray_file import hosts, own_metadata
from cluster.remote import Answer, ask_all, login_of

PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}  # looked at on the head; workers choose theirs
SKEW_SECONDS = 5.0
DISK_BYTES = 5_000_000_000
PACKAGES = ("ray", "torch", "mlflow", "numpy", "trireme")

# Runs on the other machine, with its Python and nothing but the standard library.
PROBE = r"""
import json, os, platform, shutil, socket, sys, time
from importlib.metadata import PackageNotFoundError, version
facts = {"time": time.time(), "python": platform.python_version(), "executable": sys.executable, "packages": {}}
for name in PACKAGES:
    try: facts["packages"][name] = version(name)
    except PackageNotFoundError: facts["packages"][name] = None
facts["host"] = socket.gethostname()
try: facts["resolves_to"] = socket.gethostbyname(facts["host"])
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
        mark = os.path.join(STORAGE, f".trireme-{facts['host']}-{os.getpid()}")
        open(mark, "w").close(); os.remove(mark)
    except OSError as error: facts["storage_problem"] = str(error)
print("TRIREME" + json.dumps(facts))
"""


@dataclass(frozen=True)
class HostFacts:
    """What one machine said of itself. `problem` is all there is when it could not be asked."""

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


def look(data: Mapping[str, Any]) -> list[HostFacts]:
    """Asks every machine of the file at once, the head first."""
    storage = str(own_metadata(data).get("storage") or "")
    script = f"PACKAGES={PACKAGES!r}\nPORTS={tuple(PORTS)!r}\nSTORAGE={storage!r}\n{PROBE}"
    before = time.time()
    answers = ask_all(login_of(data), hosts(data), "python -", stdin=script)
    return [read(answer, before, time.time()) for answer in answers]


def read(answer: Answer, before: float, after: float) -> HostFacts:
    """A machine's answer as facts. Its clock was read some time between `before` and `after`."""
    if answer.problem:
        return HostFacts(answer.host, answer.problem)
    match = re.search(r"^TRIREME(\{.*\})$", answer.out, re.MULTILINE)
    if not match:
        said = next((line for line in reversed(answer.err.splitlines()) if line.strip()), "nothing")
        return HostFacts(answer.host, f"{answer.host} has no usable `python` in a login shell ({said.strip()[:120]})")
    found = json.loads(match[1])
    skew = max(0.0, found["time"] - after) or min(0.0, found["time"] - before)
    return HostFacts(
        answer.host,
        python=found["python"],
        packages=found["packages"],
        skew=skew,
        resolves_to=found["resolves_to"],
        busy_ports=tuple(found["busy_ports"]),
        disk_free=found["disk_free"],
        rsync=found["rsync"],
        ray_running=found["ray_running"],
        storage_problem=found["storage_problem"],
    )


def judge(facts: list[HostFacts]) -> list[str]:
    """What is wrong with the machines, the head first among them; each a sentence with what to do. Pure."""
    found = [host.problem for host in facts if host.problem]
    there = [host for host in facts if not host.problem]
    if not there:
        return found
    head = facts[0]
    found += [
        f"{host.host} has the clock {abs(host.skew):.0f} s {'ahead' if host.skew > 0 else 'behind'}: run chrony or "
        "systemd-timesyncd on it"
        for host in there
        if abs(host.skew) > SKEW_SECONDS
    ]
    reference = head if not head.problem else there[0]
    found += _versions(there, reference)
    for host in there:
        found += _host(host, len(facts) > 1)
    if not head.problem and not head.ray_running:
        found += [
            f"port {port} of {head.host} is taken, and {PORTS[port]} needs it: end what listens there "
            f"(`ss -ltnp sport = :{port}`)"
            for port in head.busy_ports
        ]
    return found


def _versions(there: list[HostFacts], reference: HostFacts) -> list[str]:
    found = []
    pythons = Counter(host.python for host in there)
    if len(pythons) > 1:
        found += [
            f"{host.host} has Python {host.python}, and {reference.host} has {reference.python}: Ray needs the same "
            "everywhere"
            for host in there
            if host.python != reference.python
        ]
    for name, wanted in reference.packages.items():
        for host in there:
            has = host.packages.get(name)
            if has == wanted:
                continue
            said = f"{host.host} has {name} {has}" if has else f"{host.host} has no {name}"
            other = f"{reference.host} has {wanted}" if wanted else f"{reference.host} has none"
            mend = "install with the same constraints.txt on both"
            found.append(f"{said}, and {other}: {mend}")
    if reference.packages and reference.packages.get("ray") is None:
        found.append(f"{reference.host} has no Ray: `pip install --constraint constraints.txt .` there")
    return found


def _host(host: HostFacts, several: bool) -> list[str]:
    found = []
    if several and (host.resolves_to is None or host.resolves_to.startswith("127.")):
        has = f"resolves to {host.resolves_to}" if host.resolves_to else "does not resolve"
        found.append(
            f"the host name of {host.host} {has} there, where its peers cannot reach it: write its address beside "
            "the name in /etc/hosts"
        )
    if host.disk_free < DISK_BYTES:
        found.append(f"{host.host} has {host.disk_free / 1e9:.1f} GB free in /tmp, where Ray works: make room")
    if not host.rsync:
        found.append(f"{host.host} has no rsync, with which Ray copies files: install it")
    if host.storage_problem:
        found.append(f"{host.host} cannot write to the shared storage: {host.storage_problem}")
    return found
