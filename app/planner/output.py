"""A plan as a table with the reasons for each strategy, as JSON, and as an experiment's file."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from app.config.io import to_dict
from app.console.terminal import quantity
from app.errors import UserError
from app.planner.advice import PARTS, advice, figures, settings_text, shortage, smallest
from app.planner.assumptions import assumptions_text
from app.planner.corrections import Correction
from app.planner.estimate import CLOSE, Estimate
from app.planner.layouts import LEAST_TOKENS, Fixed, enumerate_layouts
from app.planner.plan import GIB, NEAR, Plan
from app.planner.remedies import Remedy, needs_remedies, remedies
from app.training.hooks import overrides
from cluster.shape import align_columns
from strategies import registry
from strategies.dims import DEGREES

COLUMNS = (
    "strategy",
    "degrees",
    "at once",
    "recompute",
    "precision",
    "GiB",
    "",
    "s/step",
    "{}/s",
    "MFU",
    "$/step",
)
"""The table's columns; {} is the task's unit."""
REMEDY_COLUMNS = ("try", "write", "GPUs", "GiB", "", "s/step", "GiB of each host")
REMEDIES_HEAD = "To try, in this order; those above LoRA add up, the others are taken alone:"
WHY_OPTION = "--why for each strategy's reason"
ASSUMPTIONS_OPTION = "--assumptions for what the devices are taken to reach"
ALIKE = 0.02
"""Layouts of one split within this share of time, and `CLOSE` of memory, share a row."""


def text(
    plan: Plan, top: int = 5, *, with_reasons: bool = False, with_assumptions: bool = False
) -> str:
    """The advice, then the best layouts.

    Args:
        plan: What is planned.
        top: Layouts to show.
        with_reasons: Also why each strategy's best layout is, or is not, the best of all.
        with_assumptions: Also what the devices are assumed to reach.
    """
    tried = list(remedies(plan)) if needs_remedies(plan) else []
    lines = [*advice(plan, tried), ""]
    if tried:
        lines += [REMEDIES_HEAD, *align_columns([REMEDY_COLUMNS, *map(_remedy_cells, tried)]), ""]
    lines.append(_summary(plan))
    if plan.reader.note:
        lines.append(f"note: {plan.reader.note}")
    if overrides(plan.reader.task, "training_step"):
        lines.append(
            "note: the task has a training_step of its own, which pipelines cannot take: a step is "
            "planned as one update with the task's loss, so more updates take longer"
        )
    correction = _correction(plan)
    if correction is not None:
        lines.append(correction.sentence)
    lines.append("")
    lines += align_columns([_head(plan), *(cells(plan, row) for row in distinct(plan, top))])
    lines.append(
        f"The first is the simplest of those within {100 * NEAR:.0f} % of the best. Speeds are the "
        "range in which 80 % of runs lie; with `close` a trial decides (--max-batch)."
    )
    if plan.by_kernels:
        lines.append(_kernels_sentence(plan))
    if plan.fused_attention is not None:
        lines.append(_attention_sentence(plan.rows[0], *plan.fused_attention))
    if plan.by_trainer:
        lines.append(_trainers_sentence(plan))
    unmeasured = plan.rows[0].unmeasured
    if unmeasured:
        kinds = ", ".join(unmeasured)
        lines.append(f"No measured run of this kind ({kinds}): the ranges are extrapolated.")
    if plan.machine.price_per_hour:
        lines.append(
            "Prices are list prices of cluster/hardware.yaml; spot and reserved machines cost less."
        )
    further = []
    if with_reasons:
        reasons = families(plan)
        lines += ["", "Why:", *(f"  {family}: {reason}" for family, reason in reasons.items())]
    else:
        further.append(WHY_OPTION)
    if with_assumptions:
        lines += ["", assumptions_text(plan.machine.device, plan.rows[0].candidate.precision)]
    else:
        further.append(ASSUMPTIONS_OPTION)
    if further:
        lines.append(f"Further: {'; '.join(further)}.")
    return "\n".join(lines)


def _kernels_sentence(plan: Plan) -> str:
    """What torch.compile makes of the first layout's time and memory."""
    figures_of = {
        name: f"{row.step_seconds:.3g} s a step and {row.memory_bytes / GIB:.3g} GiB"
        for name, row in plan.by_kernels.items()
    }
    return (
        f"The first compiled (train.compile=true): {figures_of['compiled']}; operation by "
        f"operation: {figures_of['eager']}."
    )


