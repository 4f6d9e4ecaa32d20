"""What a study says: the universal scalability law through its points, and what is on its page. Pure functions.

Throughput of n workers relative to one (Gunther 1993):     C(n) = n / (1 + σ (n − 1) + κ n (n − 1))

σ: contention, the share of the work that is not divided; with κ = 0 the law is Amdahl's and σ his serial fraction.
κ: coherence, what every worker exchanges with every other; with κ > 0 there is a number of workers past which more is
slower. Where the batch grows with n (weak scaling), C counts samples per second all the same.
"""

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.console.terminal import duration
from experiments.report import figures

Speeds = Mapping[int, Sequence[float]]
"""Workers → samples per second, repeated."""
Law = dict[str, tuple[float, float | None, float | None]]
""""sigma" and "kappa": value, and its 95 % interval by the bootstrap over repeats; None where there are too few."""
LEAST_REPEATS = 3
"""Of every number of workers, for an interval: fewer say nothing of how far one measurement is from the next."""
PAYS = 1.5
"""Twice the workers are worth it, we say, if they do at least half as much again."""


def fit(speeds: Speeds, draws: int = 1000) -> Law | None:
    """None without a point of one worker and one of another number."""
    if 1 not in speeds or len(speeds) < 2:
        return None
    if fewest_repeats(speeds) < LEAST_REPEATS:
        sigma, kappa = _fit(speeds)
        return {"sigma": (sigma, None, None), "kappa": (kappa, None, None)}
    source = random.Random(0)
    samples = [{n: [source.choice(list(s)) for _ in s] for n, s in speeds.items()} for _ in range(draws)]
    drawn = [sorted(column) for column in zip(*map(_fit, samples))]
    low, high = int(0.025 * draws), int(0.975 * draws)
    contention, coherence = ((value, found[low], found[high]) for value, found in zip(_fit(speeds), drawn))
    return {"sigma": contention, "kappa": coherence}


def fewest_repeats(speeds: Speeds) -> int:
    """How often the number of workers was measured that was measured least often."""
    return min(map(len, speeds.values()))


def has_interval(law: Law) -> bool:
    """Whether it is known how far off the law may be; else nothing is said of more workers than were measured."""
    return all(low is not None and high is not None for _, low, high in law.values())


def _fit(speeds: Speeds) -> tuple[float, float]:
    """σ and κ: n / C − 1 = σ (n − 1) + κ n (n − 1) is linear in both, neither of which is negative; relative errors
    count. Two numbers of workers tell σ only."""
    import numpy as np
    from scipy import optimize

    one = statistics.median(speeds[1])
    n = np.array([count for count in speeds if count > 1], dtype=float)
    gain = np.array([statistics.median(speeds[count]) / one for count in speeds if count > 1])
    columns = [n - 1, n * (n - 1)] if len(n) > 1 else [n - 1]
    solution, _ = optimize.nnls((np.stack(columns) * gain / n).T, (n / gain - 1) * gain / n)
    return float(solution[0]), float(solution[1]) if len(n) > 1 else 0.0


def speedup(law: Law, n: float, bound: int = 0) -> float:
    """Throughput of n workers relative to one. bound: 0 by the law's values, 1 and 2 by the ends of its intervals."""
    sigma, kappa = law["sigma"][bound], law["kappa"][bound]
    assert sigma is not None and kappa is not None, "a law without an interval has no bounds"
    return n / (1 + sigma * (n - 1) + kappa * n * (n - 1))


def verdict(law: Law, largest: int) -> str:
    """Whether twice the largest number of workers that was measured pays, in a sentence; or that it is not known."""
    if not has_interval(law):
        return (
            f"Whether more than {largest} workers pay is not known: some numbers of workers were measured fewer than "
            f"{LEAST_REPEATS} times. Measure with --repeats {LEAST_REPEATS} or more."
        )
    gain, most, least = (speedup(law, 2 * largest, bound) / speedup(law, largest, bound) for bound in range(3))
    does = f"{2 * largest} workers would do {gain:.2f} times the work of {largest}"
    if (least >= PAYS) != (most >= PAYS):
        return f"Whether the next doubling pays is not known: {does} (95 %: {least:.2f} to {most:.2f})."
    does += f", at {2 / gain:.2f} times the cost per sample{'; more is slower' if gain <= 1 else ''}"
    return f"The next doubling {'pays' if gain >= PAYS else 'does not pay'}: {does}."


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
    once = any(fewest_repeats(found) == 1 for found in speeds.values())
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
        {"strategy": s, "parameter": name, "value": round(value, 5), "95 %": _interval(low, high)}
        for s, law in laws.items()
        for name, (value, low, high) in (("contention σ", law["sigma"]), ("coherence κ", law["kappa"]))
        if name != "coherence κ" or len(speeds[s]) > 2  # two numbers of workers do not tell it
    ]
    ahead = []
    for s, law in ((s, law) for s, law in laws.items() if has_interval(law)):
        for n in (factor * max(speeds[s]) for factor in AHEAD):
            gain = speedup(law, n)
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


def _interval(low: float | None, high: float | None) -> str:
    return "not known: too few repeats" if low is None or high is None else f"{low:.4f} to {high:.4f}"


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
    figure, axes = figures.new()
    largest = 4 * max(max(found) for found in speeds.values())
    for i, (strategy, found) in enumerate(speeds.items()):
        base = statistics.median(found[min(found)]) / min(found)
        seen = [(n, speed / base) for n, repeats in found.items() for speed in repeats]
        axes.plot(*zip(*seen), figures.MARKS[i], color=figures.colour(i), markersize=5, alpha=0.75, label=strategy)
        if strategy in laws:
            end = largest if has_interval(laws[strategy]) else max(found)
            grid = [end ** (j / 60) for j in range(61)]
            axes.plot(grid, [speedup(laws[strategy], n) for n in grid], color=figures.colour(i))
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
