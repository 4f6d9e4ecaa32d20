"""A sweep's page and its plots, from what was learnt; experiments/report draws and lays out."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

from app.console.terminal import duration
from experiments.report import figures
from experiments.sweep import analysis
from experiments.sweep.analysis import Answer
from experiments.sweep.spec import Sweep
from experiments.sweep.trials import BATCH, FAILURES, RATE, Trial, TrialStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BY_WORKERS = (
    "The batch size, of those tried and between them, that is soonest at the target: steps, by the critical batch size "
    "(else by the gradient noise scale), times seconds per step, by the trials' speed; the learning rate by the rule. "
    "Communication among more workers than trials had is not in it: `trireme scale` measures that."
)


def content(sweep: Sweep, store: TrialStore, answer: Answer) -> dict[str, Any]:
    """What is on the page (experiments/report/page.py)."""
    best, trials = answer.best, list(store.trials.values())
    facts = [(f"best {sweep.metric}", f"{best['value']:.4g}", f"{best['trial']}, at step {best['step']:,}")]
    facts += [("training time", duration(answer.spent["worker_seconds"]), f"worker-time, {len(trials)} trials")]
    if answer.rule:
        facts.append(("learning rate ∝", f"batch^{answer.rule.exponent:.2f}", answer.rule.name))
    if answer.critical:
        facts.append(("critical batch size", f"{answer.critical.batch:.0f}", answer.critical.interval))
    if answer.noise:
        facts.append(("gradient noise scale", f"{answer.noise:.0f}", "samples, measured in training"))
    scored = [(analysis.best_value(trial, sweep), trial) for trial in trials]
    scored.sort(key=lambda pair: math.inf if pair[0] is None else sweep.sign * pair[0])
    rows = [
        {"trial": t.name, **{key.rsplit(".", 1)[-1]: value for key, value in t.values.items()}}
        | _values(t, sweep)
        | {"seconds": round(t.last.get("seconds", 0.0), 1), "end": t.message or t.status}
        for value, t in scored
    ]
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(store.head["created"]))
    how = f"sweep of {', '.join(sweep.space)} by {sweep.searcher}, scheduler {sweep.scheduler}"
    learnt = [line for line in answer.sentences if not line.startswith("on ")]  # a table has those
    at = [row["trial"] for row in rows].index(best["trial"])
    return {
        "title": sweep.name,
        "about": f"{how}; begun {began}; {store.folder}",
        "facts": facts,
        "sections": [
            {"title": "What was learnt", "sentences": [": ".join(line.split(maxsplit=1)) for line in learnt]},
            {"title": "What to use, by workers", "tables": [{"rows": answer.by_workers}], "note": BY_WORKERS},
            {"title": "Plots", "plots": _plots(sweep, store, answer)},
            {"title": "Trials", "tables": [{"rows": rows, "best": at}]},
            {"title": "Failures", "sentences": [f"{t.name}: {t.message}" for t in trials if t.status in FAILURES]},
            {"title": "The sweep", "folded": {"search and experiment": json.dumps(store.head["about"], indent=1)}},
        ],
    }


def _values(trial: Trial, sweep: Sweep) -> dict[str, Any]:
    """The columns of a trial's value: the best of its evaluations, by which trials are compared, and the last one."""
    best, last = analysis.best_report(trial, sweep), analysis.last_value(trial, sweep)
    return {
        f"best {sweep.metric}": "–" if best is None else best[1],
        "at step": "–" if best is None else best[0],
        f"last {sweep.metric}": "–" if last is None else last,
        "steps": trial.last.get("step", 0),
    }


def _plots(sweep: Sweep, store: TrialStore, answer: Answer) -> list[tuple[str, str]]:
    """What there is data for; the docstring of what draws it is the caption."""
    drawn = [(draw(sweep, store, answer), draw) for draw in (_heat_map, _learning_rate, _steps_to_target, _speed)]
    return [(figures.svg(figure), " ".join((draw.__doc__ or "").split())) for figure, draw in drawn if figure]


