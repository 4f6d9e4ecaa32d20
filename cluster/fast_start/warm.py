"""The folder's face to `cluster/connect.py`: where a command's workers, its Ray and the command itself come from."""

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster import ray_internals
from cluster.fast_start import client

TESTED = "linux, Python 3.11, Ray 2.60"
STUB = str(Path(client.__file__).resolve())
PYTHON_FIELDS = ("pip", "uv", "conda", "py_executable", "container", "image_uri", "nsight", "rocprof_sys")
"""Fields of a job's runtime environment that decide what its workers are started with."""
ABOUT_SECONDS, END_SECONDS = 5.0, 15.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def why_not() -> str:
    """Why nothing here is used on this machine; "" where it is."""
    if os.environ.get("TRIREME_FAST_START") == "0":
        return "TRIREME_FAST_START is 0"
    from importlib.metadata import version

    ray, python = version("ray").rpartition(".")[0], ".".join(map(str, sys.version_info[:2]))
    here = f"{sys.platform}, Python {python}, Ray {ray}"
    return "" if here == TESTED else f"it was tested with {TESTED}, and this is {here}"


class PrivateRay:
    """The fork server and the lean head of this command's own Ray; both end with this process, if not before."""

    path = ""
    head: Any = None

    def warm_up(self, preload: str) -> None:
        """Has the server import, once."""
        if self.path:
            return
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as ray.init does, but before the server reads it
        with contextlib.suppress(OSError):
            self.path = client.ensure(preload, os.getpid(), os.environ)
            os.environ[client.SOCKET] = self.path

    def start(self, object_store_bytes: int, folder: str) -> str | None:
        """Starts Ray, its files in `folder`; its address, None where that is for `ray.init` to do."""
        with contextlib.suppress(ImportError, AttributeError):
            self.head = ray_internals.start_lean_head(object_store_bytes, STUB, folder)
            return str(self.head.gcs_address)
        return None

    def guard(self) -> None:
        """Once Ray answers: has the server end Ray's agents when this process is killed. They would wait a minute."""
        import psutil

        with contextlib.suppress(OSError, psutil.Error):
            raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
            agents = [child.pid for raylet in raylets for child in raylet.children()]
            client.ask(self.path, {"adopt": agents}).close()

    def end_head(self) -> None:
        """Ends Ray, of which ray.shutdown has been called, and keeps the server."""
        if self.head:
            self.head.kill_all_processes(check_alive=False, allow_graceful=False)  # they block SIGTERM
        self.head = None

    def end(self) -> None:
        """After ray.shutdown."""
        self.end_head()
        if self.path:
            with contextlib.suppress(OSError):
                client.ask(self.path, {"end": True}).close()  # its forks too: an agent may outlive its raylet
            Path(self.path).unlink(missing_ok=True)  # upon which one that was still importing ends
            os.environ.pop(client.SOCKET, None)
        self.path = ""


PRIVATE = PrivateRay()


def warm_up_node(address: str, preload: str) -> str:
    """The socket of this node's fork server, which may still be importing; "" where this machine is not a node of the
    cluster at `address`, or what its raylet starts would be in another control group than what this process does."""
    with contextlib.suppress(OSError):
        raylet = raylet_of(address)
        if raylet and Path("/proc/self/cgroup").read_text() == Path(f"/proc/{raylet}/cgroup").read_text():
            return client.ensure(preload, raylet, environment(raylet))
    return ""


def kept() -> list[dict[str, Any]]:
    """This user's fork servers on this machine that have imported what they serve: pid, processes (forks of it that
    live), age (seconds) and memory (bytes that only it has)."""
    import psutil

    found = []
    for path in Path(client.folder()).glob("*.socket"):
        with contextlib.suppress(OSError, psutil.Error), client.ask(str(path), {"about": True}) as connection:
            if about := client.answer(connection, ABOUT_SECONDS):
                memory = psutil.Process(about["pid"]).memory_full_info().uss
                found.append({**about, "age": time.time() - about.pop("began"), "memory": memory, "socket": str(path)})
    return sorted(found, key=lambda each: each["pid"])


def end(server: dict[str, Any]) -> bool:
    """Ends one of `kept`, and workers that were forked from it; whether it is gone."""
    import psutil

    try:
        process = psutil.Process(server["pid"])
        client.ask(server["socket"], {"end": True}).close()
        process.wait(END_SECONDS)
    except (OSError, psutil.Error):
        return not os.path.exists(f"/proc/{server['pid']}")
    return True


def raylet_of(address: str) -> int | None:
    """This user's raylet on this machine of the cluster at an address; by its port, since a host has several names."""
    port = address.rpartition(":")[2]
    for folder in Path("/proc").glob("[0-9]*") if port.isdigit() else ():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            known = next((word for word in words if word.startswith("--gcs-address=")), "")
            if words[0].endswith("/raylet") and known.endswith(f":{port}") and folder.stat().st_uid == os.getuid():
                return int(folder.name)
    return None


def environment(raylet: int) -> dict[str, str]:
    """This process' environment with the authentication of the cluster that a raylet belongs to."""
    pairs = [pair.split("=", 1) for pair in Path(f"/proc/{raylet}/environ").read_text().split("\0") if "=" in pair]
    authentication = {name: value for name, value in pairs if name.startswith("RAY_AUTH_")}
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")} | authentication


def runtime_env(preload: str) -> dict[str, Any]:
    """What a job asks of its workers' processes: to be started by the stub. Empty where the job has a Python of its own
    (or another start of it) than the cluster's."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
    if any(job.get(name) for name in PYTHON_FIELDS) or shlex.quote(STUB) != STUB:
        return {}
    # Ray has a shell read this on the node. What `python` is there, only its raylet knows.
    python = "tr '\\0' '\\n' < /proc/$RAY_RAYLET_PID/cmdline | sed -n 's/^--python_worker_command=\\([^ ]*\\) .*/\\1/p'"
    stub = f"$p {STUB} {preload}"
    return {"py_executable": f'$(p=$({python}); p=${{p:-python3}}; test -f {STUB} && echo "{stub}" || echo "$p")'}


def run_forked(words: Sequence[str], address: str, preload: str) -> int | None:
    """Runs `trireme WORDS` in a process forked from this node's server, with this process' streams, folder, environment
    and limits; its exit code, None where there is no server. The first command on a node starts the server, rather
    than import the same things beside it. Signals are handed on; when this process is killed, the fork is too."""
    path = "" if preload in sys.modules else warm_up_node(address, preload)  # this may be such a fork
    if not path:
        return None
    request = {"argv": ["-m", "app", *words], "env": dict(os.environ), "wait": True, **client.inherited()}
    try:
        connection = client.ask(path, request)
    except OSError:
        return None
    with connection:
        forked = client.answer(connection, client.ANSWER_SECONDS)
        if forked is None:  # the server's code is not what is on disk any more, or it is stuck
            return None

        def hand_on(number: int, frame: Any) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(forked["pid"], number)

        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, hand_on)
        ended = client.answer(connection)
    return int(ended["exit"]) if ended else 128 + signal.SIGKILL
