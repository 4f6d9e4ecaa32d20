"""Starts, looks at and ends the cluster of a file: Ray's own launcher, with a check of the machines before it, and what
runs, starts or has failed by Ray's documented commands (`ray list nodes`; `ray status -v` for the autoscaler).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cluster import ClusterError, ray_file, ray_rules
from cluster.environment import below_home
from cluster.files import read_cluster, read_ray_file
from cluster.pending import autoscaler_report, ray_environment
from cluster.remote import Result, is_open, last_line, login_of, probe, run, run_on_all, unfit
from cluster.shape import ClusterShape

ASK = (
    'test ! -f ~/.ray/auth_token || export RAY_AUTH_MODE="${{RAY_AUTH_MODE:-token}}"; '
    "ray list nodes --format=json --limit=10000 --timeout=10 --address=http://127.0.0.1:{dashboard} && "
    "ray status -v --address=127.0.0.1:{gcs}"
)
Say = Callable[[str], None]


def up(path: str, say: Say, *, timeout: float = 600.0) -> Status:
    """Starts a cluster and waits until every machine that it is to have at least is there.

    Raises:
        ClusterError: the file is wrong, a machine is not fit, it is up already, or Ray's launcher fails; nothing was
            started in the first three cases.
    """
    data, file = read_ray_file(path)
    for _, missing in ray_rules.missing_files(data):
        raise ClusterError(f"{file}: {missing}")
    log, environment = _log(data, "up"), ray_environment()
    commands: list[str | list[str]] = [["ray", "up", "--yes", "--no-config-cache", "--disable-usage-stats", file]]
    if any("auth_token" in str(mount) for mount in data.get("file_mounts") or {}):
        make_token()
    if ray_file.is_this_machine(data):
        if is_open("127.0.0.1", ray_file.gcs_port(data)):
            raise ClusterError(f"Ray is running on this machine already: `trireme cluster down {file}` ends it")
        commands = data["head_start_ray_commands"]
    elif data["provider"]["type"] == "local":
        _check_machines(data, say)
        # With autoscaler v2 the head counts against max_workers, and one worker never comes (Ray 2.60).
        environment |= {"RAY_UP_enable_autoscaler_v2": "0"}
    else:
        _check_not_up(data, file, say)
    say(f"starting {data['cluster_name']}")
    for command in commands:
        _run(command, environment, log, timeout)
    return _wait(data, file, say, timeout)


def make_token() -> None:
    """The token that Ray's processes and users of one cluster share; made once, in ~/.ray/auth_token."""
    path = Path("~/.ray/auth_token").expanduser()
    if not path.exists():
        environment = ray_environment() | {"RAY_AUTH_MODE": "token"}
        done = subprocess.run(["ray", "get-auth-token", "--generate"], capture_output=True, text=True, env=environment)
        if not path.exists():
            raise ClusterError(f"Ray does not make a token in {path}: {done.stderr.strip()[-200:]}")
    path.chmod(0o600)


def _check_machines(data: Mapping[str, Any], say: Say) -> None:
    say("checking the machines")
    found = unfit(probe(login_of(data), ray_file.hosts(data)))
    for sentence in found[1:]:
        say(f"also: {sentence}")
    if found:
        raise ClusterError(found[0])


def _check_not_up(data: Mapping[str, Any], file: str, say: Say) -> None:
    """Raises ClusterError if the cloud has this cluster's head and Ray answers there: `ray up` would restart it, and
    end whatever runs."""
    say(f"asking {data['provider']['type']} whether {data['cluster_name']} is there already")
    status = status_of(data, file)
    if status.reachable:
        raise ClusterError(
            f"{status.name} is up already, with {len(status.alive)} nodes: `trireme cluster status {file}` shows it, "
            f"and `trireme cluster down {file}` ends it"
        )


