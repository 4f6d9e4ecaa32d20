"""All that is there for a campaign: a Ray head without CPUs and two nodes of two, an MLflow database, drivers.

Nothing is ended here that was not started here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from experiments.benchmarks.harness import free_port
from experiments.benchmarks.start import end_tree, ray_start, wait_until

ROOT = Path(__file__).parents[3]
HEALTH = {"RAY_health_check_initial_delay_ms": "2000", "RAY_health_check_period_ms": "1000"}
HEALTH |= {"RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3"}  # as cluster/onprem.yaml


def environment(**more: str) -> dict[str, str]:
    """This environment without what would send a run's metrics, or its Ray, elsewhere."""
    drop = ("MLFLOW_", "RAY_ADDRESS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"} | more


class Cluster:
    """folder: of the runs and the MLflow database."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.database = folder, folder / "mlflow.db"
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            self._ray("--head", f"--port={self.address.split(':')[1]}", "--num-cpus=0", "--include-dashboard=false")
            self.nodes = [self._node(), self._node()]
            logs = list(self.temporary.glob("*/log"))
            wait_until(lambda: all(b"Ray runtime started" in log.read_bytes() for log in logs), 90, pause=0.2)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all that it started."""
        for process in self.processes:
            end_tree(process.pid)
            process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def mend(self) -> None:
        """A new node for each that has ended."""
        self.nodes = [self._node() if node.poll() is not None else node for node in self.nodes]

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """A driver; what it says is appended to `log`."""
        env = environment(RAY_ADDRESS=self.address, MLFLOW_TRACKING_URI=f"sqlite:///{self.database}")
        with log.open("ab") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
        self.processes.append(process)
        return process

    def raylet_of(self, worker: int) -> int | None:
        """The raylet of a worker's node, if that is one of ours; None for the head's."""
        with contextlib.suppress(psutil.Error, KeyError):
            raylet = int(psutil.Process(worker).environ()["RAY_RAYLET_PID"])  # its parent may be a fork server
            living = [psutil.Process(node.pid) for node in self.nodes if node.poll() is None]
            return raylet if raylet in {child.pid for node in living for child in node.children(True)} else None
        return None

    def curve(self, name: str, metric: str = "train/loss") -> tuple[list[str], list[tuple[int, float]]]:
        """The statuses of all MLflow runs of that name, and the points of their metric, by step."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{self.database}")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments, f"attributes.run_name = '{name}'")
        points = [(p.step, p.value) for run in runs for p in client.get_metric_history(run.info.run_id, metric)]
        return [run.info.status for run in runs], sorted(points)

    # --- what is started ------------------------------------------------------------------------------------------

    def _ray(self, *flags: str) -> subprocess.Popen[bytes]:
        # Nodes of one folder that start together take the same sockets.
        folder = self.temporary / str(len(self.processes))
        folder.mkdir()
        self.processes.append(ray_start(folder, environment(**HEALTH), *flags))
        return self.processes[-1]

    def _node(self) -> subprocess.Popen[bytes]:
        return self._ray(f"--address={self.address}", "--num-cpus=2")
