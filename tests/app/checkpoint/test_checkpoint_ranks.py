"""Checkpoints of several ranks, and of processes that are killed: any layout reads any other's; a rank that fails is
named on all, and none hangs; what is committed is always whole."""

import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from app import checkpoint
from app.checkpoint import Checkpointer, CheckpointError, NotFinite
from app.checkpoint.dcp import HashingStream
from app.checkpoint.ranks import RankFailed, Ranks
from app.errors import UserError
from experiments.parity.curves import parallelize_trial, run_steps
from experiments.parity.rows import Row
from strategies.parallelize import Options
from tests.app.checkpoint.kit import plain, save, steps
from tests.pool import DistributedFailure, run_distributed
from tests.running import flip
from tests.strategies.models import masked_trial

pytestmark = pytest.mark.alone


def whole(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The model that every layout below is a layout of."""
    return {f"blocks.{i}.w": scale * (torch.arange(7 * 6.0).reshape(7, 6) + 100 * i) for i in range(2)}


def state_of(rank: int | None, scale: float = 1.0) -> dict[str, Any]:
    """All of a state, or the part that this rank has where each has its own block, as stages of a pipeline do."""
    model = {name: tensor for name, tensor in whole(scale).items() if rank is None or f"blocks.{rank}." in name}
    moments = {name: {"exp_avg": whole(2 * scale)[name]} for name in model}
    return {"model": model, "optimizer": {"state": moments, "lr": 0.5 * scale}}


def _staged(rank: int, folder: str) -> list[int]:
    """Bytes this rank copied in each of four saves; before the third, its layout changes on rank 1 alone."""
    checkpointer, state, copied = Checkpointer(folder, keep_last=9), state_of(None), []
    memory: list[list[int]] = []
    for step in (1, 2, 3, 4):
        if step == 3 and rank == 1:
            state["model"]["only.on.1"] = torch.ones(1000)
        checkpointer.save(state, meta={"step": step})
        buffers = checkpointer._stager._buffer._tensors.values()
        assert all(buffer.untyped_storage().nbytes() == buffer.nbytes for buffer in buffers), "else DCP copies it again"
        copied.append(sum(buffer.nbytes for buffer in buffers))
        memory.append([buffer.data_ptr() for buffer in buffers])
        checkpointer.wait()
    assert memory[0] == memory[1] and memory[2] == memory[3], "one piece serves every save of a layout"
    into = {"model": {**whole(0.0), "only.on.1": torch.zeros(1000)}}
    checkpoint.load(checkpoint.commits(folder)[0], into)
    assert all(torch.equal(into["model"][name], t) for name, t in whole().items())
    assert into["model"]["only.on.1"].sum() == 1000
    return copied


def test_replicas_copy_only_what_they_write(tmp_path: Path) -> None:
    tensor = 7 * 6 * 4  # bytes, of four in all
    first, second = run_distributed(_staged, 2, str(tmp_path))
    assert first[:2] == second[:2] == [2 * tensor, 2 * tensor], "evenly"
    assert [one + other for one, other in zip(first, second, strict=True)][2:] == 2 * [4 * tensor + 4000], "once"


def _refused(rank: int, folder: str) -> tuple[str, int, list[str]]:
    save(folder, 1, 2, state=state_of(rank))
    # As under torchrun: rank 0 looks at what a person named, the others wait for what it says.
    found = [checkpoint.find(folder) if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None and found[0].step == 2
    state = state_of(rank, 0.0)
    if rank == 1:
        state["model"]["blocks.1.w"] = torch.zeros(2, 2)
    with pytest.raises(UserError) as caught:
        checkpoint.load(found[0], state)
    if rank == 1:
        flip(Path(folder, "step-00000002", "__1_0.distcp"))
    dist.barrier()
    good, skipped = checkpoint.latest_good(folder)
    return str(caught.value), good.step, skipped


def test_a_difference_and_a_flipped_bit_on_one_rank_are_known_on_all(tmp_path: Path) -> None:
    first, second = run_distributed(_refused, 2, str(tmp_path))
    words, step, skipped = first
    assert first == second and step == 1 and "blocks.1.w is (7, 6) there and (2, 2) here" in words
    assert "__1_0.distcp does not have the content" in skipped[0]


def _plan(rank: int, folder: str) -> None:
    ranks = Ranks(own_group=True)
    assert ranks.run_and_divide(lambda: rank, lambda all_: [10 * each for each in all_]) == 10 * rank
    for what, then in ((lambda: {0: 0}[rank], list), (lambda: 1, lambda all_: [1 // 0])):
        with pytest.raises(RankFailed, match=r"^rank (1: KeyError: 1|0: ZeroDivisionError: .*)$"):
            ranks.run_and_divide(what, then)
    checkpointer = Checkpointer(folder)
    with pytest.raises(NotFinite):
        checkpointer.save(state_of(None), meta={"step": 1}, finite=rank == 0)
    checkpointer.save(state_of(None), meta={"step": 2})
    checkpointer.close()


def test_each_gets_its_own_plan_and_they_save_nothing_that_is_not_finite_on_one(tmp_path: Path) -> None:
    run_distributed(_plan, 2, str(tmp_path))
    assert steps(tmp_path) == [2]


# -- ranks that fail


class Unsendable(Exception):
    """Cannot be pickled, as some libraries' exceptions cannot."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__("the store said no")
        self.lock = threading.Lock()


BREAKS: list[tuple[int, type, str, BaseException, str]] = [
    (1, HashingStream, "write", OSError(28, "No space left on device"), "rank 1: No space left on device"),
    (1, HashingStream, "finish", Unsendable(1, ""), "rank 1: Unsendable: the store said no"),
    (0, Checkpointer, "_make_folder", PermissionError(13, "Permission denied"), "rank 0: Permission denied"),
    (0, Checkpointer, "_commit", OSError(28, "No space left on device"), "rank 0: No space left on device"),
]


def _fail(rank: int, folder: Path) -> list[str]:
    """One step of the second save fails on one rank; what is said, by case."""
    said = []
    for case, (bad, owner, name, error, _) in enumerate(BREAKS):
        checkpointer = Checkpointer(str(folder / str(case)), keep_last=5)
        checkpointer.save(state_of(None), meta={"step": 1})
        checkpointer.wait()
        with pytest.MonkeyPatch.context() as patch:
            if rank == bad:
                patch.setattr(owner, name, Mock(side_effect=error))
            checkpointer.save(state_of(None, 2.0), meta={"step": 2})
            said.append(str(checkpointer._pending.exception(60)))
        # It is not forgotten by looking, and the next save tells it and begins nothing.
        again = partial(checkpointer.save, state_of(None), meta={"step": 3})
        for look in (checkpointer.check, checkpointer.check, again):
            with pytest.raises(CheckpointError, match=f"^{re.escape(said[-1])}$"):
                look()
        checkpointer.check()
        assert steps(folder / str(case)) == [1]
        dist.barrier()
        checkpointer.save(state_of(None, 3.0), meta={"step": 3})
        checkpointer.close()
    return said


def test_one_rank_fails_and_all_say_so_and_the_next_save_works(tmp_path: Path) -> None:
    first, second = run_distributed(_fail, 2, tmp_path, timeout=60)
    assert first == second
    for case, said in enumerate(first):
        assert f"({BREAKS[case][-1]}); those committed before are untouched" in said
        folder = tmp_path / str(case)
        assert "step 2 in " in said and "\n" not in said and steps(folder) == [3, 1]
        assert checkpoint.latest_good(str(folder))[1] == []
        assert len(list(folder.iterdir())) == 2, "what the failed save had written is gone"


def _die(rank: int, folder: str) -> None:
    save(folder, 1, state=state_of(None))
    if rank == 1:
        HashingStream.write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    save(folder, 2, state=state_of(None))


def test_a_killed_rank_leaves_the_commit_before(tmp_path: Path) -> None:
    with pytest.raises(DistributedFailure, match="exit code -9") as caught:
        run_distributed(_die, 2, str(tmp_path), timeout=60)
    assert "CheckpointError" in str(caught.value), "the other rank is told, not left waiting"
    good, passed = checkpoint.latest_good(str(tmp_path))
    assert good is not None and good.step == 1 and passed == []


# -- real strategies

TRIAL = masked_trial()
PIPED: dict[str, Any] = {"options": {"schedule": "1f1b"}, "micro_batches": 2}
WHOLE = [Row("ddp", 2), Row("fsdp", 2), Row("tensor", 2), Row("pipeline", 2, {"pp": 2}, **PIPED)]
IN_PARTS = [Row("context", 2, {"cp": 2}), *(Row(f"{name}+context", 4, {"cp": 2}) for name in ("fsdp", "tensor"))]
IN_PARTS += [Row("pipeline+context", 4, {"cp": 2, "pp": 2}, **PIPED)]
ONE_AFTER_ANOTHER = [Row("hsdp", 4, {"dp_shard": 2}), Row("zero1", 2), IN_PARTS[0]]
ONE_AFTER_ANOTHER += [Row("fsdp+tensor", 4, {"tp": 2}), Row("single", 1)]
PAIRS = [row for pair in (*product(WHOLE, IN_PARTS), *permutations(IN_PARTS, 2)) for row in pair]
"""Each that splits sequences goes on from each other."""


def _go_on(_: int, row: Row, folder: str, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """From the newest checkpoint: this step, a checkpoint, and while it is written the next. Rank 0's weights after
    either."""
    trial, options = row.adapt(TRIAL, Options())
    parallel = parallelize_trial(trial, row.layout, options, torch.device("cpu"))
    optimizer = parallel.prepare_optimizer(trial.optimizer(parallel.parameters()))
    commit, _passed = checkpoint.latest_good(folder)
    if commit is not None:
        state = {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
        checkpoint.load(commit, state)
        parallel.load_model_state(state["model"])
        parallel.load_optimizer_state(optimizer, state["optimizer"])
    run_steps(trial, parallel, optimizer, range(step, step + 1))
    first = {name: tensor.clone() for name, tensor in parallel.full_model_state().items()}
    checkpointer = Checkpointer(folder)
    state = {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
    checkpointer.save(state, meta={"step": step})
    run_steps(trial, parallel, optimizer, range(step + 1, step + 2))
    checkpointer.close()
    return first, parallel.full_model_state()


@pytest.mark.parametrize("rows", [ONE_AFTER_ANOTHER, pytest.param(PAIRS, marks=pytest.mark.slow)], ids=len)
def test_what_one_strategy_saves_another_continues_optimizer_and_all(tmp_path: Path, rows: list[Row]) -> None:
    expected: dict[str, torch.Tensor] = {}
    for step, row in enumerate(rows):
        got, then = run_distributed(_go_on, row.workers, row, str(tmp_path), step)[0]
        assert steps(tmp_path)[0] == step and set(got) == set(expected or got)
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{name}: read by {row}")
        expected = then


# -- SIGKILL at every file operation of saving and pruning

OPERATIONS = {"open", "mkdir", "link", "rename", "replace", "remove", "unlink", "rmdir", "truncate", "flush", "fsync"}


def test_a_kill_at_any_file_operation(tmp_path: Path) -> None:
    """Each saver, a fork of a process that has torch, is killed just before its k-th operation on files (or piece of
    data, half of which is still written), for k = 1, 2, … until one gets through. What only fills a buffer leaves the
    disk as it was, and does not count."""
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
        operation(lambda: write(self, view[: len(view) // 2]) and self._stream.flush())
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
