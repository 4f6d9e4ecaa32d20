"""Advice in the tutorials' own terms, with the figures behind it; which strategy to use today, what would change that.

One GPU holds it: stay until time matters. Several GPUs in one machine: ddp. It does not fit: fsdp. It crosses slow
links: hsdp. One layer is too big: tensor. Still too big, or links too slow for that: pipeline.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from app.planner.evaluate import evaluate
from app.planner.plan import GIB, Plan
from app.planner.table import Held, Table, enumerate_layouts
from app.planner.verdicts import FAMILIES, Verdict, dims_text, families, figures, members, size_text

__all__ = ["FAMILIES", "Verdict", "advice", "dims_text", "families", "members", "single", "table_of"]


def advice(plan: Plan) -> list[str]:
    """Which strategy to use today, with the figures behind it; and what would change it."""
    machine, best = plan.machine, plan.best()
    if best is None:
        from app.planner.nowhere import nowhere

        return nowhere(plan) + [f"Note: {note}." for note in plan.notes]
    sentences = _from_one_gpu(plan, best)
    if machine.world > 1:
        sentences += [*_copies(plan), *_shards(plan), *_links(plan), *_splits(plan)]
    name = plan.table.name(best)
    sentences.append(f"Use {name} today: {dims_text(plan, best)}: {figures(plan, best)}.")
    sentences += _what_would_change(plan, best, name)
    if plan.rank == "cost":
        sentences += _fewer(plan, best)
    if machine.assumed:
        sentences.append(machine.assumed[0].upper() + machine.assumed[1:] + ".")
    return sentences + [f"Note: {note}." for note in plan.notes]


def _from_one_gpu(plan: Plan, best: int) -> list[str]:
    machine = plan.machine
    if machine.world == 1:
        return [
            f"It fits one GPU ({size_text(plan.costs.bytes[best])} of {machine.capacity / GIB:.0f} GiB): stay there "
            "until time matters."
        ]
    one = single(plan)
    if one is None:
        return []
    seconds, needed, fits = one
    if not fits:
        return [
            f"One GPU does not hold it (at least {needed / GIB:.0f} GiB, {machine.capacity / GIB:.0f} there): "
            "something must be sharded or split."
        ]
    gain = seconds / plan.costs.step[best]
    return [
        f"It fits one GPU ({size_text(needed)}, {seconds:.3g} s per step); {machine.world} make it {gain:.1f} × as "
        f"fast ({100 * gain / machine.world:.0f} % of {machine.world}), so one GPU is the cheaper choice while time "
        "does not matter."
    ]


def _fastest(plan: Plan, family: str) -> int | None:
    """The family's fastest row that fits."""
    rows = np.flatnonzero(members(plan).get(family, np.zeros(len(plan.table), bool)) & plan.fits)
    return int(rows[np.argmin(plan.costs.step[rows])]) if len(rows) else None


def _least(plan: Plan, family: str) -> float | None:
    mask = members(plan).get(family)
    return float(plan.costs.bytes[mask].min()) if mask is not None and mask.any() else None


def _copies(plan: Plan) -> list[str]:
    row, least, there = _fastest(plan, "ddp"), _least(plan, "ddp"), plan.machine.capacity / GIB
    if least is None:
        return []
    if row is None:
        return [f"Several GPUs in one machine → ddp, but a whole copy needs {least / GIB:.1f} GiB, {there:.0f} there."]
    return [f"Several GPUs in one machine → ddp: a whole copy fits, {figures(plan, row)}."]


def _shards(plan: Plan) -> list[str]:
    row, least, there = _fastest(plan, "fsdp"), _least(plan, "fsdp"), plan.machine.capacity / GIB
    if least is None:
        return []
    if row is None:
        return [
            f"It does not fit → fsdp, but sharded over all it still needs {least / GIB:.1f} GiB, {there:.0f} there."
        ]
    copy = _least(plan, "ddp")
    needs = copy is not None and copy > plan.machine.capacity
    why = "It does not fit → fsdp" if needs else "Were it not to fit → fsdp"
    return [f"{why}: everything sharded over {plan.machine.world} takes {figures(plan, row)}."]


def _links(plan: Plan) -> list[str]:
    """hsdp, with the two links that it is about."""
    machine, row = plan.machine, _fastest(plan, "hsdp")
    if machine.world <= machine.per_node:
        return ["Slow links → hsdp: all GPUs are in one machine, so there are none to cross."]
    within, across = machine.device.gpu.link_within, machine.across / machine.per_node
    said = (
        f"Slow links → hsdp: a GPU has {within / 1e9:.0f} GB/s to the others of its machine and "
        f"{across / 1e9:.1f} GB/s (its part of {machine.across / 1e9:.0f}) to other machines"
    )
    if row is None:
        return []
    whole = _fastest(plan, "fsdp")
    beside = f", fsdp over all {plan.costs.step[whole]:.3g} s" if whole is not None else ""
    return [f"{said}: sharded in groups of {int(plan.table.dp_shard[row])} it takes {figures(plan, row)}{beside}."]


