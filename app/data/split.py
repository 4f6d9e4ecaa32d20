"""Holding out: which samples are for evaluation, always the same ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app.data.order import Indices, Order

HELD_OUT_SEED = 20_111
"""Fixed, and no setting: runs with different seeds must be judged on the same samples."""


def hold_out(n: int, count: int, labels: npt.NDArray[np.int64] | None = None) -> tuple[Indices, Indices]:
    """Split range(n) into (training, `count` held out), each shuffled.

    With labels, every class is held out in proportion to its size (largest remainders make up the count).
    """
    shuffled = Order(n, HELD_OUT_SEED).indices(0, n)
    if labels is None:
        return shuffled[count:], shuffled[:count]
    sizes = np.bincount(labels)
    quotas = sizes * count / n
    taken = np.floor(quotas).astype(np.int64)
    most_short = np.argsort(taken - quotas, kind="stable")
    taken[most_short[: count - taken.sum()]] += 1

    # A sample's number among those of its class, in shuffled order, decides.
    by_class = np.argsort(labels[shuffled], kind="stable")
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    number_in_class = np.empty(n, dtype=np.int64)
    number_in_class[by_class] = np.arange(n) - np.repeat(starts, sizes)
    held = number_in_class < taken[labels[shuffled]]
    # Among those left, classes that came late in the shuffled order lie early: shuffle again.
    return _shuffled(shuffled[~held]), _shuffled(shuffled[held])


def _shuffled(samples: Indices) -> Indices:
    return samples[Order(len(samples), HELD_OUT_SEED).indices(0, len(samples))] if len(samples) else samples
