"""Why each family of layouts lost, cannot be, or won: one sentence with figures for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.planner.plan import GIB, NEAR, Plan
from app.planner.table import DATA

FAMILIES = {
    "single": "one GPU",
    "ddp": "a whole copy per GPU",
    "zero1": "copies, optimizer state sharded",
    "zero2": "copies, optimizer state and gradients sharded",
    "fsdp": "everything sharded over all",
    "hsdp": "sharded in groups, groups replicated",
    "tensor": "each layer split",
    "pipeline": "blocks split into stages",
}


@dataclass(frozen=True)
class Verdict:
    family: str
    row: int | None
    """Its best layout; None if there is none."""
    fits: bool
    sentence: str


def families(plan: Plan) -> list[Verdict]:
    """For each family of layouts, its best and why it is not the plan's best, or that it is."""
    best = plan.best()
    found = []
    for family, mask in members(plan).items():
        rows = plan.order[mask[plan.order]]
        if not len(rows):
            found.append(Verdict(family, None, False, f"{family}: {_absent(plan, family)}"))
            continue
        row = int(rows[0])
        if not plan.fits[row]:
            found.append(Verdict(family, row, False, f"{family}: {_too_large(plan, mask)}"))
        elif row == best:
            found.append(Verdict(family, row, True, f"{family}: the best, {figures(plan, row)}"))
        else:
            found.append(Verdict(family, row, True, f"{family}: {_lost(plan, row, best)}"))
    return found


def members(plan: Plan) -> dict[str, np.ndarray]:
    """Family → which rows are its own."""
    table = plan.table
    tensor, pipeline = table.tp > 1, table.pp > 1
    plain = ~tensor & ~pipeline
    of = {name: plain & (table.data == DATA.index(name)) for name in DATA}
    copies = table.dp_replicate > 1
    if plan.machine.world == 1:
        found = {"single": of["none"]}
    else:
        found = {name: of[name] for name in ("ddp", "zero1", "zero2")}
        found |= {"fsdp": of["fsdp"] & ~copies, "hsdp": of["fsdp"] & copies}
    return found | {"tensor": tensor & ~pipeline, "pipeline": pipeline}


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def figures(plan: Plan, row: int) -> str:
    return f"{plan.costs.step[row]:.3g} s per step, {size_text(plan.costs.bytes[row])} per GPU"


def dims_text(plan: Plan, row: int) -> str:
    table = plan.table
    sides = [("dp_replicate", table.dp_replicate), ("dp_shard", table.dp_shard), ("tp", table.tp), ("pp", table.pp)]
    written = " ".join(f"{name}={int(column[row])}" for name, column in sides if column[row] > 1)
    recomputes = ("", ", selective recomputation", ", full recomputation")[table.checkpointing[row]]
    if table.checkpointing[row] == 2 and plan.settings.every > 1:
        recomputes = f", one block in {plan.settings.every} recomputed"
    moved = ", state in host memory" if table.offload[row] else ""
    return f"{written or 'one worker'}, micro-batch {int(table.micro_batch[row])}{recomputes}{moved}"


def _too_large(plan: Plan, mask: np.ndarray) -> str:
    rows = np.flatnonzero(mask)
    row = int(rows[np.argmin(plan.costs.bytes[rows])])
    there = plan.machine.capacity / GIB
    sentence = f"needs {plan.costs.bytes[row] / GIB:.0f} GiB per GPU at least, {there:.0f} there"
    fitting = np.flatnonzero(plan.fits)
    if len(fitting):
        split = plan.table.dp_shard[fitting] * plan.table.tp[fitting] * plan.table.pp[fitting]
        least = int(fitting[np.lexsort((plan.costs.step[fitting], split))[0]])
        sentence += f"; smallest that fits: {plan.table.name(least)} with {dims_text(plan, least)}"
    return sentence


def _lost(plan: Plan, row: int, best: int | None) -> str:
    assert best is not None
    costs = plan.costs
    if plan.rank == "memory":
        ratio = costs.bytes[row] / costs.bytes[best]
        return f"{figures(plan, row)}: {ratio:.2f} × the best's memory ({dims_text(plan, row)})"
    ratio = costs.step[row] / costs.step[best]
    if ratio < 1.001:
        saved = float(costs.bytes[row] - costs.bytes[best])
        memory = f"with {size_text(abs(saved))} {'more' if saved > 0 else 'less'} per GPU"
        memory = memory if abs(saved) > 0.01 * costs.bytes[best] else "in the same memory"
        if ratio > 0.999:
            return f"as fast as the best, {memory}"
        return f"{figures(plan, row)}: {100 * (1 - ratio):.1f} % less than the best's time, {_simpler(plan, row, best)}"
    parts = {name: float(v[row]) - float(costs.seconds[name][best]) for name, v in costs.seconds.items()}
    worst = max(parts, key=lambda name: parts[name])
    share = _WORDS.get(worst, worst)
    return f"{figures(plan, row)}: {ratio:.2f} × the best's time, most of it {share} ({dims_text(plan, row)})"


