"""A plan as a picture: speed by number of GPUs, and the memory of the best layouts.

It is here because the answer to "how many GPUs are worth it?" is a curve: where it leaves the
proportional line shows at a glance, with the error of the plan, and needs plans for many numbers of
GPUs that the table does not have. `trireme scale` draws the same curve from runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.console.terminal import quantity
from app.planner.advice import settings_text
from app.planner.estimate import Estimate
from app.planner.output import distinct
from app.planner.plan import GIB, Plan, ranked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
COLOURS = ("#2563a8", "#d98324", "#3a8f5c", "#a23b72", "#6b7280")
GREY, LIGHT_GREY, RED = "#8793a1", "#d9dee5", "#b0344a"
HALVINGS, DOUBLINGS = 6, 2
"""Of the number of GPUs, as far as it is planned."""
MOST_LAYOUTS = 12
"""Layouts whose memory is shown."""
KINDS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
}
"""The kinds of memory that are shown apart."""
OTHER = "other (on its way, buffers, margin)"


def best_by_number(plan: Plan) -> dict[int, Estimate | None]:
    """The best layout for fewer and more GPUs, with the same global batch and fixed keys.

    On CPUs more than the machine has are not planned.

    Returns:
        By number of GPUs, in ascending order; None if nothing fits or no layout is possible.
    """
    world = plan.machine.world
    fewer = [world >> k for k in range(HALVINGS, 0, -1) if world % (1 << k) == 0]
    more = [] if plan.machine.device.is_cpu else [world << k for k in range(1, DOUBLINGS + 1)]
    best: dict[int, Estimate | None] = {}
    for number in (*fewer, world, *more):
        if number == world:
            best[number] = plan.best
        else:
            rows = ranked(plan.on_gpus(number, plan.fixed, as_planned=True))
            best[number] = rows[0] if rows and rows[0].fits else None
    return best


def draw(plan: Plan, path: str, top: int) -> None:
    """Draw a plan.

    Args:
        plan: The plan.
        path: The file, whose suffix says in which format.
        top: Layouts whose memory is shown, at most.
    """
    from matplotlib.figure import Figure

    rows = distinct(plan, min(top, MOST_LAYOUTS))
    heights = [4.6, 1.4 + 0.4 * len(rows)]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    millions = quantity(plan.reader.parameters / 1e6)
    gpus = f"{plan.machine.world:,} × {plan.machine.device.gpu.name}"
    global_batch = plan.config.train.global_batch_size
    figure.suptitle(
        f"{millions} million parameters, planned for {gpus}, global batch {global_batch:,}",
        fontsize=11,
    )
    grid = figure.add_gridspec(2, 1, height_ratios=heights)
    speed_axes = figure.add_subfigure(grid[0]).subplots()
    memory_axes = figure.add_subfigure(grid[1]).subplots()
    _draw_speed(speed_axes, plan)
    _draw_memory(memory_axes, plan, rows)
    for axes in (speed_axes, memory_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)


def _draw_speed(axes: Axes, plan: Plan) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    world = plan.machine.world
    best = best_by_number(plan)
    labels = []
    for number, row in best.items():
        name = row.candidate.layout.name if row is not None else "nothing\nfits"
        name_lines = name.replace("+", "\n")
        labels.append(f"{number:,}\n{name_lines}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(best), labels)
    axes.set_xlim(min(best) / 1.4, max(best) * 1.4)
    devices = "CPU workers" if plan.machine.device.is_cpu else "GPUs"
    axes.set_xlabel(f"{devices}, and the best layout of each number")
    axes.set_ylabel(f"{plan.reader.task.unit} per second")
    fitting = {number: row for number, row in best.items() if row is not None}
    if not fitting:
        axes.set_yticks([])
        return

    items = plan.config.train.global_batch_size * plan.reader.items_per_sample
    numbers = list(fitting)
    speeds = {number: items / row.step_seconds for number, row in fitting.items()}
    below = []
    above = []
    for number, row in fitting.items():
        low, high = row.speed_range
        below.append(abs(low - 1) * speeds[number])
        above.append(abs(high - 1) * speeds[number])
    reference = world if world in speeds else min(speeds)
    proportional = [speeds[reference] * number / reference for number in numbers]
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.plot(numbers, proportional, ":", color=GREY, label="in proportion")
    axes.errorbar(
        numbers,
        list(speeds.values()),
        [below, above],
        fmt="o-",
        color=COLOURS[0],
        capsize=4,
        label="planned; 80 % of runs between the bars",
    )
    if reference == world:
        axes.plot(world, speeds[world], "o", color=COLOURS[1], ms=9, label="this plan")
    axes.grid(color=LIGHT_GREY)
    axes.legend(frameon=False, fontsize=8)


def _draw_memory(axes: Axes, plan: Plan, rows: list[Estimate]) -> None:
    if max(row.memory_bytes for row in rows) > GIB:
        unit, unit_bytes = "GiB", GIB
    else:
        unit, unit_bytes = "MiB", 2**20
    ends = [0.0] * len(rows)
    for colour, kind in zip(COLOURS, (*KINDS.values(), OTHER)):
        widths = [_bytes_of_kind(row, kind) / unit_bytes for row in rows]
        axes.barh(range(len(rows)), widths, 0.7, ends, color=colour, label=kind)
        ends = [end + width for end, width in zip(ends, widths)]
    limit = plan.machine.device.capacity / unit_bytes
    if limit < 20 * max(ends):
        axes.axvline(limit, color=RED, lw=1.6, label=f"limit: {limit:.0f} {unit}")
    else:
        axes.plot([], [], color=RED, label=f"limit: {limit:,.0f} {unit}, far to the right")
    labels = [f"{row.candidate.layout.name}\n{settings_text(row)}" for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} on the fullest device")
    axes.grid(axis="x", color=LIGHT_GREY)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


def _bytes_of_kind(row: Estimate, kind: str) -> float:
    return sum(size for name, size in row.memory.items() if KINDS.get(name, OTHER) == kind)
