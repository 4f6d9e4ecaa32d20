"""Whether another partition is better, by what the first steps were measured to take.

The first partition is by estimates, and an estimate does not know what a block does outside of tensors, nor how well
its matrix products suit the machine. A few measured steps do. Of a part's time for one micro-batch

- the calls of its blocks, and of the modules around them, are timed one by one in forward: they move;
- the rest is the code between modules, which every stage runs: it does not move. What the first and the last have of it
  beyond the others (preparing inputs; the loss) stays with them;
- backward is timed as a whole and shared out as forward is.

Medians over micro-batches and steps, so that a process that was interrupted for a moment does not decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from strategies.pipeline import partition
from strategies.pipeline.simulate import Span

WORTH = 0.05
"""A new partition must shorten the slowest stage by this share."""


@dataclass
class Measured:
    """What one worker took, in seconds, once for each micro-batch of each measured step."""

    ops: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    """By part and kind of instruction: F, B, W."""
    calls: dict[str, list[float]] = field(default_factory=dict)
    """Forward, by call."""

    def add(self, spans: Sequence[Span], part_of_chunk: Mapping[int, int], calls: Mapping[str, list[float]]) -> None:
        for span in spans:
            if span.kind in "FBW":
                self.ops.setdefault((part_of_chunk[span.chunk], span.kind), []).append(span.end - span.start)
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
        max(0.0, sum(ops.get((part, kind), 0.0) for kind in "FBW") - every) / max(forward[part] - every, 1e-30)
        for part in parts
    ]
    seconds = ((inside.get(name, 0.0) * factors[part_of[name]], block) for name, block in calls)
    first, costs, last = partition.costs_around_blocks(seconds, (rest[-1] - every) * factors[-1])
    first += (rest[0] - every) * factors[0]
    found = partition.balanced_partition(costs, len(sizes), first, last)
    now, then = (
        partition.max_cost(costs, chosen, first, last, every=every, stage_of=stage_of) for chosen in (sizes, found)
    )
    answer = BetterPartition(sizes, found, now, then)
    return answer if now > 0 and answer.gain >= WORTH else None


def _typical(everyone: Sequence[Mapping[Any, list[float]]]) -> dict[Any, float]:
    """The median of each worker, and their mean where several (copies of the model, say) did the same."""
    keys = dict.fromkeys(key for worker in everyone for key in worker)
    return {key: fmean(median(worker[key]) for worker in everyone if key in worker) for key in keys}
