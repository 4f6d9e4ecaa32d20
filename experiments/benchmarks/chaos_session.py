"""Where chaos.py runs: a Ray of its own on this machine, an MLflow database, and commands that are started there."""

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
HEALTH = {"RAY_health_check_initial_delay_ms": "2000", "RAY_health_check_period_ms": "1000"}
HEALTH |= {"RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3"}  # as cluster/onprem.yaml
DROPPED = ("MLFLOW_", "RAY_ADDRESS", "RANK", "WORLD_SIZE", "LOCAL_RANK")


class Session:
    """A Ray head without CPUs and two nodes of two, as `ray start` makes them; ends only what it started.

    storage: the folder of the runs and of MLflow's database.
    """

    def __init__(self, storage: Path) -> None:
        self.storage, self.database = storage, f"sqlite:///{storage}/mlflow.db"
        storage.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(DROPPED)}
        kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": self.database}
        self.env = kept | HEALTH | {"RAY_AUTH_MODE": "disabled"}
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.processes: list[subprocess.Popen[bytes]] = []
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        try:
            self._ray("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false")
            self.nodes = [self._node() for _ in range(2)]
            deadline = time.monotonic() + 300
            while not all(b"Ray runtime started" in log.read_bytes() for log in self.folder.glob("*/log")):
                if time.monotonic() > deadline:
                    raise TimeoutError("Ray did not start within 300 s")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def _ray(self, *flags: str) -> subprocess.Popen[bytes]:
        folder = self.folder / str(len(self.processes))  # nodes of one folder that start together share sockets
        folder.mkdir()
        program = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-gpus=0"]
        place = ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--object-store-memory=100000000"]
        self.processes.append(_started([*program, *place, *flags], folder / "log", self.env))
        return self.processes[-1]

    def _node(self) -> subprocess.Popen[bytes]:
        return self._ray(f"--address={self.address}", "--num-cpus=2")

    def mend(self) -> None:
        """A new node for each that has ended."""
        self.nodes = [self._node() if node.poll() is not None else node for node in self.nodes]

    def start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """A driver; what it says is appended to `log`."""
        return _started(command, log, self.env | {"RAY_ADDRESS": self.address})

    def raylet_of(self, worker: int) -> int | None:
        """The raylet of a worker's node, if that is one of ours; None for the head's."""
        with contextlib.suppress(psutil.Error, KeyError):
            raylet = int(psutil.Process(worker).environ()["RAY_RAYLET_PID"])
            living = [psutil.Process(node.pid) for node in self.nodes if node.poll() is None]
            return raylet if raylet in {child.pid for node in living for child in node.children(True)} else None
        return None

    def close(self) -> None:
        for process in self.processes:
            end_tree(process.pid)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _started(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)


def end_tree(pid: int) -> None:
    """Kills a process of ours and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
