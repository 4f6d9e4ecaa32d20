"""A plan in words: why each family of layouts lost or cannot be, which to use today, what would change that."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from app.planner.evaluate import evaluate
from app.planner.plan import GIB, Plan
from app.planner.table import Held, Table, enumerate_layouts

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
            found.append(Verdict(family, row, True, f"{family}: the best, {_figures(plan, row)}"))
        else:
            found.append(Verdict(family, row, True, f"{family}: {_lost(plan, row, best)}"))
    return found


def members(plan: Plan) -> dict[str, np.ndarray]:
    """Family → which rows are its own."""
    table = plan.table
    names = np.array([table.name(i) for i in _distinct(plan)])
    of = dict(zip(_distinct_keys(plan), names))
    every = np.array([of[key] for key in _keys(plan)])
    first = np.char.partition(every.astype(str), "+")[:, 0]
    tensor, pipeline = table.tp > 1, table.pp > 1
    plain = ~tensor & ~pipeline
    found = {name: plain & (first == name) for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp")}
    if plan.machine.world == 1:
        found = {"single": plain & (first == "single")}
    return found | {"tensor": tensor & ~pipeline, "pipeline": pipeline}


def _keys(plan: Plan) -> list[tuple[int, bool, bool, bool]]:
    table = plan.table
    return list(
        zip(
            table.data.tolist(),
            (table.dp_replicate > 1).tolist(),
            (table.tp > 1).tolist(),
            (table.pp > 1).tolist(),
        )
    )


def _distinct_keys(plan: Plan) -> list[tuple[int, bool, bool, bool]]:
    return list(dict.fromkeys(_keys(plan)))


def _distinct(plan: Plan) -> list[int]:
    first: dict[tuple[int, bool, bool, bool], int] = {}
    for i, key in enumerate(_keys(plan)):
        first.setdefault(key, i)
    return list(first.values())


def _figures(plan: Plan, row: int) -> str:
    seconds = plan.costs.step[row]
    return f"{seconds:.3g} s per step, {plan.costs.bytes[row] / GIB:.1f} GiB per GPU"


def dims_text(plan: Plan, row: int) -> str:
    table = plan.table
    sides = [("dp_replicate", table.dp_replicate), ("dp_shard", table.dp_shard), ("tp", table.tp), ("pp", table.pp)]
    written = " ".join(f"{name}={int(column[row])}" for name, column in sides if column[row] > 1)
    recomputes = ("", ", selective recomputation", ", full recomputation")[table.checkpointing[row]]
    return f"{written or 'one worker'}, micro-batch {int(table.micro_batch[row])}{recomputes}"


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
    ratio = plan.costs.step[row] / plan.costs.step[best]
    parts = {name: float(v[row]) - float(plan.costs.seconds[name][best]) for name, v in plan.costs.seconds.items()}
    worst = max(parts, key=lambda name: parts[name])
    if ratio < 1.001:
        saved = plan.costs.bytes[row] - plan.costs.bytes[best]
        return f"as fast as the best with {abs(saved) / GIB:.2g} GiB {'more' if saved > 0 else 'less'} per GPU"
    share = _WORDS.get(worst, worst)
    return f"{_figures(plan, row)}: {ratio:.2f} × the best's time, most of it {share} ({dims_text(plan, row)})"


_WORDS = {
    "compute": "computing (smaller products, or recomputation)",
    "tensor": "what tensor parallelism sends, which nothing hides",
    "shard": "gathering parameters and scattering gradients that computing does not hide",
    "replicate": "the all-reduce that backward does not hide",
    "pipeline_send": "activations sent between stages",
    "contention": "computing slowed by communication beside it",
    "bubble": "stages waiting for the pipeline to fill and drain",
    "optimizer": "the optimizer, whose state is not sharded",
}


def _absent(plan: Plan, family: str) -> str:
    model, machine = plan.model, plan.machine
    if family == "tensor" and not model.splittable:
        return "the model has no layers that can be split over its heads"
    if family == "tensor" and machine.per_node == 1:
        return "a node has one GPU, and tensor parallelism across nodes would wait for the network in every layer"
    if family == "pipeline" and len(model.blocks) < 2:
        return "the model has no chain of blocks to cut into stages"
    return "not among what is held fixed, or its degrees do not divide the workers, heads or batch"


def advice(plan: Plan) -> list[str]:
    """Which strategy to use today, in the tutorials' terms, with the figures behind it; and what would change it."""
    machine, best = plan.machine, plan.best()
    if best is None:
        from app.planner.nowhere import nowhere

        return nowhere(plan)
    table = plan.table
    sentences = _from_one_gpu(plan, best)
    name = table.name(best)
    sentences.append(f"Use {name} today: {dims_text(plan, best)}: {_figures(plan, best)}.")
    sentences += _what_would_change(plan, best, name)
    if machine.assumed:
        sentences.append(machine.assumed[0].upper() + machine.assumed[1:] + ".")
    return sentences


def _from_one_gpu(plan: Plan, best: int) -> list[str]:
    machine = plan.machine
    if machine.world == 1:
        return [
            f"It fits one GPU ({plan.costs.bytes[best] / GIB:.1f} of {machine.capacity / GIB:.0f} GiB): stay there "
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
        f"It fits one GPU ({needed / GIB:.1f} GiB, {seconds:.3g} s per step); {machine.world} make it {gain:.1f} × as "
        f"fast ({100 * gain / machine.world:.0f} % of {machine.world}), so one GPU is the cheaper choice while time "
        "does not matter."
    ]


def single(plan: Plan) -> tuple[float, float, bool] | None:
    """Seconds, bytes and fit of the best layout on one GPU."""
    machine = dataclasses.replace(plan.machine, world=1, per_node=1)
    precision = plan.layout(int(plan.order[0]))["precision"]
    table = table_of(plan, 1, Held(precision=precision))
    if not len(table):
        return None
    costs = evaluate(plan.reader.read, table, machine, plan.settings)
    fits = costs.bytes <= machine.capacity
    if not fits.any():
        return float(costs.step.min()), float(costs.bytes.min()), False
    row = int(np.flatnonzero(fits)[np.argmin(costs.step[fits])])
    return float(costs.step[row]), float(costs.bytes[row]), True


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


def _what_would_change(plan: Plan, best: int, name: str) -> list[str]:
    machine, found = plan.machine, []
    ddp = members(plan).get("ddp")
    if name.startswith(("fsdp", "hsdp", "zero")) and ddp is not None and ddp.any():
        least = float(plan.costs.bytes[ddp].min())
        if least > machine.capacity:
            found.append(f"With {least / GIB:.0f} GiB per GPU ddp would fit, which sends a third less.")
    seconds = {part: float(values[best]) for part, values in plan.costs.seconds.items()}
    total = sum(seconds.values())
    talk = sum(seconds[part] for part in ("tensor", "shard", "replicate", "pipeline_send", "contention"))
    if talk > 0.1 * total:
        found.append(
            f"Communication takes {100 * talk / total:.0f} % of the step: faster links, a larger "
            "train.global_batch_size or parallel.reduce_dtype=bf16 would shorten it."
        )
    if seconds["bubble"] > 0.1 * total:
        found.append(
            f"The pipeline's waiting takes {100 * seconds['bubble'] / total:.0f} % of the step: more micro-batches (a "
            "larger train.global_batch_size) or a zero-bubble parallel.schedule would shorten it."
        )
    if plan.table.checkpointing[best]:
        found.append("With more memory per GPU nothing would be recomputed, which is up to a quarter of the time.")
    return found