def _attention_sentence(first: Estimate, written: str, fused: Estimate) -> str:
    """What a fused attention makes of the first layout's time and memory.

    Args:
        first: The layout.
        written: What to write for a fused attention.
        fused: The layout with that.
    """
    as_planned, with_fused = (
        f"{row.step_seconds:.3g} s a step and {row.memory_bytes / GIB:.3g} GiB"
        for row in (first, fused)
    )
    return (
        f"The model's attention keeps all scores in memory: {as_planned}; fused ({written}, which "
        f"needs GPUs): {with_fused}."
    )


def _fused_attention_json(plan: Plan) -> dict[str, Any] | None:
    """The same for JSON; None if it is not said."""
    if plan.fused_attention is None:
        return None
    written, row = plan.fused_attention
    return {
        "write": written,
        "step_seconds": row.step_seconds,
        "memory_bytes": int(row.memory_bytes),
    }


def _trainers_sentence(plan: Plan) -> str:
    """What the first layout's speed would be with what other trainers do."""
    changes = [f"{name} {100 * change:+.0f} %" for name, change in plan.by_trainer.items()]
    return f"This is Trireme's speed. Other trainers (--assume): {', '.join(changes)}."


def _correction(plan: Plan) -> Correction | None:
    """What a run on this machine has measured, with which the first layout is planned."""
    return plan.estimator.correction(plan.rows[0].candidate.precision)


def _summary(plan: Plan) -> str:
    """The model, the machine, and how many layouts there are."""
    machine = plan.machine
    device = machine.device
    millions = quantity(plan.reader.parameters / 1e6)
    parameters = plan.reader.size.parameters
    trained = sum(parameter.numel for parameter in parameters if parameter.trainable)
    frozen = ""
    if trained < plan.reader.parameters:
        frozen = f", of which {quantity(trained / 1e6)} million train,"
    fitting = sum(row.fits for row in plan.rows)
    layouts = "1 layout" if len(plan.rows) == 1 else f"{len(plan.rows):,} layouts"
    return (
        f"{millions} million parameters{frozen} in {plan.reader.blocks} blocks, "
        f"on {machine.world} × {device.gpu.name} ({device.capacity / GIB:.0f} GiB each, "
        f"{machine.per_node} to a node): {layouts}, of which {fitting:,} fit"
    )


def distinct(plan: Plan, top: int) -> list[Estimate]:
    """The best rows that are a choice.

    Left out is what differs from a better row in micro-batches and schedules only, and what splits
    the model in the same way with about the same time and memory.

    Args:
        plan: What is planned.
        top: Rows, at most.
    """
    chosen: list[Estimate] = []
    by_split: dict[tuple[int, ...], list[Estimate]] = defaultdict(list)
    for row in plan.rows:
        if len(chosen) == top or (chosen and not row.fits):
            break
        dims = row.candidate.dims
        better = by_split[dims.cp, dims.ep, dims.tp, dims.pp]
        if not any(_is_like(row, other) for other in better):
            better.append(row)
            chosen.append(row)
    return chosen


def _is_like(row: Estimate, other: Estimate) -> bool:
    mine = row.candidate
    theirs = other.candidate
    has_same_layout = mine.layout.name == theirs.layout.name
    has_same_memory = (
        mine.checkpointing == theirs.checkpointing
        and mine.offload == theirs.offload
        and mine.moves_activations == theirs.moves_activations
    )
    if has_same_layout and has_same_memory:
        return True
    slower = abs(row.step_seconds / other.step_seconds - 1)
    larger = abs(row.memory_bytes / other.memory_bytes - 1)
    return slower < ALIKE and larger < CLOSE


