"""A rank that fails, whatever at, holds nobody up: all ranks say the same, and the next save works."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from app import checkpoint
from app.checkpoint import Checkpointer, CheckpointError
from app.checkpoint.dcp import HashingStream
from tests.app.checkpoint.test_checkpoint_ranks import _save, state_of
from tests.pool import DistributedFailure, run_distributed

pytestmark = pytest.mark.alone


class Unsendable(Exception):
    """Cannot be pickled, as some libraries' exceptions cannot."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__("the store said no")
        self.lock = __import__("threading").Lock()


def _break(kind: str) -> None:
    """Make one step of a save fail in this process, once."""

    def once(owner: Any, name: str, error: BaseException) -> None:
        original = getattr(owner, name)

        def fail(*args: Any, **kwargs: Any) -> None:
            setattr(owner, name, original)
            raise error

        setattr(owner, name, fail)

    full_disk = OSError(28, "No space left on device")
    if kind == "write":
        once(HashingStream, "write", full_disk)
    elif kind == "close":
        once(HashingStream, "finish", Unsendable(1, ""))
    elif kind == "folder":
        once(Checkpointer, "_make_folder", PermissionError(13, "Permission denied"))
    elif kind == "commit":
        once(Checkpointer, "_commit", full_disk)


def _fail(rank: int, folder: str, kind: str, bad: int) -> tuple[str, float]:
    checkpointer = Checkpointer(folder, keep_last=5)
    checkpointer.save(state_of("replicas", rank), meta={"step": 1})
    checkpointer.wait()
    if rank == bad:
        _break(kind)
    checkpointer.save(state_of("replicas", rank, 2.0), meta={"step": 2}, per_rank=rank)
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        checkpointer.wait()
    seconds = time.monotonic() - started
    assert [c.step for c in checkpoint.commits(folder)] == [1]
    dist.barrier()
    checkpointer.save(state_of("replicas", rank, 3.0), meta={"step": 3})
    checkpointer.close()
    return str(caught.value), seconds


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    [
        ("write", 1, "rank 1: No space left on device"),
        ("close", 1, "rank 1: Unsendable: the store said no"),
        ("folder", 0, "rank 0: Permission denied"),
        ("commit", 0, "rank 0: No space left on device"),
    ],
)
def test_one_rank_fails_and_all_say_so(tmp_path: Path, kind: str, bad: int, words: str) -> None:
    outcomes = run_distributed(_fail, 2, str(tmp_path), kind, bad, timeout=60)
    assert len({said for said, _ in outcomes}) == 1
    assert f"({words})" in outcomes[0][0] and "step 2" in outcomes[0][0] and "\n" not in outcomes[0][0]
    assert max(seconds for _, seconds in outcomes) < 10
    assert [c.step for c in checkpoint.commits(str(tmp_path))] == [3, 1]
    assert checkpoint.latest_good(str(tmp_path))[1] == []
    assert len(list(tmp_path.iterdir())) == 2, "what the failed save had written is gone"


def _die(rank: int, folder: str) -> None:
    _save(rank, folder, "replicas")
    if rank == 1:
        HashingStream.write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    checkpointer = Checkpointer(folder)
    checkpointer.save(state_of("replicas", rank), meta={"step": 2})
    checkpointer.close()


def test_a_killed_rank_leaves_the_commit_before(tmp_path: Path) -> None:
    with pytest.raises(DistributedFailure, match="exit code -9") as caught:
        run_distributed(_die, 2, str(tmp_path), timeout=60)
    assert "CheckpointError" in str(caught.value), "the other rank is told, not left waiting"
    good, passed = checkpoint.latest_good(str(tmp_path))
    assert good is not None and good.step == 1 and passed == []
