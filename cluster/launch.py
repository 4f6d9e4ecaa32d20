"""Starts and ends the cluster of a file: Ray's own launcher, with a check of the machines before and after."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster import ClusterError, preflight, ray_file
from cluster.files import read_cluster, read_ray_file
from cluster.remote import is_open, login_of, run, run_on_all
from cluster.status import RAY, Status, ray_environment, status_of

Say = Callable[[str], None]


def up(path: str, say: Say, *, timeout: float = 600.0) -> Status:
    """Starts a cluster and waits until every machine that it is to have at least is there.

    Raises:
        ClusterError: the file is wrong, a machine is not fit, it is up already, or Ray's launcher fails; nothing was
            started in the first three cases.
    """
    data, file = read_ray_file(path)
    log, environment = _log(data, "up"), ray_environment()
    commands: list[str | list[str]] = [[RAY, "up", "--yes", "--no-config-cache", "--disable-usage-stats", file]]
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
        environment = os.environ | {"RAY_AUTH_MODE": "token"}
        done = subprocess.run([RAY, "get-auth-token", "--generate"], capture_output=True, text=True, env=environment)
        if not path.exists():
            raise ClusterError(f"Ray does not make a token in {path}: {done.stderr.strip()[-200:]}")
    path.chmod(0o600)


def _check_machines(data: Mapping[str, Any], say: Say) -> None:
    say("checking the machines")
    found = preflight.problems(preflight.probe(data))
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
        raise ClusterError(f"`{name}` failed ({log}): {last_lines(log)}")


def _log(data: Mapping[str, Any], what: str) -> Path:
    """An empty file for what Ray's launcher prints."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trireme" / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{data['cluster_name']}-{what}.log"
    log.write_text("")
    return log


def last_lines(log: Path, count: int = 3) -> str:
    """The end of a log in one line, without colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " / ".join(lines[-count:]) or "nothing was printed"


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


def down(path: str, say: Say, *, timeout: float = 300.0) -> list[str]:
    """Ends a cluster; nothing of it is left on its machines or on this one. Returns what could not be reached.

    Raises:
        ClusterError: the file is wrong, or the cloud's machines could not be given back.
    """
    data, file = read_ray_file(path)
    if ray_file.is_this_machine(data):
        return _down_here(data)
    if data["provider"]["type"] != "local":
        _run([RAY, "down", "--yes", file], ray_environment(), _log(data, "down"), timeout)
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
    heads = [c for _, c in _commands() if "gcs_server" in c and f"--gcs_server_port={port}" in c]
    session = re.search(r"session_[\d_-]+", heads[0]) if heads else None
    if session is None:
        raise ClusterError(f"{data['cluster_name']} is not up: nothing listens on port {port} of this machine")

    def left() -> list[int]:
        return [pid for pid, command in _commands() if session[0] in command and pid != os.getpid()]

    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 10
        while left() and time.monotonic() < deadline:
            time.sleep(0.1)
    return [f"processes {', '.join(map(str, left()))} do not end"] if left() else []


def _commands() -> Iterator[tuple[int, str]]:
    """Processes of this machine that have not ended, and their command lines."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
