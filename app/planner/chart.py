"""A plan as a picture: throughput against the number of GPUs, and the memory of the layouts that its table shows."""

from __future__ import annotations

from typing import Any

from app.console.terminal import quantity
from app.planner.advice import settings_text
from app.planner.estimate import Estimate
from app.planner.output import distinct
from app.planner.plan import GIB, Plan, ranked

SUFFIXES = (".png", ".svg")
COLOURS = ("#2563a8", "#d98324", "#3a8f5c", "#a23b72", "#6b7280")
FEWER, MORE = 6, 2  # halvings and doublings of the number of GPUs that are looked at
SHOWN = 12  # layouts of which the memory is
KINDS = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations"}
OTHER = "other (on its way, buffers, margin)"


def best_by_number(plan: Plan) -> dict[int, Estimate | None]:
    """Number of GPUs → the best layout, for the same global batch and what is fixed; None: nothing fits, or none is
    there. More than a machine's own CPUs are not looked at."""
    world, cores = plan.machine.world, plan.machine.device.is_cpu
    fewer = [world >> k for k in range(FEWER, 0, -1) if world >> k and not world % (1 << k)]
    more = [] if cores else [world << k for k in range(1, MORE + 1)]

    def best(number: int) -> Estimate | None:
        rows = ranked(plan.on_gpus(number, plan.fixed, pipelines=True))
        return rows[0] if rows and rows[0].fits else None

    return {number: plan.best if number == world else best(number) for number in (*fewer, world, *more)}


def draw(plan: Plan, path: str, top: int) -> None:
    """Writes the picture, in the format of its suffix. top: layouts of which the memory is shown, at most."""
    from matplotlib.figure import Figure

    rows = distinct(plan, min(top, SHOWN))
    heights = [4.6, 1.4 + 0.4 * len(rows)]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    gpus = f"{plan.machine.world:,} × {plan.machine.device.gpu.name}"
    model = f"{quantity(plan.reader.parameters / 1e6)} million parameters"
    figure.suptitle(f"{model}, planned for {gpus}, global batch {plan.config.train.global_batch_size:,}", fontsize=11)
    parts: Any = figure.subfigures(2, 1, height_ratios=heights)
    speed, memory = (part.subplots() for part in parts)
    _speeds(speed, plan)
    _memory(memory, plan, rows)
    for axes in (speed, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)


def _speeds(axes: Any, plan: Plan) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    found, unit = best_by_number(plan), plan.reader.task.unit
    fitting = {number: row for number, row in found.items() if row is not None}
    name = "CPU workers" if plan.machine.device.is_cpu else "GPUs"
    names = {n: row.candidate.layout.name.replace("+", "\n") if row else "nothing\nfits" for n, row in found.items()}
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(found), [f"{number:,}\n{names[number]}" for number in found])
    axes.set_xlim(min(found) / 1.4, max(found) * 1.4)
    axes.set_xlabel(f"{name}, and the best layout of each number")
    axes.set_ylabel(f"{unit} per second")
    if not fitting:
        axes.set_yticks([])
        return
    items = plan.config.train.global_batch_size * plan.reader.items_per_sample
    speeds = {number: items / row.step_seconds for number, row in fitting.items()}
    low, high = ([abs(row.range[side] - 1) * speeds[n] for n, row in fitting.items()] for side in (0, 1))
    known = plan.machine.world if plan.machine.world in speeds else min(speeds)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.plot(list(speeds), [speeds[known] * n / known for n in speeds], ":", color="#8793a1", label="in proportion")
    axes.errorbar(
        list(speeds),
        list(speeds.values()),
        [low, high],
        fmt="o-",
        color=COLOURS[0],
        capsize=4,
        label="planned; 80 % of runs between the bars",
    )
    if known == plan.machine.world:
        axes.plot(known, speeds[known], "o", color=COLOURS[1], ms=9, label="this plan")
    axes.grid(color="#d9dee5")
    axes.legend(frameon=False, fontsize=8)


def _memory(axes: Any, plan: Plan, rows: list[Estimate]) -> None:
    capacity = plan.machine.device.capacity
    unit, size = ("GiB", GIB) if max(row.memory_bytes for row in rows) > GIB else ("MiB", 2**20)
    left, labels = [0.0] * len(rows), [f"{row.candidate.layout.name}\n{settings_text(row)}" for row in rows]
    for colour, kind in zip(COLOURS, (*KINDS.values(), OTHER)):
        width = [
            sum(value for part, value in row.memory.items() if KINDS.get(part, OTHER) == kind) / size for row in rows
        ]
        axes.barh(range(len(rows)), width, 0.7, left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, width)]
    if capacity / size < 20 * max(left):
        axes.axvline(capacity / size, color="#b0344a", lw=1.6, label=f"limit: {capacity / size:.0f} {unit}")
    else:
        axes.plot([], [], color="#b0344a", label=f"limit: {capacity / size:,.0f} {unit}, far to the right")
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} on the fullest device")
    axes.grid(axis="x", color="#d9dee5")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
