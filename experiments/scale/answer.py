"""What a study says: what more workers would bring by the law of its points; and what is on its page. All pure."""

import json
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.console.terminal import duration
from experiments.report import figures
from experiments.scale.laws import LEAST_COUNTS, LEAST_REPEATS, Law, Speeds

PAYS = 1.5
"""Twice the workers are worth it, we say, if they do at least half as much again."""
MEANINGS = {
    "a": "added to a sample's cost by each doubling",
    "sigma": "contention",
    "kappa": "coherence",
}
"""The laws' constants in words."""


def verdict(law: Law) -> str:
    """Whether twice the largest number of workers that was measured pays, in a sentence; without a verdict where the
    interval does not allow one."""
    n = 2 * law.largest
    gain = law.speedup(n) / law.speedup(law.largest)
    does = f"{n} workers would do {gain:.2f} times the work of {law.largest}"
    spread = law.spread(n)
    if spread is None:
        return (
            f"By the {law.name} law {does}. A verdict needs {LEAST_COUNTS} numbers of workers, each measured "
            f"{LEAST_REPEATS} times."
        )
    low, high = gain * (1 - spread), gain * (1 + spread)
    does += f" ({low:.2f} to {high:.2f}), at {2 / gain:.2f} times the cost per sample"
    does += "; more is slower" if high <= 1 else ""
    if low < PAYS <= high:
        return f"Whether the next doubling pays cannot be told: {does}."
    return f"The next doubling {'pays' if low >= PAYS else 'does not pay'}: {does}."


def recommend(speeds: Mapping[str, Speeds]) -> str:
    """Which strategy to use on how many workers: the fastest strategy at each number, and of the numbers the largest up
    to which every doubling does at least `PAYS` times the work.

    speeds: by strategy.
    """
    counts = sorted({n for found in speeds.values() for n in found})
    best = {n: max((statistics.median(s[n]), name) for name, s in speeds.items() if n in s) for n in counts}
    least = chosen = counts[0]
    for n in counts[1:]:
        if best[n][0] / best[chosen][0] >= PAYS ** math.log2(n / chosen):
            chosen = n
    speed, strategy = best[chosen]
    once = any(min(map(len, measured.values())) == 1 for measured in speeds.values())
    gain = speed / best[least][0]
    more = f", {gain:.2f} times the throughput of {least}, at {gain / chosen * least:.0%} efficiency"
    what = f"{strategy} on {chosen} workers" if chosen > 1 else "1 worker"
    doubt = " Some points were measured once only, so another measurement may say otherwise." if once else ""
    return f"Use {what}: {speed:,.0f} samples/s{more if chosen > least else ''}.{doubt}"


# --- the page -------------------------------------------------------------------------------------------------------

NOTE = (
    "A whole step is computing, the bubble (what a pipeline's schedule leaves idle), exposed communication (what "
    "is not hidden behind computing, on the worker that the others wait for) and waiting for data. Communication is a "
    "profile's share of the step. Balance: the mean worker's computing over the slowest's."
)
LAW_NOTE = (
    "Where the batch grows with the workers: cost = 1 + a · log₂(n / n₀). Where it does not: the plan's curve through "
    "the largest number that was measured, or the universal scalability law where nothing can be planned. Intervals "
    "are those of published series (python -m experiments.benchmarks laws) and of the repeats."
)
PARTS = {"computing": "computing", "bubble": "bubble", "communication": "exposed communication", "data": "data"}
AHEAD = (1, 2, 4, 16)
"""Times the largest number of workers that was measured."""


