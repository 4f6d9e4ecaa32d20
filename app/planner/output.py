"""A plan as a table for a terminal with the reason for each strategy, as JSON, and as an experiment's file."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from app.config.io import to_dict
from app.console.terminal import quantity
from app.errors import UserError
from app.planner.advice import PARTS, advice, figures, settings_text, shortage, smallest
from app.planner.device import assumptions
from app.planner.estimate import CLOSE, Estimate
from app.planner.layouts import LEAST_TOKENS, Fixed, enumerate_layouts
from app.planner.plan import GIB, NEAR, Plan
from cluster.shape import align_columns
from strategies import registry
from strategies.dims import DEGREES

COLUMNS = ("strategy", "degrees", "at once", "recompute", "precision", "GiB", "", "s/step", "{}/s", "MFU", "$/step")


def text(plan: Plan, top: int = 5, *, with_reasons: bool = False, with_assumptions: bool = False) -> str:
    """The advice, then the best layouts.

    Args:
        plan: What is planned.
        top: Layouts to show.
        with_reasons: Also why each strategy's best layout is, or is not, the best of all.
        with_assumptions: Also what the devices are taken to reach.
    """
    machine, read = plan.machine, plan.reader
    lines = [
        *advice(plan),
        "",
        f"{quantity(read.parameters / 1e6)} million parameters in {read.blocks} blocks, on {machine.world} × "
        f"{machine.device.gpu.name} ({machine.device.capacity / GIB:.0f} GiB each, {machine.per_node} to a node): "
        f"{len(plan.rows):,} layouts, of which {sum(row.fits for row in plan.rows):,} fit",
        *([f"note: {read.note}"] if read.note else []),
        "",
        *align_columns([_head(plan), *(cells(plan, row) for row in distinct(plan, top))]),
        f"The first is the simplest of those within {100 * NEAR:.0f} % of the best. Speeds are the range in which 80 % "
        "of runs lie; with `close` a trial decides (--max-batch).",
        *_unmeasured(plan),
    ]
    if machine.price_per_hour:
        lines.append("Prices are list prices of cluster/hardware.yaml; spot and reserved machines cost less.")
    if with_reasons:
        lines += ["", "Why:", *(f"  {family}: {reason}" for family, reason in families(plan).items())]
    if with_assumptions:
        lines += ["", assumptions(machine.device, plan.rows[0].candidate.precision)]
    missing = [option for option, is_there in ((WHY, with_reasons), (ASSUMPTIONS, with_assumptions)) if not is_there]
    return "\n".join([*lines, *(["Further: " + "; ".join(missing) + "."] if missing else [])])


WHY = "--why for each strategy's reason"
ASSUMPTIONS = "--assumptions for what the devices are taken to reach"


def _unmeasured(plan: Plan) -> list[str]:
    """Of what no run is known, if anything."""
    unseen = plan.rows[0].unseen
    return [f"No measured run of this kind ({', '.join(unseen)}): the ranges are extrapolated."] if unseen else []


ALIKE = 0.02
"""Share of its time by which a layout that splits the model as another does, in about as much memory, is no choice."""


def distinct(plan: Plan, top: int) -> list[Estimate]:
    """The best rows, so that the list shows choices: none that differs from a better one in no more than micro-batches
    and schedules, nor one that splits the model in the same way and is `ALIKE`."""
    chosen, alike = list[Estimate](), defaultdict[Any, list[Estimate]](list)
    for row in plan.rows:
        if len(chosen) == top or (chosen and not row.fits):
            break
        dims = row.candidate.dims
        better = alike[dims.cp, dims.ep, dims.tp, dims.pp]
        if not any(_is_like(row, other) for other in better):
            better.append(row)
            chosen.append(row)
    return chosen


def _is_like(row: Estimate, other: Estimate) -> bool:
    one, two = row.candidate, other.candidate
    if (one.layout.name, one.checkpointing, one.offload) == (two.layout.name, two.checkpointing, two.offload):
        return True
    seconds, size = row.step_seconds / other.step_seconds, row.memory_bytes / other.memory_bytes
    return abs(seconds - 1) < ALIKE and abs(size - 1) < CLOSE


def _head(plan: Plan) -> tuple[str, ...]:
    unit = plan.reader.task.unit
    return tuple(name.format(unit) + (" per GPU" if "{}" in name and _per_device(plan) > 1 else "") for name in COLUMNS)


def _per_device(plan: Plan) -> int:
    """What speeds are divided by: GPUs; a CPU's cores are not told apart."""
    return 1 if plan.machine.device.is_cpu else plan.machine.world