def _run(command: str | list[str], environment: dict[str, str], log: Path, timeout: float) -> None:
    """Runs a command with its output in a log: Ray's daemons keep a pipe open, and reading it would never end.

    Raises:
        ClusterError: it fails, or does not end in time.
    """
    name = command[:60] if isinstance(command, str) else f"ray {command[1]}"
    with log.open("a") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        try:
            done = subprocess.run(command, shell=isinstance(command, str), env=environment, timeout=timeout, **streams)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"`{name}` did not end within {timeout:.0f} s ({log})") from None
    if done.returncode:
        raise ClusterError(f"`{name}` failed ({log}): {last_line(log.read_text(errors='replace'), 3)}")


def _log(data: Mapping[str, Any], what: str) -> Path:
    """An empty file for what Ray's launcher prints."""
    folder = below_home("XDG_CACHE_HOME", ".cache") / "trireme" / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{data['cluster_name']}-{what}.log"
    log.write_text("")
    return log


def _wait(data: Mapping[str, Any], file: str, say: Say, timeout: float) -> Status:
    wanted = 1 + sum(kind.min_nodes for kind in read_cluster(file).workers)
    deadline, shown = time.monotonic() + timeout, 0
    while True:  # asking takes seconds itself, and the head's state API comes up some seconds after Ray
        status = status_of(data, file)
        if len(status.alive) != shown:
            shown = len(status.alive)
            say(f"{shown} of {wanted} nodes are up")
        if shown >= wanted:
            return status
        if status.failed:
            raise ClusterError(f"a machine of {data['cluster_name']} did not come up: {status.failed[0]}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"only {shown} of {wanted} nodes of {data['cluster_name']} came up within {timeout:.0f} s: "
                f"`trireme cluster status {file}` says what is known, and the head's "
                f"/tmp/ray/session_latest/logs/monitor.out the rest{status.problem and f' ({status.problem})'}"
            )


def down(path: str) -> list[str]:
    """Ends a cluster; nothing of it is left on its machines or on this one. Returns what could not be reached.

    Raises:
        ClusterError: the file is wrong, or the cloud's machines could not be given back.
    """
    data, file = read_ray_file(path)
    if ray_file.is_this_machine(data):
        return _down_here(data)
    if data["provider"]["type"] != "local":
        _run(["ray", "down", "--yes", file], ray_environment(), _log(data, "down"), 300.0)
        return []
    login, machines = login_of(data), ray_file.hosts(data)
    # The head first: its autoscaler would start the workers again. `ray down` stops Ray on the head only.
    first = run(login, machines[0], "ray stop --force", timeout=60)
    rest = run_on_all(login, machines[1:], "ray stop --force", timeout=60) if machines[1:] else []
    run(login, machines[0], "rm -f ~/ray_bootstrap_config.yaml ~/ray_bootstrap_key.pem", timeout=30)
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray")
    for suffix in ("state", "lock", "state.lock"):  # which `ray up` would believe the next time
        (folder / f"cluster-{data['cluster_name']}.{suffix}").unlink(missing_ok=True)
    return [result.problem for result in (first, *rest) if result.problem]


def _down_here(data: Mapping[str, Any]) -> list[str]:
    """Ends the Ray of this file and no other one of this machine, as `ray stop` would."""
    port = ray_file.gcs_port(data)
    command = f"--gcs_server_port={port}"
    heads = [" ".join(process.info["cmdline"]) for process in _processes() if command in process.info["cmdline"]]
    session = re.search(r"session_[\d_-]+", heads[0]) if heads else None
    if session is None:
        raise ClusterError(f"{data['cluster_name']} is not up: nothing listens on port {port} of this machine")

    def left() -> list[psutil.Process]:
        return [process for process in _processes() if session[0] in " ".join(process.info["cmdline"])]

    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in (found := left()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(found, timeout=10)
    return [f"processes {', '.join(str(process.pid) for process in left())} do not end"] if left() else []


def _processes() -> list[psutil.Process]:
    """Processes of this machine that have a command line: those that have ended have none."""
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]


