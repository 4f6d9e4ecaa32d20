"""Commands on other machines over SSH, and whether Ray can be started on a machine.

Commands run as Ray's launcher runs them, in a login shell, so that PATH is that of the machine's
user. Machines are checked beforehand because Ray's launcher says little when one does not come up.
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
SSH_FAILED = 255
"""The exit code of ssh where the command was not run."""


@dataclass(frozen=True)
class SshLogin:
    """How the machines of a cluster are reached.

    Attributes:
        user: The user on each machine.
        key: The path of the private key; "" for the keys that ssh finds by itself.
    """

    user: str
    key: str

    def command(self, host: str, *options: str) -> list[str]:
        """The words of an ssh command that logs in to a host.

        Args:
            host: Its address.
            options: Further options of ssh.
        """
        words = [
            "ssh",
            *("-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),
            *("-o", "LogLevel=ERROR"),
            *("-o", "StrictHostKeyChecking=accept-new"),
            *options,
        ]
        if self.key:
            words += ["-i", os.path.expanduser(self.key), "-o", "IdentitiesOnly=yes"]
        return [*words, f"{self.user}@{host}"]


def login_of(data: Mapping[str, Any]) -> SshLogin:
    """The login that a file for Ray's launcher has under `auth`."""
    auth = data.get("auth") or {}
    return SshLogin(
        user=auth.get("ssh_user", "ubuntu"),
        key=auth.get("ssh_private_key", ""),
    )


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What a command on a host printed.

    Attributes:
        host: The host's address.
        exit_code: The command's exit code, or that of ssh.
        stdout: What it printed.
        stderr: What it printed to standard error.
        problem: Why the command could not be run at all, in words; "" if it ran.
    """

    host: str
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    problem: str = ""


def run_on_host(
    login: SshLogin,
    host: str,
    command: str,
    *,
    stdin: str = "",
    timeout: float = 30.0,
) -> CommandResult:
    """Runs a shell command on a host; never raises.

    Args:
        login: How the host is reached.
        host: Its address.
        command: The command.
        stdin: The command's standard input.
        timeout: Seconds after which it is given up.
    """
    with_user_settings = f"{{ source ~/.bashrc; }} > /dev/null 2>&1; {command}"
    remote_command = f"bash --login -c -i {shlex.quote(with_user_settings)} "
    try:
        process = subprocess.run(
            [*login.command(host), remote_command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except FileNotFoundError:
        problem = "there is no ssh on this machine: install an OpenSSH client"
        return CommandResult(host=host, exit_code=SSH_FAILED, problem=problem)
    except subprocess.TimeoutExpired:
        problem = f"{host} took longer than {timeout:.0f} s to answer"
        return CommandResult(host=host, exit_code=SSH_FAILED, problem=problem)
    problem = ""
    if process.returncode == SSH_FAILED:
        problem = ssh_problem(host, login, process.stderr)
    return CommandResult(
        host=host,
        exit_code=process.returncode,
        stdout=process.stdout,
        stderr=process.stderr,
        problem=problem,
    )


def run_on_hosts(
    login: SshLogin,
    hosts: Sequence[str],
    command: str,
    *,
    stdin: str = "",
    timeout: float = 30.0,
) -> list[CommandResult]:
    """Runs a shell command on several hosts at once; never raises.

    Args:
        login: How the hosts are reached.
        hosts: Their addresses.
        command: The command.
        stdin: The standard input of each command.
        timeout: Seconds after which each is given up.

    Returns:
        The results in the order of the hosts.
    """
    threads = min(64, max(1, len(hosts)))
    with ThreadPoolExecutor(max_workers=threads) as pool:
        results = pool.map(
            lambda host: run_on_host(login, host, command, stdin=stdin, timeout=timeout),
            hosts,
        )
        return list(results)


def ssh_problem(host: str, login: SshLogin, stderr: str) -> str:
    """Why SSH did not reach a host, in ssh's words, and what to check.

    Args:
        host: Its address.
        login: How it should have been reached.
        stderr: What ssh printed.
    """
    reason = last_lines(stderr, 2)
    problem = f"SSH to {login.user}@{host} fails ({reason})"
    return f"{problem}: check the address, and `auth` in the cluster file"


def last_lines(text: str, count: int = 1) -> str:
    """The end of what a program printed, in one line and without colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " / ".join(line[:200] for line in lines[-count:]) or "no reason given"


