"""Which error is told if several processes fail, because a peer of theirs has."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from app.errors import RunFailed
from app.planner.processes import run_to_the_end


def raises_and_ends_late(flag: Path) -> None:
    """Raises, and ends its process some time after the flag is set."""

    def outlive_the_main_thread() -> None:
        threading.main_thread().join()
        flag.touch()
        time.sleep(2)

    threading.Thread(target=outlive_the_main_thread).start()
    raise ValueError("planted")


def is_killed(flag: Path) -> None:
    part = flag.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.replace(flag)
    os.kill(os.getpid(), signal.SIGKILL)


def one_is_stuck(rank: int, flag: Path) -> None:
    """Rank 1 raises; rank 0 ignores requests to end, as one within a library does."""
    if rank == 1:
        while not flag.exists():
            time.sleep(0.01)
        raise ValueError("planted")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    flag.touch()
    time.sleep(600)


def one_fails_before_its_peer(rank: int, fail: Callable[[Path], None], flag: Path) -> None:
    """Rank 1 fails; rank 0 notices it, and its process is the first one to end."""
    if rank == 1:
        fail(flag)
    while not flag.exists():
        time.sleep(0.01)
    pid = flag.read_text()
    while pid and psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie":
        time.sleep(0.01)
    raise RuntimeError("Connection closed by peer [127.0.0.1]")


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (raises_and_ends_late, "^ValueError: planted$"),
        (is_killed, "^process 1 was ended by SIGKILL$"),
    ],
)
def test_the_process_that_failed_first_is_named_and_not_one_that_lost_its_peer(
    tmp_path: Path, fail: Callable[[Path], None], message: str
) -> None:
    with pytest.raises(RunFailed, match=message):
        run_to_the_end(one_fails_before_its_peer, 2, fail, tmp_path / "flag")


def test_a_process_that_is_ended_here_is_not_taken_for_the_one_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"^ValueError: planted$"):
        run_to_the_end(one_is_stuck, 2, tmp_path / "flag")


def leaves_at_once(rank: int) -> None:
    os._exit(3)


def test_a_process_that_ends_without_an_exception_has_failed_too() -> None:
    with pytest.raises(RunFailed, match=r"^process 0 ended with exit code 3$"):
        run_to_the_end(leaves_at_once, 1)
