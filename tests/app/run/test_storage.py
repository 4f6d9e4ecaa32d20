"""Storage: the same calls locally and on an object store, atomic writes, and one sentence for a bad place. One that is
full or away fails the checkpoint, not the run (whole runs: tests/faults); a start that another has superseded ends."""

import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from app.checkpoint import CheckpointError
from app.checkpoint.dcp import HashedFiles, HashingStream
from app.config.io import load_config
from app.errors import UserError
from app.run.manifest import Run
from app.run.prepare import prepare, read_task
from app.storage.storage import Storage
from app.training import loop, persistence
from app.training.events import CheckpointSaved, Event, WarningIssued
from app.training.job import Job, Place, SilentChannel
from tests.app.checkpoint.kit import save
from tests.running import committed, wait_until

pytestmark = pytest.mark.pure


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    urls = {"local": str(tmp_path), "memory": f"memory://{uuid.uuid4().hex}"}
    url = request.getfixturevalue("bucket") if request.param == "s3" else urls[request.param]
    return Storage(url).join("runs", "a")


def test_write_read_list_remove(storage: Storage) -> None:
    storage.check_writable()
    assert storage.list() == [] and not storage.exists("one.json")
    storage.write_bytes("one.json", b"1")
    storage.write_bytes("deep/er/two.bin", b"22")
    storage.write_bytes("one.json", b"111")
    assert storage.read_bytes("one.json") == b"111" and storage.size("one.json") == 3
    assert abs(time.time() - storage.modified("one.json")) < 60
    assert storage.list() == ["deep", "one.json"] and storage.list("deep/er") == ["two.bin"]
    assert storage.join("deep", "er").read_bytes("two.bin") == b"22"
    assert storage.exists("deep")
    with storage.open("deep/er/two.bin") as file:
        assert file.read(1) == b"2"
    storage.rename("one.json", "uno.json")
    assert storage.list() == ["deep", "uno.json"]
    for _ in range(2):
        storage.remove("uno.json")
        storage.remove_tree("deep")
    assert storage.list() == []
    for call in (storage.read_bytes, storage.size, storage.modified):
        with pytest.raises(FileNotFoundError):
            call("uno.json")


def test_local_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/nobody")
    assert Storage("runs/../out").url == str(tmp_path / "out")
    assert Storage("runs").local_path == Storage(f"file://{tmp_path}/runs").local_path == tmp_path / "runs"
    assert Storage("~/runs").url == "/home/nobody/runs"
    assert Storage("memory://b/").url == "memory://b"
    with pytest.raises(ValueError, match="not a local folder"):
        _ = Storage("memory://b").local_path


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    storage.write_bytes("marker", b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        storage.write_bytes("marker", b"new")
    assert storage.read_bytes("marker") == b"old" and storage.list() == ["marker"]


def test_what_fails_on_s3_is_a_sentence_and_leaves_no_half_a_file(bucket: str) -> None:
    """Sentences for other places: test_bad_input.py."""
    with pytest.raises(UserError, match=r"s3://absent/runs cannot be written \(The specified bucket does not exist\)"):
        Storage("s3://absent/runs").check_writable()
    with pytest.raises(CheckpointError, match="The specified bucket does not exist"):
        save("s3://absent/runs", 1)
    storage = Storage(bucket).join("torn")
    with pytest.raises(ValueError, match="stop"), HashedFiles(storage).create_stream("half", "wb") as stream:
        stream.write(b"half")
        raise ValueError("stop")
    del stream
    assert storage.list() == []


def train(storage: Path, *more: str, heed: Any = lambda event: None, opened: Any = lambda: None) -> dict[str, Any]:
    """The summary of 20 steps in this process. heed: is told all events. opened: called before the worker begins."""
    own = ["task=tests.tasks:Points", "train.global_batch_size=16", "train.steps=20", "checkpoint.every_steps=5"]
    config = load_config([], [*own, "run.name=run", f"run.storage={storage}", "strategy=single", *more])
    run, channel = Run(config), SilentChannel()
    channel.emit = heed  # type: ignore[method-assign]
    prepared = prepare(config, read_task(config), 1, devices_per_node=None)
    run.open(prepared.config, prepared.steps)
    job = Job(
        config=config,
        layout=prepared.layout,
        folder=run.folder,
        attempt=run.attempt,
        run_uid=run.manifest.uid,
        steps=prepared.steps,
        cwd=".",
        leased=True,
    )
    place = Place(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    opened()
    try:
        return loop.train(job, place, channel)
    finally:
        run.end("stopped")


def test_a_storage_that_is_away_fails_checkpoints_and_not_the_run_and_a_start_waits_for_it(tmp_path: Path) -> None:
    """The worker's start, not the driver's: as after the death of a worker; it does not begin anew."""
    here, elsewhere, warnings = tmp_path / "here", tmp_path / "elsewhere", list[str]()

    def take_away() -> None:
        here.rename(elsewhere)
        here.mkdir()  # where it was mounted

    def heed(event: Event) -> None:
        match event:
            case CheckpointSaved(step=10):
                wait_until(lambda: 10 in committed(here / "run"))
                take_away()
            case WarningIssued(message=message):
                warnings.append(message)
                assert not list(here.glob("run/checkpoints/*")), "nothing is written where the storage is not"
                shutil.rmtree(here)
                elsewhere.rename(here)

    assert train(here, heed=heed)["step"] == 20 and committed(here / "run")[-1] == 20
    summary = train(here, "train.steps=30", heed=heed, opened=take_away)
    assert summary["resumed_from"] == 20 and summary["step"] == 30
    failed, waits = warnings
    assert "the storage cannot be reached" in failed and "cannot be reached: waiting for it" in waits
    assert failed.endswith("training continues, and the next one is tried when it is due")


def test_a_full_disk_is_waited_for_and_else_fails_the_last_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    write, full = HashingStream.write, iter([True])

    def perhaps(self: HashingStream, data: Any) -> int:
        if next(full, False) or committed(tmp_path / "stays") == [5]:
            self.cause = OSError(28, "No space left on device")
            raise self.cause
        return write(self, data)

    monkeypatch.setattr(HashingStream, "write", perhaps)
    monkeypatch.setattr(persistence, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    assert train(tmp_path, "run.name=waits", "checkpoint.every_steps=null")["step"] == 20
    assert committed(tmp_path / "waits") == [20] and next(full, None) is None, "there was room again at the end"
    with pytest.raises(CheckpointError, match=r"step 20 in .* could not be saved \(No space left on device\)"):
        train(tmp_path, "run.name=stays")
    assert committed(tmp_path / "stays") == [5], "what was committed before is untouched"


def test_a_start_that_is_superseded_commits_nothing_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "is_current", lambda folder, attempt: False)
    with pytest.raises(CheckpointError, match="another attempt of this run has taken over") as caught:
        train(tmp_path)
    assert caught.value.superseded and committed(tmp_path / "run") == []
