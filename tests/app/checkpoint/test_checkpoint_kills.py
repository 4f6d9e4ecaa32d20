"""SIGKILL at every file operation of saving and pruning: what is committed is always whole.

One process imports torch and then forks a saver per kill, so that some hundred kills take seconds. A saver is
killed just before its k-th operation on files (opening, making, renaming, removing, syncing, each piece of data,
of which half is still written), for k = 1, 2, … until it gets through.
"""

import io
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from app import checkpoint
from app.checkpoint.dcp import HashingStream
from tests.app.checkpoint.kit import plain, save, steps

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")


def test_a_kill_at_any_file_operation(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        kills, newest = alone.submit(serve, tmp_path / "c").result()
    assert kills >= 30, "the killer saw the operations"
    assert newest == {1, 2}, "there were kills before and after the commit"


def serve(here: Path) -> tuple[int, set[int]]:
    """In a process of its own: how many kills, and the newest steps after them."""
    newest: set[int] = set()
    kills, killed = 0, True
    while killed:
        shutil.rmtree(here, ignore_errors=True)
        _save(here, 1)
        killed = _save_and_die(here, 2, at=kills + 1)
        newest.add(_look(here))
        kills += killed
    return kills, newest


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), float(step))}, "n": step}


def _save(folder: Path, step: int) -> None:
    save(folder, step, state=_state(step), keep_last=1, keep_best=False)


def _save_and_die(folder: Path, step: int, at: int) -> bool:
    """Whether saving, in a fork, was killed at its `at`-th operation (or ended before it came to that)."""
    child = os.fork()
    if child == 0:
        try:
            _arm(at)
            _save(folder, step)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the saver failed: {code}"
    return code != 0


def _arm(at: int) -> None:
    left = at

    def operation(before_dying: Callable[[], None] = lambda: None) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            before_dying()
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS and (event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR)):
            operation()

    write, fsync = HashingStream.write, os.fsync

    def torn_write(self: HashingStream, data: Any) -> int:
        view = memoryview(data).cast("B")

        def half() -> None:
            write(self, view[: len(view) // 2])
            self.flush()

        operation(half)
        return write(self, view)

    def late_fsync(descriptor: int) -> None:
        operation()
        fsync(descriptor)

    def profile(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and isinstance(getattr(called, "__self__", None), io.BufferedWriter):
            operation()  # write, flush, close, the end of a with block

    HashingStream.write = torn_write  # type: ignore[method-assign]
    os.fsync = late_fsync
    sys.addaudithook(audit)
    threading.setprofile(profile)


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
