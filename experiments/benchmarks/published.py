"""`published`: published training runs beside what the plain `trireme plan` command says of them.

A table by kind of run, size of the model, length of the sequence, GPU and source; runs on several
nodes whose page names no network have a line, for which one is assumed. Nothing of a
run's trainer is told to the planner but what the command's keys say: degrees, micro-batch,
recomputation, precision, and whether its kernels are fused as those of torch.compile are.

`--fit` fits the constants to the rows of the part `fit` and writes app/planner/fitted.yaml.
`--described` puts plans beside it to which trainers are described by what their sources say of
them, as `trireme plan --assume` takes it. `--leave-out source` (or `gpu`) fits constants and ranges
anew for each source (GPU), to the rows of all others, and judges on its own.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click
import numpy as np

from app.errors import UserError
from app.planner.device import constants as planner_constants
from app.planner.ranges import DENSE, LENGTH_LIMITS, SIZE_LIMITS, Traits, spread_of
from experiments.benchmarks import evidence, fit
from experiments.benchmarks.compared import Compared, Prepared, prepare
from experiments.benchmarks.harness import show
from experiments.benchmarks.published_runs import GIB, LATER_TABLES, PARTS, Run, runs, sweep_runs

KINDS = {
    "data": "data parallel",
    "tp": "TP",
    "pp": "PP",
    "tp+pp": "TP + PP",
    "cp": "CP",
    "cp+tp+pp": "CP + TP + PP",
}
SIZES = ("up to 3 B", "3 to 10 B", "10 to 69 B", "70 B and more")
"""Names of the groups between `SIZE_LIMITS`."""
LENGTHS = ("up to 2 k", "4 to 8 k", "16 k", "32 k and more")
"""Names of the groups between `LENGTH_LIMITS`."""
GROUPINGS = ("all", "network", "kind", "size", "sequence", "GPU", "precision", "table", "source")
"""By what runs are grouped, in the order of the table."""
LEVELS_OF_PEAKS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Of the quantiles of published peaks relative to their plans."""
MEMORY_GROUPINGS = ("all", "peak", "kind", "precision", "GPU")
"""The same of their memory; a peak is what torch allocates or reserves, or what the card has."""


def _groups_of(run: Run, billions: float) -> dict[str, str]:
    """The groups that a run belongs to, by grouping.

    Args:
        run: The run.
        billions: The size of its model, in billions of parameters.
    """
    is_limited = ":" in run.gpu
    return {
        "all": "all",
        "network": "known or not needed" if run.has_known_network else "its page names none",
        "kind": KINDS.get(run.kind, run.kind),
        "size": SIZES[bisect.bisect_left(SIZE_LIMITS, billions)],
        "sequence": LENGTHS[bisect.bisect_left(LENGTH_LIMITS, run.sequence)],
        "GPU": run.gpu.partition(":")[0] + (" limited" if is_limited else ""),
        "precision": run.precision,
        "table": run.table,
        "source": run.source.removeprefix("https://"),
    }


