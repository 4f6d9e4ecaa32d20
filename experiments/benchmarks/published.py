"""`published`: published training runs beside what the plain `trireme plan` command says of them.

A table by kind of run, size of the model, length of the sequence, GPU and source. Nothing of a run's trainer is told to
the planner but what the command's keys say: degrees, micro-batch, recomputation, precision, and whether its kernels
are fused as those of torch.compile are.

`--fit` fits the constants to the rows of the part `fit` and writes app/planner/fitted.yaml. `--leave-out source` (or
`gpu`) fits anew for each source (GPU), to the rows of all others, and judges on its own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import click
import numpy as np

from app.planner.device import constants as known_constants
from experiments.benchmarks import evidence, fit
from experiments.benchmarks.compared import Compared, Prepared, prepare
from experiments.benchmarks.harness import show
from experiments.benchmarks.published_runs import PARTS, Run, runs

KINDS = {"data": "data parallel", "tp": "TP", "pp": "PP", "tp+pp": "TP + PP", "cp": "CP", "cp+tp+pp": "CP + TP + PP"}
SIZES = ((3.5, "up to 3 B"), (10, "3 to 10 B"), (69, "10 to 69 B"), (1e9, "70 B and more"))
LENGTHS = ((2048, "up to 2 k"), (8192, "4 to 8 k"), (16384, "16 k"), (1e9, "32 k and more"))
SMALL = 10
"""Rows from which on a group's bias counts."""


def _bucket(value: float, buckets: Sequence[tuple[float, str]]) -> str:
    return next(name for most, name in buckets if value <= most)


def groups_of(one: Compared, billions: float) -> list[tuple[str, str]]:
    """The groups that a run belongs to: what they are told by, and which."""
    run = one.run
    return [
        ("all", "all"),
        ("kind", KINDS.get(run.kind, run.kind)),
        ("size", _bucket(billions, SIZES)),
        ("sequence", _bucket(run.sequence, LENGTHS)),
        ("GPU", run.gpu.partition(":")[0] + (" limited" if ":" in run.gpu else "")),
        ("precision", run.precision),
        ("table", run.table),
    ]


def row_of(kind: str, name: str, members: Sequence[Compared]) -> dict[str, Any]:
    """One group's line: errors of speed in %, who is inside the range, what is refused or said not to fit."""
    speeds = [one for one in members if one.has_speed]
    out = [one for one in members if one.run.ran_out and one.plan is not None]
    errors = sorted(abs(one.error) for one in speeds)
    memory = [one.memory_error for one in members if one.run.memory_gib and one.plan is not None]
    return {
        "by": kind,
        "group": name,
        "rows": str(len(members)),
        "speeds": str(len(speeds)),
        "median": percent(statistics.median(errors)) if errors else "",
        "90th": percent(errors[int(0.9 * (len(errors) - 1))]) if errors else "",
        "bias": percent(statistics.median(one.error for one in speeds), True) if errors else "",
        "inside": percent(sum(one.is_inside for one in speeds) / len(speeds)) if errors else "",
        "refused": str(sum(one.plan is None for one in members)),
        "said not to fit": str(sum(one.plan is not None and one.plan.verdict == "does not fit" for one in speeds)),
        "ran out": f"{sum(one.plan.verdict != 'fits' for one in out if one.plan)} of {len(out)} foreseen"
        if out
        else "",
        "memory": percent(statistics.median(map(abs, memory))) if memory else "",
        "memory bias": percent(statistics.median(memory), True) if memory else "",
    }


def summary(compared: Iterable[Compared], billions: dict[Run, float]) -> list[dict[str, Any]]:
    """A line for each group."""
    groups = defaultdict[tuple[str, str], list[Compared]](list)
    for one in compared:
        for key in groups_of(one, billions[one.run]):
            groups[key].append(one)
    order = ["all", "kind", "size", "sequence", "GPU", "precision", "table"]
    return [row_of(*key, own) for key, own in sorted(groups.items(), key=lambda item: order.index(item[0][0]))]


def percent(value: float, signed: bool = False) -> str:
    return f"{100 * value:{'+' if signed else ''}.1f} %"


def fit_to(prepared: Sequence[Prepared], *, again: bool = True) -> fit.Fit:
    """The constants that are fitted to these rows. again: False takes the constants as they are."""
    change_of = fit.changed

    def seconds(values: fit.Values) -> list[float]:
        plans = [one.compare(change_of(values), described=True).plan for one in prepared]
        return [plan.step_seconds for plan in plans if plan is not None]

    measured = [one.run.step_seconds for one in prepared]
    counted = fit.weights([one.run for one in prepared])
    values = fit.fit(seconds, measured, counted) if again else fit.known_values()
    return fit.with_slopes(seconds, measured, values)


