"""The loader: which samples reach which rank in which micro-batch, the thread that brings them, and evaluation."""

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

from app.data import loader
from app.data.loader import PROBED, eval_batches, map_tensors, prefetched, rows, tensors, train_batches
from app.data.order import Order
from app.errors import UserError
from tests.running import wait_until

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")


class Plain(Dataset[Any]):
    """Sample i is (as float what `value` says, i); `broken` raises when asked for."""

    def __init__(self, n: int, broken: int | None = None, value: Callable[[int], Tensor] | None = None) -> None:
        self.n, self.broken, self.value = n, broken, value

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken:
            raise UserError(f"sample {index} is broken")
        return self.value(index) if self.value else torch.tensor([float(index)]), index


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


@settings(max_examples=80)
@given(
    kind=st.sampled_from([Plain, ReadyBatches, SampleLists, Positioned]),
    n=st.integers(1, 40),
    share=st.integers(1, 6),
    dp_size=st.integers(1, 6),
    micro=st.none() | st.integers(1, 9),
    seen=st.integers(0, 200),
)
def test_ranks_have_the_samples_from_a_position_on_in_equal_micro_batches_however_they_are_fetched(
    kind: Callable[[int], Plain], n: int, share: int, dp_size: int, micro: int | None, seen: int
) -> None:
    """So each once per epoch, and after a resume those that follow, also by another number of workers."""
    given: dict[str, Any] = {"batch": share * dp_size, "steps": 2, "samples_seen": seen, "micro_batch_size": micro}
    ranks = [load(kind(n), **given, dp_size=dp_size, dp_rank=rank) for rank in range(dp_size)]
    found = [part for step in range(2) for rank in ranks for part in rank[step]]
    sizes = [len(part) for part in torch.arange(share).split(micro or share)]
    assert [len(part) for rank in ranks for part in numbers(rank[0])] == dp_size * sizes
    order = Order(n, 7).indices(seen, 2 * share * dp_size).tolist()
    assert [number for part in numbers(found) for number in part] == order
    values = [value for inputs, _ in found for value in inputs.flatten().tolist()]
    assert values == (list(range(seen, seen + len(order))) if kind is Positioned else order)


@pytest.mark.parametrize(("data_workers", "ahead"), [(0, 0), (1, 2)])
def test_an_exception_surfaces_and_nothing_is_left(data_workers: int, ahead: int, monkeypatch: Any) -> None:
    """No thread and no process; as on a CPU, or, with `ahead`, on a GPU: from a thread."""
    monkeypatch.setattr(loader, "prefetched", partial(prefetched, ahead=ahead))
    others = set(multiprocessing.active_children())  # the session's warm pool
    endless: dict[str, Any] = {"batch": 2, "steps": 10_000, "micro_batch_size": 1, "data_workers": data_workers}
    batches = begun(Plain(10, broken=3), **endless)
    with pytest.raises(UserError, match="sample 3 is broken"):
        for _ in range(30):
            next(batches)
    assert list(batches) == []
    batches = begun(Plain(10), **endless)
    next(batches)
    batches.close()
    assert list(batches) == []
    wait_until(lambda: "trireme-prefetch" not in {thread.name for thread in threading.enumerate()})
    wait_until(lambda: set(multiprocessing.active_children()) <= others)


@pytest.mark.parametrize(("workers", "wrapped"), [(0, lambda data: Subset(data, range(16))), (1, lambda data: data)])
def test_random_numbers_are_drawn_by_position_whatever_the_workers(workers: int, wrapped: Any) -> None:
    """Also through a Subset, whose `__getitems__` is asked for a batch; and what does not draw is the same too."""
    noisy = wrapped(Plain(16, value=lambda index: torch.rand(1)))
    once = load(noisy, batch=8, steps=4, data_workers=workers)
    torch.manual_seed(99)
    rest = load(noisy, batch=8, steps=2, data_workers=2, micro_batch_size=4, samples_seen=16)
    other = load(noisy, batch=8, steps=1, seed=8)
    assert torch.equal(torch.cat([step[0][0] for step in once[2:]]), torch.cat([m[0] for step in rest for m in step]))
    assert len(torch.cat([step[0][0] for step in once]).unique()) == 32
    assert not torch.equal(once[0][0][0], other[0][0][0])
    ready, alone = (load(ReadyBatches(9), batch=4, steps=5, data_workers=number) for number in (workers, 0))
    assert [numbers(step) for step in ready] == [numbers(step) for step in alone]


@pytest.mark.parametrize("noisy", [True, False])
def test_a_thread_makes_a_few_ahead_and_draws_nothing(noisy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what draws is made between the steps, what does not in a thread that seeds nothing."""
    made: list[str] = []

    def value(index: int) -> Tensor:
        made.append(threading.current_thread().name)
        return torch.rand(1) if noisy else torch.zeros(1)

    monkeypatch.setattr(loader, "_ahead", lambda device, in_thread: 2 if in_thread else 0)
    batches = begun(Plain(64, value=value), batch=1, steps=30)
    made.clear()
    next(batches)
    if not noisy:
        wait_until(lambda: len(made) >= PROBED + 4)  # read, two waiting in the queue, one in the thread's hand
        assert len(made) == PROBED + 4
    before = torch.get_rng_state()
    made.clear()
    for _ in range(6):
        next(batches)
    assert set(made) == {"MainThread" if noisy else "trireme-prefetch"}
    assert noisy or torch.equal(before, torch.get_rng_state())
    batches.close()


@settings(max_examples=30)
@given(n=st.integers(0, 30), batch=st.integers(1, 9), dp_size=st.integers(1, 5))
def test_evaluation_counts_every_sample_once(n: int, batch: int, dp_size: int) -> None:
    given: dict[str, Any] = {"batch_size": batch, "dp_size": dp_size, "device": CPU}
    ranks = [list(eval_batches(ReadyBatches(n), **given, dp_rank=rank)) for rank in range(dp_size)]
    assert len({len(rank) for rank in ranks}) == 1
    counted = [number for rank in ranks for (_, index), weight in rank if weight for number in index.tolist()]
    assert counted == list(range(n))
    assert all(len(index) > 0 and weight in (0, len(index)) for rank in ranks for (_, index), weight in rank)


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
    pair, encoding = namedtuple("Pair", "a b")(torch.zeros(2), 4), UserDict(ids=torch.ones(1))
    batch = {"x": [torch.ones(3), "kept"], "pair": pair, "none": None, "hf": encoding}
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert doubled["x"][0].tolist() == [2, 2, 2] and doubled["x"][1] == "kept" and doubled["none"] is None
    assert type(doubled["pair"]) is type(pair) and doubled["pair"].b == 4
    assert isinstance(doubled["hf"], UserDict) and doubled["hf"]["ids"].item() == 2 and encoding["ids"].item() == 1
    assert [len(tensor) for tensor in tensors(batch)] == [3, 2, 1] and rows(batch) == 3
    with pytest.raises(UserError, match="holds no tensor"):
        rows({"x": 3})
