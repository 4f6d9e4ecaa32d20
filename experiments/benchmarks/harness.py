"""Measuring things beside each other in one run, so that whatever else the machine does falls on all of them.

Sides take turns, block by block, in the order A B B A. The figure is the median over the blocks A B B A of B's time
over A's, with a bootstrap interval: a machine that is slower for a minute is slower in both.
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
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Times = dict[str, list[float]]
"""Seconds per step of each block, by side."""


def measured(
    steps: Mapping[str, Callable[[], object]], blocks: int, each: int, together: Callable[[], object] = lambda: None
) -> Times:
    """`blocks` blocks of `each` steps per side; one more of each warms up and is left out.

    steps: by side, what takes a step. together: called before each block, and after it, in its time.
    """
    times: Times = {name: [] for name in steps}
    for number in range(-1, blocks):
        for name in list(steps) if number % 2 else list(reversed(list(steps))):
            together()
            begun = time.perf_counter()
            for _ in range(each):
                steps[name]()
            together()
            if number >= 0:
                times[name].append((time.perf_counter() - begun) / each)
    return times


def beside(times: Times, base: str) -> dict[str, dict[str, Any]]:
    """Median milliseconds of each side, and its ratio to the side `base` with a 95 % interval."""
    found = {}
    for name, own in times.items():
        ratio, ms = statistics.median(ratios(times[base], own)), 1e3 * statistics.median(own)
        found[name] = {"ms": ms, "ratio": ratio, "interval": interval(times[base], own)}
    return found


def ratios(a: list[float], b: list[float]) -> list[float]:
    """b over a, of each two blocks that follow one another; of an odd number the last stands alone."""
    return [sum(b[at : at + 2]) / sum(a[at : at + 2]) for at in range(0, len(a), 2)]


def interval(a: list[float], b: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the ratios' median."""
    draw, known = random.Random(0), ratios(a, b)
    found = sorted(statistics.median(draw.choices(known, k=len(known))) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def show(name: str, found: Any, rows: Sequence[dict[str, str]], as_json: bool) -> None:
    """Prints a table in Markdown, or `found` with where it was measured: machine, load, versions, command."""
    command = shlex.join(["python", "-m", "experiments.benchmarks", name, *sys.argv[2:]])
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[1]:.1f}"
    versions = {"Python": platform.python_version()}
    for package in ("torch", "ray", "mlflow"):  # one GPU needs neither Ray nor MLflow
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    if as_json:
        here = {"benchmark": name, "command": command, "machine": machine, "versions": versions}
        print(json.dumps({**here, "found": found}))
        return
    print(f"`{command}`: {machine}; {', '.join(f'{key} {number}' for key, number in versions.items())}\n")
    for line in [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)] if rows else []:
        print(f"| {' | '.join(line)} |")


def ratio_row(name: str, found: dict[str, Any], base: str, side: str) -> dict[str, str]:
    """Of what `beside` gives: a row for one side beside the other."""
    low, high = found[side]["interval"]
    figures = {"beside, ms": f"{found[base]['ms']:.2f}", "ms": f"{found[side]['ms']:.2f}"}
    return {"": name, **figures, "ratio": f"{found[side]['ratio']:.3f}", "95 % interval": f"{low:.3f} to {high:.3f}"}
