"""All that is ours for a session: a Ray head and two nodes, an MLflow server, and warm drivers.

Nothing is ended here that was not started here. A driver is `trireme train …` in a process forked from one that has
imported what takes seconds (multiprocessing's fork server): the same code from the command line on, with its own pid,
signals and exit code.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[3]
HEALTH = {"RAY_health_check_initial_delay_ms": "2000", "RAY_health_check_period_ms": "1000"}
HEALTH |= {"RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3"}  # as cluster/onprem.yaml
WARM = ["app.cli", "app.train", "app.run.driver", "app.run.lifecycle", "app.run.prepare", "app.launchers.pipeline"]
WARM += ["app.launchers.ray_train", "app.launchers.room", "app.doctor.job", "experiments.benchmarks.chaos.task"]


def environment(**more: str) -> dict[str, str]:
    """This environment without what would send a run's metrics, or its Ray, elsewhere."""
    drop = ("MLFLOW_", "RAY_ADDRESS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"} | more


class Session:
    """folder: of its runs. ray: the address of a Ray that is there, whose nodes are not to be killed; "": our own.
    server: whether an MLflow server is started; else runs use a database file."""

    def __init__(self, folder: Path, *, ray: str = "", server: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []  # of each `ray start`
        self.own_ray = not ray
        self.address = ray or f"127.0.0.1:{free_port()}"
        self.server: subprocess.Popen[bytes] | None = None
        self.server_port = free_port()
        self.database = folder / "mlflow.db"
        self.head: subprocess.Popen[bytes] | None = None
        try:
            self._begin(server)
        except BaseException:
            self.close()
            raise
        self.context = self._fork_server()

    def _begin(self, server: bool) -> None:
        if server:
            self.start_server()
        if self.own_ray:
            self.head = self._ray("--head", f"--port={self.address.split(':')[1]}", "--num-cpus=0", *_HEAD)
            until(lambda: answers(int(self.address.split(":")[1])), 60)
            for _ in range(2):
                self.start_node()
            until(lambda: all(b"Ray runtime started" in log.read_bytes() for log in self.logs), 90, pause=0.2)

    def _fork_server(self) -> Any:
        tracking = self.uri
        os.environ.update(environment(RAY_ADDRESS=self.address, MLFLOW_TRACKING_URI=tracking))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(WARM)
        return context

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}" if self.server else f"sqlite:///{self.database}"

    def close(self) -> None:
        """Ends all that it started."""
        for process in [*self.nodes, *filter(None, [self.head, self.server])]:
            end_tree(process.pid)
            process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    # --- drivers ------------------------------------------------------------------------------------------------

    def train(self, arguments: Sequence[str], log: Path) -> Any:
        """A driver: `trireme train ARGUMENTS`, what it says appended to `log`."""
        process = self.context.Process(target=_drive, args=(["train", *arguments], str(log)))
        process.start()
        return process

    # --- Ray ----------------------------------------------------------------------------------------------------

    def _ray(self, *flags: str) -> subprocess.Popen[bytes]:
        program = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-gpus=0"]
        own = self.temporary / str(len(self.logs))  # nodes of one folder that start together take the same sockets
        self.logs.append(self.temporary / f"ray-{len(self.logs)}.log")
        log = self.logs[-1].open("ab")
        place = ["--node-ip-address=127.0.0.1", f"--temp-dir={own}", "--object-store-memory=100000000"]
        return subprocess.Popen(
            [*program, *place, *flags],
            env=environment(**HEALTH),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def start_node(self) -> None:
        """Another node of two CPUs; it comes within seconds."""
        self.nodes.append(self._ray(f"--address={self.address}", "--num-cpus=2"))

    def raylet_of(self, worker: int) -> psutil.Process | None:
        """The raylet of a worker's node, if that is one of ours; None for the head's."""
        with contextlib.suppress(psutil.Error, KeyError):
            raylet = int(psutil.Process(worker).environ()["RAY_RAYLET_PID"])  # its parent is a fork server
            ours = {child.pid for node in self.nodes if node.poll() is None for child in _children(node.pid)}
            return psutil.Process(raylet) if raylet in ours else None
        return None

    def mend(self) -> None:
        """A new node for each that has ended, and the server if it has."""
        for node in [node for node in self.nodes if node.poll() is not None]:
            self.nodes.remove(node)
            self.start_node()
        if self.server and self.server.poll() is not None:
            self.start_server()

    # --- MLflow -------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        program = [str(Path(sys.executable).with_name("mlflow")), "server", "--workers=1", "--host=127.0.0.1"]
        place = [f"--backend-store-uri=sqlite:///{self.database}", f"--artifacts-destination={self.folder}/artifacts"]
        with (self.temporary / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                [*program, *place, f"--port={self.server_port}"],
                env=environment(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill_server(self) -> None:
        if self.server:
            end_tree(self.server.pid)
            self.server.wait()

    def server_answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
            return bool(answer.status == 200)
        return False

    def curve(self, name: str, metric: str = "train/loss") -> tuple[list[str], list[tuple[int, float]]]:
        """The statuses of all MLflow runs of that name, and the points of their metric, by step."""
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=20)) as database:
            runs = database.execute("SELECT run_uuid, status FROM runs WHERE name = ?", (name,)).fetchall()
            marks = ",".join("?" * len(runs))
            points = database.execute(
                f"SELECT step, value FROM metrics WHERE key = ? AND run_uuid IN ({marks}) ORDER BY step",
                (metric, *(run for run, _ in runs)),
            ).fetchall()
        return [status for _, status in runs], points


_HEAD = ["--include-dashboard=false"]


def _drive(arguments: list[str], log: str) -> None:
    """In the driver's process."""
    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.chdir(ROOT)
    sys.argv = ["trireme", *arguments]
    from app.cli import main

    main()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def until(condition: Callable[[], Any], timeout: float, pause: float = 0.02) -> Any:
    """What the condition gives once it is true. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(pause)
    return value


def end_tree(pid: int) -> None:
    """Kills a process of ours and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*_children(pid), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def writer_of(folder: Path) -> psutil.Process | None:
    """The process that delivers a run's metrics."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "app.tracking.writer" in line and str(folder / "tracking") in line:
            return process
    return None


def write_line(path: Path, value: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")
