"""Commands on other machines over SSH, as Ray's launcher would run them (in a login shell, so that PATH is theirs), and
whether Ray can be started on a machine: Ray's launcher says little when one does not come up.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cluster import ClusterError

CONNECT_SECONDS = 5
TUNNEL_SECONDS = 15.0


@dataclass(frozen=True)
class SshLogin:
    """How the machines of a cluster are reached."""

    user: str
    key: str  # path of the private key; "" for what ssh finds by itself

    def command(self, host: str, *options: str) -> list[str]:
        found = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "LogLevel=ERROR"]
        found += ["-o", "StrictHostKeyChecking=accept-new", *options]
        if self.key:
            found += ["-i", os.path.expanduser(self.key), "-o", "IdentitiesOnly=yes"]
        return [*found, f"{self.user}@{host}"]


def login_of(data: Mapping[str, Any]) -> SshLogin:
    auth = data.get("auth") or {}
    return SshLogin(auth.get("ssh_user", "ubuntu"), auth.get("ssh_private_key", ""))


@dataclass(frozen=True)
class Result:
    """What a command on a host printed. `problem`: why it could not be run at all, in words; else empty."""

    host: str
    code: int
    out: str
    err: str
    problem: str = ""


def run(login: SshLogin, host: str, command: str, *, stdin: str = "", timeout: float = 30.0) -> Result:
    """Runs a shell command on a host; never raises."""
    remote = f"bash --login -c -i {shlex.quote(f'{{ source ~/.bashrc; }} > /dev/null 2>&1; {command}')} "
    try:
        done = subprocess.run(
            [*login.command(host), remote], input=stdin, capture_output=True, text=True, timeout=timeout
        )
    except FileNotFoundError:
        return Result(host, 255, "", "", "there is no ssh on this machine: install an OpenSSH client")
    except subprocess.TimeoutExpired:
        return Result(host, 255, "", "", f"{host} took longer than {timeout:.0f} s to answer")
    problem = explain(host, login, done.stderr) if done.returncode == 255 else ""
    return Result(host, done.returncode, done.stdout, done.stderr, problem)


def run_on_all(login: SshLogin, hosts: list[str], command: str, **options: Any) -> list[Result]:
    """The same on every host at once."""
    with ThreadPoolExecutor(max_workers=min(64, max(1, len(hosts)))) as pool:
        return list(pool.map(lambda host: run(login, host, command, **options), hosts))


def explain(host: str, login: SshLogin, err: str) -> str:
    """That SSH did not get there, in ssh's words, and what to look at."""
    return f"SSH to {login.user}@{host} fails ({last_line(err, 2)}): check the address, and `auth` in the cluster file"


def last_line(text: str, count: int = 1) -> str:
    """The end of what a program printed, in one line and without colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " / ".join(line[:200] for line in lines[-count:]) or "no reason given"


@contextlib.contextmanager
def tunnel(login: SshLogin, host: str, port: int) -> Iterator[int]:
    """A local port that leads to `port` of the host's own loopback; kept open inside the `with`.

    Raises:
        ClusterError: SSH does not get there, or nothing listens.
    """
    local = free_port()
    forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    command = login.command(host, *forward, "-L", f"127.0.0.1:{local}:127.0.0.1:{port}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + TUNNEL_SECONDS
        while not is_open("127.0.0.1", local):
            if process.poll() is not None:
                raise ClusterError(explain(host, login, process.stderr.read() if process.stderr else ""))
            if time.monotonic() > deadline:
                raise ClusterError(f"the SSH tunnel to {host} did not open within {TUNNEL_SECONDS:.0f} s")
            time.sleep(0.05)
        yield local
    finally:
        process.terminate()
        process.wait()
        if process.stderr:
            process.stderr.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def is_open(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


# --- whether Ray can be started there; `trireme doctor` looks at the rest once it runs -------------------------------

PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}  # looked at on the head; workers choose theirs
# Runs on the other machine, with its Python and nothing but the standard library.
PROBE = r"""
import importlib.metadata, json, os, platform, shutil, socket
facts = {"python": platform.python_version(), "ray": "", "busy_ports": []}
facts["rsync"] = shutil.which("rsync") is not None
try: facts["ray"] = importlib.metadata.version("ray")
except importlib.metadata.PackageNotFoundError: pass
for port in PORTS:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try: s.bind(("0.0.0.0", port))
        except OSError: facts["busy_ports"].append(port)
facts["ray_running"] = False
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try: command = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")[0]
        except OSError: continue
        facts["ray_running"] |= command.endswith((b"/raylet", b"/gcs_server"))
print("TRIREME" + json.dumps(facts))
"""


@dataclass(frozen=True)
class HostFacts:
    """What one machine reports of itself. `problem` is all there is when it could not be asked."""

    host: str
    problem: str = ""
    python: str = ""
    ray: str = ""  # its version; "": none
    rsync: bool = True
    busy_ports: Sequence[int] = ()
    ray_running: bool = False


def probe(login: SshLogin, hosts: list[str]) -> list[HostFacts]:
    """Asks every machine at once."""
    return [read_probe(found) for found in run_on_all(login, hosts, "python -", stdin=f"PORTS={list(PORTS)}\n{PROBE}")]


def read_probe(result: Result) -> HostFacts:
    """A machine's output as facts. Pure."""
    match = re.search(r"^TRIREME(\{.*\})$", result.out, re.MULTILINE)
    missing = f"{result.host} has no usable `python` in a login shell: {last_line(result.err)}"
    if result.problem or not match:
        return HostFacts(result.host, result.problem or missing)
    return HostFacts(result.host, **json.loads(match[1]))


def unfit(facts: Sequence[HostFacts]) -> list[str]:
    """What keeps Ray from starting on machines, of which the head is first; each a sentence with what to do. Pure."""
    there = [host for host in facts if not host.problem]
    found = [
        f"Ray is running on {host.host} already: `trireme cluster down` ends it, or `ray stop` there"
        for host in there
        if host.ray_running
    ]
    found += [host.problem for host in facts if host.problem]
    for host in there:
        first = there[0]
        if not host.ray:
            found.append(f"{host.host} has no Ray: `pip install --constraint constraints.txt .` there")
        elif (host.python, host.ray) != (first.python, first.ray):
            has, other = f"Python {host.python} and Ray {host.ray}", f"Python {first.python} and Ray {first.ray}"
            found.append(f"{host.host} has {has}, and {first.host} has {other}: Ray needs the same everywhere")
        if not host.rsync:
            found.append(f"{host.host} has no rsync, with which Ray copies files: install it")
    for port in facts[0].busy_ports if not facts[0].ray_running else ():
        remedy = f"end what listens there (`ss -ltnp sport = :{port}`)"
        found.append(f"port {port} of {facts[0].host} is taken, and {PORTS[port]} needs it: {remedy}")
    return found
