"""Drivers and writers that are killed, and a server that is late: nothing is lost and nothing doubled."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.lease import process_started
from app.tracking.spool import State, size
from app.tracking.tracker import Tracker, sync
from tests.app.tracking.kit import Store, tracker
from tests.running import end_tree, free_port, start, wait_until

DRIVER = """
import sys, time
from pathlib import Path
from tests.app.tracking.kit import tracker
tracker = tracker(Path(sys.argv[1]), sys.argv[2], run_uid="uid-1")
for step in range(int(sys.argv[3]), int(sys.argv[4])):
    tracker.metrics(step, {"loss": 1 / (step + 1)})
print("ready", flush=True)
time.sleep(60)
"""


def driver(folder: Path, uri: str, first: int, last: int) -> subprocess.Popen[str]:
    """A driver process that logs the steps, says so, and sleeps until it is killed."""
    process = start([DRIVER, str(folder), uri, str(first), str(last)], program=[sys.executable, "-c"])
    assert process.stdout and process.stdout.readline() == "ready\n", process.communicate()
    return process


def test_two_runs_at_once_make_the_database_once(template: Path) -> None:
    store = Store(f"sqlite:///{template}")
    assert store.steps("loss", "uid-8") == store.steps("loss", "uid-9") == [0]
    assert store.query("select count(*) from experiments where name = 'tests'") == [(1,)]
    assert [path.name for path in template.parent.iterdir()] == ["mlflow.db"]
    location = store.query("select artifact_location from experiments where name = 'tests'")[0][0]
    assert location == (template.parents[1] / "mlartifacts").as_uri()


@pytest.mark.slow
def test_a_killed_driver_ends_as_killed_and_a_killed_writer_is_replaced(uri: str, tmp_path: Path) -> None:
    store, folder = Store(uri), tmp_path / "spool"
    process = driver(folder, uri, 0, 3000)
    said = time.time()  # its last word; that the writer is at work takes until it has imported MLflow
    writer = wait_until(lambda: State.load(folder).writer)
    wait_until(lambda: not psutil.Process(process.pid).children(recursive=True))  # whom `ray job stop` would kill
    process.kill()
    process.wait()
    wait_until(lambda: store.runs() and store.status() == "KILLED")
    assert store.steps("loss") == list(range(3000)) and abs(store.end_seconds() - said) < 5
    wait_until(lambda: not process_started(writer))
    with (folder / "events.jsonl").open("a") as file:  # torn by the kill
        file.write('{"type":"metr')
    second = tracker(folder, uri)
    for step in range(2900, 6000):
        second.metrics(step, {"loss": 0.5} | {f"m{n}": float(step + n) for n in range(10)})
    wait_until(lambda: store.steps("m9"))  # in the middle of its delivery
    end_tree(State.load(folder).writer)
    assert second.finish("FINISHED", timeout=30).complete
    assert store.status() == "FINISHED" and store.steps("loss") == list(range(6000))
    counts = store.query("select count(*), count(distinct key || ' ' || step) from metrics where key like 'm%'")
    assert counts == [(31_000, 31_000)]
    assert store.history("m9") == [(step, step + 9.0) for step in range(2900, 6000)]


def test_one_writer_delivers_a_run_and_its_children(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a sweep: children come and go, and only spool; one is killed. From a folder with an `app` of one's own."""
    for file in ("app/__init__.py", "app/tracking/__init__.py", "app/tracking/writer.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)

    def child(number: int) -> Tracker:
        run = tracker(tmp_path / f"t{number}" / "tracking", uri, run_uid=f"child-{number}", parent=parent.folder)
        run.metrics(1, {"loss": float(number)})
        return run

    store, parent = Store(uri), tracker(tmp_path / "tracking", uri)
    first = child(0)
    assert first.finish("FAILED", message="diverged").complete and not (first.folder / "writer.log").exists()
    wait_until(lambda: store.runs("child-0") and store.status("child-0") == "FAILED")
    os.close(child(1)._driver or -1)  # as the kernel does for a process that was killed
    parent.metrics(7, {"best": 0.5})
    assert parent.finish("FINISHED", timeout=20).complete and store.steps("best") == [7]
    wait_until(lambda: store.runs("child-1") and store.status("child-1") == "KILLED")
    assert store.steps("loss", "child-1") == [1]
    sql = "select count(*) from tags where key = 'mlflow.parentRunId' and value = ?"
    assert store.query(sql, store.run()) == [(2,)]


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/files"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_server_that_is_late_gets_everything_from_the_newest_writer(tmp_path: Path) -> None:
    (tmp_path / "figure.txt").write_text("bars")
    port, store, folder = free_port(), Store(f"sqlite:///{tmp_path}/server.db"), tmp_path / "spool"
    killed = driver(folder, f"http://127.0.0.1:{port}", 0, 10)
    lingering = wait_until(lambda: State.load(folder).problem and State.load(folder).writer)
    assert "does not answer (refused)" in State.load(folder).problem and not State.load(folder).run_id
    assert sync(folder).problem == "the run is going on, and its own writer delivers it"
    killed.kill()
    killed.wait()
    assert process_started(lingering)
    run = tracker(folder, f"http://127.0.0.1:{port}")
    wait_until(lambda: not process_started(lingering))
    run.artifact(tmp_path / "figure.txt", "plots")
    for step in range(5, 1500):
        run.metrics(step, {"loss": 1 / (step + 1), "nan": float("nan"), "up": float("inf")})
    with mlflow_server(tmp_path, port):
        wait_until(lambda: State.load(folder).run_id and State.load(folder).offset == size(folder))
        assert State.load(folder).problem == "" and State.load(folder).run_id == store.run()
        assert store.status() == "RUNNING"
        delivery = run.finish("FINISHED", timeout=20)
    assert delivery.complete and delivery.url == f"http://127.0.0.1:{port}/#/experiments/1/runs/{delivery.run_id}"
    assert store.status() == "FINISHED"
    assert store.history("loss") == [(step, 1 / (step + 1)) for step in range(1500)]
    assert store.history("nan") == [(step, None) for step in range(5, 1500)] and store.history("up")[0][1] > 1e308
    times = store.query("select timestamp from metrics where key = 'loss' order by step")
    assert times == sorted(times)
    assert [path.read_text() for path in (tmp_path / "files").rglob("plots/figure.txt")] == ["bars"]
