"""The plots of a sweep: each a pure function of what was learnt, kept as SVG in the sweep's folder and in MLflow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.report import figures
from experiments.sweep import science
from experiments.sweep.ledger import Ledger
from experiments.sweep.science import BATCH, RATE
from experiments.sweep.spec import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.sweep.answer import Answer


def write(sweep: Sweep, ledger: Ledger, answer: Answer, folder: Path) -> list[tuple[str, str]]:
    """Draws what there is data for in FOLDER/plots; each file, relative to the folder, with its caption."""
    place = folder / "plots"
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("*.svg"):
        old.unlink()
    found = {
        "1-heat-map": heat_map(sweep, ledger),
        "2-learning-rate": learning_rate(answer),
        "3-steps-to-target": steps_to_target(sweep, answer),
        "4-time-to-target": time_to_target(sweep, ledger, answer),
        "5-curves": curves(sweep, ledger, answer),
    }
    drawn = {name: figure for name, figure in found.items() if figure is not None}
    for name, figure in drawn.items():
        (place / f"{name}.svg").write_text(figures.svg(figure))
    return [(f"plots/{name}.svg", CAPTIONS[name]) for name in drawn]


CAPTIONS = {
    "1-heat-map": "The best value of each trial over batch size and learning rate; the best of all is framed. A value "
    "with … is of a trial that was stopped early.",
    "2-learning-rate": "The best learning rate at each batch size, and the power law through them. Hollow: the best "
    "was the last that was tried, so it may lie beyond.",
    "3-steps-to-target": "Optimizer steps until the target was reached, over batch size: below the critical batch size "
    "a larger batch saves steps, above it it does not.",
    "4-time-to-target": "Seconds of training until each trial reached the target; worker-seconds are what it costs.",
    "5-curves": "The metric over training; the best trials are coloured.",
}


def heat_map(sweep: Sweep, ledger: Ledger) -> Figure | None:
    """Metric over batch size × learning rate. Where rates are drawn at random, cells gather them by half decade."""
    cells: dict[tuple[float, float], float] = {}
    early: set[tuple[float, float]] = set()
    rates = {t.values[RATE] for t in ledger.trials.values() if RATE in t.values}
    few = len(rates) <= 12
    for trial in ledger.trials.values():
        if BATCH not in trial.values or RATE not in trial.values:
            continue
        value = science.value_of(trial, sweep.metric, sweep.mode)
        rate = float(trial.values[RATE])
        place = (float(trial.values[BATCH]), rate if few else float(f"{10 ** (round(math.log10(rate) * 2) / 2):.2g}"))
        value = value if value is not None else sweep.worse
        if place not in cells or sweep.better(value, cells[place]):
            cells[place] = value
            (early.add if trial.status == "pruned" else early.discard)(place)
    if len(cells) < 2 or not any(math.isfinite(v) for v in cells.values()):
        return None
    columns, rows = sorted({c for c, _ in cells}), sorted({r for _, r in cells})
    return figures.heat_map(
        columns, rows, cells, x="global batch size", y="learning rate", best_low=sweep.mode == "min", unfinished=early
    )


def learning_rate(answer: Answer) -> Figure | None:
    """Best learning rate against batch size with the fitted rule."""
    if not answer.rates:
        return None
    figure, axes = figures.new()
    for rate in answer.rates:
        face = "white" if rate.edge else figures.colour(0)
        axes.plot(rate.batch, rate.rate, "o", markersize=8, markerfacecolor=face, markeredgecolor=figures.colour(0))
    batches = [rate.batch for rate in answer.rates]
    if answer.rule and len(batches) > 1:
        ends = [min(batches), max(batches)]
        axes.plot(
            ends,
            [answer.rule.rate(b) for b in ends],
            color=figures.colour(1),
            label=f"measured: batch^{answer.rule.exponent:.2f}",
        )
        middle = math.sqrt(ends[0] * ends[1])
        for name, power, dash in (("linear", 1.0, (0, (1, 1.5))), ("square root", 0.5, (0, (4, 2)))):
            line = [answer.rule.rate(middle) * (b / middle) ** power for b in ends]
            axes.plot(ends, line, color="#8793a1", linewidth=1.2, linestyle=dash, label=name)
        axes.legend()
    axes.set_xscale("log")
    axes.set_yscale("log")
    figures.plain_ticks(axes, "x", batches)
    figures.plain_ticks(axes, "y", figures.one_two_five([rate.rate for rate in answer.rates]))
    axes.set_xlabel("global batch size")
    axes.set_ylabel("best learning rate")
    return figure


def steps_to_target(sweep: Sweep, answer: Answer) -> Figure | None:
    """Steps to the target against batch size with the fit."""
    if len(answer.steps) < 2:
        return None
    figure, axes = figures.new()
    batches = list(answer.steps)
    axes.plot(batches, list(answer.steps.values()), "o", color=figures.colour(0), label="measured")
    if answer.critical:
        c = answer.critical
        grid = [batches[0] * (batches[-1] / batches[0]) ** (i / 60) for i in range(61)]
        axes.plot(grid, [c.steps(b) for b in grid], color=figures.colour(1), label="S = S_min (1 + B_crit / B)")
        if batches[0] <= c.batch <= batches[-1]:
            axes.axvline(
                c.batch, color=figures.INK, linewidth=1, linestyle=(0, (4, 3)), label=f"B_crit = {c.batch:.0f}"
            )
    if answer.noise and batches[0] / 2 <= answer.noise <= batches[-1] * 2:
        axes.axvline(answer.noise, color=figures.colour(2), linewidth=1, label=f"noise scale = {answer.noise:.0f}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    figures.plain_ticks(axes, "x", batches)
    figures.plain_ticks(axes, "y", figures.one_two_five(list(answer.steps.values())))
    axes.set_ylim(min(answer.steps.values()) / 2, max(answer.steps.values()) * 2)
    axes.set_xlabel("global batch size")
    axes.set_ylabel(f"steps to {sweep.metric} {answer.target:.3g}")
    axes.legend()
    return figure


def time_to_target(sweep: Sweep, ledger: Ledger, answer: Answer) -> Figure | None:
    """Seconds to the target, trial by trial, the soonest first."""
    if answer.target is None:
        return None
    rows = []
    for trial in ledger.trials.values():
        seconds = science.steps_to(trial, sweep.metric, answer.target, sweep.mode, "seconds")
        if seconds is not None:
            rows.append((seconds, seconds * int(trial.last.get("workers") or 1), trial.name))
    if not rows:
        return None
    rows = sorted(rows)[:16][::-1]
    figure, axes = figures.new(figures.WIDTH, 0.3 * len(rows) + 1.2)
    axes.barh([r[2] for r in rows], [r[0] for r in rows], color=figures.colour(0), height=0.7)
    several = any(r[1] != r[0] for r in rows)
    for i, (seconds, cost, _) in enumerate(rows):
        text = f"{seconds:.3g} s" + (f", {cost:.3g} worker-s" if several else "")
        axes.annotate(text, (seconds, i), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, rows[0][0] * (1.6 if several else 1.25))  # so that what is written beside the longest fits
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"seconds to {sweep.metric} {answer.target:.3g}")
    return figure


def curves(sweep: Sweep, ledger: Ledger, answer: Answer) -> Figure | None:
    """Every trial's metric over its steps, the best seven named."""
    scored = [(science.value_of(t, sweep.metric, sweep.mode), t) for t in ledger.trials.values() if len(t.reports) > 1]
    kept = [(v, t) for v, t in scored if v is not None]
    kept.sort(key=lambda pair: pair[0] if sweep.mode == "min" else -pair[0])
    if not kept:
        return None
    series = {t.name: t.curve(sweep.metric, sweep.time) for _, t in kept[:40]}
    positive = all(v > 0 for points in series.values() for _, v in points if math.isfinite(v))
    rules = {"target": answer.target} if answer.target_given and answer.target is not None else None
    return figures.lines(series, x=sweep.time, y=sweep.metric, log_y=positive and sweep.mode == "min", rules=rules)
