"""Processes that are warm when they are asked for: where a command's Ray gets its workers from.

A Ray that is this command's own gets a fork server that is started with the command, and imports while Ray starts and
the driver reads its data. On a cluster the first command on a node, or its first worker, starts one for the node
(`client.py`); later workers and commands are forked from it, for as long as cluster.keep_warm_seconds
say.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.fast_start import client

PRELOAD = "app.launchers.preload"
"""The module that a fork server imports; by name, since this package knows nothing of the application."""
STUB = str(Path(client.__file__).resolve())
OWN_PYTHON = ("pip", "uv", "conda", "py_executable", "container", "image_uri", "nsight", "rocprof_sys")
"""Parts of a job's runtime environment that decide what its workers are started with."""
WITHOUT = ("cluster.keep_warm_seconds=0", "launcher=local", "launcher=torchrun")
"""Beginnings of words that say that a command needs no fork."""
SAYS = re.compile(r"keep_warm_seconds\s*[:=]\s*(\d+\.?\d*)")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Own:
    """The fork server of this command's own Ray; it ends with this process, if not before."""

    def __init__(self) -> None:
        self.pid = 0
        self.path = ""

    def begin(self) -> None:
        """Starts it, once; where that is not possible Ray's workers are what they would be without."""
        if self.pid or not _possible():
            return
        with contextlib.suppress(OSError), client.locked():
            self.path = os.path.join(client.folder(), f"own-{os.getpid()}.socket")
            self.pid = client.start(self.path, PRELOAD, os.getpid(), 1e9, environment())
            os.environ[client.SOCKET] = self.path

    def end(self) -> None:
        """Ends it; its forks are Ray's to end."""
        if not self.pid:
            return
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self.pid, self.path = 0, ""
        os.environ.pop(client.SOCKET, None)


OWN = Own()


def begin(seconds: float) -> None:
    """Has a fork server import while this command does what comes before its workers: the node's where this machine is
    one of a cluster that the command will use, else one of its own.

    seconds: cluster.keep_warm_seconds; 0 for no forks.
    """
    if seconds <= 0 or not _possible():
        return
    address = _expected()
    if not address:
        OWN.begin()
    elif (raylet := _raylet_of(address)) and _stands_like(raylet):
        with contextlib.suppress(OSError):
            client.ensure(PRELOAD, raylet, seconds, environment())


def in_a_fork(words: Sequence[str], seconds: float) -> int | None:
    """Runs `trireme WORDS` in a process forked from this node's server, where a cluster will be used, with this
    process' streams, folder, environment and limits; its exit code, None where there is no server and none to start.

    The first command on a node starts the server, rather than import the same things beside it. Signals are handed on;
    when this process is killed, the other is too.

    seconds: cluster.keep_warm_seconds where neither a word nor a file says another.
    """
    if not _possible() or not (address := _expected()) or "app.train" in sys.modules or "RANK" in os.environ:
        return None
    if any(word.startswith(WITHOUT) for word in words):
        return None
    try:
        request = {"argv": ["-m", "app", *words], "env": dict(os.environ), "wait": True, **client.bearings()}
        path = client.found(PRELOAD, environment()) or _started(address, words, seconds)
        connection = client.ask(path, request) if path else None
    except OSError:
        return None
    if connection is None:
        return None
    with connection:
        return _wait(connection)


def _started(address: str, words: Sequence[str], seconds: float) -> str | None:
    """The socket of a server that is started for this node, where what `words` ask for will be forked."""
    files = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    if not files or not all(os.path.isfile(file) for file in files):
        return None  # what is wrong with that is said sooner without
    said = "\n".join([Path(file).read_text(errors="replace") for file in files] + [*words])
    for found in SAYS.finditer(said):
        seconds = float(found[1])
    raylet = _raylet_of(address)
    if seconds <= 0 or raylet is None or not _stands_like(raylet):
        return None
    return client.ensure(PRELOAD, raylet, seconds, environment())