def _splits(plan: Plan) -> list[str]:
    found = []
    largest = float(plan.costs.block_bytes)
    row = _fastest(plan, "tensor")
    share = f"the largest block's parameters take {size_text(largest)} of {plan.machine.capacity / GIB:.0f} GiB"
    if row is not None:
        found.append(f"One layer too big → tensor: {share}; split it takes {figures(plan, row)}.")
    row = _fastest(plan, "pipeline")
    if row is not None:
        waits = plan.costs.seconds["bubble"][row] / plan.costs.step[row]
        found.append(
            f"Too many layers, or links too slow for the rest → pipeline: {int(plan.table.pp[row])} stages take "
            f"{figures(plan, row)}, {100 * waits:.0f} % of it waiting."
        )
    return found


def single(plan: Plan) -> tuple[float, float, bool] | None:
    """Seconds, bytes and fit of the best layout on one GPU."""
    found = on_fewer(plan, 1)
    return None if found is None else found[:3]


def on_fewer(plan: Plan, world: int) -> tuple[float, float, bool, str] | None:
    """Seconds, bytes and fit of the best layout on so many of the GPUs, and its name."""
    machine = dataclasses.replace(plan.machine, world=world, per_node=min(world, plan.machine.per_node))
    precision = plan.layout(int(plan.order[0]))["precision"]
    table = table_of(plan, world, Held(precision=precision))
    if not len(table):
        return None
    costs = evaluate(plan.reader.read, table, machine, plan.settings)
    fits = costs.bytes <= machine.capacity
    rows = np.flatnonzero(fits) if fits.any() else np.arange(len(table))
    row = int(rows[np.argmin((costs.step if fits.any() else costs.bytes)[rows])])
    return float(costs.step[row]), float(costs.bytes[row]), bool(fits.any()), table.name(row)


def table_of(plan: Plan, world: int, held: Held) -> Table:
    model = plan.model
    return enumerate_layouts(
        world,
        plan.config.train.global_batch_size,
        held,
        precisions=("bf16",),
        blocks=len(model.blocks),
        splits=model.splittable,
        heads=model.heads,
        per_node=min(world, plan.machine.per_node),
        sequence=model.sequence_length,
        pipelines=False,
    )


def _fewer(plan: Plan, best: int) -> list[str]:
    """What a step costs on a half, a quarter, … of the GPUs: on all of them cost is time."""
    machine, price = plan.machine, plan.machine.price_per_hour
    first = "On a given number of GPUs the cheapest layout is the fastest, as all of them are paid for"
    if price is None:
        return [f"{first}; this machine's price is not known."]
    costs = {machine.world: (price * machine.world * float(plan.costs.step[best]) / 3600, float(plan.costs.step[best]))}
    world = machine.world // 2
    while world >= max(1, machine.world // 64):
        found = on_fewer(plan, world)
        if found is not None and found[2]:
            costs[world] = price * world * found[0] / 3600, found[0]
        world //= 2
    told = ", ".join(f"{n} GPUs ${cost:.3g} in {seconds:.3g} s" for n, (cost, seconds) in costs.items())
    least = min(costs, key=lambda n: costs[n][0])
    return [f"{first}; a step on {told}: the cheapest is {least}."]


def _what_would_change(plan: Plan, best: int, name: str) -> list[str]:
    found = []
    ddp = members(plan).get("ddp")
    if name.startswith(("fsdp", "hsdp", "zero")) and ddp is not None and ddp.any():
        least = float(plan.costs.bytes[ddp].min())
        if least > plan.machine.capacity:
            found.append(f"With {least / GIB:.0f} GiB per GPU ddp would fit, which sends a third less.")
    total = float(plan.costs.step[best])
    seconds = {part: float(values[best]) for part, values in plan.costs.seconds.items()}
    talk = sum(seconds[part] for part in ("tensor", "shard", "replicate", "pipeline_send", "contention"))
    if talk > 0.1 * total:
        parts = {key: float(values[best]) for key, values in plan.costs.communication.items()}
        most = max(parts, key=lambda key: parts[key])
        link = "between machines" if most.endswith("across") else "within a machine"
        said = f", most of it {most.partition('.')[0].replace('_', '-')} {link}" if parts[most] > 0.02 * total else ""
        found.append(
            f"Communication takes {100 * talk / total:.0f} % of the step{said}: faster links, a larger "
            "train.global_batch_size or parallel.reduce_dtype=bf16 would shorten it."
        )
    if seconds["bubble"] > 0.1 * total:
        found.append(
            f"The pipeline's waiting takes {100 * seconds['bubble'] / total:.0f} % of the step: more micro-batches (a "
            "larger train.global_batch_size) or a zero-bubble parallel.schedule would shorten it."
        )
    return found + _recomputes(plan, best)


def _recomputes(plan: Plan, best: int) -> list[str]:
    """Whether more memory would save what is recomputed: only where memory, and not the person, asks for it."""
    costs = plan.costs
    if not plan.table.checkpointing[best] or plan.held.checkpointing:
        return []
    larger = np.flatnonzero(~plan.fits & (plan.table.checkpointing == 0) & (costs.step < 0.98 * costs.step[best]))
    if not len(larger):
        return []
    row = int(larger[np.argmin(costs.bytes[larger])])
    return [
        f"With {costs.bytes[row] / GIB:.0f} GiB per GPU nothing would be recomputed: {plan.table.name(row)}, "
        f"{costs.step[row]:.3g} s per step."
    ]
