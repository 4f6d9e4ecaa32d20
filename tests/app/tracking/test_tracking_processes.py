"""Drivers and writers that are killed, and a server that is late: nothing is lost and nothing doubled."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.lease import process_started
from app.tracking.spool import State
from app.tracking.tracker import Tracker, sync
from tests.app.tracking.kit import Store, tracker
from tests.running import end_tree, environment, free_port, start, wait_until

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


@pytest.mark.slow
def test_killed_drivers_and_writers_and_a_server_that_is_late_lose_and_double_nothing(tmp_path: Path) -> None:
    (tmp_path / "figure.txt").write_text("bars")
    port, file, folder = free_port(), tmp_path / "server.db", tmp_path / "spool"
    address, store = f"http://127.0.0.1:{port}", Store(f"sqlite:///{file}")
    first = driver(folder, address, 0, 3000)
    lingering = wait_until(lambda: State.load(folder).problem and State.load(folder).writer)
    assert "does not answer (refused)" in State.load(folder).problem and not State.load(folder).run_id
    assert sync(folder).problem == "the run is going on, and its own writer delivers it"
    wait_until(lambda: not psutil.Process(first.pid).children(recursive=True))  # whom `ray job stop` would kill
    first.kill()
    first.wait()
    assert process_started(lingering)
    with (folder / "events.jsonl").open("a") as events:  # torn by the kill
        events.write('{"type":"metr')
    run = tracker(folder, address)
    wait_until(lambda: not process_started(lingering))  # a newer start's writer comes
    run.artifact(tmp_path / "figure.txt", "plots")
    for step in range(2900, 6000):
        more = {"nan": float("nan"), "up": float("inf")} | {f"m{n}": float(step + n) for n in range(5)}
        run.metrics(step, {"loss": 1 / (step + 1)} | more)
    command = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{file}", "--artifacts-destination", f"{tmp_path}/files"]
    env = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", MLFLOW_DISABLE_TELEMETRY="true")
    server = subprocess.Popen([sys.executable, *command], env=env, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: State.load(folder).run_id and store.steps("m4"))  # in the middle of its delivery
        assert State.load(folder).problem == "" and State.load(folder).run_id == store.run()
        assert store.run("status") == "RUNNING"
        end_tree(State.load(folder).writer)
        delivery = run.finish("FINISHED", timeout=30)
        assert delivery.complete and delivery.url == f"{address}/#/experiments/1/runs/{delivery.run_id}"
        assert store.run("status") == "FINISHED"
        last, said = driver(folder, address, 5900, 6100), time.time()  # its last word
        wait_until(lambda: store.run("status") == "RUNNING")
        last.kill()
        last.wait()
        wait_until(lambda: store.run("status") == "KILLED")
    finally:
        end_tree(server.pid)
    assert abs(store.run("end_time") / 1000 - said) < 5
    assert store.history("loss") == [(step, 1 / (step + 1)) for step in range(6100)]
    assert store.history("m4") == [(step, step + 4.0) for step in range(2900, 6000)]
    counts = store.query("select count(*), count(distinct key || ' ' || step) from metrics where key like 'm%'")
    assert counts == [(15_500, 15_500)]
    assert store.history("nan") == [(step, None) for step in range(2900, 6000)] and store.history("up")[0][1] > 1e308
    times = store.query("select timestamp from metrics where key = 'loss' order by step")
    assert times == sorted(times)
    assert [path.read_text() for path in (tmp_path / "files").rglob("plots/figure.txt")] == ["bars"]


def test_one_writer_delivers_a_run_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a sweep: children come and go, and only spool; one is killed. From a folder with an `app` of one's own,
    into a database that is yet to be made."""
    file = tmp_path / "deep" / "mlflow.db"
    for own in ("app/__init__.py", "app/tracking/__init__.py", "app/tracking/writer.py"):
        (tmp_path / own).parent.mkdir(exist_ok=True)
        (tmp_path / own).write_text("")
    monkeypatch.chdir(tmp_path)

    def child(number: int) -> Tracker:
        run = tracker(tmp_path / f"t{number}" / "tracking", uri, run_uid=f"child-{number}", parent=parent.folder)
        run.metrics(1, {"loss": float(number)})
        return run

    uri = f"sqlite:///{file}"
    store, parent = Store(uri), tracker(tmp_path / "tracking", uri)
    first = child(0)
    assert first.finish("FAILED", message="diverged").complete and not (first.folder / "writer.log").exists()
    wait_until(lambda: file.exists() and store.run("status", "child-0") == "FAILED")
    os.close(child(1)._driver or -1)  # as the kernel does for a process that was killed
    parent.metrics(7, {"best": 0.5})
    assert parent.finish("FINISHED", timeout=60).complete and store.steps("best") == [7]
    wait_until(lambda: store.run("status", "child-1") == "KILLED")
    assert store.steps("loss", "child-1") == [1]
    sql = "select count(*) from tags where key = 'mlflow.parentRunId' and value = ?"
    assert store.query(sql, store.run()) == [(2,)]
