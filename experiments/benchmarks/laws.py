"""`laws`: the scaling study's laws beside published series of runs that differ in their number of GPUs alone.

Each law is fitted to the two smallest numbers of GPUs of a series and judged on the others. Weak: the batch grows with
the GPUs; strong: it does not. `spread`: the relative error within which nine in ten points lie for each doubling
beyond the second number, which experiments/scale/laws.py has as its intervals.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import click

from experiments.benchmarks.compared import Compared, prepare
from experiments.benchmarks.harness import show
from experiments.benchmarks.published import percent
from experiments.benchmarks.published_runs import Run, runs
from experiments.scale.laws import LAWS, fit_law

LEAST = 3
"""Numbers of GPUs that a series has."""
BATCHES = 0.02
"""Share by which batches of as many samples a GPU may differ."""


@dataclass(frozen=True)
class Judged:
    """A law's word on one point: relative error of samples per second, and doublings beyond what it was fitted to."""

    group: str
    law: str
    error: float
    doublings: float


def series(table: Iterable[Run]) -> dict[str, list[list[Run]]]:
    """By whether they are weak or strong and how the model is split: runs that differ in their GPUs alone, fewest
    first. A number of GPUs that is there twice is left out of both."""
    others = [f.name for f in fields(Run) if f.name not in ("gpus", "global_batch", "step_seconds", "memory_gib")]
    alike = defaultdict[Any, list[Run]](list)
    for run in table:
        if run.step_seconds:
            base = tuple(repr(getattr(run, name)) for name in others)
            alike["weak", *base, round(math.log(run.global_batch / run.gpus) / BATCHES)].append(run)
            alike["strong", *base, run.global_batch].append(run)
    found = defaultdict[str, list[list[Run]]](list)
    for (scaling, *_), members in alike.items():
        counts = [run.gpus for run in members]
        own = sorted((run for run in members if counts.count(run.gpus) == 1), key=lambda run: run.gpus)
        if len(own) >= LEAST:
            split = "split" if own[0].tp * own[0].pp > 1 else "data parallel"
            found[f"{scaling}, {split}"].append(own)
    return found


def judge(group: str, members: list[Compared]) -> list[Judged]:
    """Every law's errors on one series."""
    speeds = {one.run.gpus: [one.run.global_batch / one.run.step_seconds] for one in members}
    curve = {one.run.gpus: one.run.global_batch / one.plan.step_seconds for one in members if one.plan is not None}
    seen = sorted(speeds)[:2]
    found = []
    for name in LAWS:
        law = fit_law(name, {n: speeds[n] for n in seen}, curve)
        if law is None:
            continue
        for n in sorted(speeds)[2:]:
            if name != "plan" or n in curve:
                error = law.speed * law.speedup(n) / speeds[n][0] - 1
                found.append(Judged(group, name, error, math.log2(n / seen[1])))
    return found


def table_of(judged: Iterable[Judged]) -> list[dict[str, str]]:
    """A line for each group and law."""
    groups = defaultdict[tuple[str, str], list[Judged]](list)
    for one in judged:
        groups[one.group, one.law].append(one)
    rows = []
    for (group, law), own in sorted(groups.items()):
        errors = sorted(abs(one.error) for one in own)
        spreads = sorted(abs(one.error) / one.doublings for one in own)
        rows.append(
            {
                "series": group,
                "law": law,
                "points": str(len(own)),
                "median": percent(statistics.median(errors)),
                "90th": percent(errors[int(0.9 * (len(errors) - 1))]),
                "bias": percent(statistics.median(one.error for one in own), True),
                "spread": percent(spreads[int(0.9 * (len(spreads) - 1))]),
            }
        )
    return rows


@click.command(help=__doc__)
@click.argument("tables", type=click.Path(exists=True), nargs=-1)
@click.option("--json", "as_json", is_flag=True)
def main(tables: tuple[str, ...], as_json: bool) -> None:
    found = series(runs(*tables))
    judged = [
        one
        for group, members in found.items()
        for own in members
        for one in judge(group, [prepare(run).compare() for run in own])
    ]
    show("laws", {"series": sum(map(len, found.values())), "points": len(judged)}, table_of(judged), as_json)


if __name__ == "__main__":
    main()
