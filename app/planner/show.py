"""A plan as a table for a terminal, and as a picture of time against memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from app.planner.plan import GIB, Plan
from app.planner.verdicts import FAMILIES, families, members
from app.planner.why import advice

_COLOURS = {name: f"C{i}" for i, name in enumerate(FAMILIES)}
COLUMNS = ("strategy", "degrees", "micro", "recompute", "precision", "GiB", "s/step", "per second", "MFU", "$/step")


def text(plan: Plan, top: int = 8) -> str:
    """The best layouts, the families' reasons, and the advice."""
    model, machine = plan.model, plan.machine
    lines = [
        f"{model.parameters / 1e9:.3g} billion parameters in {len(model.blocks)} blocks, on {machine.world} × "
        f"{machine.device.gpu.name} ({machine.capacity / GIB:.0f} GiB each, {machine.per_node} to a node)",
        f"{len(plan.table):,} layouts; the model was read in {plan.seconds['model']:.1f} s, they were planned in "
        f"{plan.seconds['layouts']:.2f} s",
        *([f"note: {model.note}"] if model.note else []),
        "",
    ]
    rows = distinct(plan, top)
    lines += aligned([COLUMNS, *(cells(plan.layout(row)) for row in rows)]) if rows else []
    lines += ["", "Why:", *(f"  {verdict.sentence}" for verdict in families(plan))]
    lines += ["", *advice(plan)]
    if machine.price_per_hour:
        lines.append("Prices are list prices of cluster/hardware.yaml; spot and reserved machines cost less.")
    return "\n".join(lines)


def distinct(plan: Plan, top: int) -> list[int]:
    """The best rows, at most two of a strategy with the same degrees, so that the list shows choices."""
    chosen: list[int] = []
    seen: dict[tuple[Any, ...], int] = {}
    for row in plan.order[: 50 * top]:
        if not plan.fits[row] and chosen:
            break
        key = (plan.table.name(row), int(plan.table.dp_shard[row]), int(plan.table.tp[row]), int(plan.table.pp[row]))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 2:
            chosen.append(int(row))
        if len(chosen) == top:
            break
    return chosen


def cells(layout: dict[str, Any]) -> tuple[str, ...]:
    """One row of the table, as COLUMNS has it."""
    parallel = layout["parallel"]
    degrees = " ".join(
        f"{key}={parallel[key]}" for key in ("dp_replicate", "dp_shard", "tp", "pp") if parallel[key] > 1
    )
    if parallel["schedule"]:
        degrees += f" {parallel['schedule']}" + (f"×{parallel['chunks']}" if parallel["chunks"] > 1 else "")
    if parallel["offload"]:
        degrees += " offload"
    rate = layout["tokens_per_second"] or layout["samples_per_second"]
    return (
        layout["strategy"],
        degrees.strip() or "-",
        f"{layout['micro_batches']}×{layout['micro_batch_size']}",
        layout["activation_checkpointing"],
        layout["precision"],
        f"{layout['memory_bytes'] / GIB:{'.1f' if layout['memory_bytes'] > GIB else '.3f'}}"
        + ("" if layout["fits"] else " !"),
        f"{layout['step_seconds']:.4g}",
        f"{rate:,.0f}",
        f"{100 * layout['mfu']:.0f} %",
        "-" if layout["cost_per_step"] is None else f"{layout['cost_per_step']:.3g}",
    )


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def frontier(plan: Plan) -> np.ndarray:
    """Rows that no other beats in both memory and time, by memory."""
    order = np.lexsort((plan.costs.step, plan.costs.bytes))
    best = np.minimum.accumulate(plan.costs.step[order])
    before = np.concatenate([[np.inf], best[:-1]])
    return order[plan.costs.step[order] < before]


def picture(plans: dict[str, Plan], path: str | Path) -> None:
    """Time against memory of every layout of each plan, by family, with the frontier and the GPU's memory marked.

    Raises:
        UserError: matplotlib is not installed.
    """
    from app.errors import UserError

    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError("a picture needs matplotlib: pip install matplotlib") from error
    columns = min(5, len(plans))
    lines = -(-len(plans) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4 * columns, 3.2 * lines), squeeze=False)
    for axis, (title, plan) in zip(axes.flat, plans.items()):
        _draw(axis, title, plan)
    for axis in list(axes.flat)[len(plans) :]:
        axis.axis("off")
    axes.flat[min(1, len(plans) - 1)].legend(fontsize=6, loc="upper right", markerscale=1.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axis: Any, title: str, plan: Plan) -> None:
    for name, mask in members(plan).items():
        rows = np.flatnonzero(mask)[:: max(1, int(mask.sum()) // 600)]
        if len(rows):
            across, up = plan.costs.bytes[rows] / GIB, plan.costs.step[rows]
            axis.scatter(across, up, s=4, alpha=0.4, label=name, color=_COLOURS[name])
    edge = frontier(plan)
    axis.plot(plan.costs.bytes[edge] / GIB, plan.costs.step[edge], "k-", lw=0.8, label="frontier")
    axis.axvline(plan.machine.capacity / GIB, color="r", ls="--", lw=0.8, label="a GPU's memory")
    best = plan.best()
    if best is not None:
        axis.plot(plan.costs.bytes[best] / GIB, plan.costs.step[best], "k*", ms=9, label="chosen")
    axis.set(xscale="log", yscale="log", title=title, xlabel="GiB per GPU", ylabel="s per step")
