"""What to do where nothing fits, in the order of what it changes, each with its memory and time.

Activation checkpointing, 16 bits, smaller micro-batches and activations in host memory leave the
training as it is, so each of them is planned together with those before it. LoRA, state in host
memory and more GPUs are planned without one another, since any of them may be enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from app.errors import UserError
from app.planner.estimate import Estimate
from app.planner.layouts import DATA_DEGREES, MOVES_ACTIVATIONS, Fixed
from app.planner.plan import Plan, first_of
from app.planner.stand_in import plan_experiment
from strategies import registry
from strategies.dims import MODEL_DEGREES, LayoutError

LARGEST_CLUSTER = 2**12
"""The most GPUs of a cluster that is looked for to hold a model."""
MOST_PLANNED = 16
"""With more GPUs, layouts that take the least memory are planned first, which takes less time."""
LAYOUT_KEYS = ("strategy", *(f"parallel.{name}" for name in (*DATA_DEGREES, *MODEL_DEGREES)))
"""The keys that fix a layout."""
STEP_KEYS = (
    "train.activation_checkpointing",
    "train.precision",
    "train.micro_batch_size",
    MOVES_ACTIVATIONS,
    "parallel.offload",
)
"""The keys that remedies set."""
LORA = {"r": 16}
"""`task_args.lora` of the remedy: the task's own rank."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One thing to try.

    Args:
        name: The name of it.
        keys: The keys to write for it.
        gpus: The number of GPUs for which it is planned.
        row: The layout that a plan puts first; if none fits, the one that takes the least memory;
            None if no layout is possible.
        reason: Why there is none.
    """

    name: str
    keys: str
    gpus: int
    row: Estimate | None = None
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is enough."""
        return self.row is not None and self.row.fits

    def as_json(self) -> dict[str, Any]:
        """The remedy as a dictionary for JSON; without a layout its figures are None."""
        row = self.row
        return {
            "name": self.name,
            "keys": self.keys,
            "gpus": self.gpus,
            "fits": self.fits,
            "reason": self.reason or None,
            "strategy": row.candidate.layout.name if row else None,
            "memory_bytes": int(row.memory_bytes) if row else None,
            "host_memory_bytes": int(row.host_memory_bytes) if row else None,
            "step_seconds": row.step_seconds if row else None,
        }


def needs_remedies(plan: Plan) -> bool:
    """Whether nothing fits, or only with state in host memory that nobody has asked for."""
    best = plan.best
    return best is None or (best.candidate.offload and "parallel.offload" not in plan.fixed)


def remedies(plan: Plan) -> Iterator[Remedy]:
    """What to try where nothing fits, one after the other, planned when it is asked for."""
    train = plan.config.train
    is_cpu = plan.machine.device.is_cpu
    layout = {key: value for key, value in plan.fixed.items() if key not in STEP_KEYS}
    if any(key in LAYOUT_KEYS for key in layout):
        yield _another_layout(plan)

    settled: Fixed = {**layout, "parallel.offload": False, "train.precision": train.precision}
    at_once: Fixed = {"train.micro_batch_size": train.micro_batch_size or train.global_batch_size}
    rows = on_same_gpus(plan, settled | at_once)
    rows = [row for row in rows if row.candidate.checkpointing != "none"]
    yield _with_keys(plan, "activation checkpointing", rows, "activation_checkpointing")

    precision = sixteen_bits(plan)
    settled["train.precision"] = precision
    if precision == "fp32":
        yield Remedy(
            name="16 bits",
            keys="train.precision=bf16",
            gpus=plan.machine.world,
            reason=f"{plan.machine.device.gpu.name} has no products of 16 bits",
        )
    else:
        yield _with_keys(plan, "16 bits", on_same_gpus(plan, settled | at_once), "precision")

    rows = on_same_gpus(plan, settled)
    yield _with_keys(plan, "smaller micro-batch", rows, "micro_batch_size")
    if not is_cpu:
        rows = on_same_gpus(plan, settled | {MOVES_ACTIVATIONS: True})
        yield _with_keys(plan, "activations to host", rows, "activation_offloading")

    yield _lora(plan, settled)
    has_offload = False
    if not is_cpu:
        offload = _offload(plan, precision)
        has_offload = offload.fits
        yield offload
    yield from _more_gpus(plan, has_offload=has_offload)


def on_same_gpus(plan: Plan, fixed: Fixed) -> list[Estimate]:
    """Every layout on the GPUs of a plan.

    Args:
        plan: The plan.
        fixed: Keys of the configuration whose values stay.
    """
    return plan.on_gpus(plan.machine.world, fixed, as_planned=True)


def _with_keys(plan: Plan, name: str, rows: list[Estimate], key: str) -> Remedy:
    """A remedy that is a key of `train`, with the value of its best layout."""
    row = first_of(rows)
    keys = f"train.{key}"
    if row is None:
        reason = "no layout is possible as the other keys are fixed"
        return Remedy(name=name, keys=keys, gpus=plan.machine.world, reason=reason)
    candidate = row.candidate
    value: Any = {
        "activation_checkpointing": candidate.checkpointing,
        "activation_offloading": candidate.moves_activations,
        "precision": candidate.precision,
        "micro_batch_size": candidate.micro_batch,
    }[key]
    as_now = ", as now" if getattr(plan.config.train, key) == value else ""
    written = str(value).lower() if isinstance(value, bool) else value
    return Remedy(name=name, keys=f"{keys}={written}{as_now}", gpus=plan.machine.world, row=row)


