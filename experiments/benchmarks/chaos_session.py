"""Where chaos.py runs: a Ray of its own on this machine, an MLflow database, and drivers."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from cluster.remote import free_port

ROOT = Path(__file__).parents[2]
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""How soon Ray notices a dead node, as in cluster/onprem.yaml."""
DROPPED = ("MLFLOW_", "RAY_ADDRESS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Beginnings of variables of the environment that drivers do not get."""
NODES = 2
START_SECONDS = 300


class Session:
    """A Ray head without CPUs and two nodes of two, as `ray start` makes them.

    It ends only what it has started.

    Args:
        storage: The folder of the runs and of MLflow's database.

    Attributes:
        database: The URI of MLflow's database.

    Raises:
        TimeoutError: Ray does not start.
    """

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.database = f"sqlite:///{storage}/mlflow.db"
        storage.mkdir(parents=True, exist_ok=True)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(DROPPED)
        }
        self.env = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "MLFLOW_TRACKING_URI": self.database,
            "RAY_AUTH_MODE": "disabled",
            **HEALTH,
        }
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.processes: list[subprocess.Popen[bytes]] = []
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        try:
            self._start_ray("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false")
            self.nodes = [self._start_node() for _ in range(NODES)]
            self._wait_for_ray()
        except BaseException:
            self.close()
            raise

    def _wait_for_ray(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._has_started():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ray did not start within {START_SECONDS} s")
            time.sleep(0.1)

    def _has_started(self) -> bool:
        logs = self.folder.glob("*/log")
        return all(b"Ray runtime started" in log.read_bytes() for log in logs)

    def _start_ray(self, *flags: str) -> subprocess.Popen[bytes]:
        # Nodes with the same folder that start together would share sockets.
        folder = self.folder / str(len(self.processes))
        folder.mkdir()
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--num-gpus=0",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={folder}",
            "--object-store-memory=100000000",
            *flags,
        ]
        process = _start_process(command, folder / "log", self.env)
        self.processes.append(process)
        return process

    def _start_node(self) -> subprocess.Popen[bytes]:
        return self._start_ray(f"--address={self.address}", "--num-cpus=2")

    def mend(self) -> None:
        """Starts a new node for each that has ended."""
        for number, node in enumerate(self.nodes):
            if node.poll() is not None:
                self.nodes[number] = self._start_node()

    def start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a driver.

        Args:
            command: Its command line.
            log: What it says is appended to this file.
        """
        return _start_process(command, log, self.env | {"RAY_ADDRESS": self.address})

    def raylet_of(self, worker: int) -> int | None:
        """The process id of the raylet of a worker's node.

        Args:
            worker: The worker's process id.

        Returns:
            None if the worker has ended, or its node is the head or not one of this session.
        """
        with contextlib.suppress(psutil.Error, KeyError):
            raylet = int(psutil.Process(worker).environ()["RAY_RAYLET_PID"])
            for node in self.nodes:
                if node.poll() is None:
                    children = psutil.Process(node.pid).children(recursive=True)
                    if raylet in [child.pid for child in children]:
                        return raylet
        return None

    def close(self) -> None:
        """Ends this session's Ray, and removes its files."""
        for process in self.processes:
            end_tree(process.pid)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _start_process(
    command: list[str],
    log: Path,
    env: dict[str, str],
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def end_tree(pid: int) -> None:
    """Kills a process of ours and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