def _group_row(
    grouping: str, name: str, members: Sequence[Compared], described: Sequence[Compared]
) -> dict[str, str]:
    """One group's line.

    It has the errors of speed and memory, how many published speeds are inside the range, and how
    many runs are refused or said not to fit.

    Args:
        grouping: What the group is a group of.
        name: The group's name.
        members: Its runs beside plans of the plain command.
        described: The same beside plans to which trainers were described; empty without those.
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
        "high to low": "",
        "refused": str(len(members) - len(planned)),
        "said not to fit": str(len(not_fitting)),
        "ran out": "",
        "memory": "",
        "memory bias": "",
    }
    row |= _errors_of_speed(with_speed)
    for key, value in _errors_of_speed([one for one in described if one.has_speed]).items():
        row[f"described: {key}"] = value
    if ran_out:
        foreseen = sum(plan.verdict != "fits" for plan in ran_out)
        row["ran out"] = f"{foreseen} of {len(ran_out)} foreseen"
    if memory_errors:
        row["memory"] = percent(statistics.median(map(abs, memory_errors)))
        row["memory bias"] = percent(statistics.median(memory_errors), signed=True)
    return row


def _errors_of_speed(with_speed: Sequence[Compared]) -> dict[str, str]:
    """Errors of runs with a speed, how many are inside the range, and its width; empty without."""
    if not with_speed:
        return {}
    errors = sorted(abs(one.error) for one in with_speed)
    bias = statistics.median(one.error for one in with_speed)
    return {
        "median": percent(statistics.median(errors)),
        "90th": percent(errors[int(0.9 * (len(errors) - 1))]),
        "bias": percent(bias, signed=True),
        "inside": percent(sum(one.is_inside for one in with_speed) / len(with_speed)),
        "high to low": f"{statistics.median(map(_width_of_range, with_speed)):.2f}",
    }


def _width_of_range(one: Compared) -> float:
    """The high end of the range that the plan shows, by its low end."""
    assert one.plan is not None
    low, high = one.plan.speed_range
    return high / low


def summary(
    compared: Iterable[Compared],
    billions: Mapping[Run, float],
    described: Iterable[Compared] = (),
) -> list[dict[str, str]]:
    """A line for each group.

    Args:
        compared: Runs and their plans.
        billions: The size of each run's model, in billions of parameters.
        described: The same runs beside plans to which their trainers were described.
    """
    groups = _grouped(compared, billions)
    groups_described = _grouped(described, billions)
    keys = sorted(groups, key=lambda key: GROUPINGS.index(key[0]))
    return [_group_row(*key, groups[key], groups_described[key]) for key in keys]


def _grouped(
    compared: Iterable[Compared], billions: Mapping[Run, float]
) -> defaultdict[tuple[str, str], list[Compared]]:
    """Runs by (grouping, name of the group)."""
    groups = defaultdict[tuple[str, str], list[Compared]](list)
    for one in compared:
        for grouping, name in _groups_of(one.run, billions[one.run]).items():
            groups[grouping, name].append(one)
    return groups


def memory_summary(
    compared: Iterable[Compared], billions: Mapping[Run, float]
) -> list[dict[str, str]]:
    """A line for each group of runs whose peak of memory was published, and for what peaks count.

    Runs whose source does not say what its peak counts are in a group of their own only.

    Args:
        compared: Runs and their plans.
        billions: The size of each run's model, in billions of parameters.
    """
    groups = defaultdict[tuple[str, str], list[Compared]](list)
    for one in compared:
        of_run = _groups_of(one.run, billions[one.run]) | {"peak": one.run.peak or "not said"}
        for grouping in MEMORY_GROUPINGS if one.run.peak else ("peak",):
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


def peak_quantiles(compared: Iterable[Compared]) -> dict[float, float]:
    """Quantiles of a published peak of memory relative to its plan, if it is said what peaks count.

    They are `peaks_of_others` in constants.yaml, where trainers are described. Each source counts
    as much as any other, however many rows it has.

    Args:
        compared: Runs with a peak, and their plans.

    Returns:
        By level, ascending; empty without runs.
    """
    ratios = defaultdict[str, list[float]](list)
    for one in compared:
        if one.plan is not None and one.run.memory_gib and one.run.peak:
            ratios[one.run.source].append(1 / (1 + one.memory_error))
    pairs = sorted(
        (ratio, 1 / len(of_source)) for of_source in ratios.values() for ratio in of_source
    )
    if not pairs:
        return {}
    values, weights = np.array(pairs).T
    levels = (np.cumsum(weights) - weights / 2) / weights.sum()
    return {level: round(float(np.interp(level, levels, values)), 3) for level in LEVELS_OF_PEAKS}


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
    described: bool = False,
) -> list[Compared]:
    """Plans each row with constants fitted only to rows of other sources, or on other GPUs.

    Args:
        prepared: The rows.
        whole_fit: The fit to all rows that are for it.
        fitted: Those rows.
        group_by: "source" or "gpu".
        described: Whether a row's trainer is described to its plan.
    """

    weights = fit.weights([one.run for one in fitted])
    groups = defaultdict[str, list[Prepared]](list)
    for one in prepared:
        groups[_left_out_with(one.run, group_by)].append(one)
    compared = []
    for name, members in groups.items():
        kept = np.flatnonzero([_left_out_with(one.run, group_by) != name for one in fitted])
        values = whole_fit.values
        if len(kept) < len(fitted):
            values = fit.without(whole_fit, kept, weights[kept])
        change = fit.changed(values)
        compared += [one.compare(change, described=described) for one in members]
    return compared


def _left_out_with(run: Run, group_by: str) -> str:
    """The source or the GPU with which a run is left out of a fit."""
    return run.source if group_by == "source" else run.gpu.partition(":")[0]


class Shifts:
    """By how much planned times change when constants are fitted without a second group.

    By the derivatives of the whole fit, so that nothing is planned again.

    Args:
        whole_fit: The fit to all rows that are for it.
        fitted: Those rows.
        group_by: "source" or "gpu".
    """

    def __init__(self, whole_fit: fit.Fit, fitted: Sequence[Prepared], group_by: str) -> None:
        self._whole_fit = whole_fit
        self._rows = {one.run: row for row, one in enumerate(fitted)}
        self._groups = np.array([_left_out_with(one.run, group_by) for one in fitted])
        self._weights = fit.weights([one.run for one in fitted])
        self._points: dict[frozenset[str], np.ndarray] = {}

    def of(self, run: Run, group: str, second: str) -> float:
        """The change of the logarithm of a run's time; 0 for one that is not fitted to.

        Args:
            run: The run.
            group: Its group, which is left out in any case.
            second: The other one that is left out.
        """
        if run not in self._rows:
            return 0.0
        change = self._point(frozenset((group, second))) - self._point(frozenset((group,)))
        return float(self._whole_fit.slopes[self._rows[run]] @ change)

    def _point(self, left_out: frozenset[str]) -> np.ndarray:
        """The logarithms of the constants that are fitted without some groups."""
        if left_out not in self._points:
            kept = np.flatnonzero(~np.isin(self._groups, list(left_out)))
            values = fit.without(self._whole_fit, kept, self._weights[kept])
            self._points[left_out] = np.log([values[name] for name in fit.NAMES])
        return self._points[left_out]


def _is_fitted(one: Prepared) -> bool:
    """Whether constants are fitted to a row."""
    if one.plan is None or not one.run.step_seconds:
        return False
    return one.run.part == "fit" and fit.is_for_fit(one.run)


def write_fit(prepared: Sequence[Prepared], later: Sequence[Prepared] = ()) -> str:
    """Fits the constants and the ranges to rows, and writes them.

    Ranges are fitted to the errors that runs had when nothing of their source was fitted to.

    Args:
        prepared: The rows.
        later: Rows that only ranges are fitted to.

    Returns:
        A sentence that says where they are.
    """
    fitted = [one for one in prepared if _is_fitted(one)]
    whole_fit = fit_to(fitted)
    sources = [one.run.source for one in fitted]
    intervals = fit.intervals(whole_fit, sources, fit.weights([one.run for one in fitted]))
    traits = _traits([*prepared, *later])
    unseen = without_own([*prepared, *later], whole_fit, fitted, group_by="source")
    ranges = fit.ranges([residual for _, residual in _residuals(unseen, traits)])
    return fit.write(whole_fit.values, intervals, ranges, len(fitted))


def _traits(prepared: Sequence[Prepared]) -> dict[Run, Traits]:
    """What the error of each run's plan depends on."""
    return {one.run: one.traits for one in prepared if one.plan is not None}