def _heat_map(sweep: Sweep, store: TrialStore, answer: Answer) -> Figure | None:
    """The best value of each trial over batch size and learning rate; the best of all is framed. A value with … is of a
    trial that was stopped early."""
    cells: dict[tuple[float, float], float] = {}
    early: set[tuple[float, float]] = set()
    trials = [trial for trial in store.trials.values() if {BATCH, RATE} <= trial.values.keys()]
    few = len({trial.values[RATE] for trial in trials}) <= 12
    for trial in trials:
        value, rate = analysis.best_value(trial, sweep), float(trial.values[RATE])
        if value is None:
            value = math.nan if trial.status == "failed" else sweep.sign * math.inf
        # Where rates are drawn at random, cells gather them by half decade.
        place = (float(trial.values[BATCH]), rate if few else float(f"{10 ** (round(math.log10(rate) * 2) / 2):.2g}"))
        if math.isnan(cells.get(place, math.nan)) or sweep.sign * value < sweep.sign * cells[place]:
            cells[place] = value
            (early.add if trial.status == "pruned" else early.discard)(place)
    if len(cells) < 2 or not any(math.isfinite(v) for v in cells.values()):
        return None
    columns, rows = sorted({c for c, _ in cells}), sorted({r for _, r in cells})
    return figures.heat_map(columns, rows, cells, best_low=sweep.mode == "min", unfinished=early)


def _learning_rate(sweep: Sweep, store: TrialStore, answer: Answer) -> Figure | None:
    """The best learning rate at each batch size, and the power law through them. Hollow: the best was the last that was
    tried, so it may lie beyond."""
    if not answer.rates:
        return None
    figure, axes = figures.new()
    for rate in answer.rates:
        face = "white" if rate.edge else figures.colour(0)
        axes.plot(rate.batch, rate.rate, "o", markersize=8, markerfacecolor=face, markeredgecolor=figures.colour(0))
    batches = [rate.batch for rate in answer.rates]
    if answer.rule and len(batches) > 1:
        ends, middle = [min(batches), max(batches)], math.sqrt(min(batches) * max(batches))
        label = f"measured: batch^{answer.rule.exponent:.2f}"
        axes.plot(ends, [answer.rule.rate(b) for b in ends], color=figures.colour(1), label=label)
        for name, power, dash in (("linear", 1.0, (0, (1, 1.5))), ("square root", 0.5, (0, (4, 2)))):
            line = [answer.rule.rate(middle) * (b / middle) ** power for b in ends]
            axes.plot(ends, line, color="#8793a1", linewidth=1.2, linestyle=dash, label=name)
        axes.legend()
    _logarithmic(axes, batches, [rate.rate for rate in answer.rates], "best learning rate")
    return figure


def _steps_to_target(sweep: Sweep, store: TrialStore, answer: Answer) -> Figure | None:
    """Optimizer steps until the target was reached, over batch size: below the critical batch size a larger batch saves
    steps, above it it does not."""
    if len(answer.steps) < 2:
        return None
    figure, axes = figures.new()
    batches, steps = list(answer.steps), list(answer.steps.values())
    axes.plot(batches, steps, "o", color=figures.colour(0), label="measured")
    if c := answer.critical:
        grid = [batches[0] * (batches[-1] / batches[0]) ** (i / 60) for i in range(61)]
        axes.plot(grid, [c.steps(b) for b in grid], color=figures.colour(1), label="S = S_min (1 + B_crit / B)")
    marks = {"B_crit": c.batch if c else None, "noise scale": answer.noise}
    for i, (name, at) in enumerate(marks.items()):
        if at and batches[0] / 2 <= at <= batches[-1] * 2:
            axes.axvline(at, color=figures.colour(2 + i), linewidth=1, label=f"{name} = {at:.0f}")
    _logarithmic(axes, batches, steps, f"steps to {sweep.metric} {answer.target:.3g}")
    axes.set_ylim(min(steps) / 2, max(steps) * 2)
    axes.legend()
    return figure


def _speed(sweep: Sweep, store: TrialStore, answer: Answer) -> Figure | None:
    """Samples per second and worker over the samples of a worker in a step: small shares do not fill a device."""
    points = analysis.speeds(store.trials.values())
    if len({samples for samples, _ in points}) < 2 or answer.time is None:
        return None
    figure, axes = figures.new()
    axes.plot([b for b, _ in points], [b / seconds for b, seconds in points], "o", color=figures.colour(0), alpha=0.6)
    grid = sorted({b for b, _ in points})
    axes.plot(grid, [b / answer.time.seconds(b, 1) for b in grid], color=figures.colour(1), label="t = a + b · samples")
    _logarithmic(axes, [round(b) for b in grid], [b / seconds for b, seconds in points], "samples/s per worker")
    axes.set_xlabel("samples of one worker per step")
    axes.legend()
    return figure


def _logarithmic(axes: Any, batches: list[int], values: list[float], label: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    figures.plain_ticks(axes, "x", batches)
    figures.plain_ticks(axes, "y", figures.one_two_five(values))
    axes.set_xlabel("global batch size")
    axes.set_ylabel(label)
