"""A full disk fails the checkpoint, not the run; a start that another has superseded ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app import checkpoint, loop, persistence
from app.checkpoint import CheckpointError
from app.checkpoint.files import HashingStream
from app.config_io import load_config
from app.job import Job, Place, SilentChannel
from app.run.manifest import Run
from app.run.prepare import prepare, read_task
from tests.running import committed


class Heard(SilentChannel):
    """A channel that remembers what was said, and never asks to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    @property
    def warnings(self) -> list[str]:
        return [event["text"] for event in self.events if event["type"] == "warning"]


def train(storage: Path, heard: Heard, *more: str) -> dict[str, Any]:
    own = ["task=tests.tasks:Points", "train.global_batch_size=16", "train.steps=40", "checkpoint.every_steps=5"]
    config = load_config([], [*own, "run.name=run", f"run.storage={storage}", "strategy=single", *more])
    run = Run(config)
    prepared = prepare(config, read_task(config), 1, devices_per_node=None)
    run.open(prepared.config, prepared.steps)
    job = Job(config, prepared.layout, run.folder, run.attempt, run.manifest.uid, prepared.steps, ".")
    try:
        return loop.train(job, Place(0, 1, 0, torch.device("cpu")), heard)
    finally:
        run.end("stopped")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """full: whether there is no room now for a piece of a checkpoint."""
    state: dict[str, Any] = {}
    write = HashingStream.write

    def perhaps(self: HashingStream, data: Any) -> int:
        if state["full"]():
            self.cause = OSError(28, "No space left on device")
            raise self.cause
        return write(self, data)

    monkeypatch.setattr(HashingStream, "write", perhaps)
    monkeypatch.setattr(persistence, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    return state


def test_training_goes_on_while_there_is_no_room_and_saves_again_when_there_is(
    tmp_path: Path, disk: dict[str, Any]
) -> None:
    heard = Heard()
    disk["full"] = lambda: bool(committed(tmp_path / "run")) and len(heard.warnings) < 2
    summary = train(tmp_path, heard, "task_args.step_seconds=0.01")
    assert summary["step"] == 40
    assert committed(tmp_path / "run")[-1] == 40
    assert len(heard.warnings) == 2 and all("No space left on device" in text for text in heard.warnings), (
        heard.warnings
    )
    assert len(set(heard.warnings)) == 2, "of two checkpoints"
    assert "training goes on" in heard.warnings[0] and "\n" not in heard.warnings[0]
    good, passed = checkpoint.latest_good(str(tmp_path / "run" / "checkpoints"), by="sha256")
    assert good is not None and good.step == 40 and passed == []


def test_room_that_comes_back_after_the_last_step_is_waited_for(tmp_path: Path, disk: dict[str, Any]) -> None:
    heard = Heard()
    disk["full"] = lambda: not heard.warnings
    assert train(tmp_path, heard, "checkpoint.every_steps=null")["step"] == 40
    assert committed(tmp_path / "run") == [40] and len(heard.warnings) == 1


def test_a_disk_that_stays_full_fails_the_last_checkpoint_in_a_sentence(tmp_path: Path, disk: dict[str, Any]) -> None:
    disk["full"] = lambda: bool(committed(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"step 40 in .* could not be saved \(No space left on device\)"):
        train(tmp_path, Heard(), "task_args.step_seconds=0.01")
    kept = committed(tmp_path / "run")
    assert kept and kept[-1] < 40, "what was committed before is untouched"


def test_a_start_that_is_superseded_commits_nothing_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "is_current", lambda folder, attempt: False)
    with pytest.raises(CheckpointError, match="another attempt of this run has taken over") as caught:
        train(tmp_path, Heard(), "task_args.step_seconds=0.01")
    assert caught.value.superseded and committed(tmp_path / "run") == []