def sixteen_bits(plan: Plan) -> str:
    """The configured precision, or instead of fp32 the one of 16 bits that the GPU has."""
    configured = plan.config.train.precision
    if configured != "fp32" or plan.machine.device.is_cpu:
        return configured
    peak = plan.machine.device.gpu.peak
    return next((precision for precision in ("bf16", "fp16") if precision in peak), configured)


def _another_layout(plan: Plan) -> Remedy:
    """The same GPUs with a strategy and degrees that nobody has fixed."""
    fixed_keys = [key for key in LAYOUT_KEYS if key in plan.fixed]
    kept: Fixed = {"parallel.offload": False}
    kept |= {key: value for key, value in plan.fixed.items() if key in STEP_KEYS}
    row = first_of(on_same_gpus(plan, kept))
    written = " ".join(f"{key}={plan.fixed[key]}" for key in fixed_keys)
    keys = f"without {written}"
    if row is not None and row.fits:
        keys = f"strategy={row.candidate.layout.name} instead of {written}"
    return Remedy(name="another layout", keys=keys, gpus=plan.machine.world, row=row)


def _lora(plan: Plan, settled: Fixed) -> Remedy:
    """Adapters beside frozen weights, which need neither gradients nor optimizer state."""
    config = plan.config
    remedy = Remedy(
        name="LoRA", keys=f"task_args.lora='{{r: {LORA['r']}}}'", gpus=plan.machine.world
    )
    if config.task != "huggingface":
        return replace(remedy, reason="for models of task=huggingface")
    if config.task_args.get("lora"):
        row = first_of(on_same_gpus(plan, settled))
        return replace(remedy, keys="task_args.lora, as now", row=row)
    # Imported only here, since the first run on a GPU plans without the package that reads YAML.
    from app.config.io import from_dict, to_dict

    tree = to_dict(config)
    tree["task_args"]["lora"] = dict(LORA)
    tree["train"]["precision"] = settled["train.precision"]
    fixed_keys = frozenset(settled) - {"parallel.offload"}
    try:
        adapted = plan_experiment(from_dict(tree), plan.machine, fixed_keys)
    except (UserError, LayoutError) as error:
        return replace(remedy, reason=str(error))
    row = first_of([row for row in adapted.rows if not row.candidate.offload])
    return replace(remedy, row=row)


def _offload(plan: Plan, precision: str) -> Remedy:
    """Parameters, gradients and optimizer state in host memory, on the same GPUs."""
    fixed: Fixed = {"train.precision": precision, "parallel.offload": True}
    row = first_of(on_same_gpus(plan, fixed))
    name = row.candidate.layout.name if row else registry.by_degrees("dp_shard").name
    return Remedy(
        name="offload",
        keys=f"strategy={name} parallel.offload=true",
        gpus=plan.machine.world,
        row=row,
        reason="" if row else "no layout is possible",
    )


def _more_gpus(plan: Plan, *, has_offload: bool) -> Iterator[Remedy]:
    """The fewest GPUs of the same kind that hold the model, and if fewer do with offloading, those.

    Each number is planned as `--gpus` plans it, so that the two do not contradict each other.

    Args:
        plan: The plan.
        has_offload: Whether offloading is enough without more GPUs.
    """
    for fixed in (plan.fixed, {}):
        names_offload = has_offload
        world = 2 * plan.machine.world
        while world <= LARGEST_CLUSTER:
            rows = _rows_if_any_fits(plan, world, fixed)
            on_gpus = first_of([row for row in rows if not row.candidate.offload])
            if on_gpus is not None and on_gpus.fits:
                yield _of_gpus(plan, "more GPUs", world, on_gpus)
                return
            row = first_of(rows)
            if row is not None and row.fits and not names_offload:
                names_offload = True
                yield _of_gpus(plan, "more GPUs and offload", world, row)
            world *= 2
        if names_offload and not has_offload:
            return
    reason = f"up to {LARGEST_CLUSTER:,} do not hold it"
    yield Remedy(name="more GPUs", keys="--gpus", gpus=LARGEST_CLUSTER, reason=reason)


def _rows_if_any_fits(plan: Plan, world: int, fixed: Fixed) -> list[Estimate]:
    """Every layout on a number of GPUs; of many GPUs none if none fits."""
    if world <= MOST_PLANNED:
        return plan.on_gpus(world, fixed, as_planned=True)
    for micro_batch in (1, plan.config.train.global_batch_size):
        least = {
            "train.activation_checkpointing": "full",
            "train.micro_batch_size": micro_batch,
            **fixed,
        }
        rows = plan.on_gpus(world, least, as_planned=True)
        if any(row.fits for row in rows):
            return plan.on_gpus(world, fixed, as_planned=True)
    return []


def _of_gpus(plan: Plan, name: str, world: int, row: Estimate) -> Remedy:
    keys = f"--gpus {world}"
    if any(key in LAYOUT_KEYS for key in plan.fixed):
        keys += f" strategy={row.candidate.layout.name}"
    return Remedy(name=name, keys=keys, gpus=world, row=row)
