"""Starts and ends the cluster of a file: Ray's own launcher, with a look at the machines before and after."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster import precheck, ray_file
from cluster.errors import ClusterError, refuse
from cluster.remote import answers, ask, ask_all, login_of
from cluster.source import read_documents
from cluster.status import Status, status_of

Say = Callable[[str], None]


def load(path: str) -> tuple[dict[str, Any], str]:
    """The data of a valid file for Ray's launcher, and the file's path.

    Raises:
        ClusterError: it is none, or something in it is wrong.
    """
    from cluster.shape import find
    from cluster.validate import check_is_for_ray_up, faults_of

    file = find(path)
    documents = read_documents(file)
    refuse(faults_of(documents, file))
    return check_is_for_ray_up(documents, file).data, file


def up(path: str, say: Say, *, timeout: float = 600.0) -> Status:
    """Starts a cluster and waits until every machine that it is to have at least is there.

    Raises:
        ClusterError: the file is wrong, a machine is not fit, it is up already, or Ray's launcher fails; nothing was
            started in the first three cases.
    """
    data, file = load(path)
    if any("auth_token" in str(mount) for mount in data.get("file_mounts") or {}):
        make_token()
    if ray_file.is_this_machine(data):
        return _up_here(data, file)
    if data["provider"]["type"] == "local":
        _check_machines(data, file, say)
    else:
        _check_not_up(data, file, say)
    say(f"starting {data['cluster_name']}")
    with _log(data, "up") as log:
        arguments = ["up", "--yes", "--no-config-cache", "--disable-usage-stats", file]
        if _ray(data, arguments, log, timeout):
            said = last_lines(log)
            raise ClusterError(f"Ray's launcher could not start {data['cluster_name']} ({log}): {said}")
    return _wait(data, file, say, timeout)


def make_token() -> Path:
    """The token that Ray's processes and users of one cluster share; made once, in ~/.ray/auth_token."""
    from ray._private.authentication.authentication_token_setup import generate_and_save_token

    path = Path("~/.ray/auth_token").expanduser()
    if not path.exists():
        with contextlib.redirect_stdout(None):
            generate_and_save_token()
    path.chmod(0o600)
    return path


def _check_machines(data: Mapping[str, Any], file: str, say: Say) -> None:
    machines = ray_file.hosts(data)
    say(f"looking at {len(machines)} machine{'s' if len(machines) > 1 else ''}")
    facts = precheck.look(data)
    if facts[0].ray_running:
        raise ClusterError(
            f"Ray is running on {facts[0].host} already: `trireme cluster status {file}` shows it, and "
            f"`trireme cluster down {file}` ends it"
        )
    found = precheck.judge(facts)
    found += [
        f"Ray is running on {host.host} already, for another cluster: end it there (`ray stop`)"
        for host in facts[1:]
        if host.ray_running
    ]
    if found:
        for sentence in found[1:]:
            say(f"also: {sentence}")
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


def _up_here(data: Mapping[str, Any], file: str) -> Status:
    if answers("127.0.0.1", _gcs_port(data)):
        raise ClusterError(f"Ray is running on this machine already: `trireme cluster down {file}` ends it")
    for command in data["head_start_ray_commands"]:
        # Into a file: Ray's daemons keep a pipe open, and reading it would never end.
        with _log(data, "up") as log, log.open("a") as out:
            code = subprocess.run(command, shell=True, env=_environment(), stdout=out, stderr=out, timeout=120)
        if code.returncode:
            raise ClusterError(f"Ray does not start on this machine ({log}): {last_lines(log)}")
    deadline = time.monotonic() + 60
    while True:  # its state API comes up some seconds after Ray
        status = status_of(data)
        if status.reachable:
            return status
        if time.monotonic() > deadline:
            raise ClusterError(f"Ray runs, but not its dashboard ({log}): {status.problem}")
        time.sleep(0.3)


def _gcs_port(data: Mapping[str, Any]) -> int:
    match = re.search(r"--port[= ](\d+)", " ".join(data.get("head_start_ray_commands") or []))
    return int(match[1]) if match else 6379


