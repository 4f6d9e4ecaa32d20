"""`laws`: the laws of scaling studies beside published series of runs.

The runs of a series differ in their number of GPUs alone. Each law is fitted to the two smallest
numbers of GPUs of a series and judged on the others. Weak: the batch grows with the GPUs; strong:
it does not. `spread`: the relative error within which nine in ten points lie for each doubling
beyond the second number, which experiments/scale/laws.py has as its intervals.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields

import click

from experiments.benchmarks.compared import Compared, prepare
from experiments.benchmarks.harness import show
from experiments.benchmarks.published import percent
from experiments.benchmarks.published_runs import Run, runs
from experiments.scale.laws import LAWS, fit_law

MIN_COUNTS = 3
"""Different numbers of GPUs that a series has at least."""
FITTED_COUNTS = 2
"""The smallest numbers of GPUs, to which a law is fitted."""
BATCH_TOLERANCE = 0.02
"""Share by which the samples per GPU may differ in a series."""
DIFFERING = ("gpus", "global_batch", "step_seconds", "memory_gib")
"""Fields in which the runs of a series differ."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A law's prediction of one point.

    Attributes:
        group: The kind of its series.
        law: The law.
        error: The relative error of samples per second.
        doublings: Doublings of GPUs beyond what the law was fitted to.
    """

    group: str
    law: str
    error: float
    doublings: float


def series(table: Iterable[Run]) -> dict[str, list[list[Run]]]:
    """Series of runs that differ in their number of GPUs alone, fewest GPUs first.

    Runs on a number of GPUs that a series has twice are left out of it.

    Returns:
        By kind: weak or strong scaling, and how the model is split.
    """
    common_fields = [field.name for field in fields(Run) if field.name not in DIFFERING]
    groups = defaultdict[tuple[Hashable, ...], list[Run]](list)
    for run in table:
        if not run.step_seconds:
            continue
        settings = tuple(repr(getattr(run, name)) for name in common_fields)
        samples_per_gpu = run.global_batch / run.gpus
        batch_class = round(math.log(samples_per_gpu) / BATCH_TOLERANCE)
        groups["weak", settings, batch_class].append(run)
        groups["strong", settings, run.global_batch].append(run)
    series_by_group = defaultdict[str, list[list[Run]]](list)
    for (scaling, *_), members in groups.items():
        counts = Counter(run.gpus for run in members)
        unique = [run for run in members if counts[run.gpus] == 1]
        unique.sort(key=lambda run: run.gpus)
        if len(unique) >= MIN_COUNTS:
            is_split = unique[0].tp * unique[0].pp > 1
            series_by_group[f"{scaling}, {'split' if is_split else 'data parallel'}"].append(unique)
    return series_by_group


def judge(group: str, members: Sequence[Compared]) -> list[Judgement]:
    """Judges every law on one series.

    Args:
        group: The kind of the series.
        members: Its runs and their plans.
    """
    speeds = {}
    curve = {}
    for compared in members:
        run = compared.run
        speeds[run.gpus] = [run.global_batch / run.step_seconds]
        if compared.plan is not None:
            curve[run.gpus] = run.global_batch / compared.plan.step_seconds
    counts = sorted(speeds)
    fitted = counts[:FITTED_COUNTS]
    judgements = []
    for name in LAWS:
        law = fit_law(name, {count: speeds[count] for count in fitted}, curve)
        if law is None:
            continue
        for count in counts[FITTED_COUNTS:]:
            if name == "plan" and count not in curve:
                continue
            predicted = law.speed * law.speedup(count)
            judgement = Judgement(
                group=group,
                law=name,
                error=predicted / speeds[count][0] - 1,
                doublings=math.log2(count / fitted[-1]),
            )
            judgements.append(judgement)
    return judgements


def table_of(judgements: Iterable[Judgement]) -> list[dict[str, str]]:
    """A line for each kind of series and each law."""
    groups = defaultdict[tuple[str, str], list[Judgement]](list)
    for judgement in judgements:
        groups[judgement.group, judgement.law].append(judgement)
    rows = []
    for (group, law), members in sorted(groups.items()):
        errors = [abs(member.error) for member in members]
        spreads = [abs(member.error) / member.doublings for member in members]
        bias = statistics.median(member.error for member in members)
        rows.append(
            {
                "series": group,
                "law": law,
                "points": str(len(members)),
                "median": percent(statistics.median(errors)),
                "90th": percent(_ninth_tenth(errors)),
                "bias": percent(bias, signed=True),
                "spread": percent(_ninth_tenth(spreads)),
            }
        )
    return rows


def _ninth_tenth(values: Sequence[float]) -> float:
    """The value below which nine in ten lie."""
    return sorted(values)[int(0.9 * (len(values) - 1))]


@click.command(help=__doc__)
@click.argument("tables", type=click.Path(exists=True), nargs=-1)
@click.option("--json", "as_json", is_flag=True)
def main(tables: tuple[str, ...], as_json: bool) -> None:
    series_by_group = series(runs(*tables))
    judgements = []
    for group, all_members in series_by_group.items():
        for members in all_members:
            judgements += judge(group, [prepare(run).compare() for run in members])
    results = {"series": sum(map(len, series_by_group.values())), "points": len(judgements)}
    show("laws", results, table_of(judgements), as_json=as_json)


if __name__ == "__main__":
    main()
