"""`published`: the plan beside published training runs: speed, and whether what ran fits. `--fit` finds the constants.

published.csv holds figures only, a row a run, with the address it was read at. A row without `step_seconds` ran out of
memory; one without a micro-batch or chunks does not tell them, and the plan takes its own best. Another table may be
given: this file's columns, or those of llm-foundry's.

A run is planned as the same model under Trireme, with its layout's degrees and micro-batch, and nothing of its
trainer's, but that the communication of tensor parallelism overlaps products where the run's did (`overlap`).
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import click

from app.planner.device import constants as known_constants
from app.planner.plan import GIB
from experiments.benchmarks import evidence, fit
from experiments.benchmarks.compared import Compared, compare
from experiments.benchmarks.harness import show
from experiments.benchmarks.published_runs import TABLE, Run, reader_of, runs


def refit(table: list[Run]) -> str:
    """Fits the constants to the rows that are for it, and writes them."""
    chosen = [run for run in table if not run.is_unseen and run.step_seconds]
    values = fit.fit(
        lambda tried: [compare(run, tried).plan.step_seconds for run in chosen], [run.step_seconds for run in chosen]
    )
    errors = [(one.run.kind, one.error) for one in (compare(run, values) for run in chosen)]
    return fit.write(values, fit.ranges(errors), len(chosen))


KINDS = {"data": "FSDP", "tp": "TP", "pp": "PP", "tp+pp": "TP + PP"}


def summary(compared: Iterable[Compared]) -> list[dict[str, Any]]:
    """By half, kind of layout and GPU: errors of speed in %, who is inside the range, what is said not to fit."""
    groups = defaultdict[tuple[str, str], list[Compared]](list)
    for one in compared:
        half = "unseen" if one.run.is_unseen else "fit"
        size = reader_of(one.run).parameters / 1e9
        sizes = "under 10 B" if size < 10 else "10 to 69 B" if size < 69 else "70 B and more"
        for kind in (KINDS.get(one.run.kind, one.run.kind), one.run.gpu.partition("-")[0], sizes, "all"):
            groups[half, kind].append(one)
    rows, order = [], [*KINDS.values(), "a100", "h100", "under 10 B", "10 to 69 B", "70 B and more", "all"]
    for (half, kind), own in sorted(groups.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        ran, out = [one for one in own if one.run.step_seconds], [one for one in own if not one.run.step_seconds]
        errors = sorted(abs(one.error) for one in ran)
        known = [one.memory_error for one in ran if one.run.memory_gib]
        inside = sum(one.plan.range[0] <= 1 / (1 + one.error) <= one.plan.range[1] for one in ran)
        rows.append(
            {
                "half": half,
                "kind": kind,
                "runs": str(len(ran)),
                "median": _percent(statistics.median(errors)) if ran else "",
                "90th": _percent(errors[int(0.9 * (len(errors) - 1))]) if ran else "",
                "bias": _percent(statistics.median(one.error for one in ran), True) if ran else "",
                "inside": _percent(inside / len(ran)) if ran else "",
                "memory": _percent(statistics.median(known), True) if known else "",
                "said not to fit": str(sum(one.plan.verdict == "does not fit" for one in ran)),
                "ran out": f"{sum(one.plan.verdict != 'fits' for one in out)} of {len(out)} foreseen" if out else "",
            }
        )
    return rows


def _percent(value: float, signed: bool = False) -> str:
    return f"{100 * value:{'+' if signed else ''}.1f} %"


@click.command(help=__doc__)
@click.argument("tables", type=click.Path(exists=True), nargs=-1)
@click.option("--fit", "fits", is_flag=True, help="Find the constants first, and write app/planner/fitted.yaml.")
@click.option("--runs", "every", is_flag=True, help="A line per run too.")
@click.option("--calibration", metavar="FILE", help="Draw how many runs are inside ranges of 10 to 90 %.")
@click.option("--regret", is_flag=True, help="What a plan's choice loses among the published layouts, and gains.")
@click.option("--json", "as_json", is_flag=True)
def main(tables: tuple[str, ...], fits: bool, every: bool, calibration: str, regret: bool, as_json: bool) -> None:
    entries = [run for table in tables or (TABLE,) for run in runs(table) if run.cp == 1]
    if fits:
        click.echo(refit(entries), err=True)
        known_constants.cache_clear()
    compared = [compare(run) for run in entries]
    rows = summary(compared)
    if every:
        rows = [
            {
                "run": one.run.name,
                "half": "unseen" if one.run.is_unseen else "fit",
                "error": _percent(one.error, True) if one.run.step_seconds else "ran out of memory",
                "GiB": f"{one.plan.memory_bytes / GIB:.1f}, {one.plan.verdict}",
                "measured": str(one.run.memory_gib or ""),
            }
            for one in compared
        ]
    if calibration:
        evidence.draw(compared, calibration)
    if regret:
        rows = [*evidence.among_published(compared), *evidence.beside_best(compared)]
    ran = [one for one in compared if one.run.step_seconds]
    found = {
        "rows": len(compared),
        "not_fitting": sum(one.plan.verdict == "does not fit" for one in ran),
        "median_error": statistics.median(abs(one.error) for one in ran),
    }
    show("published", found, rows, as_json)
