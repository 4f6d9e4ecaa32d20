"""A run's folder: its configuration, which of its starts may write there, and what others see."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.config import Config, RunConfig, TrackingConfig, TrainConfig
from app.errors import UserError
from app.results.history import history
from app.run.look import look
from app.run.manifest import Run
from app.run.progress import ProgressFile
from app.storage.lease import LEASE_SECONDS, is_current, write_lease
from app.tracking.settings import Settings
from app.tracking.tracker import Tracker
from tests.running import invoke


def start(folder: Path, name: str = "kept", **options: Any) -> Run:
    """A run of this name, not opened yet."""
    run_config = RunConfig(name=name, storage=str(folder))
    return Run(Config(task="language_modelling", run=run_config, **options))


def begin(folder: Path, name: str = "kept", **options: Any) -> Run:
    """A run that has been opened for 50 steps."""
    run = start(folder, name, **options)
    run.open(run.config, 50)
    return run


def step(run: Run) -> None:
    """Writes progress of step 30 and an evaluation, as the driver does."""
    progress = ProgressFile(run.storage, run.attempt)
    speed = {"rate": 1200.0, "unit": "samples", "seconds_left": 20.0}
    progress.note({"step": 30, "steps": 50, "loss": 0.25, **speed})
    progress.note({"memory_bytes": 5e8, "evaluated": {"loss": 0.5}})
    progress.close()


def test_a_secret_of_the_configuration_stays_out_of_the_runs_folder(tmp_path: Path) -> None:
    def secret(token: str) -> dict[str, Any]:
        args = {"hf_token": token, "nested": {"api_key": token}}
        args |= {"pad_token": "<pad>", "label_key": "y"}
        return {"task_args": args, "tracking": TrackingConfig(uri=f"https://me:{token}@host/x")}

    run = begin(tmp_path, **secret("planted-1"))
    run.end("stopped")
    files = [file for file in (tmp_path / "kept").rglob("*") if file.is_file()]
    written = {file.name: file.read_text() for file in files}
    assert set(written) == {"run.json", "config.yaml"}
    assert not [name for name, text in written.items() if "planted" in text], written
    assert "pad_token: <pad>" in written["config.yaml"] and "label_key: y" in written["config.yaml"]
    with_newer_token = start(tmp_path, **secret("planted-2"))
    assert with_newer_token.manifest.uid == run.manifest.uid, "it is the same run"


def test_a_start_that_was_taken_over_leaves_the_folder_to_its_successor(tmp_path: Path) -> None:
    second = start(tmp_path)
    first = begin(tmp_path)
    write_lease(second.storage, second.attempt, 0)
    second.manifest.starts = 2
    second.save()
    first.end("failed")
    assert is_current(second.folder, second.attempt) and not is_current(first.folder, first.attempt)
    assert start(tmp_path).manifest.status == second.manifest.status != "failed"
    second.end("finished")
    assert start(tmp_path).finished and not (tmp_path / "kept" / "lease.json").exists()


def test_of_several_starts_at_the_same_time_one_trains(tmp_path: Path) -> None:
    starts = [start(tmp_path) for _ in range(6)]
    barrier = threading.Barrier(len(starts))

    def open_run(run: Run) -> None:
        barrier.wait()
        run.open(run.config, 5)

    with ThreadPoolExecutor(len(starts)) as pool:
        opened = [pool.submit(open_run, run) for run in starts]
    errors = [future.exception() for future in opened]
    refused = [str(error) for error in errors if isinstance(error, UserError)]
    (winner,) = [run for run in starts if is_current(run.folder, run.attempt)]
    assert len(refused) == len(starts) - 1 and f"by process {os.getpid()} on " in refused[0]
    assert "at step 0 of 5: wait for it, add --take-over" in refused[0]
    winner.end("stopped")


def test_a_run_that_never_trained_may_become_another(tmp_path: Path) -> None:
    first = begin(tmp_path, train=TrainConfig(seed=0))
    first.end("failed")
    second = start(tmp_path, train=TrainConfig(seed=1))
    assert second.manifest.uid == first.manifest.uid and second.manifest.identity["train.seed"] == 1
    (tmp_path / "kept" / "progress.json").write_text("{}")
    with pytest.raises(UserError, match=r"was started with train.seed=0, and this is train.seed=1"):
        start(tmp_path, train=TrainConfig(seed=1))


def test_others_see_a_run_starting_running_lost_finished_and_restarted(tmp_path: Path) -> None:
    run = begin(tmp_path)
    lease = tmp_path / "kept" / "lease.json"
    assert look(run.storage).state == "starting"
    step(run)
    view = look(run.storage)
    assert (view.state, view.step, view.steps, view.loss) == ("running", 30, 50, 0.25)
    assert view.evaluated == {"loss": 0.5} and f"process {os.getpid()} on " in view.driver
    for change, silent_seconds, state in [
        ({"process_started": 1.0}, 0.0, "lost"),  # another process has got that process ID
        ({"host": "far.away"}, LEASE_SECONDS / 2, "running"),
        ({"host": "far.away"}, LEASE_SECONDS + 5, "lost"),
    ]:
        lease.write_text(json.dumps(json.loads(lease.read_text()) | change))
        os.utime(lease, (time.time() - silent_seconds,) * 2)
        assert look(run.storage).state == state
    run.end("finished", {"step": 50, "metrics": {}})
    assert look(run.storage).state == "finished" and not look(run.storage).driver
    restarted = begin(tmp_path)
    view = look(restarted.storage)
    assert (view.state, view.step) == ("starting", 30), "the step is that of the earlier start"
    restarted.end("stopped")


def test_runs_and_watch_show_states_and_name_what_does_not_exist(tmp_path: Path) -> None:
    def say(*arguments: str, code: int = 0) -> str:
        output = invoke(*arguments, code=code).output
        assert "Traceback" not in output
        return output

    finished = ("finished", {"step": 50, "metrics": {"eval/loss": 0.5}})
    for name, end in (("gpt", ("failed",)), ("mnist", finished)):
        run = begin(tmp_path, name)
        step(run)
        run.end(*end)
    listed = say("runs", str(tmp_path))
    states = [line.split()[:2] for line in listed.splitlines()[1:]]
    assert states == [["mnist", "finished"], ["gpt", "failed"]]
    assert "30/50  0.2500  0.5000" in listed
    assert "50/50  0.2500  0.5000" in listed, "the loss is the last one that was reported"
    assert "mnist finished after step 50 of 50: loss 0.5" in say("watch", str(tmp_path / "mnist"))
    assert "gpt failed after step 30 of 50" in say("watch", str(tmp_path / "gpt"), code=1)
    assert "there is no folder" in say("runs", str(tmp_path / "none"), code=2)
    assert "did you mean 'mnist'?" in say("watch", str(tmp_path / "mnits"), code=2)


def test_the_history_of_a_run_has_no_replayed_steps_and_no_system_metrics(tmp_path: Path) -> None:
    run = begin(tmp_path)
    folder = run.local_folder / "tracking"
    tracker = Tracker(folder, Settings("", ""), run_name="x", run_uid="y", parent=tmp_path)
    tracker.start()
    # After a resume step 2 comes again.
    for number, loss in [(1, 3.0), (2, 2.0), (3, 1.5), (2, 9.0)]:
        tracker.metrics(number, {"train/loss": loss})
    tracker.metrics(4, {"train/loss": 1.0, "eval/loss": 2.5})
    tracker.system_metrics({"system/node-0/cpu": 5.0}, 1.0)
    frame = history(run.storage)
    assert frame["train/loss"].to_dict() == {1: 3.0, 2: 2.0, 3: 1.5, 4: 1.0}
    assert frame["eval/loss"].dropna().to_dict() == {4: 2.5}
    assert set(frame) == {"train/loss", "eval/loss"}
    run.end("stopped")
