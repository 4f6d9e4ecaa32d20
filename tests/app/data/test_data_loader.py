"""The loader: which samples reach which rank in which micro-batch, the thread that brings them, and evaluation."""

import gc
import multiprocessing
import threading
from collections import UserDict, namedtuple
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, Subset

from app.data import loader
from app.data.loader import eval_batches, map_tensors, prefetched, rows, tensors, train_batches
from app.errors import UserError
from tests.running import wait_until

CPU = torch.device("cpu")


class Plain(Dataset[Any]):
    """Sample i is (i as float, i); `broken` raises when asked for."""

    def __init__(self, n: int, broken: int | None = None) -> None:
        self.n, self.broken = n, broken

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken:
            raise UserError(f"sample {index} is broken")
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


def begun(dataset: Dataset[Any], *, batch: int, steps: int, **changes: Any) -> Generator[Any]:
    arguments = {"seed": 7, "micro_batch_size": None, "dp_rank": 0, "dp_size": 1, "samples_seen": 0, "device": CPU}
    return train_batches(dataset, global_batch_size=batch, steps=steps, **(arguments | changes))


def load(dataset: Dataset[Any], **arguments: Any) -> list[list[Any]]:
    return list(begun(dataset, **arguments))


def numbers(step: list[Any]) -> list[list[int]]:
    """The sample numbers of each micro-batch of a step."""
    return [micro[1].tolist() for micro in step]


def flat(step: list[Any]) -> list[int]:
    return [number for micro in numbers(step) for number in micro]


@pytest.mark.parametrize("data_workers", [0, 2])
@pytest.mark.parametrize("kind", [Plain, ReadyBatches, SampleLists, Positioned])
def test_every_sample_once_per_epoch_however_it_is_fetched(kind: Callable[[int], Plain], data_workers: int) -> None:
    steps = load(kind(20), batch=5, steps=8, micro_batch_size=2, data_workers=data_workers)
    assert [[len(micro) for micro in numbers(step)] for step in steps] == [[2, 2, 1]] * 8
    for epoch in (steps[:4], steps[4:]):
        assert sorted(number for step in epoch for number in flat(step)) == list(range(20))
    assert [flat(step) for step in steps] == [flat(step) for step in load(Plain(20), batch=5, steps=8)]


@settings(max_examples=60)
@given(
    n=st.integers(1, 40),
    share=st.integers(1, 6),
    dp_size=st.integers(1, 6),
    micro=st.none() | st.integers(1, 9),
    seen=st.integers(0, 200),
)
def test_a_step_is_the_same_set_on_any_number_of_workers(
    n: int, share: int, dp_size: int, micro: int | None, seen: int
) -> None:
    given: dict[str, Any] = {"batch": share * dp_size, "steps": 2, "samples_seen": seen}
    alone = load(ReadyBatches(n), **given)
    given |= {"micro_batch_size": micro, "dp_size": dp_size}
    ranks = [load(ReadyBatches(n), **given, dp_rank=rank) for rank in range(dp_size)]
    for step in range(2):
        assert [number for rank in ranks for number in flat(rank[step])] == flat(alone[step])
        assert len({len(rank[step]) for rank in ranks}) == 1
        assert all(len(part) > 0 for rank in ranks for part in numbers(rank[step]))


def test_resume_continues_the_stream_also_with_another_batch_size_and_number_of_workers() -> None:
    whole = load(Positioned(17), batch=5, steps=10)
    rest = load(Positioned(17), batch=5, steps=7, samples_seen=15)
    for before, after in zip(whole[3:], rest, strict=True):
        assert torch.equal(before[0][0], after[0][0]) and torch.equal(before[0][1], after[0][1])
    first = [number for step in load(Plain(24), batch=4, steps=3) for number in flat(step)]
    ranks = [load(Plain(24), batch=6, steps=2, samples_seen=12, dp_rank=rank, dp_size=2) for rank in range(2)]
    second = [number for rank in ranks for step in rank for number in flat(step)]
    assert sorted(first + second) == list(range(24))


def test_positions_run_on_over_epochs_and_ranks() -> None:
    ranks = [load(Positioned(4), batch=6, steps=2, dp_rank=rank, dp_size=2, micro_batch_size=2) for rank in range(2)]
    positions = [[micro[0].flatten().tolist() for micro in step] for rank in ranks for step in rank]
    assert positions == [[[0, 1], [2]], [[6, 7], [8]], [[3, 4], [5]], [[9, 10], [11]]]