def _remedy_cells(remedy: Remedy) -> tuple[str, ...]:
    """A row of the table of what to try."""
    row = remedy.row
    if row is None:
        return (remedy.name, remedy.keys, str(remedy.gpus), "-", remedy.reason, "-", "-")
    host = f"{row.host_memory_bytes / GIB:.1f}" if row.host_memory_bytes else "-"
    size = f"{row.memory_bytes / GIB:.1f}"
    seconds = f"{row.step_seconds:.3g}"
    return (remedy.name, remedy.keys, str(remedy.gpus), size, row.verdict, seconds, host)


def _head(plan: Plan) -> tuple[str, ...]:
    names = []
    for column in COLUMNS:
        name = column.format(plan.reader.task.unit)
        if "{}" in column and _devices_of_speed(plan) > 1:
            name += " per GPU"
        names.append(name)
    return tuple(names)


def _devices_of_speed(plan: Plan) -> int:
    """What speeds are divided by: the GPUs; the cores of a CPU count as one device."""
    return 1 if plan.machine.device.is_cpu else plan.machine.world


def cells(plan: Plan, row: Estimate) -> tuple[str, ...]:
    """A row of the table, with the columns of COLUMNS."""
    layout = plan.layout(row)
    parallel = layout["parallel"]
    degrees = [f"{name}={parallel[name]}" for name in DEGREES if parallel[name] > 1]
    if parallel["schedule"]:
        chunks = f"×{parallel['chunks']}" if parallel["chunks"] > 1 else ""
        degrees.append(f"{parallel['schedule']}{chunks}")
    if parallel["offload"]:
        degrees.append("offload")
    micro_batches = layout["micro_batches"]
    times = f", {micro_batches} times" if micro_batches > 1 else ""
    size = layout["memory_bytes"] / GIB
    low, high = layout[f"{plan.reader.task.unit}_per_second_range"]
    devices = _devices_of_speed(plan)
    cost = layout["dollars_per_step"]
    return (
        layout["strategy"],
        " ".join(degrees) or "-",
        f"{layout['micro_batch_size']}{times}",
        layout["activation_checkpointing"] + ", to host" * layout["activation_offloading"],
        layout["precision"],
        f"{size:.1f}" if size > 1 else f"{size:.3f}",
        layout["verdict"],
        f"{layout['step_seconds']:.4g}",
        between(low / devices, high / devices),
        f"{100 * layout['mfu']:.0f} %",
        "-" if cost is None else f"{cost:.3g}",
    )


PREFIXES = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))
WIDE = 10.0
"""From this ratio on the ends of a range have prefixes of their own."""


def between(low: float, high: float) -> str:
    """A range of speeds, such as 6.1–7.0 k or 48–9.7 k."""
    factor, prefix = _prefix_of(high)
    digits = max(0, 1 - int(math.log10(max(high / factor, 1e-9))))
    highest = f"{high / factor:.{digits}f}{prefix}"
    if high < WIDE * low:
        return f"{low / factor:.{digits}f}–{highest}"
    if low < 1:
        return f"<1–{highest}"
    factor, prefix = _prefix_of(low)
    digits = max(0, 1 - int(math.log10(low / factor)))
    return f"{low / factor:.{digits}f}{prefix}–{highest}"


def _prefix_of(speed: float) -> tuple[float, str]:
    return next((pair for pair in PREFIXES if speed >= pair[0]), PREFIXES[-1])


# --- why ------------------------------------------------------------------------------------------


