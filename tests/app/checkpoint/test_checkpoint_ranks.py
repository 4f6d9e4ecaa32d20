"""Checkpoints of several ranks, of which any may fail or be killed.

Any layout reads the checkpoints of any other. When a rank fails, all ranks name it and none hangs.
A committed checkpoint is always complete.
"""

import contextlib
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
from experiments.benchmarks.scale_resume import ExchangedBytes
from experiments.parity.curves import parallelize_trial, run_steps
from experiments.parity.rows import Row
from strategies.parallelize import Options
from tests.app.checkpoint.kit import plain, save, steps
from tests.pool import DistributedFailure, run_distributed
from tests.running import flip
from tests.strategies.models import masked_trial

pytestmark = pytest.mark.alone


def full_model(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The unsplit model, whose values are multiplied by `scale`."""
    return {
        f"blocks.{i}.w": scale * (torch.arange(7 * 6.0).reshape(7, 6) + 100 * i) for i in range(2)
    }


def state_of(rank: int | None, scale: float = 1.0) -> dict[str, Any]:
    """The whole state, or the block that this rank holds as a stage of a pipeline would."""
    model = {
        name: tensor
        for name, tensor in full_model(scale).items()
        if rank is None or f"blocks.{rank}." in name
    }
    moments = {name: {"exp_avg": full_model(2 * scale)[name]} for name in model}
    return {"model": model, "optimizer": {"state": moments, "lr": 0.5 * scale}}


def _staged(rank: int, folder: str) -> list[int]:
    """Bytes that this rank copies per save; the state of rank 1 grows before the third of four."""
    checkpointer = Checkpointer(folder, keep_last=9)
    state = state_of(None)
    bytes_copied = []
    memory: list[list[int]] = []
    for step in (1, 2, 3, 4):
        if step == 3 and rank == 1:
            state["model"]["only.on.1"] = torch.ones(1000)
        checkpointer.save(state, meta={"step": step})
        buffers = checkpointer._stager._buffer._tensors.values()
        for buffer in buffers:
            nbytes = buffer.untyped_storage().nbytes()
            assert nbytes == buffer.nbytes, "DCP would copy a part of a storage again"
        bytes_copied.append(sum(buffer.nbytes for buffer in buffers))
        memory.append([buffer.data_ptr() for buffer in buffers])
        checkpointer.wait()
    assert memory[0] == memory[1]
    assert memory[2] == memory[3], "the buffers are reused while the state keeps its shapes"
    loaded = {"model": {**full_model(0.0), "only.on.1": torch.zeros(1000)}}
    checkpoint.load(checkpoint.commits(folder)[0], loaded)
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in full_model().items())
    assert loaded["model"]["only.on.1"].sum() == 1000
    return bytes_copied


def test_replicas_copy_only_what_they_write(tmp_path: Path) -> None:
    tensor_bytes = 7 * 6 * 4  # of each of four tensors
    first, second = run_distributed(_staged, 2, str(tmp_path))
    assert first[:2] == second[:2] == [2 * tensor_bytes, 2 * tensor_bytes], "each rank copies half"
    totals = [bytes_0 + bytes_1 for bytes_0, bytes_1 in zip(first, second, strict=True)]
    expected = 4 * tensor_bytes + 4000
    assert totals[2:] == [expected, expected], "every tensor is copied once"


def _refused(rank: int, folder: str) -> tuple[str, int, list[str]]:
    """The error of a state that differs, and the step that is usable once a file is damaged."""
    save(folder, 1, 2, state=state_of(rank))
    # As under torchrun: rank 0 finds the checkpoint, and broadcasts it to the others.
    checkpoints = [checkpoint.find(folder) if rank == 0 else None]
    dist.broadcast_object_list(checkpoints, src=0)
    (commit,) = checkpoints
    assert commit is not None and commit.step == 2
    state = state_of(rank, 0.0)
    if rank == 1:
        state["model"]["blocks.1.w"] = torch.zeros(2, 2)
    with pytest.raises(UserError) as caught:
        checkpoint.load(commit, state)
    if rank == 1:
        flip(Path(folder, "step-00000002", "__1_0.distcp"))
    dist.barrier()
    usable, skipped = checkpoint.latest_good(folder)
    return str(caught.value), usable.step, skipped


def test_a_difference_and_a_flipped_bit_on_one_rank_are_known_on_all(tmp_path: Path) -> None:
    first, second = run_distributed(_refused, 2, str(tmp_path))
    message, step, skipped = first
    assert first == second and step == 1
    assert "blocks.1.w is (7, 6) there and (2, 2) here" in message
    assert "__1_0.distcp does not have the content" in skipped[0]


def _plan(rank: int, folder: str) -> None:
    ranks = Ranks(own_group=True)
    plan = ranks.run_and_divide(lambda: rank, lambda values: [10 * value for value in values])
    assert plan == 10 * rank
    with pytest.raises(RankFailed, match=r"^rank 1: KeyError: 1$"):
        ranks.run_and_divide(lambda: {0: 0}[rank], list)
    with pytest.raises(RankFailed, match=r"^rank 0: ZeroDivisionError: .*$"):
        ranks.run_and_divide(lambda: 1, lambda values: [1 // 0])
    checkpointer = Checkpointer(folder)
    with pytest.raises(NotFinite):
        checkpointer.save(state_of(None), meta={"step": 1}, finite=rank == 0)
    checkpointer.save(state_of(None), meta={"step": 2})
    checkpointer.close()


def test_each_rank_gets_its_plan_and_none_saves_a_state_not_finite_on_one(tmp_path: Path) -> None:
    run_distributed(_plan, 2, str(tmp_path))
    assert steps(tmp_path) == [2]


def _bytes_of_saves(rank: int, folder: str, tensors: int) -> list[int]:
    """What this rank exchanges for each of six saves; the fourth fails, the sixth has more."""
    state: dict[str, Any] = {f"w{number}": torch.ones(8) for number in range(tensors)}
    counts = []
    exchanged = ExchangedBytes()
    with exchanged.counting():
        checkpointer = Checkpointer(folder, keep_last=9)
        for step in range(1, 7):
            if step == 6:
                state["another"] = torch.ones(8)
            with pytest.MonkeyPatch.context() as failing:
                if step == 4 and rank == 0:
                    failing.setattr(Checkpointer, "_commit", Mock(side_effect=DISK_FULL))
                checkpointer.save({"model": state}, meta={"step": step})
                with contextlib.suppress(CheckpointError):
                    checkpointer.wait()
            counts.append(exchanged.count - sum(counts))
    for commit in checkpoint.commits(folder):
        loaded = {"model": {f"w{number}": torch.zeros(8) for number in range(tensors)}}
        if commit.step == 6:
            loaded["model"]["another"] = torch.zeros(8)
        checkpoint.load(commit, loaded)
        assert all(float(tensor.sum()) == 8 for tensor in loaded["model"].values())
    return counts


def test_what_ranks_tell_each_other_for_a_save_is_told_once(tmp_path: Path) -> None:
    few = run_distributed(_bytes_of_saves, 2, str(tmp_path / "few"), 10)
    many = run_distributed(_bytes_of_saves, 2, str(tmp_path / "many"), 200)
    assert steps(tmp_path / "many") == [6, 5, 3, 2, 1]
    for of_few, of_many in zip(few, many, strict=True):
        first, second, third, _, after_failure, changed = of_many
        assert first > 10 * of_few[0] / 2 > 0, "the plan and the places of all tensors"
        assert second <= of_few[1] + 64 and third <= of_few[2] + 64, "of any number of tensors"
        assert second < first / 20
        assert second < after_failure < first, "the places are told again, the plan is not"
        assert changed > after_failure, "a tensor more changes the plan"


# -- ranks that fail


class Unsendable(Exception):
    """An exception that cannot be pickled, as those of some libraries."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__("the store said no")
        self.lock = threading.Lock()


DISK_FULL = OSError(28, "No space left on device")
FORBIDDEN = PermissionError(13, "Permission denied")
FAILURES: list[tuple[int, type, str, BaseException, str]] = [
    (1, HashingStream, "write", DISK_FULL, "rank 1: No space left on device"),
    (1, HashingStream, "finish", Unsendable(1, ""), "rank 1: Unsendable: the store said no"),
    (0, Checkpointer, "_make_folder", FORBIDDEN, "rank 0: Permission denied"),
    (0, Checkpointer, "_commit", DISK_FULL, "rank 0: No space left on device"),
]
"""The rank that fails, the method that raises there, its error, and the message on all ranks."""


def _fail(rank: int, folder: Path) -> list[str]:
    """The messages on this rank when the second save fails on one rank, for each failure."""
    messages = []
    for case, (failing_rank, owner, name, error, _) in enumerate(FAILURES):
        checkpointer = Checkpointer(str(folder / str(case)), keep_last=5)
        checkpointer.save(state_of(None), meta={"step": 1})
        checkpointer.wait()
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing_rank:
                patch.setattr(owner, name, Mock(side_effect=error))
            checkpointer.save(state_of(None, 2.0), meta={"step": 2})
            messages.append(str(checkpointer._pending.exception(60)))
        # check() does not consume the error, and the next save raises it and writes nothing.
        save_again = partial(checkpointer.save, state_of(None), meta={"step": 3})
        for call in (checkpointer.check, checkpointer.check, save_again):
            with pytest.raises(CheckpointError, match=f"^{re.escape(messages[-1])}$"):
                call()
        checkpointer.check()
        assert steps(folder / str(case)) == [1]
        dist.barrier()
        checkpointer.save(state_of(None, 3.0), meta={"step": 3})
        checkpointer.close()
    return messages


def test_one_rank_fails_and_all_say_so_and_the_next_save_works(tmp_path: Path) -> None:
    first, second = run_distributed(_fail, 2, tmp_path, timeout=60)
    assert first == second
    for case, message in enumerate(first):
        assert f"({FAILURES[case][-1]}); those committed before are untouched" in message
        folder = tmp_path / str(case)
        assert "step 2 in " in message and "\n" not in message and steps(folder) == [3, 1]
        assert checkpoint.latest_good(str(folder))[1] == []
        assert len(list(folder.iterdir())) == 2, "the files of the failed save are deleted"


def _die(rank: int, folder: str) -> None:
    save(folder, 1, state=state_of(None))
    if rank == 1:
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        HashingStream.write = lambda *_: kill()  # type: ignore[assignment,method-assign]
    save(folder, 2, state=state_of(None))


def test_a_killed_rank_leaves_the_commit_before(tmp_path: Path) -> None:
    with pytest.raises(DistributedFailure, match="exit code -9") as caught:
        run_distributed(_die, 2, str(tmp_path), timeout=60)
    assert "CheckpointError" in str(caught.value), "the other rank fails too, and does not hang"
    usable, skipped = checkpoint.latest_good(str(tmp_path))
    assert usable is not None and usable.step == 1 and skipped == []


# -- real strategies

TRIAL = masked_trial()
PIPED: dict[str, Any] = {"options": {"schedule": "1f1b"}, "micro_batches": 2}
UNSPLIT = [Row("ddp", 2), Row("fsdp", 2), Row("tensor", 2), Row("pipeline", 2, {"pp": 2}, **PIPED)]
SPLIT = [
    Row("context", 2, {"cp": 2}),
    Row("fsdp+context", 4, {"cp": 2}),
    Row("tensor+context", 4, {"cp": 2}),
    Row("pipeline+context", 4, {"cp": 2, "pp": 2}, **PIPED),
]
"""Layouts that split sequences."""
CHAIN = [
    Row("hsdp", 4, {"dp_shard": 2}),
    Row("zero1", 2),
    SPLIT[0],
    Row("fsdp+tensor", 4, {"tp": 2}),
    Row("single", 1),
]
"""Each layout continues from the checkpoint of the one before."""
PAIRS = [row for pair in (*product(UNSPLIT, SPLIT), *permutations(SPLIT, 2)) for row in pair]
"""Every layout that splits sequences continues from every other layout."""


def _continue(
    _: int, row: Row, folder: str, step: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Continues from the newest checkpoint for two steps, and saves one after the first.

    Returns:
        Rank 0's weights after the first step and after the second, which runs during the save.
    """
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


@pytest.mark.parametrize("rows", [CHAIN, pytest.param(PAIRS, marks=pytest.mark.slow)], ids=len)
def test_every_strategy_continues_from_the_checkpoint_of_another(
    tmp_path: Path, rows: list[Row]
) -> None:
    expected: dict[str, torch.Tensor] = {}
    for step, row in enumerate(rows):
        loaded, continued = run_distributed(_continue, row.workers, row, str(tmp_path), step)[0]
        assert steps(tmp_path)[0] == step and set(loaded) == set(expected or loaded)
        for name, tensor in expected.items():
            torch.testing.assert_close(
                loaded[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{name}: read by {row}"
            )
        expected = continued


# -- SIGKILL at every file operation of saving and pruning

OPERATIONS = {
    "open",
    "mkdir",
    "link",
    "rename",
    "replace",
    "remove",
    "unlink",
    "rmdir",
    "truncate",
    "flush",
    "fsync",
}


def test_a_kill_at_any_file_operation(tmp_path: Path) -> None:
    """The k-th saver is killed before its k-th operation on files, until one is not killed.

    A saver is a fork of a process that has imported torch. Half of a write is still done before
    the kill. Operations that only fill a buffer do not change the disk, and do not count.
    """
    ((kills, newest, states),) = run_distributed(_kill_at_each, 1, tmp_path)
    assert kills >= 25, "operations were counted"
    assert newest == {1, 2}, "there were kills before and after the commit"
    assert len(states) >= 14, "the kills left folders in that many states"
    sizes = {size for state in states for name, size in state if name == "step-00000002.distcp"}
    assert len(sizes) > 2, "some kills left a part of a file"


def _kill_at_each(_: int, folder: Path) -> tuple[int, set[int], set[frozenset[tuple[str, int]]]]:
    """The number of kills, and the newest steps and the states of the folder after them.

    A state is the set of the files' names and sizes.
    """
    copy = folder / "c"
    newest = set[int]()
    states = set[frozenset[tuple[str, int]]]()
    kills = 0
    killed = True
    _save(folder / "first", 1)
    while killed:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder / "first", copy)
        saver = multiprocessing.get_context("fork").Process(
            target=_save_and_die, args=(copy, 2, kills + 1)
        )
        saver.start()
        saver.join()
        assert saver.exitcode in (0, -signal.SIGKILL), f"the saver failed: {saver.exitcode}"
        killed = saver.exitcode != 0
        files = [path for path in copy.rglob("*") if path.is_file()]
        states.add(
            frozenset((path.parent.name + path.suffix, path.stat().st_size) for path in files)
        )
        newest.add(_checked_step(copy))
        kills += killed
    return kills, newest, states


def _state(step: int) -> dict[str, Any]:
    """A state of one tensor that holds `step`."""
    return {"model": {"w": torch.full((64,), float(step))}, "n": step}


def _save(folder: Path, step: int) -> None:
    save(folder, step, state=_state(step), keep_last=1, keep_best=False)


def _save_and_die(folder: Path, step: int, operation_number: int) -> None:
    """Saves in a fork that kills itself at the operation of that number, if there are so many."""
    operations_left = operation_number
    write = HashingStream.write

    def operation(before_dying: Callable[[], None] = lambda: None) -> None:
        nonlocal operations_left
        operations_left -= 1
        if operations_left == 0:
            before_dying()
            os.kill(os.getpid(), signal.SIGKILL)

    def torn_write(self: HashingStream, data: Any) -> int:
        view = memoryview(data).cast("B")
        operation(lambda: write(self, view[: len(view) // 2]) and self._stream.flush())
        return write(self, view)

    def profile(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in OPERATIONS:
            operation()

    HashingStream.write = torn_write  # type: ignore[method-assign]
    threading.setprofile(profile)  # for the thread that writes
    _save(folder, step)


def _checked_step(folder: Path) -> int:
    """The newest usable step that a killed saver left.

    Raises:
        AssertionError: The folder is in a state that a kill may not leave.
    """
    usable, skipped = checkpoint.latest_good(str(folder))
    assert usable is not None
    assert not skipped, f"no good checkpoint, or damaged ones were committed: {skipped}"
    faults = [
        fault for commit in checkpoint.commits(str(folder)) for fault in checkpoint.verify(commit)
    ]
    assert not faults, f"a damaged checkpoint is listed: {faults}"
    loaded = _state(0)
    checkpoint.load(usable, loaded)
    assert plain(loaded) == plain(_state(usable.step)), "another step's state"
    checkpoint.sweep(str(folder))
    folders = sorted(entry.name for entry in folder.iterdir())
    expected = sorted(Path(commit.path).name for commit in checkpoint.commits(str(folder)))
    assert folders == expected, f"sweep left {folders}"
    files = sorted(path.name for path in Path(usable.path).iterdir())
    assert files == sorted([*usable.files, "COMMIT.json"]), "sweep left files"
    _save(folder, 9)
    assert steps(folder) == [9], "the next save is not the only checkpoint"
    return usable.step
