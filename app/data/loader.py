"""Batches, already on the device when the loop asks.

app/data/order.py decides what the samples of a step are; here they are cut into ranks' shares and micro-batches,
fetched, and moved.

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
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, default_convert

from app.data.batch import Batch
from app.data.order import Order, mix64, shares
from app.data.prefetch import Prefetcher

Picks = list[tuple[int, int]]  # of a micro-batch: (sample number, position in the run's stream) of every sample


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

    The stream continues at position `samples_seen`. `dp_size` divides the global batch; every rank gets the same number
    of micro-batches, of which the last may be smaller (5 by 2: 2, 2, 1).
    """
    share = global_batch_size // dp_size
    cuts = micro_batch_slices(share, micro_batch_size)

    def picks() -> Iterator[Picks]:
        order = Order(len(dataset), seed)  # type: ignore[arg-type]
        for step in range(steps):
            start = samples_seen + step * global_batch_size + dp_rank * share
            indices = order.indices(start, share).tolist()
            for cut in cuts:
                yield list(zip(indices[cut], range(start + cut.start, start + cut.stop), strict=True))

    def grouped() -> Iterator[list[Batch]]:
        source = _fetched(dataset, picks, seed, data_workers)
        for first in source:
            yield [first, *(next(source) for _ in cuts[1:])]

    return Prefetcher(grouped, device)


def micro_batch_slices(share: int, micro_batch_size: int | None) -> list[slice]:
    """Where a rank's share of a global batch is cut into micro-batches: full ones, the last may be smaller."""
    micro = micro_batch_size or share
    return [slice(begin, min(begin + micro, share)) for begin in range(0, share, micro)]


def eval_batches(
    dataset: Dataset[Any], *, batch_size: int, dp_rank: int, dp_size: int, device: torch.device
) -> Prefetcher[tuple[Batch, float]]:
    """This rank's part of the data in order, as (batch, weight), with equally many batches on every rank.

    The weight is the number of samples in the batch, 0.0 for a batch that is only there so that every rank takes part
    in the collectives; so sum(weight * mean) / sum(weight) over all ranks is the mean over the data.
    """
    parts = shares(len(dataset), dp_size)  # type: ignore[arg-type]
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
    if type(dataset) is TensorDataset:
        return tuple(tensor[torch.as_tensor(indices)] for tensor in dataset.tensors)
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
        batch_sampler=picks(),  # type: ignore[arg-type]
        num_workers=data_workers,
        collate_fn=default_convert,  # a batch is one already
        # A generator of its own: DataLoader would otherwise draw from the global one that dropout uses.
        generator=torch.Generator().manual_seed(seed % 2**63),
    )
    return iter(loader)


class _Fetching(Dataset[Any]):
    """A data set as DataLoader's worker processes see it: asked for picks, it answers with a batch."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, picks: Picks) -> Batch:
        return fetch(self.dataset, picks, before_sample=partial(seed_globals, self.seed))


def seed_globals(seed: int, position: int) -> None:
    """Seed torch's, Python's and NumPy's global generators from (seed, position)."""
    words = np.array([seed % 2**64, position % 2**64], dtype=np.uint64)
    value = int(mix64(words[1:] ^ mix64(words[:1]))[0])
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)
