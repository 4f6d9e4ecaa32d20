"""What can be done with a plan: print it for machines, write it as an experiment, try it in processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from app.config_io import to_dict
from app.errors import UserError
from app.planner.plan import Plan
from app.planner.why import advice, families

if TYPE_CHECKING:
    from strategies.pipeline.simulate import Times


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
            "assumed": machine.assumed or None,
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


def experiment(plan: Plan, row: int, size: int | None = None) -> dict[str, Any]:
    """The whole configuration with that layout; size: its micro-batch, if it is another."""
    tree = to_dict(plan.config)
    for key, value in changes(plan, row).items():
        if isinstance(value, dict):
            tree[key] = tree[key] | {k: v for k, v in value.items() if k in tree[key]}
        else:
            tree[key] = value
    if size is not None:
        tree["train"] = tree["train"] | {"micro_batch_size": size}
    return tree


def write(plan: Plan, path: str, row: int | None = None, size: int | None = None) -> str:
    """Writes a layout, the best if it is not said which, as an experiment file; what was done, in a sentence.

    Raises:
        UserError: nothing fits, or the file cannot be written.
    """
    row = plan.best() if row is None else row
    if row is None:
        raise UserError("there is nothing to write: " + " ".join(advice(plan)))
    text = yaml.safe_dump(experiment(plan, row, size), sort_keys=False, allow_unicode=True, width=120)
    head = f"# Planned for {plan.machine.world} × {plan.machine.device.gpu.name} by `trireme plan`.\n"
    try:
        Path(path).write_text(head + text)
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}") from error
    return f"written: {path} (trireme train {path})"


def schedule(plan: Plan, picture: str | None = None) -> str:
    """The best pipeline's schedule, with the times that are predicted for its parts, as text; into `picture`, too.

    Raises:
        UserError: no layout with stages fits; the picture's name has an ending that no picture has.
    """
    rows = [int(row) for row in plan.order if plan.table.pp[row] > 1 and plan.fits[row]]
    if not rows:
        raise UserError("no pipeline fits, or none is held: write parallel.pp=2 to have one")
    from app import schedule_picture
    from strategies.pipeline.schedules import chunks_of, make
    from strategies.pipeline.simulate import simulate

    layout = plan.layout(rows[0])
    parallel, micros = layout["parallel"], layout["micro_batches"]
    name, stages = parallel["schedule"], parallel["pp"]
    spans = simulate(make(name, stages, micros, chunks_of(name, parallel["chunks"])), part_times(plan, rows[0]))
    head = (
        f"{name}, {stages} stages of {parallel['stages']} blocks, {micros} micro-batches of "
        f"{layout['micro_batch_size']}, as predicted for {plan.machine.device.gpu.name}"
    )
    if picture:
        schedule_picture.draw(spans, picture, head)
    return f"{head}:\n{schedule_picture.text(spans)}"


def part_times(plan: Plan, row: int) -> Times:
    """Seconds of each part's F, B and W with one micro-batch. Of backward, the gradients of weights take half; what is
    computed again goes before those of inputs."""
    from app.planner.evaluate import as_on
    from app.planner.work import ways_of, work
    from strategies.pipeline.simulate import Times

    layout, device, table = plan.layout(row), plan.machine.device, plan.table
    precision = layout["precision"]
    way = ways_of(False, precision)  # a pipeline leaves the cast to autocast
    costs = plan.reader.read(as_on(plan.machine, way)).costs[as_on(plan.machine, way)]
    done = work(costs, way, precision, table.micro_batch[[row]], table.tp[[row]], device, plan.settings.compiled)
    again = {1: done.recompute_selective, 2: done.recompute_full}.get(int(table.checkpointing[row]))
    slow = device.slowdown(min(plan.machine.world, plan.machine.per_node)) * plan.settings.correction
    forward = {name: slow * float(done.forward[i, 0]) for i, name in enumerate(done.names)}
    backward = {name: slow * float(done.backward[i, 0]) for i, name in enumerate(done.names)}
    every = plan.settings.every if int(table.checkpointing[row]) == 2 else 1
    extra = {name: slow * float(again[i, 0]) / every if again is not None else 0.0 for i, name in enumerate(done.names)}
    found: list[tuple[float, float, float]] = []
    sizes, begin = layout["parallel"]["stages"], 0
    for part, length in enumerate(sizes):
        held = costs.order[begin : begin + length]
        around = [name for name, at in (("before", 0), ("after", len(sizes) - 1)) if at == part and name in forward]
        half = sum(backward[name] for name in (*held, *around)) / 2
        found.append((sum(forward[name] for name in (*held, *around)), half + sum(extra[name] for name in held), half))
        begin += length
    forwards, backwards, weights = ([part[i] for part in found] for i in range(3))
    return Times(forwards, backwards, weights)