def _residuals(
    unseen: Sequence[Compared], traits: Mapping[Run, Traits]
) -> list[tuple[Run, fit.Residual]]:
    """The errors that ranges are made of: those of half of the rows."""
    return [
        (one.run, fit.Residual(one.run.source, traits[one.run], one.error))
        for one in unseen
        if one.has_speed and one.run.part == "fit"
    ]


def with_ranges_of_others(
    compared: Sequence[Compared],
    unseen: Sequence[Compared],
    traits: Mapping[Run, Traits],
    shifts: Shifts,
    *,
    group_by: str,
) -> list[Compared]:
    """The same runs, with ranges that were made of the errors of other sources', or on other GPUs.

    These errors too are those of plans with constants to which neither the run's source nor theirs
    was fitted (CV+: Barber et al. 2021, https://arxiv.org/abs/1905.02928). Ranges stay as they are
    where there are too few others to make any of.

    Args:
        compared: The runs beside their plans.
        unseen: The runs, each planned with constants of others, by the plain command.
        traits: What the error of each run's plan depends on.
        shifts: By how much the planned times change without a second group.
        group_by: "source" or "gpu".
    """
    residuals = _residuals(unseen, traits)
    ranges_for: dict[str, dict[str, Any]] = {}
    for group in {_left_out_with(one.run, group_by) for one in compared}:
        others = []
        for run, residual in residuals:
            group_of_run = _left_out_with(run, group_by)
            if group_of_run != group:
                share = math.exp(shifts.of(run, group_of_run, group))
                others.append(residual._replace(error=(1 + residual.error) / share - 1))
        has_enough = sum(fit.has_constants(each.traits) for each in others) >= fit.ENOUGH
        ranges_for[group] = fit.ranges(others) if has_enough else {}
    changed = []
    for one in compared:
        ranges = ranges_for[_left_out_with(one.run, group_by)]
        if one.plan is None or not ranges:
            changed.append(one)
            continue
        spread = spread_of(traits[one.run], ranges)
        plan = replace(one.plan, speed_range=(spread.low, spread.high))
        changed.append(replace(one, plan=plan))
    return changed


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
    help="Beside plans to which trainers are described too, by --assume.",
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
@click.option(
    "--sweep",
    is_flag=True,
    help="The same of every layout of one complete sweep (layouts.csv.gz) in place of the tables.",
)
@click.option(
    "--publishers",
    "compares_publishers",
    is_flag=True,
    help="How far repositories are apart that have a run of the same settings.",
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
    sweep: bool,
    compares_publishers: bool,
    as_json: bool,
) -> None:
    if of_memory and (fits or leave_out or calibration or regret or sweep):
        raise UserError(
            "--memory reads few runs: leave out --fit, --leave-out, --calibration, --regret and "
            "--sweep"
        )
    studies_plans = any((of_memory, fits, leave_out, calibration, regret, sweep))
    if compares_publishers and (studies_plans or parts or described or shows_runs):
        raise UserError("--publishers plans nothing: leave out all other options but --json")
    if compares_publishers:
        _show_publishers(runs(*tables), as_json=as_json)
        return
    all_runs = sweep_runs() if sweep else runs(*tables)
    if of_memory:
        all_runs = [run for run in all_runs if run.memory_gib]
    prepared = [prepare(run) for run in all_runs]
    later: list[Prepared] = []
    if (fits or leave_out or calibration) and not tables:
        later = _prepared_later()
    if fits:
        click.echo(write_fit(prepared, later), err=True)
        planner_constants.cache_clear()
        prepared = [prepare(run) for run in runs(*tables)]
    chosen = [one for one in prepared if not parts or one.run.part in parts]
    compared_described: list[Compared] = []
    if leave_out or calibration:
        compared, compared_described = _left_out(
            prepared, chosen, leave_out or "source", later=later, described=described
        )
    else:
        compared = [one.compare() for one in chosen]
        if described:
            compared_described = [one.compare(described=True) for one in chosen]
    if calibration:
        evidence.draw_calibration(chosen, compared, calibration)
    judged = compared_described or compared
    results = _figures(judged if sweep else compared)
    if of_memory:
        quantiles = peak_quantiles(judged)
        results["peaks"] = {str(level): ratio for level, ratio in quantiles.items()}
    if regret or sweep:
        chosen_layouts = evidence.choices(judged)
        results |= evidence.figures_of(chosen_layouts)
        lines = [choice.row for choice in chosen_layouts] + evidence.beside_best(chosen)
    elif shows_runs:
        lines = [_run_row(one) for one in judged]
    elif of_memory:
        lines = memory_summary(judged, _billions_by_run(prepared))
    else:
        lines = summary(compared, _billions_by_run(prepared), compared_described)
    show("published", results | {"table": lines}, lines, as_json=as_json)


