"""Several data sets as one, each with a share of the samples: which is a function of (seed, position) alone.

Of every `BLOCK` positions each set gets its share exactly, at places shuffled by (seed, block), and its own samples
come in its own order: each once per pass over that set, however often the others have been gone through by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from app.data.order import Indices, Order, permuted
from app.errors import UserError

BLOCK = 1000


class Mixture(ConcatDataset[Any]):
    """Map-style data sets, whose samples have the same shapes, with weights: 3 and 1 are three quarters and one."""

    def __init__(self, datasets: Iterable[Dataset[Any]], weights: Sequence[float]) -> None:
        super().__init__(datasets)
        given, whole = list(weights), sum(weights)
        if len(given) != len(self.datasets) or not all(w * BLOCK >= whole > 0 for w in given):
            raise UserError(
                f"the weights of {len(self.datasets)} mixed data sets are {given}: write one for each, none below a "
                "thousandth of their sum"
            )
        exact = np.array(given) * BLOCK / whole
        self.counts = np.floor(exact).astype(int)
        self.counts[np.argsort(self.counts - exact, kind="stable")[: BLOCK - self.counts.sum()]] += 1

    def order(self, seed: int) -> MixtureOrder:
        """What the loader asks for in place of a shuffled Order."""
        return MixtureOrder([len(each) for each in self.datasets], self.counts.tolist(), seed)  # type: ignore[arg-type]


class MixtureOrder:
    """The endless stream of sample numbers, those of later data sets above those of earlier ones."""

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], seed: int) -> None:
        self.counts, self.seed = counts, seed
        self.parts = [Order(size, seed + number) for number, size in enumerate(sizes)]
        self.offsets = np.cumsum([0, *sizes[:-1]])

    def indices(self, start: int, count: int) -> Indices:
        """See Order."""
        first = start // BLOCK
        blocks = [self._block(number) for number in range(first, (start + count - 1) // BLOCK + 1)]
        return np.concatenate([np.empty(0, dtype=np.int64), *blocks])[start - first * BLOCK :][:count]

    def _block(self, number: int) -> Indices:
        which = np.searchsorted(np.cumsum(self.counts), permuted(BLOCK, self.seed, number, 0, BLOCK), side="right")
        found = np.empty(BLOCK, dtype=np.int64)
        for own, (part, offset, count) in enumerate(zip(self.parts, self.offsets, self.counts, strict=True)):
            found[which == own] = offset + part.indices(number * count, count)
        return found


def order_of(dataset: Dataset[Any], seed: int) -> Order | MixtureOrder:
    """The order that samples are taken in: the data set's own `order(seed)`, else each once per epoch, shuffled."""
    return dataset.order(seed) if isinstance(dataset, Mixture) else Order(len(dataset), seed)  # type: ignore[arg-type]
