"""Which sample comes when: a pure function of (seed, position); and which are held out for evaluation.

A run reads one endless stream of sample numbers. Position p of the stream lies in epoch p // n, and each epoch is a
pseudorandom permutation of range(n) keyed by (seed, epoch). Nothing depends on the number of workers, and any position
can be asked for directly, so a resumed run continues at its own position on whatever layout it finds.

Two ways of making the permutation, by size:

- up to 65,536 samples: the sample numbers sorted by a 64-bit hash of (key, number); any of the n! orders may come up.
- above: a Feistel network on the smallest power of four that holds n, with cycle walking (Black and Rogaway, "Ciphers
  with arbitrary finite domains", 2002), so that only one block of results is kept, however large n is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app.errors import UserError

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

SORT_UP_TO = 1 << 16
BLOCK = 1 << 12
ROUNDS = 8
HELD_OUT_SEED = 20_111  # fixed: runs with different seeds must be judged on the same samples


class Order:
    """The endless stream of sample numbers of a data set of `n` samples."""

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"an order needs at least one sample, not {n}")
        self.n, self.seed = n, seed
        self._block_size = n if n <= SORT_UP_TO else BLOCK
        self._block_key: tuple[int, int] | None = None
        self._block: Indices = np.empty(0, dtype=np.int64)

    def indices(self, start: int, count: int) -> Indices:
        """Sample numbers at positions start … start + count - 1; the range may span epochs."""
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self.n)
            block_number, begin = divmod(offset, self._block_size)
            part = self._read_block(epoch, block_number)[begin : begin + count]
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _read_block(self, epoch: int, block_number: int) -> Indices:
        if self._block_key != (epoch, block_number):
            begin = block_number * self._block_size
            end = min(begin + self._block_size, self.n)
            self._block = permuted(self.n, self.seed, epoch, begin, end)
            self._block_key = (epoch, block_number)
        return self._block


def permuted(n: int, seed: int, epoch: int, begin: int, end: int) -> Indices:
    """Elements begin … end - 1 of the epoch's permutation of range(n)."""
    key = mix64(np.array([seed % 2**64], dtype=np.uint64) ^ mix64(np.array([epoch % 2**64], dtype=np.uint64)))
    if n <= SORT_UP_TO:
        ranks = mix64(mix64(np.arange(n, dtype=np.uint64)) ^ key)
        return np.argsort(ranks, kind="stable")[begin:end].astype(np.int64)
    half_bits = ((n - 1).bit_length() + 1) // 2
    values = np.arange(begin, end, dtype=np.uint64)
    values = _feistel(values, half_bits, key)
    # Results outside range(n) are sent through again until they fall inside: still one-to-one on range(n).
    outside = np.flatnonzero(values >= n)
    while len(outside):
        values[outside] = _feistel(values[outside], half_bits, key)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _feistel(values: Words, half_bits: int, key: Words) -> Words:
    """A permutation of range(4 ** half_bits), element by element."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_number in range(ROUNDS):
        round_key = mix64(key + np.uint64(round_number))
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right


def mix64(values: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def shares(count: int, parts: int) -> list[slice]:
    """Split range(count) into `parts` contiguous slices whose sizes differ by at most one, the larger first."""
    small, larger = divmod(count, parts)
    bounds = [part * small + min(part, larger) for part in range(parts + 1)]
    return [slice(bounds[part], bounds[part + 1]) for part in range(parts)]


# --- holding out --------------------------------------------------------------------------------------------------


def held_out(total: int, eval_samples: int | None, default_fraction: float) -> int:
    """How many of `total` samples to hold out, at least one being left to train on: `eval_samples`, or a fraction."""
    if eval_samples is None:
        return min(round(total * default_fraction), total - 1)
    if isinstance(eval_samples, bool) or not isinstance(eval_samples, int) or not 0 <= eval_samples < total:
        raise UserError(
            f"task_args.eval_samples is {eval_samples!r}; write a whole number below {total}, the number of samples"
        )
    return eval_samples


def hold_out(n: int, count: int, labels: Indices | None = None) -> tuple[Indices, Indices]:
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
