"""Taking turns: several things measured in one run, block by block, in the order A B B A, so that whatever else the
machine does falls on all of them; and what comes of that as a ratio.

The ratio is the median over the blocks A B B A of B's time over A's: a machine that is slower for a minute is slower in
both, so it says nothing about either.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any


def in_blocks(
    turns: dict[str, Callable[[int], None]], blocks: int, each: int, together: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds per step of each turn of `each` steps, A B B A; the first block of every side warms up and is left out.
    `together` is called before each."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(-1, blocks):
        for name in list(turns) if number % 2 else list(reversed(turns)):
            together()
            begun = time.perf_counter()
            turns[name](each)
            if number >= 0:
                times[name].append((time.perf_counter() - begun) / each)
    return times


def in_turns(advances: dict[str, Callable[[], Any]], blocks: int, each: int) -> dict[str, list[float]]:
    """`in_blocks` of trainings, by what takes one step of each. Ranks begin a block together."""
    import torch.distributed as dist

    def steps(advance: Callable[[], Any]) -> Callable[[int], None]:
        def turn(count: int) -> None:
            for _ in range(count):
                advance()

        return turn

    def together() -> None:
        if dist.is_initialized():
            dist.barrier()

    return in_blocks({name: steps(advance) for name, advance in advances.items()}, blocks, each, together)


def beside(times: dict[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """Median milliseconds of each side, and its ratio to the side `base` with a 95 % interval."""
    found = {}
    for name, own in times.items():
        found[name] = {
            "ms": 1e3 * statistics.median(own),
            "ratio": statistics.median(ratios(times[base], own)),
            "interval": interval(times[base], own),
        }
    return found


def ratios(a: list[float], b: list[float]) -> list[float]:
    """b over a, of each two blocks that follow one another; of an odd number the last stands alone."""
    return [sum(b[at : at + 2]) / sum(a[at : at + 2]) for at in range(0, len(a), 2)]


def interval(a: list[float], b: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the ratios' median."""
    draw, known = random.Random(0), ratios(a, b)
    found = sorted(statistics.median(draw.choices(known, k=len(known))) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]
