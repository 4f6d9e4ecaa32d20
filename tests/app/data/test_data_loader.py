"""The loader: which samples reach which rank in which micro-batch, and the thread that brings them."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from app.data import prefetch
from app.data.loader import micro_batch_slices, train_batches
from app.data.prefetch import Prefetcher
from app.errors import UserError

CPU = torch.device("cpu")
SLOW = 2e-3  # seconds a sample takes, so that a thread pays


class Plain(Dataset[Any]):
    """Sample i is (i as float, i); `broken` raises when asked for; each takes `seconds`."""

    def __init__(self, n: int, broken: int | None = None, seconds: float = 0.0) -> None:
        self.n, self.broken, self.seconds = n, broken, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken:
            raise UserError(f"sample {index} is broken")
        time.sleep(self.seconds)
        return torch.tensor([float(index)]), index


class Noisy(Plain):
    """Each sample carries a random number from torch's global generator, as ordinary augmentation does."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(1), index


class ReadyBatches(Plain):
    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(indices).float()[:, None], torch.tensor(indices)


class SampleLists(Plain):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [self[index] for index in indices]


class Positioned(Plain):
    def batch_at(self, indices: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(positions).float()[:, None], torch.tensor(indices)


def load(dataset: Dataset[Any], *, batch: int, steps: int, **changes: Any) -> list[list[Any]]:
    arguments = {"seed": 7, "micro_batch_size": None, "dp_rank": 0, "dp_size": 1, "samples_seen": 0, "device": CPU}
    return list(train_batches(dataset, global_batch_size=batch, steps=steps, **(arguments | changes)))


def numbers(step: list[Any]) -> list[list[int]]:
    """The sample numbers of each micro-batch of a step."""
    return [micro[1].tolist() for micro in step]


def flat(step: list[Any]) -> list[int]:
    return [number for micro in numbers(step) for number in micro]


@pytest.mark.parametrize("data_workers", [0, 2])
@pytest.mark.parametrize("kind", [Plain, ReadyBatches, SampleLists, Positioned])
def test_every_sample_once_per_epoch(kind: Callable[[int], Plain], data_workers: int) -> None:
    steps = load(kind(20), batch=5, steps=8, micro_batch_size=2, data_workers=data_workers)
    assert [[len(micro) for micro in numbers(step)] for step in steps] == [[2, 2, 1]] * 8
    for epoch in (steps[:4], steps[4:]):
        assert sorted(number for step in epoch for number in flat(step)) == list(range(20))


@pytest.mark.parametrize("data_workers", [0, 1])
def test_all_ways_of_fetching_agree(data_workers: int) -> None:
    wanted = [flat(step) for step in load(Plain(20), batch=6, steps=5)]
    for kind in (ReadyBatches, SampleLists, Positioned):
        assert [flat(step) for step in load(kind(20), batch=6, steps=5, data_workers=data_workers)] == wanted


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    batch=st.integers(1, 24),
    micro=st.none() | st.integers(1, 9),
    seen=st.integers(0, 200),
    data=st.data(),
)
def test_a_step_is_the_same_set_on_any_number_of_workers(
    n: int, batch: int, micro: int | None, seen: int, data: st.DataObject
) -> None:
    dp_size = data.draw(st.integers(1, batch))
    alone = load(ReadyBatches(n), batch=batch, steps=2, samples_seen=seen)
    ranks = [
        load(
            ReadyBatches(n), batch=batch, steps=2, samples_seen=seen, micro_batch_size=micro, dp_rank=r, dp_size=dp_size
        )
        for r in range(dp_size)
    ]
    for step in range(2):
        assert [number for rank in ranks for number in flat(rank[step])] == flat(alone[step])
        assert len({len(rank[step]) for rank in ranks}) == 1
        assert all(len(part) > 0 for rank in ranks for part in numbers(rank[step]))


