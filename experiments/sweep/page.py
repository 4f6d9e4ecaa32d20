"""A sweep's page and its plots; experiments/report draws and lays out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from app.console.terminal import duration
from experiments.report import figures
from experiments.report.page import MISSING, PageContent, Section, Table
from experiments.sweep import analysis
from experiments.sweep.analysis import CriticalBatch, ScalingRule
from experiments.sweep.answer import Answer
from experiments.sweep.branches import WITHOUT_RATE
from experiments.sweep.spec import SOONEST, Sweep
from experiments.sweep.trials import BATCH, FAILURES, RATE, Trial, TrialStore

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BY_WORKERS_NOTE = (
    "The batch size, of those tried and between them, that is soonest at the target: steps, by the "
    "critical batch size (else by the gradient noise scale), times seconds per step, by the "
    "trials' speed; the learning rate by the rule. Communication among more workers than trials "
    "had is not in it: `trireme scale` measures that."
)
BRANCHES_NOTE = (
    "Losses after the same samples, at the best learning rate that was tried, means over seeds. "
    "Worse: by more than chance would make of batches that do not differ (one mistake in 20). "
    "Within noise: by no more than what another seed changes between two branches."
)
GAINS_NOTE = (
    "For the samples that the run has left, the quickest of the batches up to the critical one; "
    "seconds per step are the planner's, scaled to what branches have taken."
)
CONFIRMATION_NOTE = (
    "Means over seeds that did not choose the settings, the same seeds for all. Worse: by more "
    "than chance would make of settings that do not differ (one mistake in 20). Alike: not told "
    "apart."
)
HEAT_MAP_CAPTION = (
    "The best value of each trial over batch size and learning rate; the best of all is framed. A "
    "value with … is of a trial that was stopped early."
)
BRANCH_MAP_CAPTION = (
    "The loss of branches after the same samples over batch size and learning rate, the mean over "
    "seeds; the best of all is framed."
)
LEARNING_RATE_CAPTION = (
    "The best learning rate at each batch size, and the power law through them. Hollow: the best "
    "was the last that was tried, so it may lie beyond."
)
STEPS_CAPTION = (
    "Optimizer steps until the target was reached, over batch size: below the critical batch size "
    "a larger batch saves steps, above it it does not."
)
SPEED_CAPTION = (
    "Samples per second and worker over the samples of a worker in a step: small shares do not "
    "fill a device."
)
MAX_SETTINGS = 12
MAX_RATES = 12
"""Learning rates that a heat map shows one by one; more are gathered by half decade."""
DOTTED = (0, (1, 1.5))
DASHED = (0, (4, 2))


def content(sweep: Sweep, store: TrialStore, answer: Answer) -> PageContent:
    """What is on a sweep's page.

    Args:
        sweep: The sweep.
        store: Its trials.
        answer: What they say.
    """
    trials = list(store.trials.values())
    search = f"sweep of {', '.join(sweep.space)} by {sweep.searcher}, scheduler {sweep.scheduler}"
    created = time.localtime(store.manifest["created"])
    begun = time.strftime("%Y-%m-%d %H:%M", created)
    # The page has a table of what to use on numbers of workers.
    lines = [line for line in answer.sentences if not line.startswith("on ")]
    findings = [": ".join(line.split(maxsplit=1)) for line in lines]
    failures = [f"{trial.name}: {trial.message}" for trial in trials if trial.status in FAILURES]
    about = json.dumps(store.manifest["about"], indent=1)
    return {
        "title": sweep.name,
        "about": f"{search}; begun {begun}; {store.folder}",
        "facts": _facts(sweep, answer, trials=len(trials)),
        "sections": [
            {"title": "What was learnt", "sentences": findings},
            {
                "title": "What to use, by workers",
                "tables": [{"rows": answer.by_workers}],
                "note": BY_WORKERS_NOTE,
            },
            *_confirmation_sections(sweep, answer),
            *_branch_sections(answer),
            {"title": "Plots", "plots": _plots(sweep, store, answer)},
            {"title": "Trials", "tables": [_trials_table(sweep, trials, answer)]},
            {"title": "Failures", "sentences": failures},
            {"title": "The sweep", "folded": {"search and experiment": about}},
        ],
    }


def _confirmation_sections(sweep: Sweep, answer: Answer) -> list[Section]:
    """What several seeds say about the best settings; [] with one seed."""
    confirmation = answer.confirmation
    if confirmation is None:
        return []
    rows = []
    for setting in confirmation.settings[:MAX_SETTINGS]:
        interval = MISSING
        if setting.low is not None and setting.high is not None:
            interval = f"{setting.low:.4g} to {setting.high:.4g}"
        row: dict[str, object] = {"trial": setting.trial}
        for key, value in setting.values.items():
            row[key.rsplit(".", 1)[-1]] = value
        row["seconds to the target" if sweep.next == SOONEST else sweep.metric] = setting.mean
        row["80 % interval"] = interval
        row["seeds"] = confirmation.seeds
        row["verdict"] = setting.verdict
        rows.append(row)
    return [
        {
            "title": "The best settings with several seeds",
            "tables": [{"rows": rows}],
            "note": CONFIRMATION_NOTE,
        }
    ]


def _branch_sections(answer: Answer) -> list[Section]:
    """What branches of one training say; [] for other sweeps."""
    branches = answer.branches
    if branches is None:
        return []
    rows = []
    for each in branches.batches:
        interval = MISSING
        if each.rate is not None:
            interval = f"{each.rate.low:.3g} to {each.rate.high:.3g}"
        rows.append(
            {
                "batch size": each.batch,
                "best learning rate": each.rate.value if each.rate else each.best_rate,
                "80 % interval": interval,
                "loss": each.loss,
                "above the lowest": each.excess,
                "verdict": each.verdict,
            }
        )
    by_workers = []
    for gain in answer.gains:
        row: dict[str, object] = {
            "workers": gain.workers,
            "batch size": gain.batch,
            "learning rate": gain.rate,
            "steps": gain.steps,
            "training time": duration(3600 * gain.hours),
        }
        if gain.dollars is not None:
            row["dollars"] = gain.dollars
        if gain.times_faster is not None:
            row["times as fast as the run's batch"] = gain.times_faster
        by_workers.append(row)
    return [
        {"title": "The batch now", "tables": [{"rows": rows}], "note": BRANCHES_NOTE},
        {
            "title": "What the quickest batch would bring",
            "tables": [{"rows": by_workers}],
            "note": GAINS_NOTE,
        },
    ]


def _facts(sweep: Sweep, answer: Answer, *, trials: int) -> list[tuple[str, str, str]]:
    best = answer.best
    remark = f"{best['trial']}, at step {best['step']:,}"
    if best["seeds"]:
        remark = f"{best['trial']}, mean of {best['seeds']} seeds"
    training_time = duration(answer.spent["worker_seconds"])
    facts = [
        (f"best {sweep.metric}", f"{best['mean']:.4g}", remark),
        ("training time", training_time, f"worker-time, {trials} trials"),
    ]
    if answer.rule:
        facts.append(("learning rate ∝", f"batch^{answer.rule.exponent:.2f}", answer.rule.name))
    if answer.branches is not None and answer.branches.critical is not None:
        now = answer.branches.critical
        remark = f"80 %: {now.low:.0f} to {now.high:.0f}"
        facts.append(("critical batch size", f"{now.value:.0f}", remark))
    elif answer.critical:
        critical = answer.critical
        facts.append(("critical batch size", f"{critical.batch:.0f}", critical.interval))
    if answer.noise:
        remark = "samples, measured in training"
        facts.append(("gradient noise scale", f"{answer.noise:.0f}", remark))
    return facts


def _trials_table(sweep: Sweep, trials: Sequence[Trial], answer: Answer) -> Table:
    """All trials, the best ones first."""

    def cost(trial: Trial) -> float:
        value = analysis.best_value(trial, sweep)
        return math.inf if value is None else sweep.sign * value

    rows = [_trial_row(trial, sweep) for trial in sorted(trials, key=cost)]
    names = [row["trial"] for row in rows]
    return {"rows": rows, "best": names.index(answer.best["trial"])}


def _trial_row(trial: Trial, sweep: Sweep) -> Mapping[str, object]:
    """A trial's row: its values, the evaluation by which trials are compared, and the last one."""
    row: dict[str, object] = {"trial": trial.name}
    for key, value in trial.values.items():
        row[key.rsplit(".", 1)[-1]] = value
    best = analysis.best_report(trial, sweep)
    last = analysis.last_value(trial, sweep)
    row[f"best {sweep.metric}"] = MISSING if best is None else best[1]
    row["at step"] = MISSING if best is None else best[0]
    row[f"last {sweep.metric}"] = MISSING if last is None else last
    row["steps"] = trial.last.get("step", 0)
    row["seconds"] = round(trial.last.get("seconds", 0.0), 1)
    row["end"] = trial.message or trial.status
    return row


