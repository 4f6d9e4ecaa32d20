"""Data sets that make batches of their samples themselves, as DataLoader's collate_fn does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, random_split

from app.config.batch_schedule import BatchSchedule
from app.data.collate import collate_of
from app.data.loader import eval_batches, fetch, pipeline_example, train_batches
from app.data.mixture import Mixture
from app.errors import UserError

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")
LENGTH = 24


def pad(samples: list[Tensor]) -> dict[str, Tensor]:
    """Texts of different lengths as one tensor, with how long each is."""
    tokens = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"tokens": tokens, "lengths": torch.tensor([len(sample) for sample in samples])}


class Texts(Dataset[Tensor]):
    """The text of number i has i + 1 tokens, which are all i + 1."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((index + 1,), index + 1)

    def collate_fn(self, samples: list[Tensor]) -> dict[str, Tensor]:
        return pad(samples)


class Listed(Texts):
    """Fetches several samples at once, and has its function as a static method."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]

    collate_fn = staticmethod(pad)  # type: ignore[assignment]


class Plain(Texts):
    """Its function is given to an object."""

    collate_fn = None  # type: ignore[assignment]


class Read(IterableDataset[Tensor]):
    """The same texts as a stream."""

    collate_fn = staticmethod(pad)

    def __iter__(self) -> Iterator[Tensor]:
        texts = Texts()
        return (texts[index] for index in range(LENGTH))


def with_function() -> Dataset[Tensor]:
    data = Plain()
    data.collate_fn = pad  # type: ignore[method-assign, assignment]
    return data


DATA: dict[str, Callable[[], Any]] = {
    "a method": Texts,
    "a static method, and lists of samples": Listed,
    "an attribute": with_function,
    "a stream": Read,
    "behind a Subset": lambda: Subset(Texts(), range(LENGTH)),
    "behind random_split and a Subset": lambda: random_split(Subset(Texts(), range(24)), [24, 0])[
        0
    ],
    "behind a ConcatDataset": lambda: ConcatDataset([Texts(), Subset(Texts(), [])]),
    "behind a mixture": lambda: Mixture([Texts(), Texts(1)], weights=[99, 1]),
}


@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
@pytest.mark.parametrize("data_workers", [0, 1])
def test_micro_batches_of_every_kind_of_data_are_made_by_its_function(
    make: Callable[[], Any], data_workers: int
) -> None:
    """Each is padded to its own longest text."""
    batches = train_batches(
        make(),
        seed=7,
        batches=BatchSchedule.constant(8),
        micro_batch_size=3,
        dp_rank=0,
        dp_size=1,
        samples_seen=0,
        steps=3,
        device=CPU,
        data_workers=data_workers,
    )
    lengths = []
    for step in batches:
        assert [len(micro_batch["tokens"]) for micro_batch in step] == [3, 3, 2]
        for micro_batch in step:
            assert micro_batch["tokens"].size(1) == micro_batch["lengths"].max()
            assert torch.equal((micro_batch["tokens"] > 0).sum(1), micro_batch["lengths"])
            lengths += micro_batch["lengths"].tolist()
    assert len(lengths) == LENGTH
    if not isinstance(make(), Mixture):
        assert sorted(lengths) == list(range(1, LENGTH + 1))


@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_what_looks_at_a_batch_before_the_start_gets_it_from_the_function(
    make: Callable[[], Any],
) -> None:
    data = make()
    assert fetch(data, [(0, 0), (1, 1)]).keys() == {"tokens", "lengths"}
    assert len(pipeline_example(data, micro_batch_size=None)["tokens"]) == 2
    if not isinstance(data, Read):
        held_out = eval_batches(data, batch_size=5, dp_rank=0, dp_size=1, device=CPU)
        assert sum(len(batch["tokens"]) for batch, _ in held_out) == len(data)


def test_parts_that_make_batches_differently_are_refused() -> None:
    parts = ConcatDataset([Texts(), with_function()])
    with pytest.raises(UserError, match="ConcatDataset make batches by different functions"):
        collate_of(parts)
    parts.collate_fn = pad  # type: ignore[attr-defined]
    assert collate_of(parts) is pad
