"""Tracking against a real MLflow server that is late."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.tracking.spool import State, size
from tests.app.tracking.kit import Store, tracker
from tests.running import free_port, wait_until

pytestmark = pytest.mark.alone


class Server:
    """`mlflow server` on loopback, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.uri, self.store = f"http://127.0.0.1:{self.port}", Store(f"sqlite:///{folder / 'server.db'}")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


def test_a_server_that_is_late_gets_everything(server: Server, tmp_path: Path) -> None:
    (tmp_path / "figure.txt").write_text("bars")
    run = tracker(tmp_path / "spool", server.uri)
    run.start()
    seconds: list[float] = []
    steps = iter(range(10_000))

    def train(count: int) -> None:
        for step in (next(steps) for _ in range(count)):
            begun = time.perf_counter()
            run.metrics(step, {"loss": float(step), "nan": float("nan"), "up": float("inf")})
            seconds.append(time.perf_counter() - begun)

    train(1500)
    run.artifact(tmp_path / "figure.txt", "plots")
    problem = wait_until(lambda: State.load(run.folder).problem)
    assert "does not answer (refused)" in problem and not State.load(run.folder).run_id
    server.start()
    train(10)
    wait_until(lambda: State.load(run.folder).run_id and State.load(run.folder).offset == size(run.folder))
    assert State.load(run.folder).problem == "" and State.load(run.folder).run_id == server.store.run()
    assert server.store.status() == "RUNNING"
    train(500)
    delivery = run.finish("FINISHED", timeout=20)
    assert delivery.complete and delivery.url == f"{server.uri}/#/experiments/1/runs/{delivery.run_id}"
    assert server.store.status() == "FINISHED"
    assert server.store.history("loss") == [(step, float(step)) for step in range(2010)]
    assert server.store.history("nan") == [(step, None) for step in range(2010)]
    assert server.store.history("up")[0][1] > 1e308
    times = server.store.query("select timestamp from metrics where key = 'loss' order by step")
    assert times == sorted(times)
    assert [path.read_text() for path in server.folder.rglob("plots/figure.txt")] == ["bars"]
    assert statistics.median(seconds) < 0.01
