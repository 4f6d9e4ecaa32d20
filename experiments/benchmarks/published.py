"""`published`: published training runs beside what the plain `trireme plan` command says of them.

A table by kind of run, size of the model, length of the sequence, GPU and source. Nothing of a
run's trainer is told to the planner but what the command's keys say: degrees, micro-batch,
recomputation, precision, and whether its kernels are fused as those of torch.compile are.

`--fit` fits the constants to the rows of the part `fit` and writes app/planner/fitted.yaml.
`--leave-out source` (or `gpu`) fits anew for each source (GPU), to the rows of all others, and
judges on its own.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import click
import numpy as np

from app.errors import UserError
from app.planner.device import constants as planner_constants
from experiments.benchmarks import evidence, fit
from experiments.benchmarks.compared import Compared, Prepared, prepare
from experiments.benchmarks.harness import show
from experiments.benchmarks.published_runs import GIB, PARTS, Run, runs

KINDS = {
    "data": "data parallel",
    "tp": "TP",
    "pp": "PP",
    "tp+pp": "TP + PP",
    "cp": "CP",
    "cp+tp+pp": "CP + TP + PP",
}
Buckets = Sequence[tuple[float, str]]
"""The largest value of each bucket, and its name."""
SIZES: Buckets = (
    (3.5, "up to 3 B"),
    (10, "3 to 10 B"),
    (69, "10 to 69 B"),
    (1e9, "70 B and more"),
)
LENGTHS: Buckets = (
    (2048, "up to 2 k"),
    (8192, "4 to 8 k"),
    (16384, "16 k"),
    (1e9, "32 k and more"),
)
GROUPINGS = ("all", "kind", "size", "sequence", "GPU", "precision", "table")
"""By what runs are grouped, in the order of the table."""
MEMORY_GROUPINGS = ("all", "peak", "kind", "precision", "GPU")
"""The same of their memory; a peak is what torch allocates or reserves, or what the card has."""


def _bucket(value: float, buckets: Buckets) -> str:
    for largest, name in buckets:
        if value <= largest:
            return name
    raise ValueError(f"{value} is above the last bucket")


def _groups_of(run: Run, billions: float) -> dict[str, str]:
    """The groups that a run belongs to, by grouping.

    Args:
        run: The run.
        billions: The size of its model, in billions of parameters.
    """
    is_limited = ":" in run.gpu
    return {
        "all": "all",
        "kind": KINDS.get(run.kind, run.kind),
        "size": _bucket(billions, SIZES),
        "sequence": _bucket(run.sequence, LENGTHS),
        "GPU": run.gpu.partition(":")[0] + (" limited" if is_limited else ""),
        "precision": run.precision,
        "table": run.table,
    }


def _group_row(grouping: str, name: str, members: Sequence[Compared]) -> dict[str, str]:
    """One group's line.

    It has the errors of speed and memory, how many published speeds are inside the range, and how
    many runs are refused or said not to fit.
    """
    with_speed = [one for one in members if one.has_speed]
    planned = [one.plan for one in members if one.plan is not None]
    not_fitting = [
        one for one in with_speed if one.plan is not None and one.plan.verdict == "does not fit"
    ]
    ran_out = [one.plan for one in members if one.run.ran_out and one.plan is not None]
    memory_errors = [
        one.memory_error for one in members if one.run.memory_gib and one.plan is not None
    ]
    row = {
        "by": grouping,
        "group": name,
        "rows": str(len(members)),
        "speeds": str(len(with_speed)),
        "median": "",
        "90th": "",
        "bias": "",
        "inside": "",
        "refused": str(len(members) - len(planned)),
        "said not to fit": str(len(not_fitting)),
        "ran out": "",
        "memory": "",
        "memory bias": "",
    }
    if with_speed:
        errors = sorted(abs(one.error) for one in with_speed)
        row["median"] = percent(statistics.median(errors))
        row["90th"] = percent(errors[int(0.9 * (len(errors) - 1))])
        bias = statistics.median(one.error for one in with_speed)
        row["bias"] = percent(bias, signed=True)
        row["inside"] = percent(sum(one.is_inside for one in with_speed) / len(with_speed))
    if ran_out:
        foreseen = sum(plan.verdict != "fits" for plan in ran_out)
        row["ran out"] = f"{foreseen} of {len(ran_out)} foreseen"
    if memory_errors:
        row["memory"] = percent(statistics.median(map(abs, memory_errors)))
        row["memory bias"] = percent(statistics.median(memory_errors), signed=True)
    return row


def summary(compared: Iterable[Compared], billions: Mapping[Run, float]) -> list[dict[str, str]]:
    """A line for each group.

    Args:
        compared: Runs and their plans.
        billions: The size of each run's model, in billions of parameters.
    """
    groups = defaultdict[tuple[str, str], list[Compared]](list)
    for one in compared:
        for grouping, name in _groups_of(one.run, billions[one.run]).items():
            groups[grouping, name].append(one)
    keys = sorted(groups, key=lambda key: GROUPINGS.index(key[0]))
    return [_group_row(grouping, name, groups[grouping, name]) for grouping, name in keys]


def memory_summary(
    compared: Iterable[Compared], billions: Mapping[Run, float]
) -> list[dict[str, str]]:
    """A line for each group of runs whose peak of memory was published, and for what peaks count.

    Args:
        compared: Runs and their plans.
        billions: The size of each run's model, in billions of parameters.
    """
    groups = defaultdict[tuple[str, str], list[Compared]](list)
    for one in compared:
        of_run = _groups_of(one.run, billions[one.run]) | {"peak": one.run.peak or "not said"}
        for grouping in MEMORY_GROUPINGS:
            groups[grouping, of_run[grouping]].append(one)
    rows = []
    for grouping, name in sorted(groups, key=lambda key: MEMORY_GROUPINGS.index(key[0])):
        members = groups[grouping, name]
        errors = [one.memory_error for one in members if one.plan is not None]
        row = {
            "by": grouping,
            "group": name,
            "rows": str(len(members)),
            "median": "",
            "90th": "",
            "bias": "",
        }
        if errors:
            sizes = sorted(map(abs, errors))
            row["median"] = percent(statistics.median(sizes))
            row["90th"] = percent(sizes[math.ceil(0.9 * len(sizes)) - 1])
            row["bias"] = percent(statistics.median(errors), signed=True)
        rows.append(row)
    return rows


def percent(value: float, *, signed: bool = False) -> str:
    """A share in percent; with its sign for errors that have one."""
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


# --- fitting --------------------------------------------------------------------------------------


def fit_to(prepared: Sequence[Prepared], *, again: bool = True) -> fit.Fit:
    """Fits the constants to rows.

    Args:
        prepared: The rows.
        again: Whether the constants are fitted; otherwise those in use are taken as they are.
    """

    def seconds(values: fit.Values) -> list[float]:
        change = fit.changed(values)
        plans = [one.compare(change, described=True).plan for one in prepared]
        return [plan.step_seconds for plan in plans if plan is not None]

    measured = [one.run.step_seconds for one in prepared]
    if again:
        weights = fit.weights([one.run for one in prepared])
        values = fit.fit(seconds, measured, weights)
    else:
        values = fit.known_values()
    return fit.with_slopes(seconds, measured, values)


def without_own(
    prepared: Sequence[Prepared],
    whole_fit: fit.Fit,
    fitted: Sequence[Prepared],
    *,
    group_by: str,
) -> list[Compared]:
    """Plans each row with constants fitted only to rows of other sources, or on other GPUs.

    Args:
        prepared: The rows.
        whole_fit: The fit to all rows that are for it.
        fitted: Those rows.
        group_by: "source" or "gpu".
    """

    def group(one: Prepared) -> str:
        return one.run.source if group_by == "source" else one.run.gpu.partition(":")[0]

    weights = fit.weights([one.run for one in fitted])
    groups = defaultdict[str, list[Prepared]](list)
    for one in prepared:
        groups[group(one)].append(one)
    compared = []
    for name, members in groups.items():
        kept = np.flatnonzero([group(one) != name for one in fitted])
        values = whole_fit.values
        if len(kept) < len(fitted):
            values = fit.without(whole_fit, kept, weights[kept])
        change = fit.changed(values)
        compared += [one.compare(change) for one in members]
    return compared


def _is_fitted(one: Prepared) -> bool:
    """Whether constants are fitted to a row."""
    if one.plan is None or not one.run.step_seconds:
        return False
    return one.run.part == "fit" and fit.is_for_fit(one.run)


def write_fit(prepared: Sequence[Prepared]) -> str:
    """Fits the constants and the ranges to rows, and writes them.

    Ranges are fitted to the errors that runs had when nothing of their source was fitted to.

    Returns:
        A sentence that says where they are.
    """
    fitted = [one for one in prepared if _is_fitted(one)]
    whole_fit = fit_to(fitted)
    sources = [one.run.source for one in fitted]
    intervals = fit.intervals(whole_fit, sources, fit.weights([one.run for one in fitted]))
    unseen = without_own(prepared, whole_fit, fitted, group_by="source")
    traits = {one.run: one.traits for one in prepared if one.plan is not None}
    errors = []
    for one in unseen:
        if one.has_speed and one.run.part == "fit":
            errors.append((traits[one.run], one.error))
    return fit.write(whole_fit.values, intervals, fit.ranges(errors), len(fitted))


# --- the command ----------------------------------------------------------------------------------


@click.command(help=__doc__)
@click.argument("tables", type=click.Path(exists=True), nargs=-1)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(sorted({*PARTS})),
    help="Only these rows.",
)
@click.option(
    "--fit",
    "fits",
    is_flag=True,
    help="Find the constants first, and write app/planner/fitted.yaml.",
)
@click.option(
    "--leave-out",
    type=click.Choice(["source", "gpu"]),
    help="Fit to the others of each.",
)
@click.option(
    "--described",
    is_flag=True,
    help="Plan with what is known of the runs' kernels, too.",
)
@click.option("--runs", "shows_runs", is_flag=True, help="A line per run too.")
@click.option(
    "--calibration",
    metavar="FILE",
    help="Draw how many runs are inside ranges of 10 to 90 %.",
)
@click.option(
    "--regret",
    is_flag=True,
    help="What a plan's choice loses among the published layouts, and gains.",
)
@click.option(
    "--memory",
    "of_memory",
    is_flag=True,
    help="Only runs whose peak of memory was published.",
)
@click.option("--json", "as_json", is_flag=True)
def main(
    tables: tuple[str, ...],
    parts: tuple[str, ...],
    fits: bool,
    leave_out: str | None,
    described: bool,
    shows_runs: bool,
    calibration: str | None,
    regret: bool,
    of_memory: bool,
    as_json: bool,
) -> None:
    if of_memory and (fits or leave_out or calibration or regret):
        raise UserError(
            "--memory reads few runs: leave out --fit, --leave-out, --calibration, --regret"
        )
    all_runs = runs(*tables)
    if of_memory:
        all_runs = [run for run in all_runs if run.memory_gib]
    prepared = [prepare(run) for run in all_runs]
    if fits:
        click.echo(write_fit(prepared), err=True)
        planner_constants.cache_clear()
        prepared = [prepare(run) for run in runs(*tables)]
    chosen = [one for one in prepared if not parts or one.run.part in parts]
    if leave_out or calibration:
        fitted = [one for one in prepared if _is_fitted(one)]
        whole_fit = fit_to(fitted, again=False)
        compared = without_own(chosen, whole_fit, fitted, group_by=leave_out or "source")
    else:
        compared = [one.compare(described=described) for one in chosen]
    if calibration:
        evidence.draw_calibration(chosen, compared, calibration)
    if regret:
        lines = [*evidence.among_published(compared), *evidence.beside_best(chosen)]
    elif shows_runs:
        lines = [_run_row(one) for one in compared]
    elif of_memory:
        lines = memory_summary(compared, {one.run: _billions(one) for one in prepared})
    else:
        lines = summary(compared, {one.run: _billions(one) for one in prepared})
    results = _figures(compared)
    show("published", results | {"table": lines}, lines, as_json=as_json)


def _billions(one: Prepared) -> float:
    """The size of a run's model in billions of parameters; very large if it was refused."""
    return one.plan.reader.parameters / 1e9 if one.plan else 1e6


