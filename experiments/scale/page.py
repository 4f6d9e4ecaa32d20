"""What is on the page of a study, from what study.json holds; experiments/report/page.py says how."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from app.console import duration
from experiments.report import figures
from experiments.scale import fits

NOTE = (
    "A whole step is computing, the bubble (what a pipeline's schedule leaves idle), exposed communication (what "
    "is not hidden behind computing) and waiting for data. Computing is measured by the same steps over a process "
    "group that sends nothing; of a pipeline by a profile of its stages. Balance: the mean worker's computing over the "
    "slowest's. –: not known, and part of computing."
)
PARTS = {"computing": "computing", "bubble": "bubble", "communication": "exposed communication", "data": "data"}
AHEAD = (1, 2, 4, 16)
"""Times the largest number of workers that was measured."""


def content(head: dict[str, Any], folder: Path) -> dict[str, Any]:
    """head: what study.json holds."""
    speeds, laws, price = head["speeds"], head["laws"], head["price"]
    points: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in head["points"]:
        points.setdefault((point["strategy"], point["workers"]), []).append(point)
    medians = {s: {n: statistics.median(repeats) for n, repeats in found.items()} for s, found in speeds.items()}
    gains = {s: {n: speed / found[min(found)] for n, speed in found.items()} for s, found in medians.items()}
    measured = [_row(own, gains[s][n], min(speeds[s])) for (s, n), own in points.items()]
    notes = [f"{p['strategy']} on {p['workers']}: {note}" for p in head["points"] for note in p["notes"]]
    fitted = [
        {"strategy": s, "parameter": name, "value": round(value, 5), "95 %": f"{low:.4f} to {high:.4f}"}
        for s, law in laws.items()
        for name, (value, low, high) in (("contention σ", law["sigma"]), ("coherence κ", law["kappa"]))
        if name != "coherence κ" or len(speeds[s]) > 2  # two numbers of workers do not tell it
    ]
    ahead = []
    for s, law in laws.items():
        for n in (factor * max(speeds[s]) for factor in AHEAD):
            gain = fits.speedup(law, n)
            seconds = head["points"][0]["samples"] / medians[s][1] / gain
            row = {"strategy": s, "workers": n, "speed-up": round(gain, 2), "efficiency": f"{gain / n:.0%}"}
            row |= {"cost per sample, × one worker": n / gain, "the whole run": duration(seconds)}
            ahead.append(row | {"its cost": seconds / 3600 * n * price if price else "–"})
    kind = "the batch grows with the workers (weak scaling)" if head["about"]["weak"] else "the same batch on all"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(head["created"]))
    return {
        "title": head["name"],
        "about": f"{kind}; begun {began}; {folder}",
        "facts": [(f"{s} on {max(g)}", f"{g[max(g)]:.2f} ×", f"the speed of {min(g)}") for s, g in gains.items()],
        "sections": [
            {"title": "What to use", "sentences": [head["recommended"], *map(": ".join, head["verdicts"].items())]},
            {"title": "Plots", "plots": [_speedups(speeds, laws), _parts(points)]},
            {"title": "Measured, ms per step", "sentences": notes, "tables": [{"rows": measured}], "note": NOTE},
            {"title": "The universal scalability law", "tables": [{"rows": fitted}]},
            {"title": "Further out, by that law", "tables": [{"rows": ahead}]},
            {"title": "The experiment", "folded": {"configuration": json.dumps(head["about"], indent=1)}},
        ],
    }


def _ms(own: list[dict[str, Any]], key: str) -> float | str:
    """The median over repeats, in milliseconds; – where it is not known."""
    known = [p[key] for p in own if p.get(key) is not None]
    return 1e3 * statistics.median(known) if known else "–"


def _row(own: list[dict[str, Any]], gain: float, least: int) -> dict[str, Any]:
    n, rate = own[0]["workers"], statistics.median(p["batch"] / p["step"] for p in own)
    row = {"layout": own[0]["layout"], "workers": n, "samples/s": rate, "speed-up": round(gain, 3)}
    row |= {"efficiency": f"{gain / n * least:.0%}", "step": _ms(own, "step")}
    row |= {label: _ms(own, part) for part, label in PARTS.items()}
    row |= {"MiB per worker": round(max(p["memory"] for p in own) / 2**20)}
    sent = [p["communication"] / p["step"] for p in own if p["communication"] is not None]
    row["communication share"] = f"{statistics.median(sent):.0%}" if sent else "–"
    return row | {"balance": f"{statistics.median(p['balance'] for p in own):.0%}"}


def _speedups(speeds: dict[str, fits.Speeds], laws: dict[str, fits.Law]) -> tuple[str, str]:
    figure, axes = figures.new()
    largest = 4 * max(max(found) for found in speeds.values())
    for i, (strategy, found) in enumerate(speeds.items()):
        base = statistics.median(found[min(found)]) / min(found)
        seen = [(n, speed / base) for n, repeats in found.items() for speed in repeats]
        axes.plot(*zip(*seen), figures.MARKS[i], color=figures.colour(i), markersize=5, alpha=0.75, label=strategy)
        if strategy in laws:
            grid = [largest ** (j / 60) for j in range(61)]
            axes.plot(grid, [fits.speedup(laws[strategy], n) for n in grid], color=figures.colour(i))
    axes.plot([1, largest], [1, largest], color="#8793a1", linewidth=1.2, linestyle=(0, (1, 1.5)), label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [2.0**i for i in range(largest.bit_length())]
    figures.plain_ticks(axes, "x", ticks)
    figures.plain_ticks(axes, "y", [2.0**-i for i in range(1, 8) if 2.0**-i >= axes.dataLim.y0 / 2] + ticks)
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up")
    axes.legend()
    return figures.svg(figure), "Every repeat of every point, the law through them, and the ideal."


def _parts(points: dict[tuple[str, int], list[dict[str, Any]]]) -> tuple[str, str]:
    figure, axes = figures.new()
    names, bottom = [f"{strategy}\n× {n}" for strategy, n in points], [0.0] * len(points)
    for i, (part, label) in enumerate(PARTS.items()):
        heights = [0.0 if (ms := _ms(own, part)) == "–" else float(ms) for own in points.values()]
        if any(heights):
            axes.bar(names, heights, bottom=bottom, color=figures.colour(i), label=label)
        bottom = [a + b for a, b in zip(bottom, heights)]
    axes.set_ylabel("ms per step")
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # over the bars, not on them
    return figures.svg(figure), "Where a step's time goes."