def _environment() -> dict[str, str]:
    """This environment with the Python of ours first, so that `ray` is its Ray."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def _ray(data: Mapping[str, Any], arguments: list[str], log: Path, timeout: float) -> int:
    environment = _environment()
    if data["provider"]["type"] == "local":
        # With autoscaler v2 the head counts against max_workers, and one worker never comes (Ray 2.60).
        environment |= {"RAY_UP_enable_autoscaler_v2": "0"}
    command = [str(Path(sys.executable).with_name("ray")), *arguments]
    with log.open("a") as file:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ClusterError(f"`ray {arguments[0]}` did not end within {timeout:.0f} s ({log})") from None


@contextlib.contextmanager
def _log(data: Mapping[str, Any], what: str) -> Iterator[Path]:
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trireme" / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{data['cluster_name']}-{what}.log"
    log.write_text("")
    yield log


def last_lines(log: Path, count: int = 3) -> str:
    """The end of a log in one line, without colours: what Ray's launcher said last."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " / ".join(lines[-count:]) or "it said nothing"


def _wait(data: Mapping[str, Any], file: str, say: Say, timeout: float) -> Status:
    from cluster.shape import read_cluster

    wanted = 1 + sum(t.min_nodes for t in read_cluster(file).workers)
    deadline, shown = time.monotonic() + timeout, 0
    while True:
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
                f"`trireme cluster status {file}` says what is known, and the head's /tmp/ray/session_latest/logs/"
                "monitor.out the rest"
            )
        time.sleep(0.3)  # asking takes about a second itself


def down(path: str, say: Say, *, timeout: float = 300.0) -> list[str]:
    """Ends a cluster; nothing of it is left on its machines or on this one. Returns what could not be reached.

    Raises:
        ClusterError: the file is wrong, or the cloud's machines could not be given back.
    """
    data, file = load(path)
    if ray_file.is_this_machine(data):
        return _down_here(data)
    if data["provider"]["type"] != "local":
        with _log(data, "down") as log:
            if _ray(data, ["down", "--yes", file], log, timeout):
                raise ClusterError(f"Ray's launcher could not end {data['cluster_name']} ({log}): {last_lines(log)}")
        return []
    login, machines = login_of(data), ray_file.hosts(data)
    # The head first: its autoscaler would start the workers again. `ray down` stops Ray on the head only.
    first = ask(login, machines[0], "ray stop --force", timeout=60)
    rest = ask_all(login, machines[1:], "ray stop --force", timeout=60) if machines[1:] else []
    ask(login, machines[0], "rm -f ~/ray_bootstrap_config.yaml ~/ray_bootstrap_key.pem", timeout=30)
    _forget(data)
    return [answer.problem for answer in (first, *rest) if answer.problem]


def _down_here(data: Mapping[str, Any]) -> list[str]:
    """Ends the Ray of this file and no other one of this machine, as `ray stop` would."""
    port = _gcs_port(data)
    session = _session_at(port)
    if session is None:
        raise ClusterError(f"{data['cluster_name']} is not up: nobody listens on port {port} of this machine")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _processes_of(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 10
        while _processes_of(session) and time.monotonic() < deadline:
            time.sleep(0.1)
    left = _processes_of(session)
    return [f"processes {', '.join(map(str, left))} do not end"] if left else []


def _session_at(port: int) -> str | None:
    """Name of the Ray session whose head has that port here, from its command line."""
    for _, command in _commands():
        if "gcs_server" in command and f"--gcs_server_port={port}" in command:
            match = re.search(r"session_[\d_-]+", command)
            return match[0] if match else None
    return None


def _processes_of(session: str) -> list[int]:
    return [pid for pid, command in _commands() if session in command and pid != os.getpid()]


def _commands() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _forget(data: Mapping[str, Any]) -> None:
    """What `ray up` noted on this machine of a cluster that is gone, and would believe the next time."""
    name = data["cluster_name"]
    from ray._common.utils import get_default_ray_temp_dir

    folder = Path(get_default_ray_temp_dir())
    for suffix in ("state", "lock", "state.lock"):
        (folder / f"cluster-{name}.{suffix}").unlink(missing_ok=True)