def _figures(compared: Sequence[Compared]) -> dict[str, object]:
    """The figures of all runs together."""
    with_speed = [one for one in compared if one.has_speed]
    verdicts = [one.plan.verdict for one in with_speed if one.plan is not None]
    median_error = None
    if with_speed:
        median_error = statistics.median(abs(one.error) for one in with_speed)
    return {
        "rows": len(compared),
        "refused": sum(one.plan is None for one in compared),
        "not_fitting": verdicts.count("does not fit"),
        "median_error": median_error,
    }


def _run_row(one: Compared) -> dict[str, str]:
    """One run's line."""
    run = one.run
    row = {
        "run": run.name,
        "part": run.part,
        "error": "refused",
        "GiB": "",
        "measured": "",
        "peak": "",
        "memory error": "",
    }
    if one.plan is None:
        row["GiB"] = one.refusal[:70]
        return row
    row["error"] = "ran out of memory" if run.ran_out else ""
    if one.has_speed:
        row["error"] = percent(one.error, signed=True)
    row["GiB"] = f"{one.plan.memory_bytes / GIB:.1f}, {one.plan.verdict}"
    if run.memory_gib:
        row["GiB"] = f"{one.memory_gib:.1f}, {one.plan.verdict}"
        row["measured"] = f"{run.memory_gib:.1f}"
        row["peak"] = run.peak
        row["memory error"] = percent(one.memory_error, signed=True)
    return row


if __name__ == "__main__":
    main()