@contextlib.contextmanager
def tunnel(login: SshLogin, host: str, port: int) -> Iterator[int]:
    """Opens an SSH tunnel, which stays open inside the `with`.

    Args:
        login: How the host is reached.
        host: Its address.
        port: The port on the host's loopback.

    Yields:
        The port on this machine that leads there.

    Raises:
        ClusterError: SSH does not reach the host, or the tunnel does not open in time.
    """
    local_port = free_port()
    command = login.command(
        host,
        "-N",
        *("-o", "ExitOnForwardFailure=yes"),
        *("-o", "ServerAliveInterval=5"),
        *("-o", "ServerAliveCountMax=3"),
        *("-L", f"127.0.0.1:{local_port}:127.0.0.1:{port}"),
    )
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + TUNNEL_SECONDS
        while not is_open("127.0.0.1", local_port):
            if process.poll() is not None:
                raise ClusterError(ssh_problem(host, login, process.stderr.read()))
            if time.monotonic() > deadline:
                problem = f"did not open within {TUNNEL_SECONDS:.0f} s"
                raise ClusterError(f"the SSH tunnel to {host} {problem}")
            time.sleep(0.05)
        yield local_port
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def free_port() -> int:
    """A port of this machine's loopback on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def is_open(host: str, port: int) -> bool:
    """Whether something listens on a port."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


# --- whether Ray can be started on a machine; `trireme doctor` checks the rest once Ray runs ------

PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}
"""What listens on ports of the head. Workers choose theirs."""
# This program runs on the other machine, with its Python and the standard library alone.
PROBE = r"""
import importlib.metadata, json, os, platform, shutil, socket
facts = {"python": platform.python_version(), "ray": "", "busy_ports": []}
facts["rsync"] = shutil.which("rsync") is not None
try:
    facts["ray"] = importlib.metadata.version("ray")
except importlib.metadata.PackageNotFoundError:
    pass
for port in PORTS:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
        except OSError:
            facts["busy_ports"].append(port)
facts["ray_running"] = False
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            program = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")[0]
        except OSError:
            continue
        facts["ray_running"] |= program.endswith((b"/raylet", b"/gcs_server"))
print("TRIREME" + json.dumps(facts))
"""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a machine reports of itself.

    Attributes:
        host: Its address.
        problem: Why it could not be asked; then nothing else is known.
        python: The version of its Python.
        ray: The version of its Ray; "" if it has none.
        rsync: Whether it has rsync.
        busy_ports: Those of `PORTS` on which something listens.
        ray_running: Whether processes of Ray run on it.
    """

    host: str
    problem: str = ""
    python: str = ""
    ray: str = ""
    rsync: bool = True
    busy_ports: Sequence[int] = ()
    ray_running: bool = False


def probe(login: SshLogin, hosts: Sequence[str]) -> list[HostFacts]:
    """Asks all machines at once for their facts."""
    program = f"PORTS={list(PORTS)}\n{PROBE}"
    return [read_probe(result) for result in run_on_hosts(login, hosts, "python -", stdin=program)]


def read_probe(result: CommandResult) -> HostFacts:
    """The facts in what the probe has printed on a machine. Pure."""
    host = result.host
    if result.problem:
        return HostFacts(host=host, problem=result.problem)
    match = re.search(r"^TRIREME(\{.*\})$", result.stdout, re.MULTILINE)
    if not match:
        reason = last_lines(result.stderr)
        problem = f"{host} has no usable `python` in a login shell: {reason}"
        return HostFacts(host=host, problem=problem)
    return HostFacts(host=host, **json.loads(match[1]))


def start_problems(facts: Sequence[HostFacts]) -> list[str]:
    """Why Ray cannot be started on machines. Pure.

    Args:
        facts: The machines, the head first.

    Returns:
        Sentences that say what to do; empty if Ray can be started on all of them.
    """
    reached = [host for host in facts if not host.problem]
    problems = []
    for host in reached:
        if host.ray_running:
            remedy = "`trireme cluster down` ends it, or `ray stop` there"
            problems.append(f"Ray is running on {host.host} already: {remedy}")
    problems += [host.problem for host in facts if host.problem]
    for host in reached:
        first = reached[0]
        if not host.ray:
            remedy = "`pip install --constraint constraints.txt .` there"
            problems.append(f"{host.host} has no Ray: {remedy}")
        elif (host.python, host.ray) != (first.python, first.ray):
            versions = f"{host.host} has Python {host.python} and Ray {host.ray}"
            versions_of_first = f"{first.host} has Python {first.python} and Ray {first.ray}"
            problems.append(f"{versions}, and {versions_of_first}: Ray needs the same everywhere")
        if not host.rsync:
            problems.append(f"{host.host} has no rsync, with which Ray copies files: install it")
    head = facts[0]
    if not head.ray_running:  # otherwise Ray itself uses the ports
        for port in head.busy_ports:
            problem = f"port {port} of {head.host} is taken, and {PORTS[port]} needs it"
            remedy = f"end what listens there (`ss -ltnp sport = :{port}`)"
            problems.append(f"{problem}: {remedy}")
    return problems
