"""A model that fits nowhere: what would make it fit here, and the smallest cluster of the catalogue that would do."""

from __future__ import annotations

import dataclasses

import numpy as np

from app.planner.evaluate import evaluate
from app.planner.plan import GIB, Plan
from app.planner.table import Held
from app.planner.why import dims_text, table_of
from cluster.hardware import all_gpus, cheapest


def nowhere(plan: Plan) -> list[str]:
    """What to say of a model that fits nowhere here: what would make it fit, and the smallest cluster that would do."""
    least = int(np.argmin(plan.costs.bytes))
    there, needed = plan.machine.capacity, float(plan.costs.bytes[least])
    parts = {name: float(values[least]) for name, values in plan.costs.memory.items()}
    largest = max(parts, key=lambda name: parts[name])
    sentences = [
        f"No layout fits: the smallest, {plan.table.name(least)} with {dims_text(plan, least)}, needs "
        f"{needed / GIB:.1f} GiB per GPU, {there / GIB:.1f} there, most of it {largest} "
        f"({parts[largest] / GIB:.1f} GiB)."
    ]
    moved = needed - sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
    if moved <= there and (plan.table.dp_shard > 1).any() and not plan.table.offload.any():
        sentences.append("parallel.offload=true (state in host memory) would make it fit here, much slower.")
    elif largest == "activations":
        sentences.append("A shorter sequence, a smaller model or parallel.tp would make it fit here.")
    found = smallest_cluster(plan)
    sentences.append(found or "No cluster of the catalogue up to 4,096 GPUs would hold it.")
    return sentences


def smallest_cluster(plan: Plan) -> str | None:
    """The cheapest cluster of the catalogue, by list price else by memory, that holds the model."""
    needs = _needs(plan)
    offers = []
    for name, gpu in all_gpus().items():
        if name == "cpu":
            continue
        count = next((n for n, needed in needs.items() if needed <= gpu.memory_bytes - 1.5e9), None)
        if count is None:
            continue
        offer = cheapest(name)
        if offer is not None:
            machines = -(-count // offer.gpus)
            offers.append((machines * offer.price_per_hour, count, name, machines, offer))
    if not offers:
        return None
    price, count, name, machines, offer = min(offers, key=lambda o: o[:2])
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
        config = dataclasses.replace(plan.config.train, global_batch_size=max(world, 1))
        changed = dataclasses.replace(plan, config=dataclasses.replace(plan.config, train=config), machine=machine)
        table = table_of(changed, world, Held(precision=precision, checkpointing="full", micro_batch=1))
        if len(table):
            costs = evaluate(plan.reader.read, table, machine, plan.settings)
            needs[world] = float(costs.bytes.min())
    return needs
