"""The page of a scaling study."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from experiments.report import figures, page
from experiments.scale import fits
from experiments.scale.run import times_of


def page_of(head: dict[str, Any], folder: Path) -> str:
    """The whole document."""
    points, weak = head["points"], head["about"]["weak"]
    strategies = list(dict.fromkeys(point["strategy"] for point in points))
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(head["created"]))
    law = "the batch grows with the workers (weak scaling)" if weak else "the same batch on all (strong scaling)"
    facts = []
    for strategy in strategies:
        times = times_of(points, strategy)
        gains = fits.throughput(times, weak)
        most = max(gains)
        step = 1e3 * statistics.median(times[most])
        facts.append((f"{strategy} on {most}", f"{gains[most]:.2f} ×", f"{step:.1f} ms per step"))
        facts.append(("efficiency", f"{gains[most] / most:.0%}", f"of {most} times one worker"))
    verdicts = [f"{strategy}: {text}" for strategy, text in head.get("verdicts", {}).items()]
    parts = [
        page.facts(facts),
        page.section("Does more pay?", page.sentences(verdicts)),
        page.section("Pictures", page.plots(_plots(head, strategies, weak))),
        page.section("Measured", _measured(points, strategies, weak), page.paragraph(_BALANCE)),
        page.section("Laws", _laws(head)),
        page.section("Further out", _forecast(head)),
        page.section("The experiment", page.folded("configuration", json.dumps(head["about"], indent=1))),
    ]
    return page.page(head["name"], f"{law}; begun {began}; {folder}", parts)


_BALANCE = (
    "Computing is a step without communication; exposed communication is what a whole step takes beyond it, with what "
    "the workers cost each other by sharing a machine; it is unknown where a strategy cannot leave communication out. "
    "Balance: the mean worker's computing time over the slowest's; below 100 % one worker does the work of others."
)


def _measured(points: list[dict[str, Any]], strategies: list[str], weak: bool) -> str:
    rows: list[list[object]] = []
    for strategy in strategies:
        gains = fits.throughput(times_of(points, strategy), weak)
        for n, gain in gains.items():
            own = [p for p in points if (p["strategy"], p["workers"]) == (strategy, n)]
            steps = [1e3 * p["step"] for p in own]
            local = [max(p["local"]) for p in own if p["local"]]
            compute = 1e3 * statistics.median(local) if local else "–"
            exposed = max(0.0, statistics.median(steps) - compute) if isinstance(compute, float) else "–"
            balance = [statistics.mean(p["local"]) / max(p["local"]) for p in own if p["local"]]
            planned = [p["predicted"] for p in own if p.get("predicted")]
            rows.append(
                [
                    strategy,
                    n,
                    round(statistics.median(steps), 2),
                    f"{min(steps):.1f}–{max(steps):.1f}",
                    compute,
                    exposed,
                    1e3 * statistics.median(p["data"] for p in own),
                    f"{statistics.median(balance):.0%}" if balance else "–",
                    round(gain, 3),
                    f"{gain / n:.0%}",
                    1e3 * planned[0] if planned else "–",
                ]
            )
    head = ["strategy", "workers", "ms per step", "range", "computing, ms", "exposed comm., ms", "data, ms", "balance"]
    return page.table([*head, "speed-up", "efficiency", "planned, ms"], rows)


def _laws(head: dict[str, Any]) -> str:
    rows: list[list[object]] = []
    names = {"s": "serial fraction", "sigma": "contention σ", "kappa": "coherence κ"}
    title = {"amdahl": "Amdahl", "gustafson": "Gustafson", "usl": "universal scalability"}
    for strategy, found in head.get("laws", {}).items():
        for law in found["laws"]:
            for key, (value, low, high) in law["parameters"].items():
                interval = f"{low:.4f} to {high:.4f}"
                rows.append([strategy, title[law["name"]], names[key], round(value, 5), interval, law["note"]])
    return page.table(["strategy", "law", "parameter", "value", "95 %", ""], rows)


def _forecast(head: dict[str, Any]) -> str:
    rows: list[list[object]] = []
    price = head.get("price")
    for strategy, found in head.get("laws", {}).items():
        for f in found["forecast"]:
            money = f["seconds"] * f["workers"] / 3600 * price if price else None
            row = [
                strategy,
                f["workers"],
                round(f["speedup"], 2),
                f"{f['efficiency']:.0%}",
                1e3 * f["seconds"],
                f["cost"],
            ]
            rows.append([*row, money if money is not None else "–"])
    names = [
        "strategy",
        "workers",
        "speed-up",
        "efficiency",
        "ms per step",
        "price per sample, × one worker",
        "per step",
    ]
    most = [
        f"{strategy}: more than {found['most_useful']:.0f} workers would be slower"
        for strategy, found in head.get("laws", {}).items()
        if found["most_useful"]
    ]
    return page.table(names, rows) + page.sentences(most)


def _plots(head: dict[str, Any], strategies: list[str], weak: bool) -> list[tuple[str, str]]:
    figure, axes = figures.new()
    parts, part_axes = figures.new()
    bars: list[tuple[str, float, float]] = []
    largest = 1
    for i, strategy in enumerate(strategies):
        times = times_of(head["points"], strategy)
        gains = fits.throughput(times, weak)
        base = statistics.median(times[min(times)])
        largest = max(largest, *gains)
        for n, seconds in times.items():
            each = [base / s * (n / min(times) if weak else 1) for s in seconds]
            axes.plot([n] * len(each), each, figures.MARKS[i], color=figures.colour(i), markersize=5, alpha=0.75)
        if strategy in head.get("laws", {}):
            _curve(axes, head["laws"][strategy]["laws"][-1], max(gains) * 4, figures.colour(i), strategy)
        bars += _bars(head["points"], strategy, times)
    ends = [1, largest * 4]
    axes.plot(ends, ends, color="#8793a1", linewidth=1.2, linestyle=(0, (1, 1.5)), label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [2**i for i in range(0, (largest * 4).bit_length())]
    figures.plain_ticks(axes, "x", ticks)
    low = min(1.0, axes.dataLim.y0)
    figures.plain_ticks(axes, "y", [2.0**-i for i in range(1, 8) if 2.0**-i >= low / 2] + ticks)
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up")
    axes.legend()
    for i, (name, compute, rest) in enumerate(bars):
        part_axes.bar(name, compute, color=figures.colour(0), label="computing" if i == 0 else None)
        part_axes.bar(
            name, rest, bottom=compute, color=figures.colour(1), label="exposed communication" if i == 0 else None
        )
    part_axes.set_ylabel("ms per step")
    part_axes.grid(axis="x", visible=False)
    part_axes.legend()
    return [
        (
            figures.svg(figure),
            "Every repeat of every point, the universal scalability law through them, and the ideal.",
        ),
        (figures.svg(parts), "Where a step's time goes."),
    ]


def _curve(axes: Any, law: dict[str, Any], most: int, colour: str, label: str) -> None:
    values = {key: found[0] for key, found in law["parameters"].items()}
    grid = [1 * most ** (i / 60) for i in range(61)]
    axes.plot(grid, [fits.speedup(law["name"], values, n) for n in grid], color=colour, label=f"{label}, fitted")


def _bars(points: list[dict[str, Any]], strategy: str, times: dict[int, list[float]]) -> list[tuple[str, float, float]]:
    found = []
    for n, seconds in times.items():
        whole = 1e3 * statistics.median(seconds)
        local = [max(p["local"]) for p in points if (p["strategy"], p["workers"]) == (strategy, n) and p["local"]]
        compute = min(whole, 1e3 * statistics.median(local)) if local else whole
        found.append((f"{strategy}\n× {n}", compute, whole - compute))
    return found
