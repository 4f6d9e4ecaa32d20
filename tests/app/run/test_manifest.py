"""What a run's folder holds of its configuration."""

import os
import threading
from pathlib import Path

import pytest

from app.config import Config, RunConfig, TrackingConfig, TrainConfig
from app.errors import UserError
from app.lease import is_current, write_lease
from app.run.manifest import Run


def test_a_secret_of_the_configuration_stays_out_of_the_runs_folder(tmp_path: Path) -> None:
    def start(token: str) -> Run:
        args = {"hf_token": token, "pad_token": "<pad>", "nested": {"api_key": token}, "label_key": "y"}
        tracking = TrackingConfig(uri=f"https://me:{token}@host/x")
        run = RunConfig(name="kept", storage=str(tmp_path))
        return Run(Config(task="language_modelling", task_args=args, tracking=tracking, run=run))

    run = start("planted-1")
    run.open(run.config, 5)
    run.end("stopped")
    written = {file.name: file.read_text() for file in (tmp_path / "kept").rglob("*") if file.is_file()}
    assert set(written) == {"run.json", "config.yaml"}
    assert not [name for name, text in written.items() if "planted" in text], written
    assert "pad_token: <pad>" in written["config.yaml"] and "label_key: y" in written["config.yaml"]
    assert start("planted-2").manifest.uid == run.manifest.uid, "the same run, also with a newer token"


def test_a_start_that_was_taken_over_leaves_the_folder_to_its_successor(tmp_path: Path) -> None:
    run = RunConfig(name="kept", storage=str(tmp_path))
    first, second = (Run(Config(task="image_classification", run=run)) for _ in range(2))
    first.open(first.config, 5)
    write_lease(second.storage, second.attempt, 0)
    second.manifest.starts = 2
    second.save()
    first.end("failed")
    assert is_current(second.folder, second.attempt) and not is_current(first.folder, first.attempt)
    assert Run(second.config).manifest.status == second.manifest.status != "failed"
    second.end("finished")
    assert Run(second.config).finished and not (tmp_path / "kept" / "lease.json").exists()


def test_of_several_that_start_at_one_moment_one_trains(tmp_path: Path) -> None:
    run = RunConfig(name="kept", storage=str(tmp_path))
    starts = [Run(Config(task="image_classification", run=run)) for _ in range(6)]
    barrier, refused = threading.Barrier(len(starts)), list[str]()

    def start(own: Run) -> None:
        barrier.wait()
        try:
            own.open(own.config, 5)
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start, args=(own,)) for own in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [own for own in starts if is_current(own.folder, own.attempt)]
    assert len(refused) == len(starts) - 1 and f"by process {os.getpid()} on " in refused[0]
    assert "at step 0 of 5: wait for it, add --take-over" in refused[0]
    winner.end("stopped")


def test_a_run_that_never_trained_may_become_another(tmp_path: Path) -> None:
    def start(seed: int) -> Run:
        run = RunConfig(name="kept", storage=str(tmp_path))
        return Run(Config(task="language_modelling", train=TrainConfig(seed=seed), run=run))

    first = start(0)
    first.open(first.config, 5)
    first.end("failed")
    second = start(1)
    assert second.manifest.uid == first.manifest.uid and second.manifest.identity["train.seed"] == 1
    (tmp_path / "kept" / "progress.json").write_text("{}")
    with pytest.raises(UserError, match=r"was started with train.seed=0, and this is train.seed=1"):
        start(1)
