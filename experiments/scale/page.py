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
from experiments.scale.plan import times_of

NOTE = (
    "A whole step is computing, the bubble (what a pipeline's schedule leaves idle), exposed communication (what "
    "is not hidden behind computing) and waiting for data. Computing is measured by the same steps over a process "
    "group that sends nothing; of a pipeline by a profile of its stages. Balance: the mean worker's computing over the "
    "slowest's. Planned: what the planner had predicted. –: not known, and part of computing."
)
PARTS = {"computing": "computing", "bubble": "bubble", "communication": "exposed communication", "data": "data"}
NAMES = {"amdahl": "Amdahl", "gustafson": "Gustafson", "usl": "universal scalability", "s": "serial fraction"}
NAMES |= {"sigma": "contention σ", "kappa": "coherence κ"}


def content(head: dict[str, Any], folder: Path) -> dict[str, Any]:
    """head: what study.json holds."""
    weak, laws, price = head["about"]["weak"], head["laws"], head.get("price")
    points: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in head["points"]:
        points.setdefault((point["strategy"], point["workers"]), []).append(point)
    times = {strategy: times_of(head["points"], strategy) for strategy, _ in points}
    gains = {strategy: fits.throughput(found, weak) for strategy, found in times.items()}
    measured = [_row(own, gains[own[0]["strategy"]][own[0]["workers"]]) for own in points.values()]
    fitted = [
        {"strategy": s, "law": NAMES[law["name"]], "parameter": NAMES[key], "value": round(value, 5)}
        | {"95 %": f"{low:.4f} to {high:.4f}", "note": law["note"]}
        for s, found in laws.items()
        for law in found["laws"]
        for key, (value, low, high) in law["parameters"].items()
    ]
    ahead = [
        {"strategy": s, "workers": f["workers"], "speed-up": round(f["speedup"], 2)}
        | {"efficiency": f"{f['efficiency']:.0%}", "ms per step": 1e3 * f["seconds"]}
        | {"cost per sample, × one worker": f["cost"], "the whole run": duration(f["run_seconds"])}
        | {"its cost": f["run_seconds"] / 3600 * f["workers"] * price if price else "–"}
        for s, found in laws.items()
        for f in found["forecast"]
    ]
    kind = "the batch grows with the workers (weak scaling)" if weak else "the same batch on all (strong scaling)"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(head["created"]))
    return {
        "title": head["name"],
        "about": f"{kind}; begun {began}; {folder}",
        "facts": [(f"{s} on {max(found)}", f"{found[max(found)]:.2f} ×", "speed-up") for s, found in gains.items()],
        "sections": [
            {"title": "Does more pay?", "sentences": [f"{s}: {said}" for s, said in head["verdicts"].items()]},
            {"title": "Pictures", "plots": [_speedups(times, laws, weak), _parts(points)]},
            {"title": "Measured, ms", "tables": [{"rows": measured}], "note": NOTE},
            {"title": "Laws", "tables": [{"rows": fitted}]},
            {"title": "Further out", "tables": [{"rows": ahead}]},
            {"title": "The experiment", "folded": {"configuration": json.dumps(head["about"], indent=1)}},
        ],
    }


def _ms(own: list[dict[str, Any]], key: str) -> float | str:
    """The median over repeats, in milliseconds; – where it is not known."""
    known = [p[key] for p in own if p.get(key) is not None]
    return 1e3 * statistics.median(known) if known else "–"


def _row(own: list[dict[str, Any]], gain: float) -> dict[str, Any]:
    n, why = own[0]["workers"], next((p["why"] for p in own if p["why"]), "")
    row = {"layout": own[0]["layout"], "workers": n, "speed-up": round(gain, 3), "efficiency": f"{gain / n:.0%}"}
    row |= {"step": _ms(own, "step"), **{label: _ms(own, part) for part, label in PARTS.items()}}
    row |= {"planned": _ms(own, "predicted"), "checkpoint stall": _ms(own, "stall"), "save": _ms(own, "save")}
    row["MiB per worker"] = round(max(max(p["memory"]) for p in own) / 2**20)
    return row | {"balance": f"{statistics.median(p['balance'] for p in own):.0%}{f': {why}' if why else ''}"}


def _speedups(times: dict[str, dict[int, list[float]]], laws: dict[str, Any], weak: bool) -> tuple[str, str]:
    figure, axes = figures.new()
    largest = 4 * max(max(found) for found in times.values())
    for i, (strategy, found) in enumerate(times.items()):
        least = min(found)
        base = statistics.median(found[least])
        speeds = [(n, base / s * (n / least if weak else 1)) for n, seconds in found.items() for s in seconds]
        axes.plot(*zip(*speeds), figures.MARKS[i], color=figures.colour(i), markersize=5, alpha=0.75)
        if strategy in laws:
            law = laws[strategy]["laws"][-1]
            values = {key: value for key, (value, _, _) in law["parameters"].items()}
            grid = [largest ** (i / 60) for i in range(61)]
            curve = [fits.speedup(law["name"], values, n) for n in grid]
            axes.plot(grid, curve, color=figures.colour(i), label=f"{strategy}, fitted")
    axes.plot([1, largest], [1, largest], color="#8793a1", linewidth=1.2, linestyle=(0, (1, 1.5)), label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [2.0**i for i in range(largest.bit_length())]
    figures.plain_ticks(axes, "x", ticks)
    figures.plain_ticks(axes, "y", [2.0**-i for i in range(1, 8) if 2.0**-i >= axes.dataLim.y0 / 2] + ticks)
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up")
    axes.legend()
    return figures.svg(
        figure
    ), "Every repeat of every point, the universal scalability law through them, and the ideal."


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
