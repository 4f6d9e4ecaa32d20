"""Tracking against a real MLflow server that is late, goes away, comes back, and whose answers get lost."""

from __future__ import annotations

import base64
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.tracking.spool import State, size
from tests.app.tracking.test_tracking_kit import Store, tracker, wait_until

pytestmark = pytest.mark.alone


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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

    def answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

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


class Proxy:
    """Stands between writer and server; `lose` says which answers never arrive, `requests` what was asked."""

    def __init__(self, target: int | None) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self.losses = 0
        self.lost = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.requests.append((self.path, self.headers.get("Authorization")))
                if target is None:
                    self.send_error(503)
                    return
                connection = http.client.HTTPConnection("127.0.0.1", target, timeout=20)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                data = answer.read()
                if self.path.endswith("runs/log-batch") and b'"metrics"' in body and proxy.losses > 0:
                    proxy.losses, proxy.lost = proxy.losses - 1, proxy.lost + 1
                    self.close_connection = True
                    return  # done, and nobody will know
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_server_that_is_late_goes_away_and_comes_back(server: Server, tmp_path: Path) -> None:
    (tmp_path / "figure.txt").write_text("bars")
    run = tracker(tmp_path / "spool", server.uri)
    run.start()
    slowest = 0.0
    steps = iter(range(10_000))

    def train(count: int) -> None:
        nonlocal slowest
        for step in (next(steps) for _ in range(count)):
            begun = time.perf_counter()
            run.metrics(step, {"loss": float(step), "nan": float("nan"), "up": float("inf")})
            slowest = max(slowest, time.perf_counter() - begun)

    train(500)
    problem = wait_until(lambda: State.load(run.folder).problem)
    assert "does not answer (refused)" in problem and not State.load(run.folder).run_id
    server.start()
    train(500)
    wait_until(server.answers, 60)
    wait_until(lambda: State.load(run.folder).offset == size(run.folder))
    assert State.load(run.folder).problem == "" and State.load(run.folder).run_id == server.store.run()
    assert server.store.status() == "RUNNING"
    server.stop()
    train(1500)
    run.artifact(tmp_path / "figure.txt", "plots")
    wait_until(lambda: State.load(run.folder).problem)
    train(10)
    server.start()
    train(500)
    wait_until(server.answers, 60)
    delivery = run.finish("FINISHED", timeout=20)
    assert delivery.complete and delivery.url == f"{server.uri}/#/experiments/1/runs/{delivery.run_id}"
    assert server.store.status() == "FINISHED"
    assert server.store.history("loss") == [(step, float(step)) for step in range(3010)]
    assert server.store.history("nan") == [(step, None) for step in range(3010)]
    assert server.store.history("up")[0][1] > 1e308
    times = server.store.query("select timestamp from metrics where key = 'loss' order by step")
    assert times == sorted(times)
    assert [path.read_text() for path in server.folder.rglob("plots/figure.txt")] == ["bars"]
    assert slowest < 0.5, f"logging a step took {slowest} s"


def test_lost_answers_double_nothing(server: Server, tmp_path: Path) -> None:
    if not server.answers():
        server.start()
        wait_until(server.answers, 60)
    proxy = Proxy(server.port)
    try:
        proxy.losses = 2
        run = tracker(tmp_path / "spool", proxy.uri, run_uid="uid-3")
        run.start()
        for step in range(2500):
            run.metrics(step, {"loss": float(step)})
        delivery = run.finish("FINISHED", timeout=20)
    finally:
        proxy.close()
    assert delivery.complete and proxy.lost == 2
    assert server.store.steps("loss", "uid-3") == list(range(2500))
    sent = sum(path.endswith("runs/log-batch") for path, _ in proxy.requests)
    assert sent <= 4, "points that MLflow already had were sent again"


@pytest.mark.parametrize(
    ("environment", "user", "header"),
    [
        ({"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "sesame"}, "", "basic"),
        ({"MLFLOW_TRACKING_TOKEN": "sesame"}, "", "Bearer sesame"),
        ({}, "me:sesame@", "basic"),
    ],
)
def test_credentials_reach_the_server_and_nothing_else(
    environment: dict[str, str], user: str, header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    proxy = Proxy(None)
    try:
        uri = proxy.uri.replace("http://", f"http://{user}")
        run = tracker(tmp_path / "spool", uri)
        run.start()
        run.metrics(0, {"loss": 1.0})
        wait_until(lambda: proxy.requests and State.load(run.folder).problem)
        delivery = run.finish("FINISHED", timeout=0.1)
    finally:
        proxy.close()
    expected = "Basic " + base64.b64encode(b"me:sesame").decode() if header == "basic" else header
    assert {authorization for _, authorization in proxy.requests} == {expected}
    assert "503" in delivery.problem
    assert not [path for path in run.folder.iterdir() if path.is_file() and b"sesame" in path.read_bytes()]