# --- plots ----------------------------------------------------------------------------------------


def _plots(sweep: Sweep, store: TrialStore, answer: Answer) -> list[tuple[str, str]]:
    """SVG and caption of the plots for which there are data."""
    trials = [*store.searched, *store.beyond]
    drawn = [
        _branch_map(sweep, trials) if answer.branches else _trial_map(sweep, trials),
        (_learning_rate(answer), LEARNING_RATE_CAPTION),
        (_steps_to_target(sweep, answer), STEPS_CAPTION),
        (_speed(trials, answer), SPEED_CAPTION),
    ]
    return [(figures.to_svg(figure), caption) for figure, caption in drawn if figure is not None]


def _branch_map(sweep: Sweep, trials: Sequence[Trial]) -> tuple[Figure | None, str]:
    """The mean loss of branches after the same samples, and the caption."""
    losses: dict[figures.Cell, list[float]] = {}
    for trial in trials:
        value = analysis.last_value(trial, sweep)
        rate = float(trial.values.get(RATE, WITHOUT_RATE))
        cell = (float(trial.values[BATCH]), rate)
        has_ended = trial.status in ("finished", "reached") and value is not None
        losses.setdefault(cell, []).append(value if has_ended and value is not None else math.nan)
    means = {cell: math.fsum(values) / len(values) for cell, values in losses.items()}
    if len(means) < 2 or not any(map(math.isfinite, means.values())):
        return None, ""
    figure = figures.heat_map(
        sorted({batch for batch, _ in means}),
        sorted({rate for _, rate in means}),
        means,
        lower_is_better=sweep.mode == "min",
        unfinished=set(),
    )
    return figure, BRANCH_MAP_CAPTION


