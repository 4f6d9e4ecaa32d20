"""Measures things beside each other in one run, so that all are affected by what the machine does.

Sides take turns, block by block, in the order A B B A. The result is the median, over blocks
A B B A, of B's time over A's, with a bootstrap interval: if the machine is slower for a minute, it
is slower for both.
"""

import contextlib
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TypedDict

Times = dict[str, list[float]]
"""Seconds per step of each block, by side."""
PACKAGES = ("torch", "ray", "mlflow")
"""Packages whose versions are shown, if they are installed."""


class Comparison(TypedDict):
    """One side beside another one.

    Attributes:
        ms: The median milliseconds per step.
        ratio: The ratio of the times to those of the other side.
        interval: The ratio's 95 % interval.
    """

    ms: float
    ratio: float
    interval: tuple[float, float]


def do_nothing() -> None:
    """Synchronises nothing."""


def measure_in_turns(
    steps: Mapping[str, Callable[[], object]],
    *,
    blocks: int,
    steps_per_block: int,
    synchronize: Callable[[], object] = do_nothing,
) -> Times:
    """Measures sides in turns; a first block of each warms up and is left out.

    Args:
        steps: By side, what takes one step.
        blocks: The number of blocks of each side.
        steps_per_block: The number of steps in a block.
        synchronize: Called before each block and at its end, and timed with it.
    """
    times: Times = {name: [] for name in steps}
    for block in range(-1, blocks):
        order = list(steps)
        if block % 2 == 0:
            order.reverse()
        for name in order:
            synchronize()
            started = time.perf_counter()
            for _ in range(steps_per_block):
                steps[name]()
            synchronize()
            seconds = time.perf_counter() - started
            if block >= 0:
                times[name].append(seconds / steps_per_block)
    return times


def compare_times(times: Times, base: str) -> dict[str, Comparison]:
    """Each side beside the side `base`."""
    comparisons: dict[str, Comparison] = {}
    for name, side in times.items():
        comparisons[name] = {
            "ms": 1e3 * statistics.median(side),
            "ratio": statistics.median(ratios(times[base], side)),
            "interval": interval(times[base], side),
        }
    return comparisons


def ratios(base: Sequence[float], side: Sequence[float]) -> list[float]:
    """The times of a side over those of the base, for each two blocks that follow one another.

    Of an odd number of blocks the last one is alone.
    """
    return [
        sum(side[start : start + 2]) / sum(base[start : start + 2])
        for start in range(0, len(base), 2)
    ]


def interval(
    base: Sequence[float],
    side: Sequence[float],
    draws: int = 2000,
) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median ratio of a side to the base."""
    generator = random.Random(0)
    all_ratios = ratios(base, side)
    medians = []
    for _ in range(draws):
        drawn = generator.choices(all_ratios, k=len(all_ratios))
        medians.append(statistics.median(drawn))
    medians.sort()
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def show(
    name: str,
    results: object,
    rows: Sequence[Mapping[str, str]],
    *,
    as_json: bool,
) -> None:
    """Prints a benchmark's results, with where they were measured: machine, load and versions.

    Args:
        name: The benchmark.
        results: What is printed as JSON.
        rows: What is printed as a table in Markdown.
        as_json: Which of the two is printed.
    """
    command = shlex.join(["python", "-m", "experiments.benchmarks", name, *sys.argv[2:]])
    load = os.getloadavg()[1]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {load:.1f}"
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    if as_json:
        answer = {
            "benchmark": name,
            "command": command,
            "machine": machine,
            "versions": versions,
            "found": results,
        }
        print(json.dumps(answer))
        return
    shown_versions = ", ".join(f"{package} {number}" for package, number in versions.items())
    print(f"`{command}`: {machine}; {shown_versions}\n")
    if rows:
        _print_line(rows[0])
        _print_line(["---"] * len(rows[0]))
        for row in rows:
            _print_line(row.values())


def _print_line(cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |")


def ratio_row(
    name: str,
    comparisons: Mapping[str, Comparison],
    *,
    base: str,
    side: str,
) -> dict[str, str]:
    """A row of a table: one side beside the base."""
    comparison = comparisons[side]
    low, high = comparison["interval"]
    return {
        "": name,
        "beside, ms": f"{comparisons[base]['ms']:.2f}",
        "ms": f"{comparison['ms']:.2f}",
        "ratio": f"{comparison['ratio']:.3f}",
        "95 % interval": f"{low:.3f} to {high:.3f}",
    }
