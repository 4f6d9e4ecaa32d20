"""`trireme plan --max-batch` and `--probe`: layouts of a plan tried on this machine, beside what was predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.config import Config
from app.planner.actions import experiment
from app.planner.measure import Measured
from app.planner.plan import GIB, Plan
from app.planner.probe import Largest, largest, measure


def written(config: Config) -> frozenset[str]:
    """What of a configuration says which layout is meant: held for --max-batch, which asks about that layout."""
    parallel = config.parallel
    keys = {"train.activation_checkpointing", "train.precision", "parallel.offload"}
    keys |= {f"parallel.{name}" for name in ("dp_replicate", "dp_shard", "tp", "pp") if getattr(parallel, name)}
    if config.strategy != "auto":
        keys.add("strategy")
    if "pipeline" in config.strategy or (parallel.pp or 1) > 1:
        keys |= {"parallel.schedule", "parallel.chunks"}
    return frozenset(keys)


@dataclass
class Found:
    """What was tried of a plan: for people, for machines, and what of it to write."""

    text: str
    json: Any
    row: int | None = None
    size: int | None = None


def max_batch(plan: Plan) -> Found:
    """The largest micro-batch of the best layout, predicted, then tried; the least one's where none should fit."""
    row = plan.best()
    row = int(plan.order[0]) if row is None else row
    found: Largest = largest(plan, row)
    layout = plan.layout(row)
    tries = [{"micro_batch_size": size} | _seen(seen) for size, seen in found.tries]
    figures = {
        "strategy": layout["strategy"],
        "parallel": layout["parallel"],
        "activation_checkpointing": layout["activation_checkpointing"],
        "precision": layout["precision"],
        "predicted": found.predicted,
        "largest": found.found,
        "share": found.share,
        "tries": tries,
    }
    text = f"largest micro-batch under {layout['strategy']}: {found.sentence}"
    return Found(text, figures, row if found.found else None, found.found or None)


def probe(plan: Plan, count: int = 3) -> Found:
    """Some unlike layouts, the best ones, tried for a few steps, beside what was predicted; row: the fastest."""
    lines, figures = [], []
    fastest: tuple[float, int] | None = None
    for row in candidates(plan, count):
        layout = plan.layout(row)
        seen = measure(experiment(plan, row), plan.machine)
        if seen.seconds is not None:
            fastest = min(fastest or (seen.seconds, row), (seen.seconds, row))
            said = f"measured {seen.seconds:.4g} s, {seen.own / GIB:.2f} GiB"
        else:
            said = f"did not run: {seen.failure}"
        lines.append(
            f"{layout['strategy']}, micro-batch {layout['micro_batch_size']}, recomputing "
            f"{layout['activation_checkpointing']}: predicted {layout['step_seconds']:.4g} s, "
            f"{layout['memory_bytes'] / GIB:.2f} GiB; {said}"
        )
        keys = ("strategy", "parallel", "micro_batch_size", "activation_checkpointing", "precision", "step_seconds")
        figures.append({key: layout[key] for key in (*keys, "memory_bytes")} | {"measured": _seen(seen)})
    text = "\n".join(lines) or "nothing fits, so there is nothing to try"
    return Found(text, figures, fastest[1] if fastest else None)


def candidates(plan: Plan, count: int) -> list[int]:
    """The best rows that fit, of unlike strategies or degrees; where those are fewer, the next best beside them.

    Two that are predicted to take the same time and memory do the same, whatever they are called."""
    table, costs = plan.table, plan.costs
    unlike: dict[tuple[Any, ...], int] = {}
    seen: set[tuple[float, float]] = set()
    others = []
    for row in plan.order[plan.fits[plan.order]].tolist():
        figures = (float(costs.step[row]), float(costs.bytes[row]))
        if figures in seen:
            continue
        seen.add(figures)
        degrees = tuple(int(column[row]) for column in (table.dp_replicate, table.dp_shard, table.tp, table.pp))
        if unlike.setdefault((table.name(row), *degrees), row) != row:
            others.append(row)
        if len(unlike) == count:
            break
    chosen = {*unlike.values(), *others[: count - len(unlike)]}
    return [row for row in plan.order.tolist() if row in chosen]


def _seen(seen: Measured) -> dict[str, Any]:
    """A try as JSON has it; bytes as plans count them."""
    ran = seen.seconds is not None
    return {
        "ran": ran,
        "step_seconds": seen.seconds,
        "memory_bytes": int(seen.own) if ran else None,
        "failure": seen.failure or None,
    }
