"""What can be done with a plan: print it for machines, write it as an experiment, try it in processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from app.config_file import to_dict
from app.errors import UserError
from app.planner.plan import GIB, Plan
from app.planner.why import advice, families


def as_json(plan: Plan, top: int) -> dict[str, Any]:
    """The layouts, best first, with what they were planned for and why."""
    machine = plan.machine
    return {
        "layouts": [plan.layout(int(row)) for row in plan.order[:top]],
        "count": len(plan.table),
        "fitting": int(plan.fits.sum()),
        "families": {v.family: {"fits": v.fits, "reason": v.sentence.partition(": ")[2]} for v in families(plan)},
        "advice": advice(plan),
        "model": {
            "parameters": plan.model.parameters,
            "blocks": len(plan.model.blocks),
            "note": plan.model.note or None,
        },
        "machine": {
            "gpu": machine.device.gpu.name,
            "gpus": machine.world,
            "gpus_per_node": machine.per_node,
            "memory_bytes": int(machine.device.gpu.memory_bytes),
            "usable_bytes": int(machine.capacity),
            "link_within": machine.device.gpu.link_within,
            "link_across": machine.across,
            "price_per_gpu_hour": machine.price_per_hour,
            "calibrated": machine.device.measured,
        },
        "seconds": plan.seconds,
    }


def changes(plan: Plan, row: int) -> dict[str, Any]:
    """What of the configuration makes `train` run a layout: nested keys."""
    layout = plan.layout(row)
    parallel = {key: layout["parallel"][key] for key in ("dp_replicate", "dp_shard", "tp", "pp")}
    if layout["parallel"]["accumulate_sharded"] is not None:
        parallel["accumulate_sharded"] = layout["parallel"]["accumulate_sharded"]
    if layout["parallel"]["offload"]:
        parallel["offload"] = True
    if layout["parallel"]["pp"] > 1:
        parallel |= {key: layout["parallel"][key] for key in ("schedule", "chunks", "stages")}
    return {
        "strategy": layout["strategy"],
        "workers": str(plan.machine.world),
        "parallel": parallel,
        "train": {
            "micro_batch_size": layout["micro_batch_size"],
            "activation_checkpointing": layout["activation_checkpointing"],
            "precision": layout["precision"],
        },
    }


def experiment(plan: Plan, row: int) -> dict[str, Any]:
    """The whole configuration with that layout."""
    tree = to_dict(plan.config)
    for key, value in changes(plan, row).items():
        if isinstance(value, dict):
            tree[key] = tree[key] | {k: v for k, v in value.items() if k in tree[key]}
        else:
            tree[key] = value
    return tree


def write(plan: Plan, path: str) -> str:
    """Writes the best layout as an experiment file; what was done, in a sentence.

    Raises:
        UserError: nothing fits, or the file cannot be written.
    """
    best = plan.best()
    if best is None:
        raise UserError("there is nothing to write: " + " ".join(advice(plan)))
    text = yaml.safe_dump(experiment(plan, best), sort_keys=False, allow_unicode=True, width=120)
    head = f"# Planned for {plan.machine.world} × {plan.machine.device.gpu.name} by `trireme plan`.\n"
    try:
        Path(path).write_text(head + text)
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}") from error
    return f"written: {path} (trireme train {path})"


def schedule(plan: Plan) -> str:
    """The best pipeline's schedule as text.

    Raises:
        UserError: no layout with stages fits.
    """
    rows = [int(row) for row in plan.order if plan.table.pp[row] > 1 and plan.fits[row]]
    if not rows:
        raise UserError("no pipeline fits, or none is held: write parallel.pp=2 to have one")
    from strategies.pipeline.schedules import make
    from strategies.pipeline.simulate import Times, bubble, simulate

    layout = plan.layout(rows[0])
    parallel = layout["parallel"]
    chunks = 2 if parallel["schedule"] == "zbv" else parallel["chunks"]
    made = make(parallel["schedule"], parallel["pp"], layout["micro_batches"], chunks)
    spans = simulate(made, Times(1.0, 1.0, 1.0))
    head = (
        f"{parallel['schedule']}, {parallel['pp']} stages of {parallel['stages']} blocks, {layout['micro_batches']} "
        f"micro-batches: {100 * bubble(spans):.0f} % waiting"
    )
    from app import schedule_picture

    return head + "\n" + schedule_picture.text(spans)


def max_batch(plan: Plan, given: frozenset[str]) -> str:
    """The largest micro-batch of the best strategy, predicted, then tried."""
    from app.planner.probe import largest

    best = plan.best()
    if best is None:
        return " ".join(advice(plan))
    table = plan.table
    same = (
        (table.data == table.data[best])
        & (table.dp_shard == table.dp_shard[best])
        & (table.tp == table.tp[best])
        & (table.pp == table.pp[best])
        & (table.checkpointing == table.checkpointing[best])
        & (table.precision == table.precision[best])
        & plan.fits
    )
    predicted = int(table.micro_batch[same].max())
    found = largest(plan, best, predicted)
    return f"largest micro-batch under {table.name(best)}: predicted {predicted}, {found}"


def probe(plan: Plan) -> str:
    """The best three layouts tried for a few steps, beside what was predicted."""
    from app.planner.probe import measure

    lines = []
    for row in [int(r) for r in plan.order[:200] if plan.fits[r]][:3]:
        layout = plan.layout(row)
        found = measure(experiment(plan, row), plan.machine)
        seen = (
            f"measured {found.seconds:.4g} s, {found.bytes / GIB:.2f} GiB"
            if found.seconds
            else f"did not run: {found.failure}"
        )
        lines.append(
            f"{layout['strategy']}, micro-batch {layout['micro_batch_size']}: predicted "
            f"{layout['step_seconds']:.4g} s, {layout['memory_bytes'] / GIB:.2f} GiB; {seen}"
        )
    return "\n".join(lines) or "nothing fits, so there is nothing to try"
