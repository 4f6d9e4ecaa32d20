"""Starts a cluster from its file, shows its state and ends it.

Ray's own launcher starts machines, after a check of those that exist already. What is running,
starting or has failed comes from Ray's documented commands: `ray list nodes`, and `ray status -v`
for the autoscaler.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import psutil

from cluster import ClusterError, ray_file, ray_rules
from cluster.environment import below_home
from cluster.files import read_cluster, read_ray_file
from cluster.pending import autoscaler_report, ray_environment
from cluster.remote import (
    CommandResult,
    is_open,
    last_lines,
    login_of,
    probe,
    run_on_host,
    run_on_hosts,
    start_problems,
)
from cluster.shape import ClusterShape

STATUS_COMMANDS = (
    'test ! -f ~/.ray/auth_token || export RAY_AUTH_MODE="${{RAY_AUTH_MODE:-token}}"; '
    "ray list nodes --format=json --limit=10000 --timeout=10 "
    "--address=http://127.0.0.1:{dashboard} && "
    "ray status -v --address=127.0.0.1:{gcs}"
)
"""What the head is asked, with the token that it has."""
Say = Callable[[str], None]


def up(path: str, say: Say, *, timeout: float = 600.0) -> Status:
    """Starts a cluster and waits until it has all the machines that it must have.

    Args:
        path: The cluster's file, or the name of one of Trireme's own.
        say: Called with sentences about the progress.
        timeout: Seconds after which each step is given up.

    Returns:
        The state of the cluster.

    Raises:
        ClusterError: The file is wrong, a machine cannot run Ray, or the cluster is up already;
            nothing was started. Or Ray's launcher fails, or machines do not come up in time.
    """
    data, file = read_ray_file(path)
    for _, problem in ray_rules.missing_files(data):
        raise ClusterError(f"{file}: {problem}")
    log = _new_log(data, "up")
    environment = ray_environment()
    ray_up = ["ray", "up", "--yes", "--no-config-cache", "--disable-usage-stats", file]
    commands: list[str | list[str]] = [ray_up]
    if any("auth_token" in str(mount) for mount in data.get("file_mounts") or {}):
        make_token()
    if ray_file.is_this_machine(data):
        if is_open("127.0.0.1", ray_file.gcs_port(data)):
            remedy = f"`trireme cluster down {file}` ends it"
            raise ClusterError(f"Ray is running on this machine already: {remedy}")
        commands = data["head_start_ray_commands"]
    elif data["provider"]["type"] == "local":
        _check_machines(data, say)
        # With autoscaler v2 the head counts against max_workers, and one worker never comes
        # (Ray 2.60).
        environment["RAY_UP_enable_autoscaler_v2"] = "0"
    else:
        _check_not_up(data, file, say)
    say(f"starting {data['cluster_name']}")
    for command in commands:
        _run_logged(command, environment, log=log, timeout=timeout)
    return _wait_for_nodes(data, file, say=say, timeout=timeout)


def make_token() -> None:
    """Makes the token that the processes and users of a cluster share, unless there is one.

    It is in ~/.ray/auth_token.

    Raises:
        ClusterError: Ray does not make it.
    """
    path = Path("~/.ray/auth_token").expanduser()
    if not path.exists():
        process = subprocess.run(
            ["ray", "get-auth-token", "--generate"],
            env=ray_environment() | {"RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
        )
        if not path.exists():
            reason = process.stderr.strip()[-200:]
            raise ClusterError(f"Ray does not make a token in {path}: {reason}")
    path.chmod(0o600)


def _check_machines(data: Mapping[str, Any], say: Say) -> None:
    """Checks that Ray can be started on the machines of an on-prem cluster.

    Raises:
        ClusterError: It cannot; with the first reason. The others are passed to `say`.
    """
    say("checking the machines")
    problems = start_problems(probe(login_of(data), ray_file.hosts(data)))
    for problem in problems[1:]:
        say(f"also: {problem}")
    if problems:
        raise ClusterError(problems[0])


def _check_not_up(data: Mapping[str, Any], file: str, say: Say) -> None:
    """Checks that a cloud's cluster is not up.

    `ray up` would restart Ray on its head, and end everything that runs.

    Raises:
        ClusterError: The cloud has the cluster's head, and Ray answers there.
    """
    say(f"asking {data['provider']['type']} whether {data['cluster_name']} is there already")
    status = status_of(data, file)
    if status.reachable:
        raise ClusterError(
            f"{status.name} is up already, with {len(status.alive)} nodes: `trireme cluster status "
            f"{file}` shows it, and `trireme cluster down {file}` ends it"
        )


def _run_logged(
    command: str | list[str],
    environment: dict[str, str],
    *,
    log: Path,
    timeout: float,
) -> None:
    """Runs a command with its output in a log.

    The output cannot be a pipe: Ray's daemons keep it open, and reading it would never end.

    Raises:
        ClusterError: The command fails, or does not end in time.
    """
    is_shell_command = isinstance(command, str)
    name = command[:60] if isinstance(command, str) else f"ray {command[1]}"
    with log.open("a") as output:
        try:
            process = subprocess.run(
                command,
                shell=is_shell_command,
                env=environment,
                timeout=timeout,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        except subprocess.TimeoutExpired:
            problem = f"`{name}` did not end within {timeout:.0f} s"
            raise ClusterError(f"{problem} ({log})") from None
    if process.returncode:
        reason = last_lines(log.read_text(errors="replace"), 3)
        raise ClusterError(f"`{name}` failed ({log}): {reason}")


def _new_log(data: Mapping[str, Any], action: str) -> Path:
    """An empty file for what Ray's launcher prints.

    Args:
        data: The cluster's file.
        action: "up" or "down".
    """
    folder = below_home("XDG_CACHE_HOME", ".cache") / "trireme" / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{data['cluster_name']}-{action}.log"
    log.write_text("")
    return log


def _wait_for_nodes(data: Mapping[str, Any], file: str, *, say: Say, timeout: float) -> Status:
    """Waits until the cluster has all the nodes that it must have.

    Raises:
        ClusterError: A node has failed, or they do not all come up in time.
    """
    wanted = 1 + sum(node_type.min_nodes for node_type in read_cluster(file).workers)
    deadline = time.monotonic() + timeout
    announced = 0
    while True:  # without a pause, because asking takes seconds
        status = status_of(data, file)
        alive = len(status.alive)
        if alive != announced:
            announced = alive
            say(f"{alive} of {wanted} nodes are up")
        if alive >= wanted:
            return status
        if status.failed:
            problem = f"a machine of {data['cluster_name']} did not come up"
            raise ClusterError(f"{problem}: {status.failed[0]}")
        if time.monotonic() > deadline:
            reason = f" ({status.problem})" if status.problem else ""
            raise ClusterError(
                f"only {alive} of {wanted} nodes of {data['cluster_name']} came up within "
                f"{timeout:.0f} s: `trireme cluster status {file}` says what is known, and the "
                f"head's /tmp/ray/session_latest/logs/monitor.out the rest{reason}"
            )


def down(path: str) -> list[str]:
    """Ends a cluster, and leaves nothing of it on its machines or on this one.

    Args:
        path: The cluster's file, or the name of one of Trireme's own.

    Returns:
        A sentence for each machine that could not be reached, and for processes that do not end.

    Raises:
        ClusterError: The file is wrong, Ray does not run on this machine, or the cloud's machines
            could not be given back.
    """
    data, file = read_ray_file(path)
    if ray_file.is_this_machine(data):
        return _end_ray_of_this_machine(data)
    if data["provider"]["type"] != "local":
        command = ["ray", "down", "--yes", file]
        _run_logged(command, ray_environment(), log=_new_log(data, "down"), timeout=300.0)
        return []
    login = login_of(data)
    head, *workers = ray_file.hosts(data)
    # `ray down` stops Ray on the head only. The head comes first here too: its autoscaler would
    # start the workers again.
    results = [run_on_host(login, head, "ray stop --force", timeout=60)]
    if workers:
        results += run_on_hosts(login, workers, "ray stop --force", timeout=60)
    files_of_launcher = "~/ray_bootstrap_config.yaml ~/ray_bootstrap_key.pem"
    run_on_host(login, head, f"rm -f {files_of_launcher}", timeout=30)
    # The next `ray up` would take the cluster for running if these files were left.
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray")
    for suffix in ("state", "lock", "state.lock"):
        (folder / f"cluster-{data['cluster_name']}.{suffix}").unlink(missing_ok=True)
    return [result.problem for result in results if result.problem]


def _end_ray_of_this_machine(data: Mapping[str, Any]) -> list[str]:
    """Ends the Ray of a file on this machine, and no other one, which `ray stop` would end too.

    Returns:
        A sentence about the processes that do not end; empty if all have ended.

    Raises:
        ClusterError: It does not run.
    """
    port = ray_file.gcs_port(data)
    head_argument = f"--gcs_server_port={port}"
    session = None
    for process in _processes_with_commands():
        if head_argument in process.info["cmdline"]:
            session = re.search(r"session_[\d_-]+", " ".join(process.info["cmdline"]))
            break
    if session is None:
        problem = f"{data['cluster_name']} is not up"
        raise ClusterError(f"{problem}: nothing listens on port {port} of this machine")
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        processes = _processes_of_session(session[0])
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
        psutil.wait_procs(processes, timeout=10)
    remaining = _processes_of_session(session[0])
    if not remaining:
        return []
    pids = ", ".join(str(process.pid) for process in remaining)
    return [f"processes {pids} do not end"]


def _processes_of_session(session: str) -> list[psutil.Process]:
    """The processes of one Ray; each has its session's folder among its arguments."""
    processes = _processes_with_commands()
    return [process for process in processes if session in " ".join(process.info["cmdline"])]


