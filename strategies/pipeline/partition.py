"""Dividing a chain into consecutive pieces, the most costly of which costs as little as can be.

Shared by the pipeline, whose slowest part sets the pace of all, and by model_parallel, whose devices should be filled
alike: the textbook dynamic programme over (how many items, how many pieces), O(n² · parts) for n items; blocks are few.

The first partition is by estimates, and an estimate does not know what a block does outside of tensors, nor how well
its matrix products suit the machine. A few measured steps do (`better_partition`). Of a part's time for one micro-batch

- the calls of its blocks, and of the modules around them, are timed one by one in forward: they move;
- the rest is the code between modules, which every stage runs: it does not move. What the first and the last have of it
  beyond the others (preparing inputs; the loss) stays with them;
- backward is timed as a whole and shared out as forward is.

Medians over micro-batches and steps, so that a process that was interrupted for a moment does not decide.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from strategies.dims import LayoutError
from strategies.pipeline.simulate import COMPUTE, Span


def balanced_partition(costs: Sequence[float], parts: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """How many consecutive items each of `parts` pieces gets, at least one each, so that the maximum cost of a piece is
    least; of several such partitions one whose pieces are as even as can be.

    first, last: what the first and the last piece cost beside their items (an embedding; a head and the loss).

    Raises:
        LayoutError: fewer items than pieces.
    """
    count = len(costs)
    if count < parts:
        raise LayoutError(f"{count} blocks cannot be divided into {parts} parts: write at most {count}")
    sums = [0.0, *itertools.accumulate(costs)]
    # pieces that are filled until they exceed the mean exceed it by less than an item: no best piece costs more
    limit = (sums[-1] + first + last) / parts + max(costs) + first + last

    @functools.cache
    def best(end: int, pieces: int) -> tuple[float, float, tuple[int, ...]]:
        """Of the first `end` items: maximum, Σ squares, and sizes."""
        found: list[tuple[float, float, tuple[int, ...]]] = []
        for start in range(end - 1, pieces - 2, -1) if pieces > 1 else (0,):
            cost = sums[end] - sums[start] + (first if start == 0 else 0.0) + (last if end == count else 0.0)
            if cost > limit and found:
                break
            most, squares, sizes = best(start, pieces - 1) if pieces > 1 else (0.0, 0.0, ())
            found.append((max(most, cost), squares + cost**2, (*sizes, end - start)))
        return min(found)

    return best(count, parts)[2]


def max_cost(
    costs: Sequence[float],
    sizes: Sequence[int],
    first: float = 0.0,
    last: float = 0.0,
    *,
    every: float = 0.0,
    stage_of: Sequence[int] | None = None,
) -> float:
    """The cost of the most costly piece; with stage_of, a number for each piece, of the most costly stage.

    every: what a piece costs whatever is in it.
    """
    bounds = [0, *itertools.accumulate(sizes)]
    sums = [sum(costs[start:end]) + every for start, end in itertools.pairwise(bounds)]
    sums[0] += first
    sums[-1] += last
    stages = stage_of or range(len(sums))
    return max(sum(cost for cost, at in zip(sums, stages, strict=True) if at == stage) for stage in set(stages))


def costs_around_blocks(calls: Iterable[tuple[float, bool]], after: float = 0.0) -> tuple[float, list[float], float]:
    """From what is called in turn, (cost, whether it is a block): what is before the first block, each block with what
    is before it, what is after the last (and `after`)."""
    first, waiting = 0.0, 0.0
    costs: list[float] = []
    for cost, is_block in calls:
        waiting += cost
        if is_block:
            if costs:
                costs.append(waiting)
            else:
                first, costs = waiting - cost, [cost]
            waiting = 0.0
    return first, costs, waiting + after


def require_blocks(blocks: int, stages: int, chunks: int) -> None:
    """Raises LayoutError unless there is a block for every part."""
    if blocks >= stages * chunks:
        return
    many = f"parallel.pp is {stages}" + (f" with {chunks} chunks each" if chunks > 1 else "")
    if blocks >= 2 * chunks:
        raise LayoutError(f"{many}, but the model has only {blocks} blocks: write at most {blocks // chunks}")
    raise LayoutError(
        f"{many}, but the model has {blocks or 'no'} repeating blocks, too few to be divided into stages: have the "
        "task's blocks() name modules that follow each other, or write strategy=fsdp, or a smaller parallel.chunks"
    )


def require_sizes(sizes: Sequence[int], blocks: int, parts: int) -> tuple[int, ...]:
    """Blocks per part as a person has written them, checked.

    Raises:
        LayoutError: it does not fit the model or the layout.
    """
    if len(sizes) != parts:
        raise LayoutError(
            f"parallel.stages names {len(sizes)} parts, but the pipeline has {parts}: write {parts} numbers"
        )
    if min(sizes) < 1 or sum(sizes) != blocks:
        raise LayoutError(
            f"parallel.stages is {list(sizes)}, which adds up to {sum(sizes)} blocks, but the model has {blocks}: "
            f"write {parts} numbers of at least 1 that add up to {blocks}"
        )
    return tuple(sizes)


# --- by measured times ------------------------------------------------------------------------------------------------

WORTH = 0.05
"""A new partition must shorten the slowest stage by this share."""


@dataclass
class Measured:
    """What one worker took, in seconds, once for each micro-batch of each measured step."""

    ops: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    """By part and kind of instruction: F, B, W."""
    calls: dict[str, list[float]] = field(default_factory=dict)
    """Forward, by call."""

    def add(self, spans: Sequence[Span], parts: Sequence[int], calls: Mapping[str, list[float]]) -> None:
        for span in spans:
            if span.kind in COMPUTE:
                self.ops.setdefault((parts[span.chunk], span.kind), []).append(span.end - span.start)
        for name, seconds in calls.items():
            self.calls.setdefault(name, []).extend(seconds)


@dataclass(frozen=True)
class BetterPartition:
    """sizes: blocks per part, now `before`. seconds: of the slowest stage with one micro-batch, expected, now
    `seconds_before`."""

    before: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds_before: float
    seconds: float

    @property
    def gain(self) -> float:
        return 1 - self.seconds / self.seconds_before


def better_partition(
    everyone: Sequence[Measured],
    sizes: tuple[int, ...],
    calls: Sequence[tuple[str, bool]],
    part_of: Mapping[str, int],
    stage_of: Sequence[int],
) -> BetterPartition | None:
    """A partition that is worth the change, if there is one.

    everyone: of all workers. sizes: as they are. calls: in order, and whether each is a block. part_of: each call's
    part. stage_of: each part's stage.
    """
    ops = _typical([worker.ops for worker in everyone])
    inside = _typical([worker.calls for worker in everyone])
    parts = range(len(sizes))
    if any((part, "F") not in ops for part in parts) or any(name not in inside for name, block in calls if block):
        return None
    forward = [ops[part, "F"] for part in parts]
    called = [sum(inside.get(name, 0.0) for name, _ in calls if part_of[name] == part) for part in parts]
    rest = [max(0.0, whole - some) for whole, some in zip(forward, called)]
    every = min(rest)
    factors = [
        max(0.0, sum(ops.get((part, kind), 0.0) for kind in COMPUTE) - every) / max(forward[part] - every, 1e-30)
        for part in parts
    ]
    seconds = ((inside.get(name, 0.0) * factors[part_of[name]], block) for name, block in calls)
    first, costs, last = costs_around_blocks(seconds, (rest[-1] - every) * factors[-1])
    first += (rest[0] - every) * factors[0]
    found = balanced_partition(costs, len(sizes), first, last)
    now, then = (max_cost(costs, chosen, first, last, every=every, stage_of=stage_of) for chosen in (sizes, found))
    answer = BetterPartition(sizes, found, now, then)
    return answer if now > 0 and answer.gain >= WORTH else None


def _typical(everyone: Sequence[Mapping[Any, list[float]]]) -> dict[Any, float]:
    """The median of each worker, and their mean where several (copies of the model, say) did the same."""
    keys = dict.fromkeys(key for worker in everyone for key in worker)
    return {key: fmean(median(worker[key]) for worker in everyone if key in worker) for key in keys}
