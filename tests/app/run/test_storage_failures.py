"""A storage that is full or unmounted fails the checkpoint, not the run; a start that another has superseded ends."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from app import checkpoint, loop, persistence
from app.checkpoint import CheckpointError
from app.checkpoint.dcp import HashingStream
from app.config_io import load_config
from app.job import Job, Place, SilentChannel
from app.run.manifest import Run
from app.run.prepare import prepare, read_task
from tests.running import LONG, POINTS, Lines, committed, curve, mlflow_run, start_soon, wait_until

# --- real file systems ------------------------------------------------------------------------------------------------


class Mount:
    """A small file system in memory, seen at `here`; `off` and `on` take it away and bring it back as it was."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.here = folder / "disk", folder / "here"
        self.disk.mkdir()
        self.here.mkdir()
        _mount("-t", "tmpfs", "-o", "size=48m", "tmpfs", str(self.disk))
        self.on()

    def on(self) -> None:
        _mount("--bind", str(self.disk), str(self.here))

    def off(self) -> None:
        subprocess.run(["umount", "-l", str(self.here)], check=True)

    def fill(self) -> None:
        """Leaves no room: the disk takes nothing more until `empty`."""
        with (self.disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        (self.disk / "filler").unlink()


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"only root may mount: {done.stderr.strip()}")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    made = Mount(tmp_path)
    try:
        yield made
    finally:
        for place in (made.here, made.disk):
            subprocess.run(["umount", "-l", str(place)], stderr=subprocess.DEVNULL, check=False)


@pytest.mark.slow
def test_a_storage_that_is_unmounted_and_then_full_fails_checkpoints_and_not_the_run(
    tmp_path: Path, mount: Mount
) -> None:
    run = ["train", *POINTS, "train.steps=240", "checkpoint.every_steps=10", "train.log_every=1", "launcher=local"]
    run += ["task_args.step_seconds=0.05", f"task_args.slow_while={tmp_path}/slow"]
    slow = tmp_path / "slow"
    slow.touch()
    process = start_soon([*run, "run.name=run", f"run.storage={mount.here}"])
    lines, folder = Lines(process), mount.here / "run"
    wait_until(lambda: committed(folder))
    mount.off()
    try:
        lines.when("the storage cannot be reached")
        assert psutil.pid_exists(process.pid), lines.text
        assert not list(mount.here.glob("run/checkpoints/*")), "nothing is written where the storage is not"
    finally:
        mount.on()
    before = committed(folder)[-1]
    wait_until(lambda: committed(folder)[-1] > before)
    mount.fill()
    lines.when("metrics wait in memory until there is room")
    lines.when("No space left on device")
    mount.empty()
    slow.unlink()
    assert process.wait(LONG) == 0, lines.text
    said = [line for line in lines.text.splitlines() if "the storage cannot be reached" in line]
    assert said and all("training continues, and the next one is tried when it is due" in line for line in said)
    assert "Traceback" not in lines.text
    good, passed = checkpoint.latest_good(str(folder / "checkpoints"))
    assert good is not None and good.step == 240 and passed == []
    assert list(curve(mount.here, "run")) == list(range(1, 241)), "no point is lost, none twice"
    assert mlflow_run(mount.here, "run").info.status == "FINISHED"


# --- in this process --------------------------------------------------------------------------------------------------


class Heard(SilentChannel):
    """A channel that remembers the warnings, and never asks to stop."""

    def __init__(self, heed: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.heed = heed

    def emit(self, event: dict[str, Any]) -> None:
        if event["type"] == "warning":
            self.warnings.append(event["text"])
            self.heed(event["text"])


def train(storage: Path, heard: Heard, *more: str, opened: Callable[[], None] = lambda: None) -> dict[str, Any]:
    own = ["task=tests.tasks:Points", "train.global_batch_size=16", "train.steps=40", "checkpoint.every_steps=5"]
    config = load_config([], [*own, "run.name=run", f"run.storage={storage}", "strategy=single", *more])
    run = Run(config)
    prepared = prepare(config, read_task(config), 1, devices_per_node=None)
    run.open(prepared.config, prepared.steps)
    job = Job(config, prepared.layout, run.folder, run.attempt, run.manifest.uid, prepared.steps, ".", leased=True)
    opened()
    try:
        return loop.train(job, Place(0, 1, 0, torch.device("cpu")), heard)
    finally:
        run.end("stopped")


def test_a_start_while_the_storage_is_away_waits_for_it_and_does_not_begin_anew(mount: Mount) -> None:
    """The worker's start, not the driver's: as after the death of a worker."""
    train(mount.here, Heard(), "train.steps=20")
    heard = Heard(lambda text: mount.on() if "cannot be reached: waiting for it" in text else None)
    summary = train(mount.here, heard, "train.steps=30", opened=mount.off)
    assert summary["resumed_from"] == 20 and summary["step"] == 30
    assert any("cannot be reached: waiting for it" in text for text in heard.warnings)


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
