"""Several data sets as one, each with a share of the samples.

Which sample comes at a position is a function of (seed, position) alone. Each set gets exactly its
share of every `BLOCK` positions, at places shuffled by (seed, block). The samples of a set come in
the order of that set: each once per pass over the set, whatever the sizes of the other sets. Each
set is shuffled with a seed of its own, derived from (seed, number of the set).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from app.data.order import Indices, Order, permuted
from app.data.randomness import mix
from app.errors import UserError

BLOCK = 1000
SEED_PLUS_NUMBER = 1
"""The version of the order in which set i was shuffled with seed + i.

Set 1 of a run with seed 0 was then in the order of set 0 of a run with seed 1.
"""
DERIVED_SEEDS = 2
"""The version in which each set is shuffled with a seed derived from (seed, number of the set)."""
ORDER_VERSION = DERIVED_SEEDS
"""Of runs that begin now. Checkpoints have it, so that a run that continues keeps its order."""


class Mixture(ConcatDataset[Any]):
    """Map-style data sets with weights.

    Args:
        datasets: Data sets whose samples have the same shapes.
        weights: One for each data set; 3 and 1 mean three quarters and one quarter.

    Raises:
        UserError: The number of weights is wrong, or one is below a thousandth of their sum.
    """

    def __init__(self, datasets: Iterable[Dataset[Any]], weights: Sequence[float]) -> None:
        super().__init__(datasets)
        total = sum(weights)
        has_all = len(weights) == len(self.datasets)
        if not has_all or not all(weight * BLOCK >= total > 0 for weight in weights):
            raise UserError(
                f"the weights of {len(self.datasets)} mixed data sets are {list(weights)}: "
                "write one for each, none below a thousandth of their sum"
            )
        exact = np.array(weights) * BLOCK / total
        self.counts = np.floor(exact).astype(int)
        # Sets with the largest remainders get the positions that rounding down has left over.
        by_remainder = np.argsort(self.counts - exact, kind="stable")
        self.counts[by_remainder[: BLOCK - self.counts.sum()]] += 1

    def order(self, seed: int, version: int = ORDER_VERSION) -> MixtureOrder:
        """The order of samples, which the loader uses instead of a shuffled `Order`.

        Args:
            seed: The run's seed.
            version: How the sets are shuffled.
        """
        sizes = [len(dataset) for dataset in self.datasets]  # type: ignore[arg-type]
        return MixtureOrder(sizes, self.counts.tolist(), seed, version)


class MixtureOrder:
    """The endless stream of sample numbers of a `Mixture`.

    As in a ConcatDataset, the numbers of each data set follow those of the one before.

    Args:
        sizes: The number of samples in each data set.
        counts: The number of each data set's positions in a block.
        seed: The run's seed.
        version: How the sets are shuffled.
    """

    def __init__(
        self, sizes: Sequence[int], counts: Sequence[int], seed: int, version: int = ORDER_VERSION
    ) -> None:
        self.counts = counts
        self.seed = seed
        self.parts = [
            Order(size, _seed_of_set(seed, number, version)) for number, size in enumerate(sizes)
        ]
        self.offsets = np.cumsum([0, *sizes[:-1]])

    def indices(self, start: int, count: int) -> Indices:
        """Sample numbers at positions start … start + count - 1."""
        first = start // BLOCK
        last = (start + count - 1) // BLOCK
        blocks = [self._block(number) for number in range(first, last + 1)]
        numbers = np.concatenate([np.empty(0, dtype=np.int64), *blocks])
        return numbers[start - first * BLOCK :][:count]

    def _block(self, number: int) -> Indices:
        places = permuted(BLOCK, seed=self.seed, epoch=number, begin=0, end=BLOCK)
        dataset_at = np.searchsorted(np.cumsum(self.counts), places, side="right")
        sample_numbers = np.empty(BLOCK, dtype=np.int64)
        datasets = zip(self.parts, self.offsets, self.counts, strict=True)
        for dataset, (part, offset, count) in enumerate(datasets):
            sample_numbers[dataset_at == dataset] = offset + part.indices(number * count, count)
        return sample_numbers


def _seed_of_set(seed: int, number: int, version: int) -> int:
    """The seed with which a set of a mixture is shuffled."""
    if version == SEED_PLUS_NUMBER:
        return seed + number
    return mix(seed, number)


def order_of(
    dataset: Dataset[Any], seed: int, version: int = ORDER_VERSION
) -> Order | MixtureOrder:
    """A data set's order of samples: a mixture's own, else each once per epoch, shuffled.

    Args:
        dataset: Map-style.
        seed: The run's seed.
        version: How the sets of a mixture are shuffled.
    """
    if isinstance(dataset, Mixture):
        return dataset.order(seed, version)
    return Order(len(dataset), seed)  # type: ignore[arg-type]