# --- status -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """A cluster at one moment. Texts are for a person."""

    name: str
    reachable: bool
    problem: str = ""  # why it could not be asked
    alive: list[dict[str, Any]] = field(default_factory=list)  # ip, head, resources, type
    starting: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    dollars_per_hour: float | None = None
    unpriced: int = 0  # living nodes whose price is not known

    def lines(self) -> list[str]:
        if not self.reachable:
            return [f"{self.name} is not up: {self.problem}"]
        gpus = sum(node["resources"].get("GPU", 0) for node in self.alive)
        found = [f"{self.name}: {len(self.alive)} node{'s' if len(self.alive) != 1 else ''} up, {gpus:g} GPUs"]
        for node in self.alive:
            r = node["resources"]
            kind = "head" if node["head"] else node["type"] or "worker"
            found.append(f"  {node['ip']:<16} {kind:<14} {r.get('CPU', 0):g} CPUs, {r.get('GPU', 0):g} GPUs")
        found += [f"  starting  {text}" for text in self.starting]
        found += [f"  failed    {text}" for text in self.failed]
        if self.dollars_per_hour is not None:
            more = f", and {self.unpriced} nodes whose price is not known" if self.unpriced else ""
            found.append(f"  costs     ${self.dollars_per_hour:.2f} an hour{more}")
        else:
            found.append("  costs     not known: write price_per_hour under metadata.trireme.nodes of the file")
        return found


def status_of(data: Mapping[str, Any], file: str) -> Status:
    """Asks the head of a cluster; never raises for one that is down."""
    name = data["cluster_name"]
    command = ASK.format(dashboard=ray_file.dashboard_port(data), gcs=ray_file.gcs_port(data))
    try:
        result = run_on_head(data, file, command)
    except ClusterError as error:
        return Status(name, False, str(error))
    return read_status(name, result, read_cluster(file))


def run_on_head(data: Mapping[str, Any], file: str, command: str, *, stdin: str = "") -> Result:
    """Runs a shell command where the cluster's head is. Raises ClusterError where that cannot be found."""
    if not ray_file.is_this_machine(data):
        return run(login_of(data), head_host(data, file), command, stdin=stdin)
    options: dict[str, Any] = {"shell": True, "env": ray_environment(), "capture_output": True, "text": True}
    done = subprocess.run(command, input=stdin, timeout=60, **options)
    return Result("this machine", done.returncode, done.stdout, done.stderr)


def head_host(data: Mapping[str, Any], file: str) -> str:
    """Address of the head: the file's, or the cloud's answer.

    Raises:
        ClusterError: the cloud has no head of this cluster, or cannot be asked.
    """
    if data["provider"]["type"] == "local":
        return data["provider"]["head_ip"]
    command = ["ray", "get-head-ip", file]
    done = subprocess.run(command, env=ray_environment(), capture_output=True, text=True, timeout=120)
    found = [line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"[\d.]+|[0-9a-f:]{3,}", line.strip())]
    if done.returncode or not found:
        why = last_line(done.stderr or done.stdout)
        raise ClusterError(f"the head of {data['cluster_name']} cannot be found: {why}")
    return found[-1]


def read_status(name: str, result: Result, shape: ClusterShape) -> Status:
    """What the head's two commands printed, put together. Pure."""
    match = re.search(r"^\[\{.*\}\]$", result.out, re.MULTILINE)
    if result.problem or not match:
        return Status(name, False, result.problem or f"Ray does not answer on its head ({last_line(result.err)})")
    alive = [
        {
            "ip": row["node_ip"],
            "head": bool(row.get("is_head_node")),
            "resources": row.get("resources_total") or {},
            "type": (row.get("labels") or {}).get("ray.io/node-group", ""),
        }
        for row in json.loads(match[0])
        if row.get("state") == "ALIVE"
    ]
    report = autoscaler_report(result.out[match.end() :])
    prices = [shape.price_of(node["type"], head=node["head"]) for node in alive]
    known = [price for price in prices if price is not None]
    dollars, unpriced = sum(known) if known else None, len(prices) - len(known)
    return Status(name, True, "", alive, list(report.starting), list(report.failed), dollars, unpriced)
