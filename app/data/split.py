"""Holding out: how many samples are for evaluation, and which, always the same ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app.data.order import Indices, Order
from app.errors import UserError

HELD_OUT_SEED = 20_111  # fixed: runs with different seeds must be judged on the same samples


def held_out(total: int, eval_fraction: float | None, eval_samples: int | None, default_fraction: float) -> int:
    """How many of `total` samples to hold out, at least one being left to train on.

    `eval_samples` counts before `eval_fraction`; with neither, `default_fraction` is taken.
    """
    if eval_samples is None:
        chosen = default_fraction if eval_fraction is None else eval_fraction
        if isinstance(chosen, bool) or not isinstance(chosen, (int, float)) or not 0 <= chosen < 1:
            raise UserError(f"task_args.eval_fraction is {chosen!r}; it must be a number from 0 to less than 1")
        return min(round(total * chosen), total - 1)
    if isinstance(eval_samples, bool) or not isinstance(eval_samples, int) or not 0 <= eval_samples < total:
        raise UserError(
            f"task_args.eval_samples is {eval_samples!r}; write a whole number below {total}, the number of samples"
        )
    return eval_samples


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