def _wait(connection: socket.socket) -> int | None:
    connection.settimeout(client.ANSWER_SECONDS)
    said = client.answer(connection)
    if said is None:  # its code is not what is on disk any more, or it is stuck
        return None
    connection.settimeout(None)
    pid = said["pid"]
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: _hand_on(pid, number))
    said = client.answer(connection)
    if said is None:
        return _outlive(pid)
    code = said["exit"]
    if code < 0:  # as if the signal had met this process
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return int(code)


def _outlive(pid: int) -> int:
    """Waits for a fork whose server has died: it goes on by itself, but its exit code is lost."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.2)
    print(f"trireme: what process {pid} ended with is not known: run the same command again to see", file=sys.stderr)
    return 1


def _hand_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def environment() -> dict[str, str]:
    """This process' environment with what every worker is to import from: the current folder first."""
    return dict(os.environ) | {"PYTHONPATH": python_path()}


def python_path() -> str:
    parts = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, parts)))


def runtime_env(seconds: float) -> dict[str, Any]:
    """What a job on a cluster asks of its workers' processes; seconds: as in `begin`."""
    if seconds <= 0 or not _possible() or _has_own_python() or shlex.quote(STUB) != STUB:
        return {}
    # Ray has a shell read this on the node. What `python` is there, only its raylet knows.
    python = "tr '\\0' '\\n' < /proc/$RAY_RAYLET_PID/cmdline | sed -n 's/^--python_worker_command=\\([^ ]*\\) .*/\\1/p'"
    flags = f"--preload={PRELOAD} --seconds={seconds:g}"
    found = f'p=$({python}); p=${{p:-python3}}; test -f {STUB} && echo "$p {STUB} {flags}" || echo "$p"'
    return {"py_executable": f"$({found})"}


def _has_own_python() -> bool:
    """Whether this process is a Ray job that asks for another Python, or another start of it, than the cluster's."""
    try:
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
    except ValueError:
        return False
    return any(job.get(name) for name in OWN_PYTHON)


def _possible() -> bool:
    """Forks, Unix sockets and /proc as they are on Linux."""
    if sys.platform != "linux" or "TRIREME_NO_FORKS" in os.environ:
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _stands_like(raylet: int) -> bool:
    """Whether what this process starts would have the limits, cores and control group of what the raylet starts."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    with contextlib.suppress(OSError):
        return (
            all(resource.getrlimit(limit)[1] == resource.prlimit(raylet, limit)[1] for limit in limits)
            and os.sched_getaffinity(0) == os.sched_getaffinity(raylet)
            and os.getpriority(os.PRIO_PROCESS, 0) == os.getpriority(os.PRIO_PROCESS, raylet)
            and Path("/proc/self/cgroup").read_text() == Path(f"/proc/{raylet}/cgroup").read_text()
        )
    return False


def _expected() -> str:
    """The address of the cluster that `cluster.connect` will find, as far as can be told without asking anyone."""
    if (address := os.environ.get("RAY_ADDRESS", "")) not in ("", "auto"):
        return address
    temporary = os.environ.get("RAY_TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return Path(temporary, "ray", "ray_current_cluster").read_text().strip()
    return ""


def _raylet_of(address: str) -> int | None:
    """The raylet on this machine of the cluster at an address, if there is one and it is this user's."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if words[0].endswith("/raylet") and folder.stat().st_uid == os.getuid():
                known = [word.partition("=")[2] for word in words if word.startswith("--gcs-address=")]
                if any(_same_place(address, other) for other in known):
                    return int(folder.name)
    return None


def _same_place(one: str, other: str) -> bool:
    """Whether two addresses, host:port, are one: Ray gives its raylets another name of the machine than users do."""
    (host, _, port), (twin, _, its_port) = one.rpartition(":"), other.rpartition(":")
    return port == its_port and (host == twin or (_is_here(host) and _is_here(twin)))


def _is_here(host: str) -> bool:
    """Whether a host is this machine: whether its first address can be bound."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
            return True
    return False
