"""Dividing a chain into consecutive pieces so that the most costly one costs as little as possible.

The pipeline uses this because its slowest part sets the pace of all, and model_parallel because its
devices should be filled alike. It is the textbook dynamic programme over (items, pieces), in
O(n² · parts) for n items. The items are a model's blocks, which are few.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence

from strategies.dims import LayoutError


def balanced_partition(
    costs: Sequence[float], parts: int, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Divide items into consecutive pieces of at least one item each.

    Args:
        costs: The cost of each item.
        parts: Number of pieces.
        first: What the first piece costs besides its items, such as an embedding.
        last: What the last piece costs besides its items, such as a head and the loss.

    Returns:
        The number of items in each piece. The maximum cost of a piece is the least possible; among
        such partitions, the sum of the squared costs is.

    Raises:
        LayoutError: There are fewer items than pieces.
    """
    count = len(costs)
    if count < parts:
        raise LayoutError(
            f"{count} blocks cannot be divided into {parts} parts: write at most {count}"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    # If pieces are filled until they exceed the mean, they exceed it by less than one item, so no
    # piece of a best partition costs more than this.
    limit = (sums[-1] + first + last) / parts + max(costs) + first + last

    @functools.cache
    def best(end: int, pieces: int) -> tuple[float, float, tuple[int, ...]]:
        """Of the first `end` items: (maximum cost, sum of squared costs, sizes)."""
        candidates: list[tuple[float, float, tuple[int, ...]]] = []
        # The last piece grows backwards; the pieces before it need an item each.
        starts: Iterable[int] = range(end - 1, pieces - 2, -1) if pieces > 1 else (0,)
        for start in starts:
            cost = sums[end] - sums[start]
            if start == 0:
                cost += first
            if end == count:
                cost += last
            if cost > limit and candidates:
                break
            maximum, squares, sizes = best(start, pieces - 1) if pieces > 1 else (0.0, 0.0, ())
            candidates.append((max(maximum, cost), squares + cost**2, (*sizes, end - start)))
        return min(candidates)

    _, _, sizes = best(count, parts)
    return sizes


def costs_around_blocks(
    calls: Iterable[tuple[float, bool]], after: float = 0.0
) -> tuple[float, list[float], float]:
    """Add the cost of what is between blocks to the block that follows.

    Args:
        calls: What is called in turn: (its cost, whether it is a block).
        after: The cost of what follows all calls.

    Returns:
        The cost before the first block, that of each block with what is between it and the block
        before, and the cost after the last block.
    """
    before_first = 0.0
    costs: list[float] = []
    since_block = 0.0
    for cost, is_block in calls:
        since_block += cost
        if not is_block:
            continue
        if costs:
            costs.append(since_block)
        else:
            before_first = since_block - cost
            costs.append(cost)
        since_block = 0.0
    return before_first, costs, since_block + after


def require_blocks(blocks: int, stages: int, chunks: int) -> None:
    """Check that there is a block for every part.

    Args:
        blocks: Number of blocks of the model.
        stages: Number of stages.
        chunks: Number of parts on each stage.

    Raises:
        LayoutError: There are too few blocks.
    """
    if blocks >= stages * chunks:
        return
    degrees = f"parallel.pp is {stages}"
    if chunks > 1:
        degrees += f" with {chunks} chunks each"
    if blocks >= 2 * chunks:
        raise LayoutError(
            f"{degrees}, but the model has only {blocks} blocks: write at most {blocks // chunks}"
        )
    lack = "has no repeating blocks"
    if blocks:
        lack = f"has only {blocks} repeating block{'s' if blocks > 1 else ''}"
    fewer_chunks = ", or a smaller parallel.chunks" if chunks > 1 else ""
    raise LayoutError(
        f"{degrees}, but the model {lack}: have the task's blocks() name modules that follow each "
        f"other, or write strategy=fsdp{fewer_chunks}"
    )


def require_sizes(sizes: Sequence[int], blocks: int, parts: int) -> tuple[int, ...]:
    """Check the number of blocks in each part that a person has written.

    Args:
        sizes: `parallel.stages`.
        blocks: Number of blocks of the model.
        parts: Number of parts.

    Returns:
        The sizes.

    Raises:
        LayoutError: They do not fit the model or the layout.
    """
    if len(sizes) != parts:
        raise LayoutError(
            f"parallel.stages names {len(sizes)} parts, but the pipeline has {parts}: write "
            f"{parts} numbers"
        )
    if min(sizes) < 1 or sum(sizes) != blocks:
        raise LayoutError(
            f"parallel.stages is {list(sizes)}, which adds up to {sum(sizes)} blocks, but the "
            f"model has {blocks}: write {parts} numbers of at least 1 that add up to {blocks}"
        )
    return tuple(sizes)
