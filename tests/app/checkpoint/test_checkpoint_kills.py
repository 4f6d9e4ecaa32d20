"""SIGKILL at every file operation of saving and pruning: what is committed is always whole.

A process that has torch forks a saver per kill, so that all kills take seconds. A saver is killed just before its k-th
operation on files (opening, making, renaming, removing, flushing, syncing, each piece of data, of which half is still
written), for k = 1, 2, … until it gets through. What only fills a buffer is no operation: it leaves the disk as it was.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app import checkpoint
from app.checkpoint.dcp import HashingStream
from tests.app.checkpoint.kit import plain, save, steps
from tests.pool import run_distributed

OPERATIONS = {"open", "mkdir", "link", "rename", "replace", "remove", "unlink", "rmdir", "truncate", "flush", "fsync"}


def test_a_kill_at_any_file_operation(tmp_path: Path) -> None:
    ((kills, newest, states),) = run_distributed(_kill_at_each, 1, tmp_path)
    assert kills >= 25, "the killer saw the operations"
    assert newest == {1, 2}, "there were kills before and after the commit"
    assert len(states) >= 14, "they left as many different folders"
    assert len({size for state in states for name, size in state if name == "step-00000002.distcp"}) > 2, "torn pieces"


def _kill_at_each(_: int, folder: Path) -> tuple[int, set[int], set[frozenset[tuple[str, int]]]]:
    """How many kills, the newest steps after them, and the files with their sizes that each has left."""
    here, newest, states = folder / "c", set[int](), set[frozenset[tuple[str, int]]]()
    kills, killed = 0, True
    _save(folder / "first", 1)
    while killed:
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(folder / "first", here)
        saver = multiprocessing.get_context("fork").Process(target=_save_and_die, args=(here, 2, kills + 1))
        saver.start()
        saver.join()
        assert saver.exitcode in (0, -signal.SIGKILL), f"the saver failed: {saver.exitcode}"
        killed = saver.exitcode != 0
        files = [path for path in here.rglob("*") if path.is_file()]
        states.add(frozenset((path.parent.name + path.suffix, path.stat().st_size) for path in files))
        newest.add(_look(here))
        kills += killed
    return kills, newest, states


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), float(step))}, "n": step}


def _save(folder: Path, step: int) -> None:
    save(folder, step, state=_state(step), keep_last=1, keep_best=False)


def _save_and_die(folder: Path, step: int, at: int) -> None:
    """In a fork, whose saving is killed at its `at`-th operation, if it comes to that."""
    left, write = at, HashingStream.write

    def operation(before_dying: Callable[[], None] = lambda: None) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            before_dying()
            os.kill(os.getpid(), signal.SIGKILL)

    def torn_write(self: HashingStream, data: Any) -> int:
        view = memoryview(data).cast("B")

        def half() -> None:
            write(self, view[: len(view) // 2])
            self._stream.flush()

        operation(half)
        return write(self, view)

    def profile(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in OPERATIONS:
            operation()

    HashingStream.write = torn_write  # type: ignore[method-assign]
    threading.setprofile(profile)  # of the thread that writes
    _save(folder, step)


def _look(folder: Path) -> int:
    """The newest good step of what a killed saver has left. AssertionError: something is wrong with it."""
    good, skipped = checkpoint.latest_good(str(folder))
    assert good is not None and not skipped, f"no good checkpoint, or damaged ones were committed: {skipped}"
    listed = [fault for commit in checkpoint.commits(str(folder)) for fault in checkpoint.verify(commit)]
    assert not listed, f"a damaged checkpoint is listed: {listed}"
    into = _state(0)
    checkpoint.load(good, into)
    assert plain(into) == plain(_state(good.step)), "another step's state"
    checkpoint.sweep(str(folder))
    left = sorted(entry.name for entry in folder.iterdir())
    assert left == sorted(Path(c.path).name for c in checkpoint.commits(str(folder))), f"sweep left {left}"
    assert sorted(p.name for p in Path(good.path).iterdir()) == sorted([*good.files, "COMMIT.json"]), "sweep left files"
    _save(folder, 9)
    assert steps(folder) == [9], "the next save is not the only checkpoint"
    return good.step