def _show_publishers(published: Sequence[Run], *, as_json: bool) -> None:
    """Shows how far publishers of the same run are apart.

    Args:
        published: All runs.
        as_json: Whether a program reads it.
    """
    rows, apart = evidence.publishers(published)
    show("published", apart | {"table": rows}, rows, as_json=as_json)
    if rows and not as_json:
        click.echo(evidence.apart_text(apart))


def _prepared_later() -> list[Prepared]:
    """The rows of `LATER_TABLES` that ranges are made of.

    These are mixtures and adapters whose page names the network. Dense models stay apart, so that
    plans can be judged by them.
    """
    later = [prepare(run) for run in runs(*LATER_TABLES) if run.has_known_network]
    return [one for one in later if one.plan is not None and one.traits.model != DENSE]


def _left_out(
    prepared: Sequence[Prepared],
    chosen: Sequence[Prepared],
    group_by: str,
    *,
    later: Sequence[Prepared] = (),
    described: bool,
) -> tuple[list[Compared], list[Compared]]:
    """Runs beside plans whose constants and ranges come from other sources, or other GPUs.

    Args:
        prepared: All rows that constants may be fitted to.
        chosen: The rows that are judged.
        group_by: "source" or "gpu".
        later: Rows that only ranges are made of.
        described: Whether the second list is wanted.

    Returns:
        (beside plans of the plain command, beside plans to which trainers were described)
    """
    fitted = [one for one in prepared if _is_fitted(one)]
    whole_fit = fit_to(fitted, again=False)
    traits = _traits([*prepared, *later])
    unseen = without_own([*prepared, *later], whole_fit, fitted, group_by=group_by)
    unseen_described = without_own(prepared, whole_fit, fitted, group_by=group_by, described=True)
    shifts = Shifts(whole_fit, fitted, group_by)
    judged = {one.run for one in chosen}
    compared, compared_described = (
        with_ranges_of_others(
            [one for one in each if one.run in judged],
            unseen,
            traits,
            shifts,
            group_by=group_by,
        )
        for each in (unseen, unseen_described)
    )
    return compared, compared_described if described else []


def _billions_by_run(prepared: Sequence[Prepared]) -> dict[Run, float]:
    """The billions of parameters of each run's model."""
    return {one.run: _billions(one) for one in prepared}


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
    ran_out = [one.plan for one in compared if one.run.ran_out and one.plan is not None]
    return {
        "rows": len(compared),
        "refused": sum(one.plan is None for one in compared),
        "not_fitting": verdicts.count("does not fit"),
        "median_error": median_error,
        "rows_out_of_memory": len(ran_out),
        "foreseen": sum(plan.verdict != "fits" for plan in ran_out),
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