def _trial_map(sweep: Sweep, trials: Sequence[Trial]) -> tuple[Figure | None, str]:
    return _heat_map(sweep, trials), HEAT_MAP_CAPTION


def _heat_map(sweep: Sweep, trials: Sequence[Trial]) -> Figure | None:
    """The best value over batch size and learning rate; None with fewer than two cells."""
    values: dict[figures.Cell, float] = {}
    stopped_early: set[figures.Cell] = set()
    trials = [trial for trial in trials if {BATCH, RATE} <= trial.values.keys()]
    has_few_rates = len({trial.values[RATE] for trial in trials}) <= MAX_RATES
    for trial in trials:
        value = analysis.best_value(trial, sweep)
        if value is None:
            value = math.nan if trial.status == "failed" else sweep.sign * math.inf
        rate = float(trial.values[RATE])
        if not has_few_rates:
            half_decade = round(math.log10(rate) * 2) / 2
            rate = float(f"{10**half_decade:.2g}")
        cell = float(trial.values[BATCH]), rate
        previous = values.get(cell, math.nan)
        if math.isnan(previous) or sweep.sign * value < sweep.sign * previous:
            values[cell] = value
            if trial.status == "pruned":
                stopped_early.add(cell)
            else:
                stopped_early.discard(cell)
    if len(values) < 2 or not any(map(math.isfinite, values.values())):
        return None
    return figures.heat_map(
        sorted({batch for batch, _ in values}),
        sorted({rate for _, rate in values}),
        values,
        lower_is_better=sweep.mode == "min",
        unfinished=stopped_early,
    )


