"""What of a plan is fixed by the person, and the sentence for what nothing is left of."""

from __future__ import annotations

from app.config import Config
from app.errors import UserError
from app.job import strategy_options
from app.planner.evaluate import Machine
from app.planner.read import ModelRead
from app.planner.table import Held, Table
from app.planner.work import ways_of
from strategies.layout import LayoutError, check, choose
from strategies.options import PRECISIONS as RUNNABLE
from strategies.options import checkpoint_every
from strategies.registry import STRATEGIES


def held_of(config: Config, machine: Machine, given: frozenset[str]) -> tuple[Held, tuple[str, ...]]:
    """What is fixed, and the precisions to look at."""
    train, parallel = config.train, config.parallel
    checkpoint_every(train.activation_checkpointing)  # refuses what is no mode
    precisions = [config.train.precision]
    if config.train.precision == "fp8" and "fp8" not in machine.device.gpu.peak:
        raise LayoutError(
            f"train.precision=fp8, but {machine.device.gpu.name} has no float8 products: write train.precision=bf16"
        )
    if machine.device.gpu.name != "cpu":
        peaks = machine.device.gpu.peak
        precisions += [p for p in ("bf16", "fp16") if p in peaks and p in RUNNABLE][:1]
    stages = _check_stages(config, given)
    strategy = config.strategy if "strategy" in given and config.strategy != "auto" else None
    data, parts = _strategy_parts(strategy)
    if parts is not None:
        more = {"tensor": "parallel.tp", "pipeline": "parallel.pp"}
        parts |= {part for part, key in more.items() if key in given}
    return (
        Held(
            data=data,
            parts=parts,
            replicated={"hsdp": True, "fsdp": False}.get((strategy or "").split("+")[0])
            if "parallel.dp_replicate" not in given
            else None,
            dp_replicate=parallel.dp_replicate if "parallel.dp_replicate" in given else None,
            dp_shard=parallel.dp_shard if "parallel.dp_shard" in given else None,
            tp=parallel.tp if "parallel.tp" in given else None,
            pp=parallel.pp if "parallel.pp" in given else stages,
            micro_batch=train.micro_batch_size if "train.micro_batch_size" in given else None,
            checkpointing=train.activation_checkpointing if "train.activation_checkpointing" in given else None,
            precision=train.precision if "train.precision" in given else None,
            schedule=parallel.schedule if given & {"parallel.schedule", "parallel.stages"} else None,
            chunks=parallel.chunks if given & {"parallel.chunks", "parallel.stages"} else None,
            offload=parallel.offload if "parallel.offload" in given else None,
        ),
        tuple(dict.fromkeys(precisions)),
    )


def _check_stages(config: Config, given: frozenset[str]) -> int | None:
    """parallel.stages, held, also says how many stages there are where parallel.pp does not.

    Raises:
        LayoutError: it says how many blocks, but not of which pipeline.
    """
    parallel = config.parallel
    if "parallel.stages" not in given or not parallel.stages:
        return None
    chunks = 2 if parallel.schedule == "zbv" else parallel.chunks if parallel.schedule == "interleaved_1f1b" else 1
    if len(parallel.stages) % chunks or (parallel.pp or 0) * chunks not in (0, len(parallel.stages)):
        raise LayoutError(
            f"parallel.stages names {len(parallel.stages)} parts, but the pipeline has {(parallel.pp or 1) * chunks}: "
            "write as many numbers as parts"
        )
    return len(parallel.stages) // chunks


def _strategy_parts(strategy: str | None) -> tuple[tuple[str, ...], frozenset[str] | None]:
    """A strategy's name as what a table holds fixed.

    Raises:
        LayoutError: no such strategy.
    """
    if strategy is None:
        return (), None
    parts = [part.strip() for part in strategy.replace("×", "+").split("+")]
    for part in parts:
        if part in ("tensor", "pipeline"):
            continue
        if part in ("dp", "model_parallel", "ddp_model_parallel", "deepspeed"):
            other = {"deepspeed": "zero2 or fsdp"}.get(part, "ddp" if part == "dp" else "pipeline")
            raise UserError(
                f"strategy {part} is not planned, because {other} does the same for less: plan that instead"
            )
        if part not in STRATEGIES:
            choose(part, 1)  # says what is near
    data = {"zero3": "fsdp", "hsdp": "fsdp", "single": "none"}
    names = tuple(data.get(part, part) for part in parts if part not in ("tensor", "pipeline"))
    return names or ("none", "ddp", "fsdp"), frozenset(parts)


def notes_of(config: Config, machine: Machine, given: frozenset[str], table: Table) -> list[str]:
    """What of what is held was changed for some layouts, and what of it no time or memory is counted for."""
    found = []
    wanted = config.train.micro_batch_size
    if "train.micro_batch_size" in given and wanted and len(table) and (table.micro_batch < wanted).any():
        least = int(table.micro_batch.min())
        found.append(
            f"train.micro_batch_size is {wanted}, more than a worker's share of train.global_batch_size "
            f"({config.train.global_batch_size}) in some layouts: it is {least} there"
        )
    if config.train.compile and machine.device.compiled_bytes == 1:
        found.append("train.compile is not modelled on this device: times are those without")
    elif config.train.compile:
        found.append("train.compile is counted as fewer bytes and launches in blocks; memory is as without")
    return found


def refuse(config: Config, machine: Machine, held: Held, model: ModelRead) -> None:
    """Raises the sentence that says why no layout is left."""
    batch = config.train.global_batch_size
    if held.data or held.dp_replicate or held.dp_shard or held.tp or held.pp or held.offload:
        layout = choose(
            config.strategy if held.data else "auto",
            machine.world,
            dp_replicate=held.dp_replicate,
            dp_shard=held.dp_shard,
            tp=held.tp,
            pp=held.pp,
            devices_per_node=machine.per_node,
        )
        check(layout, strategy_options(config))
    if held.tp and model.heads and model.heads % held.tp:
        raise LayoutError(f"parallel.tp is {held.tp}, which does not divide the model's {model.heads} heads")
    if held.tp and held.tp > 1 and not model.splittable:
        raise LayoutError(
            f"parallel.tp is {held.tp}, but the model cannot be split: {model.note or 'no linear layers'}"
        )
    if held.pp and held.pp > max(1, len(model.blocks)):
        raise LayoutError(f"parallel.pp is {held.pp}, but the model has only {len(model.blocks)} blocks")
    if held.schedule and (held.pp or 0) > 1:
        raise LayoutError(
            f"parallel.schedule is {held.schedule}, which no micro-batches of train.global_batch_size {batch} can feed "
            f"on {held.pp} stages: write a larger batch, fewer stages, or 1f1b"
        )
    degrees = [d for d in range(1, batch + 1) if batch % d == 0]
    raise LayoutError(
        f"train.global_batch_size is {batch}, which {machine.world} workers cannot share as they are held: the number "
        f"of data-parallel workers must divide it (the largest that do: {', '.join(map(str, degrees[-4:]))})"
    )


def ways_needed(held: Held, precisions: tuple[str, ...]) -> set[str]:
    """The ways of having precision that the model must be read under."""
    kinds = (held.precision,) if held.precision else precisions
    return {ways_of(sharded, kind) for kind in kinds for sharded in (False, True)}