@pytest.mark.parametrize(("data_workers", "ahead"), [(0, 0), (0, 2), (1, 2)])
def test_an_exception_surfaces_in_next_and_no_thread_or_process_is_left(
    data_workers: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU, or, with `ahead`, on a GPU: from a thread."""
    monkeypatch.setattr(loader, "prefetched", partial(prefetched, ahead=ahead))
    others = set(multiprocessing.active_children())  # the session's warm pool

    def training(dataset: Dataset[Any]) -> Generator[Any]:
        return begun(dataset, batch=2, steps=10_000, micro_batch_size=1, data_workers=data_workers)

    batches = training(Plain(10, broken=3))
    with pytest.raises(UserError, match="sample 3 is broken"):
        for _ in range(30):
            next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    batches = training(Plain(10))
    next(batches)
    batches.close()
    assert list(batches) == []
    batches = training(Plain(10))
    next(batches)
    del batches
    gc.collect()
    wait_until(lambda: "trireme-prefetch" not in {thread.name for thread in threading.enumerate()})
    wait_until(lambda: set(multiprocessing.active_children()) <= others)


def test_a_thread_makes_items_a_few_ahead() -> None:
    made: list[str] = []

    def make() -> Iterator[Tensor]:
        while True:
            made.append(threading.current_thread().name)
            yield torch.zeros(1)

    batches = prefetched(make, CPU, ahead=2)
    next(batches)
    wait_until(lambda: len(made) >= 4)  # read, two waiting in the queue, one in the thread's hand
    assert len(made) == 4 and made[0] == "trireme-prefetch"
    batches.close()


@pytest.mark.parametrize("wrapped", [lambda data: data, lambda data: Subset(data, range(16))])
@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_are_drawn_by_position_whatever_the_workers(
    workers: int, wrapped: Callable[[Any], Dataset[Any]]
) -> None:
    """Also through a Subset, whose `__getitems__` is asked for a batch."""
    once = load(wrapped(Noisy(16)), batch=8, steps=4, data_workers=workers)
    torch.manual_seed(99)
    rest = load(wrapped(Noisy(16)), batch=8, steps=2, data_workers=2, micro_batch_size=4, samples_seen=16)
    other = load(wrapped(Noisy(16)), batch=8, steps=4, data_workers=workers, seed=8)
    assert torch.equal(torch.cat([step[0][0] for step in once[2:]]), torch.cat([m[0] for step in rest for m in step]))
    assert len(torch.cat([step[0][0] for step in once]).unique()) == 32
    assert not torch.equal(once[0][0][0], other[0][0][0])


def test_a_thread_leaves_the_generators_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what draws is made between the steps, what does not in a thread that seeds nothing."""
    made: list[str] = []

    class Watched(Plain):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            made.append(threading.current_thread().name)
            return (torch.rand(1) if noisy else torch.zeros(1)), index

    monkeypatch.setattr(loader, "_ahead", lambda device, beside: 2 if beside else 0)
    for noisy, expected in ((True, "MainThread"), (False, "trireme-prefetch")):
        batches = begun(Watched(64), batch=2, steps=30)
        next(batches)
        before = torch.get_rng_state()
        made.clear()
        for _ in range(6):
            next(batches)
        assert set(made) == {expected}
        assert noisy or torch.equal(before, torch.get_rng_state())
        batches.close()


@settings(max_examples=40)
@given(n=st.integers(0, 30), batch=st.integers(1, 9), dp_size=st.integers(1, 5))
def test_evaluation_counts_every_sample_once(n: int, batch: int, dp_size: int) -> None:
    ranks = [
        list(eval_batches(ReadyBatches(n), batch_size=batch, dp_rank=rank, dp_size=dp_size, device=CPU))
        for rank in range(dp_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    assert all((weight == 0) == (number * batch >= -(-(n - r) // dp_size)) for r, rank in enumerate(ranks)
               for number, (_, weight) in enumerate(rank))  # fmt: skip
    counted = [number for rank in ranks for (_, index), weight in rank if weight for number in index.tolist()]
    assert counted == list(range(n))
    total = sum(weight for rank in ranks for _, weight in rank)
    assert total == n
    if n:
        mean = sum(weight * inputs.mean().item() for rank in ranks for (inputs, _), weight in rank) / total
        assert mean == pytest.approx((n - 1) / 2)
    assert all(len(index) > 0 for rank in ranks for (_, index), _ in rank)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_gpu_unharmed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    given: dict[str, Any] = {"batch": 64, "steps": 200, "micro_batch_size": 16}
    wanted = load(ReadyBatches(1000), **given)
    for step, expected in zip(begun(ReadyBatches(1000), device=device, **given), wanted, strict=True):
        assert step[0][0].device == device
        assert numbers(step) == numbers(expected)


def test_a_batch_is_tensors_in_any_nesting() -> None:
    Pair = namedtuple("Pair", "a b")
    encoding = UserDict(ids=torch.ones(1))
    batch = {"x": [torch.ones(3), "kept"], "pair": Pair(torch.zeros(2), 4), "none": None, "hf": encoding}
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert doubled["x"][0].tolist() == [2, 2, 2] and doubled["x"][1] == "kept" and doubled["none"] is None
    assert isinstance(doubled["pair"], Pair) and doubled["pair"].b == 4
    assert isinstance(doubled["hf"], UserDict) and doubled["hf"]["ids"].item() == 2 and encoding["ids"].item() == 1
    assert [len(tensor) for tensor in tensors(batch)] == [3, 2, 1] and rows(batch) == 3
    with pytest.raises(UserError, match="holds no tensor"):
        rows({"x": 3})
