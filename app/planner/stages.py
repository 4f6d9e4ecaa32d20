"""How a pipeline is cut into stages, and which parts of the model each stage has.

Each stage holds one or more chunks of consecutive blocks. The first chunk of the model also has
what comes before the blocks, and the last chunk what comes after them.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from app.planner.model_costs import ModelCosts
from app.planner.part_trace import AFTER, BEFORE
from strategies.pipeline import partition
from strategies.pipeline.schedules import Placement


class StageParts(NamedTuple):
    """The parts of the model that a stage has.

    Args:
        number: The number of the stage.
        counts: How many of each part the stage has.
        chunks: How many of each part each of its chunks has.
    """

    number: int
    counts: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]


class Stages(NamedTuple):
    """The stages of a pipeline.

    Args:
        sizes: The number of blocks of each chunk; None without a pipeline.
        slowest: How many of each part the slowest stage has.
        candidates_for_fullest: The stages one of which needs the most memory.
    """

    sizes: tuple[int, ...] | None
    slowest: tuple[int, ...]
    candidates_for_fullest: list[StageParts]


def single_stage(model: ModelCosts) -> Stages:
    """The whole model as one stage, for layouts without a pipeline."""
    whole_model = tuple(model.counts.values())
    return Stages(None, whole_model, [StageParts(0, whole_model, (whole_model,))])


def balanced_sizes(model: ModelCosts, seconds: Mapping[str, float], chunks: int) -> tuple[int, ...]:
    """The number of blocks of each chunk with which the slowest chunk is as fast as possible.

    Args:
        model: The costs of the model, which know the order of its blocks.
        seconds: The time of forward and backward of each part, by name.
        chunks: The number of chunks of the whole pipeline.
    """
    # Costs are in blocks, and rounded, so that most layouts share one partition.
    block_seconds = max(seconds[name] for name in model.order)
    return _balanced_partition(
        tuple(round(seconds[name] / block_seconds, 2) for name in model.order),
        chunks,
        first=round(seconds.get(BEFORE, 0.0) / block_seconds, 1),
        last=round(seconds.get(AFTER, 0.0) / block_seconds, 1),
    )


@functools.cache
def _balanced_partition(
    costs: tuple[float, ...], parts: int, *, first: float, last: float
) -> tuple[int, ...]:
    """partition.balanced_partition, remembered: most layouts of a model are cut in the same way."""
    return partition.balanced_partition(costs, parts, first, last)


def cut_into_stages(
    model: ModelCosts,
    sizes: tuple[int, ...],
    placement: Placement,
    *,
    seconds: Mapping[str, float],
    watched_stage: int | None = None,
) -> Stages:
    """The stages of a pipeline whose chunks have the given sizes.

    Args:
        model: The costs of the model, which know its parts and the order of its blocks.
        sizes: The number of blocks of each chunk.
        placement: Which stage holds which chunks.
        seconds: The time of forward and backward of each part, by name.
        watched_stage: The number of the only stage whose memory matters; None if it is the fullest
            stage's.
    """
    counts_of_chunks = [
        tuple(names.count(name) for name in model.parts)
        for names in _names_of_chunks(model.order, sizes)
    ]
    stages = []
    for number in range(placement.stages):
        chunks = tuple(counts_of_chunks[chunk] for chunk in placement.parts_of(number))
        counts = tuple(map(sum, zip(*chunks)))
        stages.append(StageParts(number, counts, chunks))
    seconds_of_stages = [
        sum(count * seconds[name] for count, name in zip(stage.counts, model.parts))
        for stage in stages
    ]
    slowest = seconds_of_stages.index(max(seconds_of_stages))
    # Early stages have the most micro-batches in flight, and the last one has the head.
    last = placement.stages - 1
    candidates_for_fullest = sorted({0, min(1, last), slowest, last})
    if watched_stage is not None:
        candidates_for_fullest = [watched_stage]
    return Stages(
        tuple(sizes),
        stages[slowest].counts,
        [stages[number] for number in candidates_for_fullest],
    )


def _names_of_chunks(order: list[str], sizes: tuple[int, ...]) -> list[list[str]]:
    """The names of the parts in each chunk of a pipeline that has `sizes` blocks a chunk."""
    ends = [0, *itertools.accumulate(sizes)]
    chunks = [order[begin:end] for begin, end in itertools.pairwise(ends)]
    chunks[0] = [BEFORE, *chunks[0]]
    chunks[-1] = [*chunks[-1], AFTER]
    return chunks