@pytest.mark.parametrize(
    ("batch", "dp_size", "micro", "sizes"),
    [
        (5, 1, 2, [[2, 2, 1]]),
        (8, 2, 2, [[2, 2], [2, 2]]),
        (6, 1, None, [[6]]),
        (6, 1, 100, [[6]]),
        (10, 2, 2, [[2, 2, 1], [2, 2, 1]]),
        (11, 2, 2, [[2, 2, 2], [2, 2, 1]]),
        (7, 3, 1, [[2, 1], [1, 1], [1, 1]]),
        (7, 2, None, [[4], [3]]),
        (9, 2, 4, [[3, 2], [2, 2]]),
    ],
)
def test_micro_batch_sizes(batch: int, dp_size: int, micro: int | None, sizes: list[list[int]]) -> None:
    cuts = [micro_batch_slices(batch, dp_size, rank, micro) for rank in range(dp_size)]
    assert [[cut.stop - cut.start for cut in rank] for rank in cuts] == sizes


def test_resume_continues_the_stream_exactly() -> None:
    whole = load(Positioned(17), batch=5, steps=10)
    for stopped in (1, 3, 7):
        rest = load(Positioned(17), batch=5, steps=10 - stopped, samples_seen=5 * stopped)
        for before, after in zip(whole[stopped:], rest, strict=True):
            assert torch.equal(before[0][0], after[0][0]) and torch.equal(before[0][1], after[0][1])


def test_resume_with_another_batch_size_and_number_of_workers_repeats_nothing() -> None:
    first = [number for step in load(Plain(24), batch=4, steps=3) for number in flat(step)]
    ranks = [load(Plain(24), batch=6, steps=2, samples_seen=12, dp_rank=rank, dp_size=2) for rank in range(2)]
    second = [number for rank in ranks for step in rank for number in flat(step)]
    assert sorted(first + second) == list(range(24))


def test_positions_run_on_over_epochs_and_ranks() -> None:
    ranks = [load(Positioned(4), batch=6, steps=2, dp_rank=rank, dp_size=2, micro_batch_size=2) for rank in range(2)]
    positions = [[micro[0].flatten().tolist() for micro in step] for rank in ranks for step in rank]
    assert positions == [[[0, 1], [2]], [[6, 7], [8]], [[3, 4], [5]], [[9, 10], [11]]]


def test_micro_batches_give_the_exact_gradient_of_the_whole_batch() -> None:
    """Weighing each micro-batch's mean by its items gives the mean over the batch: 5 by 2, and 11 over 2 ranks."""
    weight = torch.randn(3, 1, dtype=torch.float64)
    targets = torch.arange(50) % 3

    def gradient(steps: list[list[Any]], total: int) -> Tensor:
        parameter = weight.clone().requires_grad_()
        for inputs, index in (micro for step in steps for micro in step):
            loss = F.cross_entropy(inputs.double() / 50 @ parameter.T, targets[index])
            (loss * len(index) / total).backward()
        assert parameter.grad is not None
        return parameter.grad

    whole = gradient(load(Plain(50), batch=5, steps=1), 5)
    assert torch.allclose(whole, gradient(load(Plain(50), batch=5, steps=1, micro_batch_size=2), 5), rtol=0, atol=1e-15)
    whole = gradient(load(Plain(50), batch=11, steps=1), 11)
    ranks = [load(Plain(50), batch=11, steps=1, micro_batch_size=2, dp_rank=r, dp_size=2)[0] for r in range(2)]
    assert torch.allclose(whole, gradient(ranks, 11), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("data_workers", "seconds"), [(0, 0.0), (0, SLOW), (1, 0.0)])
def test_an_exception_surfaces_in_next_and_ends_the_thread(data_workers: int, seconds: float) -> None:
    batches = train_batches(
        Plain(10, broken=3, seconds=seconds), seed=0, global_batch_size=2, micro_batch_size=None, dp_rank=0, dp_size=1,
        samples_seen=0, steps=100, device=CPU, data_workers=data_workers,
    )  # fmt: skip
    with pytest.raises(UserError, match="sample 3 is broken"):
        for _ in range(30):
            next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    assert_nothing_left()


