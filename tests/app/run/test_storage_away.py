"""A storage that is unmounted and mounted again, or full for a while: real file systems, real runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import checkpoint
from tests.app.launchers.test_pipeline_in_ray import Lines
from tests.running import POINTS, committed, curve, mlflow_run, start, trireme, wait_until

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount"),
]


class Mount:
    """A small file system in memory, seen at `here`; `off` and `on` take it away and bring it back as it was."""

    def __init__(self, folder: Path, size: str) -> None:
        self.disk, self.here = folder / "disk", folder / "here"
        self.disk.mkdir()
        self.here.mkdir()
        _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self.disk))
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

    def close(self) -> None:
        for place in (self.here, self.disk):
            subprocess.run(["umount", "-l", str(place)], stderr=subprocess.DEVNULL, check=False)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not let root mount: {done.stderr.strip()}")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    made = Mount(tmp_path, "48m")
    try:
        yield made
    finally:
        made.close()


def command(storage: Path, name: str, *more: str) -> list[str]:
    own = ["train", *POINTS, "train.steps=150", "task_args.step_seconds=0.05", "checkpoint.every_steps=10"]
    return [*own, "train.log_every=1", "launcher=local", f"run.name={name}", f"run.storage={storage}", *more]


def assert_as_undisturbed(storage: Path, other: Path) -> None:
    calm = trireme(*command(other, "calm", "task_args.step_seconds=0"))
    assert calm.code == 0, calm.err
    assert curve(storage, "run") == curve(other, "calm"), "no point is lost, none twice"
    assert mlflow_run(storage, "run").info.status == "FINISHED"


def test_a_storage_that_is_unmounted_for_a_while_fails_checkpoints_and_not_the_run(
    tmp_path: Path, mount: Mount
) -> None:
    process = start(command(mount.here, "run"))
    lines, folder = Lines(process), mount.here / "run"
    wait_until(lambda: committed(folder), 60)
    mount.off()
    try:
        lines.when("the storage is away", 30)
        time.sleep(1.0)
        assert process.poll() is None, lines.text
        assert not list(mount.here.glob("run/checkpoints/*")), "nothing is written where the storage is not"
    finally:
        mount.on()
    assert process.wait(90) == 0, lines.text
    said = [line for line in lines.text.splitlines() if "the storage is away" in line]
    assert said and all("training goes on, and the next one is tried when it is due" in line for line in said)
    assert "Traceback" not in lines.text
    good, passed = checkpoint.latest_good(str(folder / "checkpoints"), by="sha256")
    assert good is not None and good.step == 150 and passed == []
    assert_as_undisturbed(mount.here, tmp_path)


def test_a_start_while_the_storage_is_away_waits_for_it_and_does_not_begin_anew(tmp_path: Path, mount: Mount) -> None:
    """The worker's start, not the driver's: as after the death of a worker."""
    import torch

    from app import loop
    from app.config_io import load_config
    from app.job import Job, Place
    from app.run.manifest import Run
    from app.run.prepare import prepare, read_task
    from tests.app.run.test_storage_full import Heard

    first = trireme(*command(mount.here, "run", "train.steps=20", "task_args.step_seconds=0"))
    assert first.code == 0, first.err
    arguments = command(mount.here, "run", "train.steps=30", "task_args.step_seconds=0", "strategy=single")[1:]
    config = load_config([], arguments)
    run = Run(config)
    prepared = prepare(config, read_task(config), 1, devices_per_node=None)
    run.open(prepared.config, prepared.steps)
    job = Job(config, prepared.layout, run.folder, run.attempt, run.manifest.uid, prepared.steps, ".", leased=True)

    class Helper(Heard):
        def emit(self, event: dict) -> None:
            super().emit(event)
            if "is away: waiting for it" in event.get("text", ""):
                mount.on()

    heard = Helper()
    mount.off()
    summary = loop.train(job, Place(0, 1, 0, torch.device("cpu")), heard)
    run.end("finished")
    assert summary["resumed_from"] == 20 and summary["step"] == 30
    assert any("is away: waiting for it" in text for text in heard.warnings)


def test_a_disk_that_is_full_for_a_while_costs_no_point_of_a_curve(tmp_path: Path, mount: Mount) -> None:
    process = start(command(mount.here, "run"))
    lines, folder = Lines(process), mount.here / "run"
    wait_until(lambda: committed(folder), 60)
    mount.fill()
    lines.when("metrics wait in memory until there is room", 30)
    lines.when("No space left on device", 30)
    time.sleep(1.0)
    mount.empty()
    assert process.wait(90) == 0, lines.text
    assert "Traceback" not in lines.text
    assert_as_undisturbed(mount.here, tmp_path)
