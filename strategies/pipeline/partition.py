"""Dividing a chain into consecutive pieces, the most costly of which costs as little as can be.

Shared by the pipeline, whose slowest part sets the pace of all, and by model_parallel, whose devices should be filled
alike: the textbook dynamic programme over (how many items, how many pieces), O(n² · parts) for n items; blocks are few.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence

from strategies.dims import LayoutError


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
