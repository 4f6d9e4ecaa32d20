"""A model that fits nowhere: what would make it fit here, and the smallest cluster of the catalogue that would do."""

from __future__ import annotations

import dataclasses

import numpy as np

from app.planner.evaluate import evaluate
from app.planner.plan import GIB, Plan
from app.planner.table import Held
from app.planner.verdicts import dims_text
from app.planner.why import table_of
from cluster.hardware import Instance, all_gpus, all_instances

CONTEXT = 1.5e9
"""Bytes of a GPU that its process takes, where nothing is known of it."""


def nowhere(plan: Plan) -> list[str]:
    """What to say of a model that fits nowhere here: what would make it fit, and the smallest cluster that would do."""
    least = int(np.argmin(plan.costs.bytes))
    there, needed = plan.machine.capacity, float(plan.costs.bytes[least])
    parts = {name: float(values[least]) for name, values in plan.costs.memory.items()}
    largest = max(parts, key=lambda name: parts[name])
    first = (
        f"No layout fits: the smallest, {plan.table.name(least)} with {dims_text(plan, least)}, needs "
        f"{needed / GIB:.1f} GiB per GPU, {there / GIB:.1f} there, most of it {largest} "
        f"({parts[largest] / GIB:.1f} GiB)."
    )
    needs = _needs(plan)
    found = smallest_cluster(plan, needs)
    return [
        first,
        _here(plan, needs, largest),
        found or f"No cluster of the catalogue up to {max(needs, default=1):,} GPUs would hold it.",
    ]


def _here(plan: Plan, needs: dict[int, float], largest: str) -> str:
    """What would make it fit on these GPUs: something else held, state in host memory, more GPUs, a smaller model."""
    there, name = plan.machine.capacity, plan.machine.device.gpu.name
    free = _free(plan)
    if free:
        return f"To make it fit here: {free}."
    more = next((n for n, needed in needs.items() if needed <= there and n > plan.machine.world), None)
    if more:
        return f"To make it fit here: {more} × {name} would hold it ({needs[more] / GIB:.1f} GiB each)."
    if largest == "activations":
        return "To make it fit here: a shorter sequence, or a model of fewer or narrower layers."
    return (
        f"To make it fit here: a smaller model, or GPUs of more than {there / GIB:.0f} GiB; more of these do not help."
    )


def _free(plan: Plan) -> str:
    """The first layout here that fits if nothing but the precision is held; then with state in host memory."""
    precision = plan.layout(int(plan.order[0]))["precision"]
    for held in (Held(precision=precision), Held(precision=precision, offload=True)):
        table = table_of(plan, plan.machine.world, held)
        if not len(table) or plan.machine.device.gpu.name == "cpu":
            continue
        costs = evaluate(plan.reader.read, table, plan.machine, dataclasses.replace(plan.settings, every=1))
        rows = np.flatnonzero(costs.bytes <= plan.machine.capacity)
        if len(rows):
            row = int(rows[np.argmin(costs.step[rows])])
            other = dataclasses.replace(plan, table=table, costs=costs, settings=plan.settings)
            key = "parallel.offload=true (state in host memory), " if held.offload else ""
            return (
                f"{key}{table.name(row)} with {dims_text(other, row)} needs {costs.bytes[row] / GIB:.1f} GiB and takes "
                f"{costs.step[row]:.3g} s per step"
            )
    return ""


def smallest_cluster(plan: Plan, needs: dict[int, float] | None = None) -> str | None:
    """The cheapest cluster of the catalogue by list price that holds the model; of equal ones the fewest machines."""
    needs = needs or _needs(plan)
    offers: list[tuple[float, int, int, str, Instance]] = []
    for name, gpu in all_gpus().items():
        count = next((n for n, needed in needs.items() if needed <= gpu.memory_bytes - CONTEXT), None)
        if name == "cpu" or count is None:
            continue
        for offer in all_instances().values():
            if offer.gpu == name:
                machines = -(-count // offer.gpus)
                offers.append((round(machines * offer.price_per_hour, 4), machines, count, name, offer))
    if not offers:
        return None
    price, machines, count, name, offer = min(offers, key=lambda o: o[:3])
    return (
        f"The smallest cluster of the catalogue that holds it: {count} × {name}, {machines} × {offer.name} "
        f"({offer.provider}, ${price:,.2f} per hour, {offer.date})."
    )


def _needs(plan: Plan) -> dict[int, float]:
    """GPUs → least bytes per GPU, with everything sharded, recomputed, and one sample at a time."""
    needs = {}
    precision = plan.layout(int(plan.order[0]))["precision"]
    for power in range(13):
        world = 2**power
        machine = dataclasses.replace(plan.machine, world=world, per_node=8)
        train = dataclasses.replace(plan.config.train, global_batch_size=max(world, 1))
        changed = dataclasses.replace(plan, config=dataclasses.replace(plan.config, train=train), machine=machine)
        table = table_of(changed, world, Held(precision=precision, checkpointing="full", micro_batch=1))
        if len(table):
            settings = dataclasses.replace(plan.settings, every=1)
            costs = evaluate(plan.reader.read, table, machine, settings)
            needs[world] = float(costs.bytes.min())
    return needs
