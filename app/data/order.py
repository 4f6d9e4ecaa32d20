"""The order of samples, as a pure function of (seed, position), and the samples held out.

A run reads one endless stream of sample numbers. Position p of the stream lies in epoch p // n, and
each epoch is a pseudorandom permutation of range(n) with the key (seed, epoch). Nothing depends on
the number of workers, and any position can be computed directly, so that a resumed run continues at
its position on any layout.

The size decides how the permutation is made:

- up to 65,536 samples: the sample numbers are sorted by a 64-bit hash of (key, number); each of the
  n! orders is possible.
- above: a Feistel network on the smallest power of four that holds n, with cycle walking (Black and
  Rogaway, "Ciphers with arbitrary finite domains", 2002). Only one block of results is in memory,
  however large n is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.config.batch_schedule import BatchSchedule
from app.errors import UserError

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

SORT_UP_TO = 1 << 16
BLOCK = 1 << 12
ROUNDS = 8
HELD_OUT_SEED = 20_111  # fixed: runs with different seeds are evaluated on the same samples


class Order:
    """The endless stream of sample numbers of a data set.

    Args:
        n: The number of samples in the data set.
        seed: The run's seed.
    """

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"an order needs at least one sample, not {n}")
        self.n = n
        self.seed = seed
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
            self._block = permuted(self.n, seed=self.seed, epoch=epoch, begin=begin, end=end)
            self._block_key = (epoch, block_number)
        return self._block


def permuted(n: int, *, seed: int, epoch: int, begin: int, end: int) -> Indices:
    """Elements begin … end - 1 of the epoch's permutation of range(n)."""
    seed_word = np.array([seed % 2**64], dtype=np.uint64)
    epoch_word = np.array([epoch % 2**64], dtype=np.uint64)
    key = mix64(seed_word ^ mix64(epoch_word))
    if n <= SORT_UP_TO:
        ranks = mix64(mix64(np.arange(n, dtype=np.uint64)) ^ key)
        return np.argsort(ranks, kind="stable")[begin:end].astype(np.int64)
    half_bits = ((n - 1).bit_length() + 1) // 2
    values = np.arange(begin, end, dtype=np.uint64)
    values = _feistel(values, half_bits, key)
    # Cycle walking: encrypt results outside range(n) again until they fall inside it. The mapping
    # stays one-to-one on range(n).
    outside = np.flatnonzero(values >= n)
    while len(outside):
        values[outside] = _feistel(values[outside], half_bits, key)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _feistel(values: Words, half_bits: int, key: Words) -> Words:
    """A permutation of range(4 ** half_bits), element by element."""
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = values >> shift
    right = values & mask
    for round_number in range(ROUNDS):
        round_key = mix64(key + np.uint64(round_number))
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right


def mix64(values: Words) -> Words:
    """The finaliser of SplitMix64, in which every input bit affects every output bit.

    Source: Steele, Lea and Flood, 2014.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """The samples of one step that a worker computes.

    Args:
        begin: The position of the first in the run's stream.
        before: Samples of the step that workers before this one compute.
        global_batch_size: Samples of the step on all workers.
        micro_batches: Slices of the share.
    """

    begin: int
    before: int
    global_batch_size: int
    micro_batches: list[slice]

    @property
    def size(self) -> int:
        """How many samples the share has."""
        return int(self.micro_batches[-1].stop)


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """The samples of each step that a worker computes; they can be gone through again.

    Args:
        batches: Samples of a step on all workers; multiples of `dp_size`.
        micro_batch_size: Samples of a micro-batch; None means all of the worker's share.
        dp_rank: The worker's number among those that have different data.
        dp_size: The number of workers that have different data.
        samples_seen: The position in the run's stream at which the first step begins.
        steps: The number of steps.
    """

    batches: BatchSchedule
    micro_batch_size: int | None
    dp_rank: int
    dp_size: int
    samples_seen: int
    steps: int

    def __iter__(self) -> Iterator[StepShare]:
        begin = self.samples_seen
        for _ in range(self.steps):
            global_batch_size = self.batches.batch_at(begin)
            size = global_batch_size // self.dp_size
            before = self.dp_rank * size
            yield StepShare(
                begin=begin + before,
                before=before,
                global_batch_size=global_batch_size,
                micro_batches=micro_batch_slices(size, self.micro_batch_size),
            )
            begin += global_batch_size


def micro_batch_slices(share: int, micro_batch_size: int | None) -> list[slice]:
    """Slices of a worker's share of a global batch; the last micro-batch may be smaller."""
    micro = micro_batch_size or share
    return [slice(begin, min(begin + micro, share)) for begin in range(0, share, micro)]


def shares(count: int, parts: int) -> list[slice]:
    """Split range(count) into contiguous slices whose sizes differ by at most one, larger first.

    Args:
        count: The number of elements.
        parts: The number of slices.
    """
    small, larger = divmod(count, parts)
    bounds = [part * small + min(part, larger) for part in range(parts + 1)]
    return [slice(bounds[part], bounds[part + 1]) for part in range(parts)]


# --- holding out ----------------------------------------------------------------------------------


def held_out(total: int, eval_samples: int | None, default_fraction: float) -> int:
    """How many samples to hold out, such that at least one remains for training.

    Args:
        total: The number of samples.
        eval_samples: `task_args.eval_samples`; None means the default fraction.
        default_fraction: The fraction to hold out by default.

    Raises:
        UserError: `eval_samples` is not a whole number below `total`.
    """
    if eval_samples is None:
        return min(round(total * default_fraction), total - 1)
    is_whole = isinstance(eval_samples, int) and not isinstance(eval_samples, bool)
    if not is_whole or not 0 <= eval_samples < total:
        raise UserError(
            f"task_args.eval_samples is {eval_samples!r}; "
            f"write a whole number below {total}, the number of samples"
        )
    return eval_samples


def hold_out(n: int, count: int, labels: Indices | None = None) -> tuple[Indices, Indices]:
    """Split the numbers of samples into those to train on and those held out, each shuffled.

    Args:
        n: The number of samples.
        count: How many to hold out.
        labels: Each sample's class, (n,). If given, every class is held out in proportion to its
            size; the classes with the largest remainders make up the count.

    Returns:
        (training samples, held-out samples)
    """
    shuffled = Order(n, HELD_OUT_SEED).indices(0, n)
    if labels is None:
        return shuffled[count:], shuffled[:count]
    sizes = np.bincount(labels)
    quotas = sizes * count / n
    class_counts = np.floor(quotas).astype(np.int64)
    by_remainder = np.argsort(class_counts - quotas, kind="stable")
    class_counts[by_remainder[: count - class_counts.sum()]] += 1

    # The first samples of each class, in shuffled order, are held out.
    by_class = np.argsort(labels[shuffled], kind="stable")
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    number_in_class = np.empty(n, dtype=np.int64)
    number_in_class[by_class] = np.arange(n) - np.repeat(starts, sizes)
    is_held_out = number_in_class < class_counts[labels[shuffled]]
    # Removing the first samples of each class leaves the classes unevenly spread: shuffle again.
    return _shuffled(shuffled[~is_held_out]), _shuffled(shuffled[is_held_out])


def _shuffled(samples: Indices) -> Indices:
    if len(samples) == 0:
        return samples
    return samples[Order(len(samples), HELD_OUT_SEED).indices(0, len(samples))]
