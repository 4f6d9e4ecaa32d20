"""Runs seen from another shell: listed and followed by what their folders hold."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import group
from app.config import Config, RunConfig
from app.lease import LEASE_SECONDS
from app.run.history import history
from app.run.look import list_runs, look
from app.run.manifest import Run
from app.run.progress import ProgressFile
from app.storage import Storage
from app.tracking.settings import Settings
from app.tracking.tracker import Tracker

EVENT = {"step": 30, "steps": 50, "loss": 0.25, "rate": 1200.0, "unit": "samples", "seconds_left": 20.0}
EVENT |= {"memory_bytes": 5e8, "evaluated": {"loss": 0.5}}


def begin(storage: str, name: str = "seen") -> tuple[Run, ProgressFile]:
    run = Run(Config(task="image_classification", run=RunConfig(name=name, storage=storage)))
    run.open(run.config, 50)
    return run, ProgressFile(run.storage, run.attempt)


def on_another_machine(run: Run, silent_for: float) -> None:
    file = run.storage.local_path / "lease.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "far.away"}))
    os.utime(file, (time.time() - silent_for,) * 2)


def test_a_run_is_starting_then_running_then_finished(tmp_path: Path) -> None:
    run, progress = begin(str(tmp_path))
    assert look(run.storage).state == "starting"
    progress.note(EVENT)
    progress.close()
    seen = look(run.storage)
    assert (seen.state, seen.step, seen.steps, seen.loss) == ("running", 30, 50, 0.25)
    assert seen.evaluated == {"loss": 0.5} and f"process {os.getpid()} on " in seen.driver
    run.end("finished", {"step": 50, "metrics": {}})
    assert look(run.storage).state == "finished" and not look(run.storage).driver


def test_a_run_without_a_living_driver_is_lost(tmp_path: Path) -> None:
    run, _ = begin(str(tmp_path))
    lease = run.storage.local_path / "lease.json"
    lease.write_text(json.dumps(json.loads(lease.read_text()) | {"process_started": 1.0}))  # another of that number
    assert look(run.storage).state == "lost"
    on_another_machine(run, silent_for=LEASE_SECONDS / 2)
    assert look(run.storage).state == "starting"
    on_another_machine(run, silent_for=LEASE_SECONDS + 5)
    assert look(run.storage).state == "lost"
    run.end("stopped")


def test_progress_of_an_earlier_start_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    first, progress = begin(str(tmp_path))
    progress.note(EVENT)
    progress.close()
    first.end("stopped")
    second, _ = begin(str(tmp_path))
    assert look(second.storage).state == "starting" and look(second.storage).step == 30
    second.end("stopped")


def test_runs_in_an_object_store_are_listed_too(bucket: str) -> None:
    run, progress = begin(bucket, "far")
    progress.note(EVENT)
    progress.close()
    assert [(seen.name, seen.state, seen.step) for seen in list_runs(bucket)] == [("far", "running", 30)]
    assert time.time() - Storage(bucket).modified("far/lease.json") < 60
    run.end("stopped")


def test_runs_and_watch_say_how_it_is(tmp_path: Path) -> None:
    runs = [begin(str(tmp_path), name) for name in ("a", "b")]
    for _, progress in runs:
        progress.note(EVENT)
        progress.close()
    runs[0][0].end("failed")
    runs[1][0].end("finished", {"step": 50, "metrics": {"eval/loss": 0.5}})
    listed = CliRunner().invoke(group, ["runs", str(tmp_path)]).output
    assert [line.split()[:2] for line in listed.splitlines()[1:]] == [["b", "finished"], ["a", "failed"]]
    assert "30/50  0.2500  0.5000" in listed and "50/50  0.2500  0.5000" in listed, "its last start took no step"
    followed = CliRunner().invoke(group, ["watch", str(tmp_path / "b")], standalone_mode=False)
    assert followed.return_value is None and "b finished after step 50 of 50: loss 0.5" in followed.output
    failed = CliRunner().invoke(group, ["watch", str(tmp_path / "a")])
    assert failed.exit_code == 1 and "a failed after step 30 of 50" in failed.output


def test_what_a_run_has_logged_is_a_frame_without_replays_and_machines(tmp_path: Path) -> None:
    run, _ = begin(str(tmp_path))
    tracker = Tracker(run.local_folder / "tracking", Settings("", ""), run_name="x", run_uid="y", parent=tmp_path)
    tracker.start()
    for step, loss in [(1, 3.0), (2, 2.0), (3, 1.5), (2, 9.0), (4, 1.0)]:  # after a resume step 2 comes again
        tracker.metrics(step, {"train/loss": loss} | ({"eval/loss": 2.5} if step == 4 else {}))
    tracker.emit({"type": "metrics", "step": None, "time": 1.0, "values": {"system/node-0/cpu": 5.0}})
    frame = history(run.storage)
    assert frame["train/loss"].to_dict() == {1: 3.0, 2: 2.0, 3: 1.5, 4: 1.0}
    assert frame["eval/loss"].dropna().to_dict() == {4: 2.5} and set(frame) == {"train/loss", "eval/loss"}
    run.end("stopped")


@pytest.mark.parametrize(
    ("command", "said"),
    [(["runs", "{}/none"], "there is no folder"), (["watch", "{}/mnits"], "did you mean 'mnist'?")],
)
def test_what_is_not_there_is_one_sentence(tmp_path: Path, command: list[str], said: str) -> None:
    (tmp_path / "mnist").mkdir()
    result = CliRunner().invoke(group, [word.format(tmp_path) for word in command])
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output