def _processes_with_commands() -> list[psutil.Process]:
    """The processes of this machine, except those that have ended: they have no command line."""
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]


# --- status ---------------------------------------------------------------------------------------


class LivingNode(TypedDict):
    """A node of a `Status`.

    `resources` are those of `ray list nodes`; `type` is the name of its node type, or "".
    """

    ip: str
    head: bool
    resources: dict[str, Any]
    type: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a cluster at one moment.

    Attributes:
        name: The cluster's name.
        reachable: Whether its head answers.
        problem: Why it does not.
        alive: The living nodes.
        starting: The autoscaler's line for each node that is starting.
        failed: The autoscaler's line for each node that has failed.
        dollars_per_hour: US dollars for the living nodes; None if no price is known.
        unpriced: The number of living nodes whose price is not known.
    """

    name: str
    reachable: bool
    problem: str = ""
    alive: list[LivingNode] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    dollars_per_hour: float | None = None
    unpriced: int = 0

    def lines(self) -> list[str]:
        """The state for a person."""
        if not self.reachable:
            return [f"{self.name} is not up: {self.problem}"]
        gpus = sum(node["resources"].get("GPU", 0) for node in self.alive)
        plural = "s" if len(self.alive) != 1 else ""
        lines = [f"{self.name}: {len(self.alive)} node{plural} up, {gpus:g} GPUs"]
        for node in self.alive:
            kind = "head" if node["head"] else node["type"] or "worker"
            node_cpus = node["resources"].get("CPU", 0)
            node_gpus = node["resources"].get("GPU", 0)
            lines.append(f"  {node['ip']:<16} {kind:<14} {node_cpus:g} CPUs, {node_gpus:g} GPUs")
        lines += [f"  starting  {text}" for text in self.starting]
        lines += [f"  failed    {text}" for text in self.failed]
        lines.append(f"  costs     {self._cost()}")
        return lines

    def _cost(self) -> str:
        if self.dollars_per_hour is None:
            return "not known: write price_per_hour under metadata.trireme.nodes of the file"
        cost = f"${self.dollars_per_hour:.2f} an hour"
        if self.unpriced:
            cost += f", and {self.unpriced} nodes whose price is not known"
        return cost


def status_of(data: Mapping[str, Any], file: str) -> Status:
    """Asks the head of a cluster for its state; does not raise for one that is down.

    Args:
        data: The cluster's file.
        file: Its path.
    """
    name = data["cluster_name"]
    command = STATUS_COMMANDS.format(
        dashboard=ray_file.dashboard_port(data),
        gcs=ray_file.gcs_port(data),
    )
    try:
        result = run_on_head(data, file, command)
    except ClusterError as error:
        return Status(name=name, reachable=False, problem=str(error))
    return read_status(name, result, read_cluster(file))


def run_on_head(
    data: Mapping[str, Any],
    file: str,
    command: str,
    *,
    stdin: str = "",
) -> CommandResult:
    """Runs a shell command on the cluster's head.

    Args:
        data: The cluster's file.
        file: Its path.
        command: The command.
        stdin: The command's standard input.

    Raises:
        ClusterError: The head cannot be found.
    """
    if not ray_file.is_this_machine(data):
        return run_on_host(login_of(data), head_host(data, file), command, stdin=stdin)
    process = subprocess.run(
        command,
        shell=True,
        env=ray_environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return CommandResult(
        host="this machine",
        exit_code=process.returncode,
        stdout=process.stdout,
        stderr=process.stderr,
    )


def head_host(data: Mapping[str, Any], file: str) -> str:
    """The address of the head: that of the file, or the cloud's answer.

    Args:
        data: The cluster's file.
        file: Its path.

    Raises:
        ClusterError: The cloud has no head of this cluster, or cannot be asked.
    """
    if data["provider"]["type"] == "local":
        return data["provider"]["head_ip"]
    process = subprocess.run(
        ["ray", "get-head-ip", file],
        env=ray_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = map(str.strip, process.stdout.splitlines())
    addresses = [line for line in lines if re.fullmatch(r"[\d.]+|[0-9a-f:]{3,}", line)]
    if process.returncode or not addresses:
        reason = last_lines(process.stderr or process.stdout)
        raise ClusterError(f"the head of {data['cluster_name']} cannot be found: {reason}")
    return addresses[-1]


def read_status(name: str, result: CommandResult, shape: ClusterShape) -> Status:
    """The state in what the head's two commands have printed. Pure.

    Args:
        name: The cluster's name.
        result: What they have printed.
        shape: The cluster with its prices.
    """
    nodes_json = re.search(r"^\[\{.*\}\]$", result.stdout, re.MULTILINE)
    if result.problem or not nodes_json:
        reason = last_lines(result.stderr)
        problem = result.problem or f"Ray does not answer on its head ({reason})"
        return Status(name=name, reachable=False, problem=problem)
    alive = _living_nodes(json.loads(nodes_json[0]))
    autoscaler = autoscaler_report(result.stdout[nodes_json.end() :])
    all_prices = [shape.price_of(node["type"], head=node["head"]) for node in alive]
    prices = [price for price in all_prices if price is not None]
    return Status(
        name=name,
        reachable=True,
        alive=alive,
        starting=list(autoscaler.starting),
        failed=list(autoscaler.failed),
        dollars_per_hour=sum(prices) if prices else None,
        unpriced=len(all_prices) - len(prices),
    )


def _living_nodes(rows: Sequence[Mapping[str, Any]]) -> list[LivingNode]:
    """The living nodes among the rows of `ray list nodes --format=json`."""
    nodes = []
    for row in rows:
        if row.get("state") != "ALIVE":
            continue
        node = LivingNode(
            ip=row["node_ip"],
            head=bool(row.get("is_head_node")),
            resources=row.get("resources_total") or {},
            type=(row.get("labels") or {}).get("ray.io/node-group", ""),
        )
        nodes.append(node)
    return nodes
