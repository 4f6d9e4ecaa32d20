"""A plan as a table for a terminal, as JSON, as an experiment's file, and as a picture of time against memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from app.config_io import to_dict
from app.console import quantity
from app.errors import UserError
from app.planner.advice import advice, families
from app.planner.estimate import Estimate
from app.planner.plan import GIB, Plan
from strategies.dims import NAMES

COLUMNS = ("strategy", "degrees", "micro", "recompute", "precision", "GiB", "s/step", "per second", "MFU", "$/step")


def text(plan: Plan, top: int = 8) -> str:
    """The best layouts, the strategies' reasons, and the advice."""
    machine, read = plan.machine, plan.reader
    lines = [
        f"{quantity(read.parameters / 1e6)} million parameters in {read.blocks} blocks, on {machine.world} × "
        f"{machine.device.gpu.name} ({machine.device.capacity / GIB:.0f} GiB each, {machine.per_node} to a node)",
        f"{len(plan.rows):,} layouts, of which {sum(row.fits for row in plan.rows):,} fit",
        *([f"note: {read.note}"] if read.note else []),
        "",
        *aligned([COLUMNS, *(cells(plan.layout(row)) for row in distinct(plan, top))]),
        "",
        "Why:",
        *(f"  {family}: {reason}" for family, reason in families(plan).items()),
        "",
        *advice(plan),
    ]
    if machine.price_per_hour:
        lines.append("Prices are list prices of cluster/hardware.yaml; spot and reserved machines cost less.")
    return "\n".join(lines)


def distinct(plan: Plan, top: int) -> list[Estimate]:
    """The best rows, at most two of a strategy with the same degrees, so that the list shows choices."""
    chosen: list[Estimate] = []
    seen: Counter[Any] = Counter()
    for row in plan.rows:
        if len(chosen) == top or (chosen and not row.fits):
            break
        seen[row.candidate.layout] += 1
        chosen += [row] if seen[row.candidate.layout] <= 2 else []
    return chosen


def cells(layout: dict[str, Any]) -> tuple[str, ...]:
    """One row of the table, as COLUMNS has it."""
    parallel, size, cost = layout["parallel"], layout["memory_bytes"] / GIB, layout["cost_per_step"]
    degrees = [f"{name}={parallel[name]}" for name in NAMES if parallel[name] > 1]
    if parallel["schedule"]:
        degrees.append(parallel["schedule"] + (f"×{parallel['chunks']}" if parallel["chunks"] > 1 else ""))
    degrees += ["offload"] if parallel["offload"] else []
    return (
        layout["strategy"],
        " ".join(degrees) or "-",
        f"{layout['micro_batches']}×{layout['micro_batch_size']}",
        layout["activation_checkpointing"],
        layout["precision"],
        f"{size:{'.1f' if size > 1 else '.3f'}}" + ("" if layout["fits"] else " !"),
        f"{layout['step_seconds']:.4g}",
        f"{layout.get('tokens_per_second', layout['samples_per_second']):,.0f}",
        f"{100 * layout['mfu']:.0f} %",
        "-" if cost is None else f"{cost:.3g}",
    )


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def as_json(plan: Plan, top: int) -> dict[str, Any]:
    """The layouts, best first, with what they were planned for and why."""
    machine, gpu = plan.machine, plan.machine.device.gpu
    return {
        "layouts": [plan.layout(row) for row in plan.rows[:top]],
        "count": len(plan.rows),
        "fitting": sum(row.fits for row in plan.rows),
        "families": families(plan),
        "advice": advice(plan),
        "model": {key: getattr(plan.reader, key) for key in ("parameters", "blocks", "note")},
        "machine": {
            "gpu": gpu.name,
            "gpus": machine.world,
            "gpus_per_node": machine.per_node,
            "memory_bytes": int(gpu.memory_bytes),
            "usable_bytes": int(machine.device.capacity),
            "link_within": gpu.link_within,
            "link_across": machine.across,
            "price_per_gpu_hour": machine.price_per_hour,
            "calibrated": machine.device.measured,
            "assumed": machine.assumed or None,
        },
    }


def experiment(plan: Plan, row: Estimate) -> dict[str, Any]:
    """The whole configuration with a layout."""
    layout, tree = plan.layout(row), to_dict(plan.config)
    tree |= {"strategy": layout["strategy"], "workers": str(plan.machine.world)}
    tree["parallel"] |= {key: value for key, value in layout["parallel"].items() if value is not None}
    tree["train"] |= {key: layout[key] for key in ("micro_batch_size", "activation_checkpointing", "precision")}
    return tree


def write(plan: Plan, path: str, row: Estimate | None = None) -> str:
    """Writes a layout, the best if not told which, as an experiment file; what was done, in a sentence.

    Raises:
        UserError: nothing fits, or the file cannot be written.
    """
    row = row or plan.best
    if row is None:
        raise UserError("there is nothing to write: " + " ".join(advice(plan)))
    head = f"# Planned for {plan.machine.world} × {plan.machine.device.gpu.name} by `trireme plan`.\n"
    try:
        Path(path).write_text(
            head + yaml.safe_dump(experiment(plan, row), sort_keys=False, allow_unicode=True, width=120)
        )
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}") from error
    return f"written: {path} (trireme train {path})"


def picture(plan: Plan, path: str | Path) -> None:
    """Time against memory of every layout, with the frontier and the GPU's memory marked.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError("a picture needs matplotlib: pip install matplotlib") from error

    def points(rows: list[Estimate]) -> tuple[list[float], list[float]]:
        return [row.memory_bytes / GIB for row in rows], [row.step_seconds for row in rows]

    figure, axis = plt.subplots(figsize=(6, 4.5))
    for i, family in enumerate(dict.fromkeys(sorted(row.candidate.family for row in plan.rows))):
        rows = [row for row in plan.rows if row.candidate.family == family]
        axis.scatter(*points(rows[:: max(1, len(rows) // 600)]), s=4, alpha=0.4, label=family, color=f"C{i}")
    edge: list[Estimate] = []  # the rows that no other beats in both memory and time
    for row in sorted(plan.rows, key=lambda row: (row.memory_bytes, row.step_seconds)):
        edge += [row] if not edge or row.step_seconds < edge[-1].step_seconds else []
    axis.plot(*points(edge), "k-", lw=0.8, label="frontier")
    axis.axvline(plan.machine.device.capacity / GIB, color="r", ls="--", lw=0.8, label="a GPU's memory")
    axis.plot(*points([plan.best] if plan.best else []), "k*", ms=9, label="best")
    title = f"{plan.machine.world} × {plan.machine.device.gpu.name}"
    axis.set(xscale="log", yscale="log", title=title, xlabel="GiB per GPU", ylabel="s per step")
    axis.legend(fontsize=6, markerscale=1.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