@pytest.mark.parametrize(("data_workers", "seconds"), [(0, 0.0), (0, SLOW), (1, 0.0)])
@pytest.mark.parametrize("how", ["close", "collected", "read to the end", "never read"])
def test_no_thread_or_process_is_left(how: str, data_workers: int, seconds: float) -> None:
    steps = 15 if how == "read to the end" else 10_000
    batches: Prefetcher[Any] | None = train_batches(
        Plain(10, seconds=seconds), seed=0, global_batch_size=2, micro_batch_size=1, dp_rank=0, dp_size=1,
        samples_seen=0, steps=steps, device=CPU, data_workers=data_workers,
    )  # fmt: skip
    assert batches is not None
    if how == "read to the end":
        assert len(list(batches)) == 15
    elif how == "close":
        read_some(batches)
        batches.close()
        batches.close()
        assert list(batches) == []
    elif how == "collected":
        read_some(batches)
    batches = None
    gc.collect()
    assert_nothing_left()


def read_some(batches: Prefetcher[Any]) -> None:
    """Enough for the loader to see whether its data are slow."""
    for _ in range(prefetch.WINDOW + 1):
        next(batches)


@pytest.fixture(autouse=True)
def _others() -> None:
    """Processes that were there before the test: the session's warm pool."""
    OTHERS.update(multiprocessing.active_children())


OTHERS: set[Any] = set()


def assert_nothing_left() -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        threads = [thread for thread in threading.enumerate() if thread.name == "trireme-prefetch"]
        children = set(multiprocessing.active_children()) - OTHERS
        if not threads and not children:
            return
        time.sleep(0.01)
    raise AssertionError(f"left: {threads}, {children}")


class Counting(Plain):
    """Notes what was asked for, and by which thread."""

    def __init__(self, n: int, seconds: float) -> None:
        super().__init__(n, seconds=seconds)
        self.asked: list[str] = []

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked.append(threading.current_thread().name)
        return super().__getitem__(index)


def counted(seconds: float) -> tuple[Counting, Prefetcher[Any]]:
    data = Counting(100, seconds)
    batches = train_batches(
        data, seed=0, global_batch_size=1, micro_batch_size=None, dp_rank=0, dp_size=1,
        samples_seen=0, steps=50, device=CPU,
    )  # fmt: skip
    return data, batches


def test_slow_data_are_made_by_a_thread_a_few_ahead() -> None:
    data, batches = counted(SLOW)
    read_some(batches)  # the last is the thread's
    deadline = time.monotonic() + 5
    while len(data.asked) < prefetch.WINDOW + 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(data.asked) == prefetch.WINDOW + 4  # two wait in the queue, one in the thread's hand
    assert set(data.asked[prefetch.WINDOW :]) == {"trireme-prefetch"}
    batches.close()


def test_cheap_data_are_made_when_asked_for_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CHEAP", 60.0)  # whatever else the machine does
    monkeypatch.setattr(prefetch, "PATIENCE", 60.0)
    data, batches = counted(0.0)
    assert len(list(batches)) == 50
    assert set(data.asked) == {threading.current_thread().name}


@pytest.mark.parametrize("data_workers", [0, 2])
def test_the_global_generator_is_left_alone(data_workers: int) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    load(Plain(20), batch=5, steps=4, data_workers=data_workers)
    assert torch.equal(before, torch.get_rng_state())


def test_data_workers_draw_random_numbers_by_position() -> None:
    once = load(Noisy(16), batch=8, steps=4, data_workers=1)
    rest = load(Noisy(16), batch=8, steps=2, data_workers=2, micro_batch_size=4, samples_seen=16)
    other = load(Noisy(16), batch=8, steps=4, data_workers=1, seed=8)
    assert torch.equal(torch.cat([step[0][0] for step in once[2:]]), torch.cat([m[0] for step in rest for m in step]))
    assert len(torch.cat([step[0][0] for step in once]).unique()) == 32
    assert not torch.equal(once[0][0][0], other[0][0][0])


@pytest.mark.parametrize(
    ("dataset", "batch", "dp_size", "says"),
    [
        (Plain(0), 4, 1, "training data is empty"),
        (Plain(9), 2, 3, "global_batch_size is 2, but 3 data-parallel workers"),
    ],
)
def test_impossible_loading_is_one_sentence(dataset: Plain, batch: int, dp_size: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(dataset, batch=batch, steps=1, dp_size=dp_size)