def _simpler(plan: Plan, row: int, best: int) -> str:
    same = plan.table.name(row) == plan.table.name(best)
    return f"within the {100 * (NEAR - 1):.0f} % that plans are sure of, and {'' if same else 'less '}simple" + (
        " too" if same else ""
    )


_WORDS = {
    "compute": "computing (smaller products, or recomputation)",
    "tensor": "what tensor parallelism sends, which nothing hides",
    "shard": "gathering parameters and scattering gradients that computing does not hide",
    "replicate": "the all-reduce that backward does not hide",
    "pipeline_send": "activations sent between stages",
    "contention": "computing slowed by communication beside it",
    "bubble": "stages waiting for the pipeline to fill and drain",
    "optimizer": "the optimizer, whose state is not sharded",
    "data": "copying samples to the GPU",
    "rest": "what a step costs by itself",
}


def _absent(plan: Plan, family: str) -> str:
    """Which of the reasons keeps a whole family out."""
    model, machine, batch = plan.model, plan.machine, plan.config.train.global_batch_size
    world = machine.world
    if family == "tensor" and not model.splittable:
        return "the model has no layers that can be split over its heads"
    if family == "pipeline" and len(model.blocks) < 2:
        return "the model has no chain of blocks to cut into stages"
    held = _held_out(plan, family)
    if held:
        return f"left out, because {held} is held"
    if world == 1:
        return "there is one GPU"
    if family == "tensor":
        if machine.per_node == 1:
            return "a node has one GPU, and tensor parallelism across nodes would wait for the network in every layer"
        return f"no number of GPUs within a node of {machine.per_node} divides the {world} workers, the model's " + (
            f"{model.heads} heads and its sequence" if model.heads else "sequence"
        )
    if family == "hsdp":
        return f"{world} workers cannot be cut into several groups of several"
    if family == "pipeline":
        return f"no number of stages divides {world} workers and leaves each enough of the batch of {batch}"
    return f"train.global_batch_size {batch} cannot be shared by {world} data-parallel workers"


def _held_out(plan: Plan, family: str) -> str:
    """The key that, as it is held, rules the family out; "" if none does."""
    held, parallel = plan.held, plan.config.parallel
    data = {"hsdp": "fsdp", "single": "none"}.get(family, family)
    if family in ("tensor", "pipeline"):
        if held.parts is not None and family not in held.parts:
            return f"strategy={plan.config.strategy}"
        key, value = ("tp", held.tp) if family == "tensor" else ("pp", held.pp)
        if value == 1:
            return f"parallel.{key}=1"
        return f"parallel.pp={held.pp}" if family == "tensor" and (held.pp or 1) > 1 else _others(plan)
    if held.parts is not None and held.data and data not in held.data:
        return f"strategy={plan.config.strategy}"
    if held.replicated is not None and family in ("fsdp", "hsdp") and held.replicated is not (family == "hsdp"):
        return f"strategy={plan.config.strategy}"
    for name in ("tp", "pp", "dp_shard", "dp_replicate", "offload"):
        value = getattr(held, name)
        if value is None or f"parallel.{name}" not in plan.given:
            continue
        rules_out = {
            "tp": value > 1,
            "pp": value > 1,
            "dp_shard": (value > 1) is (family == "ddp") or (value < plan.machine.world) is (family == "fsdp"),
            "dp_replicate": (value > 1) is (family == "fsdp") or (value == 1 and family == "hsdp"),
            "offload": bool(value) and family == "ddp",
        }
        if rules_out[name]:
            return f"parallel.{name}={value}".replace("True", "true")
    if held.parts and held.parts & {"tensor", "pipeline"}:
        return f"strategy={plan.config.strategy}"
    return "parallel.stages" if parallel.stages and "parallel.stages" in plan.given else ""


def _others(plan: Plan) -> str:
    """A degree that leaves no room for another."""
    for name in ("dp_shard", "dp_replicate"):
        value = getattr(plan.held, name)
        if value is not None and value == plan.machine.world:
            return f"parallel.{name}={value}"
    return ""