def _learning_rate(answer: Answer) -> Figure | None:
    """The best learning rates over batch size; None if there are none."""
    if not answer.rates:
        return None
    figure, axes = figures.new()
    for rate in answer.rates:
        axes.plot(
            rate.batch,
            rate.rate,
            "o",
            markersize=8,
            markerfacecolor="white" if rate.edge else figures.colour(0),
            markeredgecolor=figures.colour(0),
        )
    batches = [rate.batch for rate in answer.rates]
    if answer.rule and len(batches) > 1:
        _draw_rules(axes, answer.rule, min(batches), max(batches))
    _set_logarithmic(axes, batches, [rate.rate for rate in answer.rates], "best learning rate")
    return figure


def _draw_rules(axes: Axes, rule: ScalingRule, smallest: float, largest: float) -> None:
    """Draws the measured power law, and two rules of thumb through its middle."""
    ends = [smallest, largest]
    middle = math.sqrt(smallest * largest)
    label = f"measured: batch^{rule.exponent:.2f}"
    axes.plot(ends, [rule.rate(batch) for batch in ends], color=figures.colour(1), label=label)
    for name, exponent, dashes in (("linear", 1.0, DOTTED), ("square root", 0.5, DASHED)):
        rates = [rule.rate(middle) * (batch / middle) ** exponent for batch in ends]
        axes.plot(ends, rates, color=figures.GREY, linewidth=1.2, linestyle=dashes, label=name)
    axes.legend()


def _steps_to_target(sweep: Sweep, answer: Answer) -> Figure | None:
    """Steps to the target over batch size; None with fewer than two batch sizes."""
    if len(answer.steps) < 2:
        return None
    figure, axes = figures.new()
    batches = list(answer.steps)
    steps = list(answer.steps.values())
    smallest = batches[0]
    largest = batches[-1]
    axes.plot(batches, steps, "o", color=figures.colour(0), label="measured")
    if answer.critical:
        _draw_critical_batch(axes, answer.critical, smallest, largest)
    critical = answer.critical.batch if answer.critical else None
    marks = (("B_crit", critical, 2), ("noise scale", answer.noise, 3))
    for name, batch, colour in marks:
        if batch and smallest / 2 <= batch <= largest * 2:
            label = f"{name} = {batch:.0f}"
            axes.axvline(batch, color=figures.colour(colour), linewidth=1, label=label)
    _set_logarithmic(axes, batches, steps, f"steps to {sweep.metric} {answer.target:.3g}")
    axes.set_ylim(min(steps) / 2, max(steps) * 2)
    axes.legend()
    return figure


def _draw_critical_batch(
    axes: Axes,
    law: CriticalBatch,
    smallest: float,
    largest: float,
) -> None:
    batches = [smallest * (largest / smallest) ** (i / 60) for i in range(61)]
    steps = [law.steps(batch) for batch in batches]
    axes.plot(batches, steps, color=figures.colour(1), label="S = S_min (1 + B_crit / B)")


def _speed(trials: Sequence[Trial], answer: Answer) -> Figure | None:
    """The speed of a worker over its samples per step; None with fewer than two numbers of them."""
    speeds = analysis.step_speeds(trials)
    samples = [samples_of_step for samples_of_step, _ in speeds]
    rates = [samples_of_step / seconds for samples_of_step, seconds in speeds]
    different_samples = sorted(set(samples))
    if len(different_samples) < 2 or answer.time is None:
        return None
    figure, axes = figures.new()
    axes.plot(samples, rates, "o", color=figures.colour(0), alpha=0.6)
    fitted = [count / answer.time.seconds(count, workers=1) for count in different_samples]
    axes.plot(different_samples, fitted, color=figures.colour(1), label="t = a + b · samples")
    ticks = [round(count) for count in different_samples]
    _set_logarithmic(axes, ticks, rates, "samples/s per worker")
    axes.set_xlabel("samples of one worker per step")
    axes.legend()
    return figure


def _set_logarithmic(
    axes: Axes,
    batches: Sequence[float],
    values: Sequence[float],
    label: str,
) -> None:
    """Makes both axes logarithmic, with a tick for each batch size."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    figures.set_ticks(axes, "x", batches)
    figures.set_ticks(axes, "y", figures.log_ticks(values))
    axes.set_xlabel("global batch size")
    axes.set_ylabel(label)