def without_own(prepared: Sequence[Prepared], known: fit.Fit, rows: Sequence[Prepared], name: str) -> list[Compared]:
    """Each row planned with constants that are fitted to rows of other sources, or on other GPUs, alone.

    Args:
        prepared: All rows.
        known: The fit.
        rows: Those that it was fitted to.
        name: source or gpu.
    """

    def group(one: Prepared) -> str:
        return one.run.source if name == "source" else one.run.gpu.partition(":")[0]

    counted = fit.weights([one.run for one in rows])
    found = []
    for own in dict.fromkeys(map(group, prepared)):
        kept = np.flatnonzero([group(one) != own for one in rows])
        values = known.values if len(kept) == len(rows) else fit.without(known, kept, counted[kept])
        found += [one.compare(fit.changed(values)) for one in prepared if group(one) == own]
    return found


def with_ranges(prepared: Sequence[Prepared], unseen: Sequence[Compared], part: str) -> dict[str, Any]:
    """Ranges by the errors that runs of a part had when nothing of their source was fitted to."""
    traits = {one.run: one.traits for one in prepared if one.plan is not None}
    return fit.ranges([(traits[one.run], one.error) for one in unseen if one.has_speed and one.run.part == part])


def is_fitted(one: Prepared) -> bool:
    """Whether constants are fitted to the row."""
    return one.plan is not None and bool(one.run.step_seconds) and one.run.part == "fit" and fit.is_for_fit(one.run)


def write_fit(prepared: Sequence[Prepared]) -> str:
    """Fits the constants and the ranges to rows, and writes them."""
    rows = [one for one in prepared if is_fitted(one)]
    known = fit_to(rows)
    between = fit.intervals(known, [one.run.source for one in rows], fit.weights([one.run for one in rows]))
    unseen = without_own(prepared, known, rows, "source")
    return fit.write(known.values, between, with_ranges(prepared, unseen, "fit"), len(rows))


@click.command(help=__doc__)
@click.argument("tables", type=click.Path(exists=True), nargs=-1)
@click.option("--part", "parts", multiple=True, type=click.Choice(sorted({*PARTS})), help="Only these rows.")
@click.option("--fit", "fits", is_flag=True, help="Find the constants first, and write app/planner/fitted.yaml.")
@click.option("--leave-out", type=click.Choice(["source", "gpu"]), help="Fit to the others of each.")
@click.option("--described", is_flag=True, help="Plan with what is known of the runs' kernels, too.")
@click.option("--runs", "every", is_flag=True, help="A line per run too.")
@click.option("--calibration", metavar="FILE", help="Draw how many runs are inside ranges of 10 to 90 %.")
@click.option("--regret", is_flag=True, help="What a plan's choice loses among the published layouts, and gains.")
@click.option("--json", "as_json", is_flag=True)
def main(
    tables: tuple[str, ...],
    parts: tuple[str, ...],
    fits: bool,
    leave_out: str | None,
    described: bool,
    every: bool,
    calibration: str,
    regret: bool,
    as_json: bool,
) -> None:
    prepared = [prepare(run) for run in runs(*tables)]
    if fits:
        click.echo(write_fit(prepared), err=True)
        known_constants.cache_clear()
        prepared = [prepare(run) for run in runs(*tables)]
    chosen = [one for one in prepared if not parts or one.run.part in parts]
    if leave_out or calibration:
        rows = [one for one in prepared if is_fitted(one)]
        compared = without_own(chosen, fit_to(rows, again=False), rows, leave_out or "source")
    else:
        compared = [one.compare(described=described) for one in chosen]
    billions = {one.run: one.plan.reader.parameters / 1e9 if one.plan else 1e6 for one in prepared}
    lines = summary(compared, billions)
    if every:
        lines = [line_of(one) for one in compared]
    if calibration:
        evidence.draw(chosen, compared, calibration)
    if regret:
        lines = [*evidence.among_published(compared), *evidence.beside_best(chosen)]
    speeds = [one for one in compared if one.has_speed]
    found = {
        "rows": len(compared),
        "refused": sum(one.plan is None for one in compared),
        "not_fitting": sum(one.plan is not None and one.plan.verdict == "does not fit" for one in speeds),
        "median_error": statistics.median(abs(one.error) for one in speeds) if speeds else None,
    }
    show("published", found | {"table": lines}, lines, as_json)


def line_of(one: Compared) -> dict[str, Any]:
    """One run's line."""
    if one.plan is None:
        return {"run": one.run.name, "part": one.run.part, "error": "refused", "GiB": one.refusal[:70], "measured": ""}
    return {
        "run": one.run.name,
        "part": one.run.part,
        "error": percent(one.error, True) if one.has_speed else "ran out of memory" if one.run.ran_out else "",
        "GiB": f"{one.plan.memory_bytes / 2**30:.1f}, {one.plan.verdict}",
        "measured": f"{one.run.memory_gib:.1f}" if one.run.memory_gib else "",
    }


if __name__ == "__main__":
    main()
