"""The page of a scaling study."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from app.console import duration
from experiments.report import figures, page
from experiments.scale import fits
from experiments.scale.plan import times_of


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
        page.section("Measured, ms", _measured(points, strategies, weak), page.paragraph(_PARTS)),
        page.section("Checkpoints, memory, balance", _beside(points, strategies)),
        page.section("Laws", _laws(head)),
        page.section("Further out", _forecast(head)),
        page.section("The experiment", page.folded("configuration", json.dumps(head["about"], indent=1))),
    ]
    return page.page(head["name"], f"{law}; begun {began}; {folder}", parts)


_PARTS = (
    "A whole step is computing, the bubble (what a pipeline's schedule leaves idle), exposed communication (what "
    "sending adds beyond what is hidden behind computing) and waiting for data. Computing is measured by the same "
    "steps over a process group that sends nothing; of a pipeline by a profile of its stages. A checkpoint comes on "
    "top: how long training stands still for it, and how long until it is committed. Balance: the mean worker's "
    "computing over the slowest's; below 95 % it is said why. Planned: what the planner had predicted beforehand. –: "
    "not known, and part of computing."
)
Bar = tuple[str, dict[str, float]]
LABELS = {"communication": "exposed communication", "data": "waiting for data"} | {
    k: k for k in ("computing", "bubble")
}
PARTS = ("computing", "bubble", "communication", "data")


def _ms(points: list[dict[str, Any]], key: str) -> float | str:
    """The median over repeats, in milliseconds; – where it is not known."""
    known = [p[key] for p in points if p[key] is not None]
    return 1e3 * statistics.median(known) if known else "–"


def _measured(points: list[dict[str, Any]], strategies: list[str], weak: bool) -> str:
    rows: list[list[object]] = []
    for strategy in strategies:
        gains = fits.throughput(times_of(points, strategy), weak)
        for n, gain in gains.items():
            own = [p for p in points if (p["strategy"], p["workers"]) == (strategy, n)]
            steps = [1e3 * p["step"] for p in own]
            planned = [1e3 * p["predicted"] for p in own if p.get("predicted")]
            times: list[object] = [
                _ms(own, "step"),
                f"{min(steps):.1f}–{max(steps):.1f}",
                *(_ms(own, k) for k in PARTS),
            ]
            rows.append([strategy, n, round(gain, 3), f"{gain / n:.0%}", *times, planned[0] if planned else "–"])
    head = ["strategy", "workers", "speed-up", "efficiency", "ms per step", "range", "computing", "bubble"]
    return page.table([*head, "exposed comm.", "data", "planned"], rows)


def _beside(points: list[dict[str, Any]], strategies: list[str]) -> str:
    """What is not part of a step: checkpoints, memory, and whether workers share the work."""
    rows: list[list[object]] = []
    for strategy in strategies:
        for n in times_of(points, strategy):
            own = [p for p in points if (p["strategy"], p["workers"]) == (strategy, n)]
            each = [1e3 * statistics.median(times) for times in zip(*(p["workers_computing"] for p in own))]
            why = next((p["why"] for p in own if p["why"]), "even") if n > 1 else ""
            balance = f"{statistics.median(p['balance'] for p in own):.0%}"
            shown = ", ".join(f"{ms:.1f}" for ms in each[:8]) + (" …" if len(each) > 8 else "")
            memory = max(max(p["memory"]) for p in own) / 2**20
            row = [own[0]["layout"], n, _ms(own, "stall"), _ms(own, "save"), round(memory), shown, balance, why]
            rows.append(row)
    head = ["layout", "workers", "checkpoint stalls, ms", "committed after, ms", "MiB per worker"]
    return page.table([*head, "computing per worker, ms", "balance", "why"], rows)


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
            n, hours = f["workers"], f["run_seconds"] / 3600
            row = [strategy, n, round(f["speedup"], 2), f"{f['efficiency']:.0%}", 1e3 * f["seconds"], f["cost"]]
            rows.append([*row, duration(f["run_seconds"]), hours * n * price if price else "–"])
    names = ["strategy", "workers", "speed-up", "efficiency", "ms per step", "price per sample, × one worker"]
    names += ["the whole run", "its cost"]
    most = [
        f"{strategy}: more than {found['most_useful']:.0f} workers would be slower"
        for strategy, found in head.get("laws", {}).items()
        if found["most_useful"]
    ]
    return page.table(names, rows) + page.sentences(most)


def _plots(head: dict[str, Any], strategies: list[str], weak: bool) -> list[tuple[str, str]]:
    figure, axes = figures.new()
    shares, part_axes = figures.new()
    bars: list[Bar] = []
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
    names, heap = [name for name, _ in bars], [0.0] * len(bars)
    for i, part in enumerate(PARTS):
        heights = [parts[part] for _, parts in bars]
        if max(heights) > 0.002 * max(map(sum, zip(heap, heights))):
            part_axes.bar(names, heights, bottom=heap, color=figures.colour(i), label=LABELS[part])
        heap = [a + b for a, b in zip(heap, heights)]
    part_axes.set_ylabel("ms per step")
    part_axes.grid(axis="x", visible=False)
    part_axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # over the bars, not on them
    return [
        (
            figures.svg(figure),
            "Every repeat of every point, the universal scalability law through them, and the ideal.",
        ),
        (figures.svg(shares), "Where a step's time goes."),
    ]


def _curve(axes: Any, law: dict[str, Any], most: int, colour: str, label: str) -> None:
    values = {key: found[0] for key, found in law["parameters"].items()}
    grid = [1 * most ** (i / 60) for i in range(61)]
    axes.plot(grid, [fits.speedup(law["name"], values, n) for n in grid], color=colour, label=f"{label}, fitted")


def _bars(points: list[dict[str, Any]], strategy: str, times: dict[int, list[float]]) -> list[Bar]:
    found = []
    for n in times:
        own = [p for p in points if (p["strategy"], p["workers"]) == (strategy, n)]
        found.append((f"{strategy}\n× {n}", {part: float(str(_ms(own, part)).replace("–", "0")) for part in PARTS}))
    return found
