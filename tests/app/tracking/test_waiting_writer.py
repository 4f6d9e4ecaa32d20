"""A writer that is started before there is anything to write, and imports MLflow meanwhile."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.tracking.settings import Settings
from app.tracking.spool import State
from app.tracking.tracker import Tracker, WriterProcess
from tests.app.tracking.kit import Store
from tests.running import environment, wait_until

pytestmark = pytest.mark.usefixtures("real_start")
LONG = 120.0
"""Seconds that importing MLflow may take on a busy machine."""


def waiting_writers(folder: Path) -> list[int]:
    """The processes of writers of a spool that were started ahead."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "app.tracking.writer" in words and str(folder) in words and words[-1] == "wait":
            pids.append(process.pid)
    return pids


def test_it_delivers_the_spool_that_it_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "tracking"
    settings = Settings(f"sqlite:///{tmp_path}/mlflow.db", "tests", tmp_path.as_uri())
    writer = WriterProcess(folder, settings.uri)
    writer.import_ahead()
    assert not folder.exists()
    tracker = Tracker(folder, settings, run_name="a-run", run_uid="uid-1", writer=writer)
    tracker.start()
    wait_until(lambda: State.load(folder).writer is not None, LONG)
    assert waiting_writers(folder) == [State.load(folder).writer]
    tracker.metrics(1, {"loss": 0.5})
    delivery = tracker.finish("FINISHED")
    assert delivery.complete, delivery
    assert Store(settings.uri).history("loss") == [(1, 0.5)]
    assert "Creating initial MLflow database" in (folder / "writer.log").read_text()


def test_it_claims_the_spool_before_mlflow_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver waits for the claim, and on a busy machine importing may take minutes."""
    (tmp_path / "mlflow.py").write_text(f"import time\ntime.sleep({LONG})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run" / "tracking"
    writer = WriterProcess(folder, "sqlite://")
    writer.import_ahead()
    folder.mkdir(parents=True)
    began = time.monotonic()
    assert writer._spawn() == "" and writer._is_alive()
    assert time.monotonic() - began < LONG / 2
    for pid in waiting_writers(folder):
        psutil.Process(pid).kill()


def test_one_that_is_not_needed_ends_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tracking"
    writer = WriterProcess(folder, f"sqlite:///{tmp_path}/mlflow.db")
    writer.import_ahead()
    wait_until(lambda: bool(waiting_writers(folder)), LONG)
    writer.dismiss()
    wait_until(lambda: not waiting_writers(folder), LONG)
    assert not list(tmp_path.iterdir())


def test_it_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "tracking"
    program = (
        "import sys, time; from pathlib import Path; "
        "from app.tracking.tracker import WriterProcess; "
        "WriterProcess(Path(sys.argv[1]), 'sqlite://').import_ahead(); time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", program, str(folder)], env=environment())
    try:
        wait_until(lambda: bool(waiting_writers(folder)), LONG)
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not waiting_writers(folder), LONG)


@pytest.mark.slow
def test_another_takes_the_place_of_one_that_has_died(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "tracking"
    settings = Settings(f"sqlite:///{tmp_path}/mlflow.db", "tests", tmp_path.as_uri())
    writer = WriterProcess(folder, settings.uri)
    writer.import_ahead()
    wait_until(lambda: bool(waiting_writers(folder)), LONG)
    while pids := waiting_writers(folder):
        for pid in pids:
            psutil.Process(pid).kill()
        time.sleep(0.05)
    tracker = Tracker(folder, settings, run_name="a-run", run_uid="uid-1", writer=writer)
    tracker.start()
    tracker.metrics(1, {"loss": 0.5})
    assert tracker.finish("FINISHED").complete
    assert Store(settings.uri).history("loss") == [(1, 0.5)]