def families(plan: Plan) -> dict[str, str]:
    """For each strategy that this number of workers can have, why it is or is not the best."""
    reasons = {}
    for record in registry.STRATEGIES.values():
        is_for_several = bool(record.degrees)
        if not record.plannable or record.alias_of or is_for_several != (plan.space.world > 1):
            continue
        rows = [row for row in plan.rows if row.candidate.family == record.name]
        if rows:
            reasons[record.name] = _reason(plan, rows)
        else:
            reasons[record.name] = _reason_of_absence(plan, record.name)
    return reasons


def _reason(plan: Plan, rows: list[Estimate]) -> str:
    """Why the first of a strategy's rows is or is not the plan's best."""
    row = rows[0]
    best = plan.best
    if not row.fits:
        sentence = f"needs at least {shortage(smallest(rows))}"
        fitting = [other for other in plan.rows if other.fits]
        if fitting:
            least_sharded = min(
                fitting,
                key=lambda other: (-other.candidate.dims.dp_replicate, other.step_seconds),
            )
            name = least_sharded.candidate.layout.name
            settings = settings_text(least_sharded)
            sentence += f"; the least sharded layout that fits: {name}, {settings}"
        return sentence
    if best is None or row is best:
        return f"the best, {figures(row)}"
    summary = f"{figures(row)} ({settings_text(row)})"
    ratio = row.step_seconds / best.step_seconds
    if 0.999 < ratio < 1.001:
        return f"{summary}: as fast as the best"
    if ratio < 1 / (1 + NEAR):
        chances = [f"{100 * each.fit_probability:.0f} %" for each in (row, best)]
        return (
            f"{summary}: {ratio:.2f} × the best's time, but {chances[0]} sure to fit, "
            f"the best {chances[1]}"
        )
    if ratio < 1.001:
        return f"{summary}: within {100 * NEAR:.0f} % of the best, and not simpler"
    slower = {part: seconds - best.seconds[part] for part, seconds in row.seconds.items()}
    most = max(slower, key=lambda part: slower[part])
    return f"{summary}: {ratio:.2f} × the best's time, mostly {PARTS[most]}"


def _reason_of_absence(plan: Plan, family: str) -> str:
    """Why a strategy has no layout in the plan."""
    space = plan.space
    degrees = registry.STRATEGIES[family].degrees

    def has_layouts(fixed: Fixed) -> bool:
        return bool(enumerate_layouts(space, fixed, family))

    if has_layouts({}):
        excluding = [key for key, value in plan.fixed.items() if not has_layouts({key: value})]
        keys = excluding[:1] or list(plan.fixed)
        written = [f"{key}={str(plan.fixed[key]).replace('True', 'true')}" for key in keys]
        verb = "is" if len(written) == 1 else "are"
        return f"left out, because {' and '.join(written)} {verb} fixed"
    if "tp" in degrees and not space.splits_layers:
        return "the model has no layers that can be split over its heads"
    if "cp" in degrees and space.cp_sequence is None:
        return "the model has no sequence that can be split"
    if "cp" in degrees and space.cp_sequence is not None and space.cp_sequence < 2 * LEAST_TOKENS:
        return (
            f"of {space.cp_sequence:,} tokens a worker would have fewer than {LEAST_TOKENS:,} "
            "(parallel.cp=2 asks for it)"
        )
    if "ep" in degrees and space.experts == 1:
        return "the model is not a mixture of experts"
    if "pp" in degrees and space.blocks < 2:
        return "the model has no chain of blocks to cut into stages"
    return (
        f"no {' × '.join(degrees)} of {space.world} workers, {space.per_node} to a node, goes with "
        f"train.global_batch_size {space.global_batch} and the model's "
        f"{space.heads or 'number of'} heads and {space.blocks} blocks"
    )


# --- files ----------------------------------------------------------------------------------------