def content(head: dict[str, Any], folder: Path) -> dict[str, Any]:
    """head: what study.json holds."""
    speeds, price = head["speeds"], head["price"]
    laws = {strategy: Law.of_data(law) for strategy, law in head["laws"].items()}
    points: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in head["points"]:
        points.setdefault((point["strategy"], point["workers"]), []).append(point)
    medians = {s: {n: statistics.median(repeats) for n, repeats in found.items()} for s, found in speeds.items()}
    gains = {s: {n: speed / found[min(found)] for n, speed in found.items()} for s, found in medians.items()}
    measured = [_row(own, gains[s][n], min(speeds[s])) for (s, n), own in points.items()]
    notes = [f"{p['strategy']} on {p['workers']}: {note}" for p in head["points"] for note in p["notes"]]
    fitted = [
        {"strategy": s, "law": law.name, "constant": MEANINGS[name], "value": round(value, 5)}
        for s, law in laws.items()
        for name, value in law.values.items()
        if name != "kappa" or law.counts > 2  # two numbers of workers do not tell it
    ]
    ahead = [row for s, law in laws.items() for row in _ahead(s, law, head["points"][0]["samples"], price)]
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
            {"title": "The law of each strategy", "tables": [{"rows": fitted}], "note": LAW_NOTE},
            {"title": "Further out, by that law", "tables": [{"rows": ahead}]},
            {"title": "The experiment", "folded": {"configuration": json.dumps(head["about"], indent=1)}},
        ],
    }


def _ahead(strategy: str, law: Law, samples: int, price: float | None) -> list[dict[str, Any]]:
    """What is expected of numbers of workers up to the furthest of AHEAD."""
    rows = []
    for n in (factor * law.largest for factor in AHEAD):
        gain, spread = law.speedup(n), law.spread(n)
        seconds = samples / law.speed / gain
        around = "not known" if spread is None else f"{gain * (1 - spread):.2f} to {gain * (1 + spread):.2f}"
        row = {"strategy": strategy, "workers": n, f"speed-up over {law.base}": round(gain, 2)}
        row |= {"9 in 10 lie in": around, "efficiency": f"{1 / law.cost(n):.0%}"}
        row |= {f"cost per sample, × {law.base}": law.cost(n), "the whole run": duration(seconds)}
        rows.append(row | {"its cost": seconds / 3600 * n * price if price else "–"})
    return rows


def _ms(own: list[dict[str, Any]], key: str) -> float:
    """The median over repeats, in milliseconds."""
    return 1e3 * statistics.median(p[key] for p in own)


def _row(own: list[dict[str, Any]], gain: float, least: int) -> dict[str, Any]:
    n, rate = own[0]["workers"], statistics.median(p["batch"] / p["step"] for p in own)
    row = {"layout": own[0]["layout"], "workers": n, "samples/s": rate, "speed-up": round(gain, 3)}
    row |= {"efficiency": f"{gain / n * least:.0%}", "step": _ms(own, "step")}
    row |= {label: _ms(own, part) for part, label in PARTS.items()}
    row |= {"MiB per worker": round(max(p["memory"] for p in own) / 2**20)}
    row["communication share"] = f"{statistics.median(p['communication'] / p['step'] for p in own):.0%}"
    return row | {"balance": f"{statistics.median(p['balance'] for p in own):.0%}"}


def _speedups(speeds: dict[str, Speeds], laws: dict[str, Law]) -> tuple[str, str]:
    """Relative to one worker's speed, or where one was not measured to an equal share of the smallest number's."""
    figure, axes = figures.new()
    largest = 4 * max(max(found) for found in speeds.values())
    for i, (strategy, found) in enumerate(speeds.items()):
        base = statistics.median(found[min(found)]) / min(found)
        seen = [(n, speed / base) for n, repeats in found.items() for speed in repeats]
        axes.plot(*zip(*seen), figures.MARKS[i], color=figures.colour(i), markersize=5, alpha=0.75, label=strategy)
        if law := laws.get(strategy):
            grid = [n for n in sorted(law.costs) if n <= largest]
            grid = grid or [law.base * (largest / law.base) ** (j / 60) for j in range(61)]
            axes.plot(grid, [law.base * law.speedup(n) for n in grid], color=figures.colour(i))
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
        heights = [_ms(own, part) for own in points.values()]
        if any(heights):
            axes.bar(names, heights, bottom=bottom, color=figures.colour(i), label=label)
        bottom = [a + b for a, b in zip(bottom, heights)]
    axes.set_ylabel("ms per step")
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # over the bars, not on them
    return figures.svg(figure), "Where a step's time goes."
