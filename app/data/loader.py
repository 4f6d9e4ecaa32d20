"""Batches, already on the device when the loop asks.

What the samples of a step are is decided by app/data/order.py; here they are cut into ranks' shares and
micro-batches, fetched, and moved.

A data set is map-style: `__len__` and `__getitem__(i)`. It may have, each faster or more able than the last:

- `__getitems__(indices)`: a whole batch in one call. A returned list is taken for a list of samples and
  collated (PyTorch's convention); anything else (tuple, dict, tensor) for a batch that is ready.
- `batch_at(indices, positions)`: likewise a ready batch, told also the position of each sample in the run's
  stream, so that random augmentation can be a function of the position: the same after a resume and on any
  number of workers.

With `data_workers=0` samples are fetched in the training process (on a GPU in a thread), so a data set must leave the
global random generators alone. With data workers they are seeded before every sample from (seed, position),
so an ordinary data set with random augmentation is reproducible there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from app.data.batch import Batch
from app.data.order import Order, mix64, shares
from app.data.prefetch import Prefetcher
from app.errors import UserError

Picks = list[tuple[int, int]]
"""What to fetch for one micro-batch: (sample number, position in the run's stream) of every sample."""


def train_batches(
    dataset: Dataset[Any],
    *,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int | None,
    dp_rank: int,
    dp_size: int,
    samples_seen: int,
    steps: int,
    device: torch.device,
    data_workers: int = 0,
) -> Prefetcher[list[Batch]]:
    """For each of `steps` steps the list of this rank's micro-batches, on the device.

    The stream continues at position `samples_seen`. Every rank gets the same number of micro-batches. Where
    the ranks' shares are equal, micro-batches are full and the last may be smaller (5 by 2: 2, 2, 1); where
    they are not, each share is split evenly so that the numbers agree, and micro-batches exceed
    `micro_batch_size` only if a rank would otherwise have an empty one.

    `next()` raises whatever fetching raised; `close()` stops the thread. Raises UserError where there is no
    data, or not a sample for every rank.
    """
    size = len(dataset)  # type: ignore[arg-type]
    if size < 1:
        raise UserError("The training data is empty; give the task data with at least one sample.")
    if global_batch_size < dp_size:
        raise UserError(
            f"train.global_batch_size is {global_batch_size}, but {dp_size} data-parallel workers need at least "
            f"one sample each; write {dp_size} or more."
        )
    mine = shares(global_batch_size, dp_size)[dp_rank]
    cuts = micro_batch_slices(global_batch_size, dp_size, dp_rank, micro_batch_size)

    def picks() -> Iterator[Picks]:
        order = Order(size, seed)
        for step in range(steps):
            start = samples_seen + step * global_batch_size + mine.start
            indices = order.indices(start, mine.stop - mine.start).tolist()
            for cut in cuts:
                yield list(zip(indices[cut], range(start + cut.start, start + cut.stop), strict=True))

    def grouped() -> Iterator[list[Batch]]:
        source = _fetched(dataset, picks, seed, data_workers)
        for first in source:
            yield [first, *(next(source) for _ in cuts[1:])]

    return Prefetcher(grouped, device)


def micro_batch_slices(global_batch_size: int, dp_size: int, dp_rank: int, micro_batch_size: int | None) -> list[slice]:
    """Where a rank's share of a global batch is cut into micro-batches; as many cuts on every rank."""
    sizes = [part.stop - part.start for part in shares(global_batch_size, dp_size)]
    micro = min(micro_batch_size or sizes[0], sizes[0])
    count = -(-sizes[0] // micro)
    if sizes[0] == sizes[-1]:
        return [slice(begin, min(begin + micro, sizes[0])) for begin in range(0, sizes[0], micro)]
    return shares(sizes[dp_rank], min(count, sizes[-1]))


def eval_batches(
    dataset: Dataset[Any], *, batch_size: int, dp_rank: int, dp_size: int, device: torch.device
) -> Prefetcher[tuple[Batch, float]]:
    """This rank's part of the data in order, as (batch, weight), with equally many batches on every rank.

    The weight is the number of samples in the batch, 0.0 for a batch that is only there so that every rank
    takes part in the collectives; so sum(weight * mean) / sum(weight) over all ranks is the mean over the
    data. (Where a task's items vary between samples, weigh with its `items` where weight > 0.)
    """
    size = len(dataset)  # type: ignore[arg-type]
    parts = shares(size, dp_size)
    mine = parts[dp_rank]
    rounds = -(-(parts[0].stop - parts[0].start) // batch_size)

    def batches() -> Iterator[tuple[Batch, float]]:
        for number in range(rounds):
            begin = mine.start + number * batch_size
            indices = list(range(begin, min(begin + batch_size, mine.stop)))
            picks = [(index, index) for index in indices or [0]]
            yield fetch(dataset, picks), float(len(indices))

    return Prefetcher(batches, device)


def fetch(dataset: Dataset[Any], picks: Picks, before_sample: Callable[[int], None] | None = None) -> Batch:
    """One batch, by the most able way the data set offers; `before_sample(position)` is called first."""
    indices, positions = [index for index, _ in picks], [position for _, position in picks]
    seed_at = before_sample or (lambda position: None)
    if hasattr(dataset, "batch_at"):
        return dataset.batch_at(indices, positions)
    if hasattr(dataset, "__getitems__"):
        seed_at(positions[0])
        batch = dataset.__getitems__(indices)
        return default_collate(batch) if isinstance(batch, list) else batch
    samples = []
    for index, position in picks:
        seed_at(position)
        samples.append(dataset[index])
    return default_collate(samples)


def _fetched(
    dataset: Dataset[Any], picks: Callable[[], Iterator[Picks]], seed: int, data_workers: int
) -> Iterator[Batch]:
    if data_workers < 1:
        return (fetch(dataset, pick) for pick in picks())
    loader = DataLoader(
        _Fetching(dataset, seed),
        batch_sampler=_Replayed(picks),  # type: ignore[arg-type]
        num_workers=data_workers,
        collate_fn=_as_is,
        # A generator of its own: DataLoader would otherwise draw from the global one that dropout uses.
        generator=torch.Generator().manual_seed(seed % 2**63),
    )
    return iter(loader)


class _Fetching(Dataset[Any]):
    """A data set as DataLoader's worker processes see it: asked for picks, it answers with a batch."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, picks: Picks) -> Batch:
        return fetch(self.dataset, picks, before_sample=partial(seed_globals, self.seed))


class _Replayed:
    """An iterable from a function that makes iterators."""

    def __init__(self, make: Callable[[], Iterator[Picks]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Picks]:
        return self.make()


def _as_is(batch: Batch) -> Batch:
    return batch


def seed_globals(seed: int, position: int) -> None:
    """Seed torch's, Python's and NumPy's global generators from (seed, position)."""
    words = np.array([seed % 2**64, position % 2**64], dtype=np.uint64)
    value = int(mix64(words[1:] ^ mix64(words[:1]))[0])
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)