def as_json(plan: Plan, top: int) -> dict[str, Any]:
    """The best layouts, with what they were planned for and why.

    Args:
        plan: What is planned.
        top: Layouts, at most.
    """
    machine = plan.machine
    gpu = machine.device.gpu
    reader = plan.reader
    tried = list(remedies(plan)) if needs_remedies(plan) else []
    correction = _correction(plan)
    return {
        "layouts": [plan.layout(row) for row in plan.rows[:top]],
        "count": len(plan.rows),
        "fitting": sum(row.fits for row in plan.rows),
        **_reasons(plan),
        "advice": advice(plan, tried),
        "kernels": {
            name: {"step_seconds": row.step_seconds, "memory_bytes": int(row.memory_bytes)}
            for name, row in plan.by_kernels.items()
        },
        "fused_attention": _fused_attention_json(plan),
        "other_trainers": [
            {"assume": name, "faster": change} for name, change in plan.by_trainer.items()
        ],
        "remedies": [remedy.as_json() for remedy in tried],
        "model": {
            "parameters": reader.parameters,
            "trained_parameters": sum(
                parameter.numel for parameter in reader.size.parameters if parameter.trainable
            ),
            "blocks": reader.blocks,
            "note": reader.note,
        },
        "machine": {
            "gpu": gpu.name,
            "gpus": machine.world,
            "gpus_per_node": machine.per_node,
            "memory_bytes": int(gpu.memory_bytes),
            "usable_bytes": int(machine.device.capacity),
            "link_within_bytes_per_second": gpu.link_within,
            "link_across_bytes_per_second": machine.link_across,
            "dollars_per_gpu_hour": machine.price_per_hour,
            "calibrated": machine.device.measured,
            "corrected": None if correction is None else correction.sentence,
            "assumed": machine.assumption or None,
        },
    }


def _reasons(plan: Plan) -> dict[str, Any]:
    """The layout that `trireme train` would take, and why not the best of each other strategy."""
    reasons = families(plan)
    best = plan.best
    if best is None:
        return {"chosen": None, "rejected": reasons}
    reason = reasons.pop(best.candidate.family, "")
    strategy = best.candidate.layout.name
    chosen = {"strategy": strategy, "keys": key_values(plan, best), "reason": reason}
    return {"chosen": chosen, "rejected": reasons}


def experiment(plan: Plan, row: Estimate) -> dict[str, Any]:
    """The whole configuration with a layout, as nested dictionaries."""
    tree = to_dict(plan.config)
    for key, value in _values(plan, row).items():
        section, _, name = key.rpartition(".")
        (tree[section] if section else tree)[name] = value
    return tree


def key_values(plan: Plan, row: Estimate) -> list[str]:
    """A layout as the key=value arguments of `trireme train`."""
    words = []
    for key, value in _values(plan, row).items():
        # As JSON, true and false are small, and lists without blanks are one word for a shell.
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        words.append(f"{key}={text}")
    return words


def _values(plan: Plan, row: Estimate) -> dict[str, Any]:
    """The keys of the configuration that a layout decides."""
    layout = plan.layout(row)
    values = {"strategy": layout["strategy"], "workers": str(plan.machine.world)}
    for name, value in layout["parallel"].items():
        if value is not None:
            values[f"parallel.{name}"] = value
    for name in (
        "micro_batch_size",
        "activation_checkpointing",
        "activation_offloading",
        "precision",
    ):
        values[f"train.{name}"] = layout[name]
    return values


def write(plan: Plan, path: str, row: Estimate | None = None) -> str:
    """Write a layout as an experiment file.

    Args:
        plan: What is planned.
        path: The file.
        row: The layout; None for the best.

    Returns:
        A sentence on what was written.

    Raises:
        UserError: Nothing fits, or the file cannot be written.
    """
    row = row or plan.best
    if row is None:
        raise UserError("there is nothing to write: " + " ".join(advice(plan)))
    machine = plan.machine
    head = f"# Planned for {machine.world} × {machine.device.gpu.name} by `trireme plan`.\n"
    tree = experiment(plan, row)
    try:
        Path(path).write_text(
            head + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
        )
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}") from error
    return f"written: {path} (trireme train {path})"
