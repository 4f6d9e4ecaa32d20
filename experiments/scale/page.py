"""A scaling study's page and its plots; experiments/report draws and lays out. Pure."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from app.console.terminal import duration
from experiments.report import figures
from experiments.report.page import MISSING, PageContent
from experiments.scale.laws import Law, Speeds
from experiments.scale.manifest import Point, ScalingManifest

MEANINGS = {
    "a": "added to a sample's cost by each doubling",
    "sigma": "contention",
    "kappa": "coherence",
}
"""The constants of laws in words."""
MEASURED_NOTE = (
    "A whole step is computing, the bubble (what a pipeline's schedule leaves idle), exposed "
    "communication (what is not hidden behind computing, on the worker that the others wait for) "
    "and waiting for data. Communication is a profile's share of the step. Balance: the mean "
    "worker's computing over the slowest's."
)
LAW_NOTE = (
    "Where the batch grows with the workers: cost = 1 + a · log₂(n / n₀). Where it does not: the "
    "plan's curve through the largest number that was measured, or the universal scalability law "
    "where nothing can be planned. Intervals are those of published series (python -m "
    "experiments.benchmarks laws) and of the repeats."
)
Part = Literal["step", "computing", "bubble", "communication", "data"]
PARTS: dict[Part, str] = {
    "computing": "computing",
    "bubble": "bubble",
    "communication": "exposed communication",
    "data": "data",
}
"""The parts of a step, and what they are called on the page."""
AHEAD = (1, 2, 4, 16)
"""The page predicts these multiples of the largest number of workers that was measured."""
Key = tuple[str, int]
"""A strategy and a number of workers."""


def content(manifest: ScalingManifest, folder: Path) -> PageContent:
    """What is on a study's page.

    Args:
        manifest: What study.json holds.
        folder: The study's folder.
    """
    speeds = manifest["speeds"]
    laws = {strategy: Law.from_json(law) for strategy, law in manifest["laws"].items()}
    points: dict[Key, list[Point]] = {}
    for point in manifest["points"]:
        points.setdefault((point["strategy"], point["workers"]), []).append(point)
    scaling = "the same batch on all"
    if manifest["about"]["weak"]:
        scaling = "the batch grows with the workers (weak scaling)"
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest["created"]))
    verdicts = [f"{strategy}: {verdict}" for strategy, verdict in manifest["verdicts"].items()]
    about = json.dumps(manifest["about"], indent=1)
    return {
        "title": manifest["name"],
        "about": f"{scaling}; begun {begun}; {folder}",
        "facts": _facts(speeds),
        "sections": [
            {"title": "What to use", "sentences": [manifest["recommended"], *verdicts]},
            {"title": "Plots", "plots": [_speedup_plot(speeds, laws), _parts_plot(points)]},
            {
                "title": "Measured, ms per step",
                "sentences": _notes(manifest["points"]),
                "tables": [{"rows": _measured_rows(points, speeds)}],
                "note": MEASURED_NOTE,
            },
            {
                "title": "The law of each strategy",
                "tables": [{"rows": _law_rows(laws)}],
                "note": LAW_NOTE,
            },
            {
                "title": "Further out, by that law",
                "tables": [{"rows": _predicted_rows(laws, manifest)}],
            },
            {"title": "The experiment", "folded": {"configuration": about}},
        ],
    }


def _speedups(speeds: Speeds) -> dict[int, float]:
    """By number of workers, the median speed relative to that of the smallest number."""
    base = statistics.median(speeds[min(speeds)])
    return {workers: statistics.median(repeats) / base for workers, repeats in speeds.items()}


def _facts(speeds: Mapping[str, Speeds]) -> list[tuple[str, str, str]]:
    facts = []
    for strategy, measured in speeds.items():
        speedups = _speedups(measured)
        largest = max(speedups)
        speedup = f"{speedups[largest]:.2f} ×"
        facts.append((f"{strategy} on {largest}", speedup, f"the speed of {min(speedups)}"))
    return facts


def _notes(points: Sequence[Point]) -> list[str]:
    notes = []
    for point in points:
        name = f"{point['strategy']} on {point['workers']}"
        notes += [f"{name}: {note}" for note in point["notes"]]
    return notes


# --- tables ---------------------------------------------------------------------------------------


def _milliseconds(repeats: Sequence[Point], part: Part) -> float:
    """The median over the repeats of a point."""
    return 1e3 * statistics.median(point[part] for point in repeats)


def _measured_rows(
    points: Mapping[Key, Sequence[Point]],
    speeds: Mapping[str, Speeds],
) -> list[dict[str, object]]:
    rows = []
    for (strategy, workers), repeats in points.items():
        speedup = _speedups(speeds[strategy])[workers]
        rows.append(_measured_row(repeats, speedup, base=min(speeds[strategy])))
    return rows


def _measured_row(repeats: Sequence[Point], speedup: float, *, base: int) -> dict[str, object]:
    """What was measured of one point.

    Args:
        repeats: Its measurements.
        speedup: Its speed relative to that of `base` workers.
        base: The smallest number of workers that was measured.
    """
    first = repeats[0]
    workers = first["workers"]
    shares = [point["communication"] / point["step"] for point in repeats]
    row: dict[str, object] = {
        "layout": first["layout"],
        "workers": workers,
        "samples/s": statistics.median(point["batch"] / point["step"] for point in repeats),
        "speed-up": round(speedup, 3),
        "efficiency": f"{speedup / workers * base:.0%}",
        "step": _milliseconds(repeats, "step"),
    }
    for part, label in PARTS.items():
        row[label] = _milliseconds(repeats, part)
    row["MiB per worker"] = round(max(point["memory"] for point in repeats) / 2**20)
    row["communication share"] = f"{statistics.median(shares):.0%}"
    row["balance"] = f"{statistics.median(point['balance'] for point in repeats):.0%}"
    return row


def _law_rows(laws: Mapping[str, Law]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for strategy, law in laws.items():
        for name, value in law.values.items():
            if name == "kappa" and law.counts <= 2:
                continue  # two numbers of workers do not tell it
            rows.append(
                {
                    "strategy": strategy,
                    "law": law.name,
                    "constant": MEANINGS[name],
                    "value": round(value, 5),
                }
            )
    return rows


def _predicted_rows(
    laws: Mapping[str, Law],
    manifest: ScalingManifest,
) -> list[dict[str, object]]:
    """What the laws predict for the numbers of workers of `AHEAD`."""
    samples = manifest["points"][0]["samples"]
    price = manifest["price"]
    rows = []
    for strategy, law in laws.items():
        for factor in AHEAD:
            workers = factor * law.largest
            rows.append(_predicted_row(strategy, law, workers, samples=samples, price=price))
    return rows


def _predicted_row(
    strategy: str,
    law: Law,
    workers: int,
    *,
    samples: int,
    price: float | None,
) -> dict[str, object]:
    speedup = law.speedup(workers)
    seconds = samples / law.speed / speedup
    spread = law.spread(workers)
    interval = "not known"
    if spread is not None:
        interval = f"{speedup * (1 - spread):.2f} to {speedup * (1 + spread):.2f}"
    return {
        "strategy": strategy,
        "workers": workers,
        f"speed-up over {law.base}": round(speedup, 2),
        "9 in 10 lie in": interval,
        "efficiency": f"{1 / law.cost(workers):.0%}",
        f"cost per sample, × {law.base}": law.cost(workers),
        "the whole run": duration(seconds),
        "its cost, $": seconds / 3600 * workers * price if price else MISSING,
    }


# --- plots ----------------------------------------------------------------------------------------


def _speedup_plot(speeds: Mapping[str, Speeds], laws: Mapping[str, Law]) -> tuple[str, str]:
    """SVG and caption of speed-ups over numbers of workers.

    They are relative to one worker's speed, or where one was not measured to an equal share of the
    smallest number's.
    """
    figure, axes = figures.new()
    largest = 4 * max(max(measured) for measured in speeds.values())
    for i, (strategy, measured) in enumerate(speeds.items()):
        base = min(measured)
        speed_of_one = statistics.median(measured[base]) / base
        counts = [workers for workers, repeats in measured.items() for _ in repeats]
        speedups = [speed / speed_of_one for repeats in measured.values() for speed in repeats]
        axes.plot(
            counts,
            speedups,
            figures.MARKS[i],
            color=figures.colour(i),
            markersize=5,
            alpha=0.75,
            label=strategy,
        )
        if strategy in laws:
            law = laws[strategy]
            grid: list[float] = [workers for workers in sorted(law.costs) if workers <= largest]
            if not grid:  # only a plan's curve is known at some numbers of workers alone
                grid = [law.base * (largest / law.base) ** (j / 60) for j in range(61)]
            fitted = [law.base * law.speedup(workers) for workers in grid]
            axes.plot(grid, fitted, color=figures.colour(i))
    ideal = [1, largest]
    dots = (0, (1, 1.5))
    axes.plot(ideal, ideal, color=figures.GREY, linewidth=1.2, linestyle=dots, label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [2.0**power for power in range(largest.bit_length())]
    lowest = axes.dataLim.y0 / 2
    fractions = [2.0**-power for power in range(1, 8) if 2.0**-power >= lowest]
    figures.set_ticks(axes, "x", ticks)
    figures.set_ticks(axes, "y", fractions + ticks)
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up")
    axes.legend()
    caption = "Every repeat of every point, the law through them, and the ideal."
    return figures.to_svg(figure), caption


def _parts_plot(points: Mapping[Key, Sequence[Point]]) -> tuple[str, str]:
    """SVG and caption of the parts of each point's step."""
    figure, axes = figures.new(1.2 + 0.26 * len(points))
    names = [f"{strategy} × {workers}" for strategy, workers in points]
    left = [0.0] * len(points)
    for i, (part, label) in enumerate(PARTS.items()):
        widths = [_milliseconds(repeats, part) for repeats in points.values()]
        if any(widths):
            axes.barh(names, widths, left=left, color=figures.colour(i), label=label)
        left = [before + width for before, width in zip(left, widths)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.grid(axis="y", visible=False)
    figures.legend_above(axes)
    return figures.to_svg(figure), "Where a step's time goes."