def cells(plan: Plan, row: Estimate) -> tuple[str, ...]:
    """One row of the table, as COLUMNS has it."""
    layout = plan.layout(row)
    parallel, size, cost = layout["parallel"], layout["memory_bytes"] / GIB, layout["cost_per_step"]
    degrees = [f"{name}={parallel[name]}" for name in DEGREES if parallel[name] > 1]
    if parallel["schedule"]:
        degrees.append(parallel["schedule"] + (f"×{parallel['chunks']}" if parallel["chunks"] > 1 else ""))
    degrees += ["offload"] if parallel["offload"] else []
    times = f", {layout['micro_batches']} times" if layout["micro_batches"] > 1 else ""
    low, high = (speed / _per_device(plan) for speed in layout[f"{plan.reader.task.unit}_per_second_range"])
    return (
        layout["strategy"],
        " ".join(degrees) or "-",
        f"{layout['micro_batch_size']}{times}",
        layout["activation_checkpointing"],
        layout["precision"],
        f"{size:{'.1f' if size > 1 else '.3f'}}",
        layout["verdict"],
        f"{layout['step_seconds']:.4g}",
        between(low, high),
        f"{100 * layout['mfu']:.0f} %",
        "-" if cost is None else f"{cost:.3g}",
    )


def between(low: float, high: float) -> str:
    """Two speeds as a person reads them: 6.1–7.0 k."""
    size, mark = next(((s, m) for s, m in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if high >= s), (1.0, ""))
    digits = max(0, 1 - int(math.log10(max(high / size, 1e-9))))
    return f"{low / size:.{digits}f}–{high / size:.{digits}f}{mark}"


def families(plan: Plan) -> dict[str, str]:
    """Each strategy that there is for the number of workers → why its best layout is or is not the plan's best."""
    found, several = {}, plan.space.world > 1
    for record in registry.STRATEGIES.values():
        if record.plannable and not record.alias_of and bool(record.degrees) == several:
            rows = [row for row in plan.rows if row.candidate.family == record.name]
            found[record.name] = _verdict(plan, rows) if rows else _absent(plan, record.name)
    return found


def _verdict(plan: Plan, rows: list[Estimate]) -> str:
    row, best = rows[0], plan.best
    if not row.fits:
        fitting = [r for r in plan.rows if r.fits]
        sentence = f"needs at least {shortage(smallest(rows))}"
        if fitting:
            least = min(fitting, key=lambda r: (-r.candidate.dims.dp_replicate, r.step_seconds))
            sentence += f"; the least sharded layout that fits: {least.candidate.layout.name}, {settings_text(least)}"
        return sentence
    if best is None or row is best:
        return f"the best, {figures(row)}"
    what, ratio = f"{figures(row)} ({settings_text(row)})", row.step_seconds / best.step_seconds
    if ratio < 1.001:
        near = f"within {100 * NEAR:.0f} % of the best, and not simpler"
        return f"{what}: {'as fast as the best' if ratio > 0.999 else near}"
    more = {name: seconds - best.seconds[name] for name, seconds in row.seconds.items()}
    return f"{what}: {ratio:.2f} × the best's time, mostly {PARTS[max(more, key=lambda name: more[name])]}"


def _absent(plan: Plan, family: str) -> str:
    """Which of the reasons keeps a whole strategy out."""
    space, degrees = plan.space, registry.STRATEGIES[family].degrees

    def is_there(fixed: Fixed) -> bool:
        return bool(enumerate_layouts(space, fixed, family))

    if is_there({}):
        alone = [key for key, value in plan.fixed.items() if not is_there({key: value})]
        keys = [f"{key}={str(plan.fixed[key]).replace('True', 'true')}" for key in alone[:1] or plan.fixed]
        return f"left out, because {' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} fixed"
    if "tp" in degrees and not space.splits:
        return "the model has no layers that can be split over its heads"
    if "cp" in degrees and space.length is None:
        return "the model has no sequence that can be split"
    if "cp" in degrees and space.length is not None and space.length < 2 * LEAST_TOKENS:
        return f"of {space.length:,} tokens a worker would have fewer than {LEAST_TOKENS:,} (parallel.cp=2 asks for it)"
    if "ep" in degrees and space.experts == 1:
        return "the model is no mixture of experts"
    if "pp" in degrees and space.blocks < 2:
        return "the model has no chain of blocks to cut into stages"
    return (
        f"no {' × '.join(degrees)} of {space.world} workers, {space.per_node} to a node, goes with "
        f"train.global_batch_size {space.global_batch} and the model's {space.heads or 'number of'} heads and "
        f"{space.blocks} blocks"
    )


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
