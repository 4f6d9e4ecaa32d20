"""The loader: the samples of each rank and micro-batch, the prefetching thread, and evaluation."""

import itertools
import multiprocessing
import threading
from collections import UserDict, namedtuple
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, Subset

from app.config.batch_schedule import BatchSchedule
from app.data import loader
from app.data.loader import (
    PROBED,
    eval_batches,
    map_tensors,
    prefetched,
    rows,
    tensors,
    train_batches,
)
from app.data.order import Order
from app.errors import UserError
from tests.running import wait_until

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")


class Plain(Dataset[Any]):
    """Sample i is (`make_value(i)` or i as a float, i); the sample `broken_index` raises."""

    def __init__(
        self,
        length: int,
        broken_index: int | None = None,
        make_value: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.length = length
        self.broken_index = broken_index
        self.make_value = make_value

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken_index:
            raise UserError(f"sample {index} is broken")
        return self.make_value(index) if self.make_value else torch.tensor([float(index)]), index


class ReadyBatches(Plain):
    """Fetches a whole batch at once, as tensors."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(indices).float()[:, None], torch.tensor(indices)


class SampleLists(Plain):
    """Fetches a whole batch at once, as a list of samples."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [self[index] for index in indices]


class Positioned(Plain):
    """Its inputs are the positions of samples in the order of data."""

    def batch_at(self, indices: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(positions).float()[:, None], torch.tensor(indices)


def batches_of(
    dataset: Dataset[Any], *, batch: int | BatchSchedule, steps: int, **options: Any
) -> Generator[Any]:
    """The steps of one rank, with `batch` samples in all; each step is a list of micro-batches."""
    batches = BatchSchedule.constant(batch) if isinstance(batch, int) else batch
    arguments = {
        "seed": 7,
        "micro_batch_size": None,
        "dp_rank": 0,
        "dp_size": 1,
        "samples_seen": 0,
        "device": CPU,
    }
    return train_batches(dataset, batches=batches, steps=steps, **(arguments | options))


def load(dataset: Dataset[Any], **arguments: Any) -> list[list[Any]]:
    return list(batches_of(dataset, **arguments))


def numbers(step: list[Any]) -> list[list[int]]:
    """The sample numbers of each micro-batch of a step."""
    return [micro_batch[1].tolist() for micro_batch in step]


@settings(max_examples=80)
@given(
    dataset_class=st.sampled_from([Plain, ReadyBatches, SampleLists, Positioned]),
    length=st.integers(1, 40),
    share=st.integers(1, 6),
    dp_size=st.integers(1, 6),
    micro_batch_size=st.none() | st.integers(1, 9),
    samples_seen=st.integers(0, 200),
)
def test_ranks_get_equal_shares_of_the_samples_from_any_position_on(
    dataset_class: Callable[[int], Plain],
    length: int,
    share: int,
    dp_size: int,
    micro_batch_size: int | None,
    samples_seen: int,
) -> None:
    """Each sample comes once per epoch, also after a resume with another number of workers."""
    options: dict[str, Any] = {
        "batch": share * dp_size,
        "steps": 2,
        "samples_seen": samples_seen,
        "micro_batch_size": micro_batch_size,
    }
    ranks = [
        load(dataset_class(length), **options, dp_size=dp_size, dp_rank=rank)
        for rank in range(dp_size)
    ]
    expected_sizes = [len(part) for part in torch.arange(share).split(micro_batch_size or share)]
    for rank in ranks:
        assert [len(micro_batch) for micro_batch in numbers(rank[0])] == expected_sizes
    micro_batches = []
    for step in range(2):
        for rank in ranks:
            micro_batches += rank[step]
    order = Order(length, 7).indices(samples_seen, 2 * share * dp_size).tolist()
    assert list(itertools.chain(*numbers(micro_batches))) == order
    values = [value for inputs, _ in micro_batches for value in inputs.flatten().tolist()]
    positions = list(range(samples_seen, samples_seen + len(order)))
    assert values == (positions if dataset_class is Positioned else order)


@pytest.mark.parametrize(("data_workers", "ahead"), [(0, 0), (1, 2)])
def test_an_exception_surfaces_and_leaves_no_thread_or_process(
    data_workers: int, ahead: int, monkeypatch: Any
) -> None:
    """With `ahead` batches come from a thread, as on a GPU; otherwise as on a CPU."""
    monkeypatch.setattr(loader, "prefetched", partial(prefetched, ahead=ahead))
    earlier_children = set(multiprocessing.active_children())  # the session's warm pool
    options: dict[str, Any] = {
        "batch": 2,
        "steps": 10_000,
        "micro_batch_size": 1,
        "data_workers": data_workers,
    }
    batches = batches_of(Plain(10, broken_index=3), **options)
    with pytest.raises(UserError, match="sample 3 is broken"):
        for _ in range(30):
            next(batches)
    assert list(batches) == []
    batches = batches_of(Plain(10), **options)
    next(batches)
    batches.close()
    assert list(batches) == []
    wait_until(lambda: "trireme-prefetch" not in {thread.name for thread in threading.enumerate()})
    wait_until(lambda: set(multiprocessing.active_children()) <= earlier_children)


@pytest.mark.parametrize(
    ("workers", "wrap"), [(0, lambda data: Subset(data, range(16))), (1, lambda data: data)]
)
def test_random_numbers_depend_on_the_position_and_not_on_workers(workers: int, wrap: Any) -> None:
    """Also through a Subset, which is asked for whole batches; and so do samples without them."""
    noisy = wrap(Plain(16, make_value=lambda index: torch.rand(1)))
    uninterrupted = load(noisy, batch=8, steps=4, data_workers=workers)
    torch.manual_seed(99)
    resumed = load(noisy, batch=8, steps=2, data_workers=2, micro_batch_size=4, samples_seen=16)
    other_seed = load(noisy, batch=8, steps=1, seed=8)
    assert torch.equal(
        torch.cat([step[0][0] for step in uninterrupted[2:]]),
        torch.cat([micro_batch[0] for step in resumed for micro_batch in step]),
    )
    assert len(torch.cat([step[0][0] for step in uninterrupted]).unique()) == 32
    assert not torch.equal(uninterrupted[0][0][0], other_seed[0][0][0])
    with_workers = load(ReadyBatches(9), batch=4, steps=5, data_workers=workers)
    without_workers = load(ReadyBatches(9), batch=4, steps=5, data_workers=0)
    assert [numbers(step) for step in with_workers] == [numbers(step) for step in without_workers]


@pytest.mark.parametrize("noisy", [True, False])
def test_a_thread_prefetches_only_samples_without_random_numbers(
    noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: samples that draw numbers are made between steps, others in a thread."""
    threads_used: list[str] = []

    def value(index: int) -> Tensor:
        threads_used.append(threading.current_thread().name)
        return torch.rand(1) if noisy else torch.zeros(1)

    monkeypatch.setattr(loader, "_ahead", lambda device, in_thread: 2 if in_thread else 0)
    batches = batches_of(Plain(64, make_value=value), batch=1, steps=30)
    threads_used.clear()
    next(batches)
    if not noisy:
        # One is read, two wait in the queue, and the thread holds one.
        wait_until(lambda: len(threads_used) >= PROBED + 4)
        assert len(threads_used) == PROBED + 4
    before = torch.get_rng_state()
    threads_used.clear()
    for _ in range(6):
        next(batches)
    assert set(threads_used) == {"MainThread" if noisy else "trireme-prefetch"}
    assert noisy or torch.equal(before, torch.get_rng_state())
    batches.close()


@settings(max_examples=30)
@given(
    length=st.integers(0, 30),
    batch=st.integers(1, 9),
    dp_size=st.integers(1, 5),
    whole_batches=st.booleans(),
)
def test_evaluation_counts_every_sample_once(
    length: int, batch: int, dp_size: int, whole_batches: bool
) -> None:
    options: dict[str, Any] = {"batch_size": batch, "dp_size": dp_size, "device": CPU}
    options["whole_batches"] = whole_batches
    ranks = [
        list(eval_batches(ReadyBatches(length), **options, dp_rank=rank)) for rank in range(dp_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    numbers_counted = []
    for rank in ranks:
        for (_, indices), weight in rank:
            assert len(indices) > 0 and weight in (0, len(indices))
            if weight:
                numbers_counted += indices.tolist()
                # Where samples meet in a metric, its batches must not depend on the ranks.
                assert not whole_batches or indices[0] % batch == 0
                assert not whole_batches or len(indices) == min(batch, length - int(indices[0]))
    assert numbers_counted == list(range(length))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_gpu_unchanged() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    options: dict[str, Any] = {"batch": 64, "steps": 200, "micro_batch_size": 16}
    batches_on_cpu = load(ReadyBatches(1000), **options)
    batches_on_gpu = batches_of(ReadyBatches(1000), device=device, **options)
    for step, expected in zip(batches_on_gpu, batches_on_cpu, strict=True):
        assert step[0][0].device == device
        assert numbers(step) == numbers(expected)


def test_a_batch_is_tensors_in_any_nesting() -> None:
    pair = namedtuple("Pair", "a b")(torch.zeros(2), 4)
    encoding = UserDict(ids=torch.ones(1))
    batch = {"x": [torch.ones(3), "kept"], "pair": pair, "none": None, "hf": encoding}
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert doubled["x"][0].tolist() == [2, 2, 2]
    assert doubled["x"][1] == "kept"
    assert doubled["none"] is None
    assert type(doubled["pair"]) is type(pair) and doubled["pair"].b == 4
    assert isinstance(doubled["hf"], UserDict)
    assert doubled["hf"]["ids"].item() == 2
    assert encoding["ids"].item() == 1
    assert [len(tensor) for tensor in tensors(batch)] == [3, 2, 1] and rows(batch) == 3
    with pytest.raises(UserError, match="holds no tensor"):
        rows({"x": 3})
