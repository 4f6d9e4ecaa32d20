"""Storage: the same calls locally and on an object store, atomic writes, and errors.

A storage that is full or unreachable fails the checkpoint, not the run (whole runs: tests/faults).
A start that another one has superseded ends.
"""

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
    """A storage of each kind, without any file."""
    urls = {"local": str(tmp_path), "memory": f"memory://{uuid.uuid4().hex}"}
    url = request.getfixturevalue("bucket") if request.param == "s3" else urls[request.param]
    return Storage(url).join("runs", "a")


def test_every_storage_writes_reads_lists_and_removes(storage: Storage) -> None:
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
    assert Storage("runs").local_path == tmp_path / "runs"
    assert Storage(f"file://{tmp_path}/runs").local_path == tmp_path / "runs"
    assert Storage("~/runs").url == "/home/nobody/runs"
    assert Storage("memory://b/").url == "memory://b"
    with pytest.raises(ValueError, match="not a local folder"):
        _ = Storage("memory://b").local_path


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path)
    storage.write_bytes("marker", b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        storage.write_bytes("marker", b"new")
    assert storage.read_bytes("marker") == b"old" and storage.list() == ["marker"]


def test_a_failure_on_s3_is_one_sentence_and_leaves_no_partial_file(bucket: str) -> None:
    """The sentences for other storages: test_bad_input.py."""
    message = r"s3://absent/runs cannot be written \(The specified bucket does not exist\)"
    with pytest.raises(UserError, match=message):
        Storage("s3://absent/runs").check_writable()
    with pytest.raises(CheckpointError, match="The specified bucket does not exist"):
        save("s3://absent/runs", 1)
    storage = Storage(bucket).join("torn")
    with (
        pytest.raises(ValueError, match="stop"),
        HashedFiles(storage).create_stream("half", "wb") as stream,
    ):
        stream.write(b"half")
        raise ValueError("stop")
    del stream
    assert storage.list() == []


def train(
    storage: Path,
    *overrides: str,
    handle_event: Any = lambda event: None,
    before_training: Any = lambda: None,
) -> dict[str, Any]:
    """Trains 20 steps in this process, and returns the run's summary.

    Args:
        storage: The folder of runs.
        overrides: Values of the configuration.
        handle_event: Gets every event of the worker.
        before_training: Called after the run is opened, before the worker starts.
    """
    defaults = [
        "task=tests.tasks:Points",
        "train.global_batch_size=16",
        "train.steps=20",
        "checkpoint.every_steps=5",
        "run.name=run",
        f"run.storage={storage}",
        "strategy=single",
    ]
    config = load_config([], [*defaults, *overrides])
    run = Run(config)
    channel = SilentChannel()
    channel.emit = handle_event  # type: ignore[method-assign]
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
    before_training()
    try:
        return loop.train(job, place, channel)
    finally:
        run.end("stopped")


def test_an_unreachable_storage_fails_checkpoints_only_and_a_start_waits_for_it(
    tmp_path: Path,
) -> None:
    """It is the start of a worker that waits, as after the death of one, and then resumes."""
    storage = tmp_path / "here"
    moved = tmp_path / "elsewhere"
    warnings = list[str]()

    def take_away() -> None:
        storage.rename(moved)
        storage.mkdir()  # the empty mount point

    def handle_event(event: Event) -> None:
        match event:
            case CheckpointSaved(step=10):
                wait_until(lambda: 10 in committed(storage / "run"))
                take_away()
            case WarningIssued(message=message):
                warnings.append(message)
                files = list(storage.glob("run/checkpoints/*"))
                assert not files, "nothing is written to the mount point"
                shutil.rmtree(storage)
                moved.rename(storage)

    assert train(storage, handle_event=handle_event)["step"] == 20
    assert committed(storage / "run")[-1] == 20
    summary = train(storage, "train.steps=30", handle_event=handle_event, before_training=take_away)
    assert summary["resumed_from"] == 20 and summary["step"] == 30
    failed_save, waiting = warnings
    assert "the storage cannot be reached" in failed_save
    assert "cannot be reached: waiting for it" in waiting
    assert failed_save.endswith("training continues, and the next one is tried when it is due")


def test_a_save_waits_for_room_on_a_full_disk_and_else_fails(
    tmp_path: Path, monkeypatch: Any
) -> None:
    write = HashingStream.write
    disk_is_full = iter([True])

    def write_or_fail(self: HashingStream, data: Any) -> int:
        if next(disk_is_full, False) or committed(tmp_path / "stays") == [5]:
            self.cause = OSError(28, "No space left on device")
            raise self.cause
        return write(self, data)

    monkeypatch.setattr(HashingStream, "write", write_or_fail)
    monkeypatch.setattr(persistence, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    assert train(tmp_path, "run.name=waits", "checkpoint.every_steps=null")["step"] == 20
    assert committed(tmp_path / "waits") == [20]
    assert next(disk_is_full, None) is None, "the disk was full once, then had room"
    message = r"step 20 in .* could not be saved \(No space left on device\).*; make room there, "
    with pytest.raises(CheckpointError, match=message):
        train(tmp_path, "run.name=stays")
    assert committed(tmp_path / "stays") == [5], "the earlier checkpoint is untouched"


def test_a_start_that_is_superseded_commits_nothing_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "is_current", lambda folder, attempt: False)
    message = "another attempt of this run has taken over"
    with pytest.raises(CheckpointError, match=message) as caught:
        train(tmp_path)
    assert caught.value.superseded and committed(tmp_path / "run") == []
