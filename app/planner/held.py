"""What of a plan is fixed by the person, and the sentence for what nothing is left of."""

from __future__ import annotations

from app.config import Config
from app.errors import UserError
from app.job import options
from app.planner.evaluate import Machine
from app.planner.read import ModelRead
from app.planner.table import Held
from app.planner.work import ways_of
from strategies.dims import LayoutError
from strategies.names import OWN, choose
from strategies.options import PRECISIONS as RUNNABLE
from strategies.options import check


def held_of(config: Config, machine: Machine, given: frozenset[str]) -> tuple[Held, tuple[str, ...]]:
    """What is fixed, and the precisions to look at."""
    train, parallel = config.train, config.parallel
    precisions = [config.train.precision]
    if machine.device.gpu.name != "cpu":
        peaks = machine.device.gpu.peak
        precisions += [p for p in ("bf16", "fp16") if p in peaks and p in RUNNABLE][:1]
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
            pp=parallel.pp if "parallel.pp" in given else None,
            micro_batch=train.micro_batch_size if "train.micro_batch_size" in given else None,
            checkpointing=train.activation_checkpointing if "train.activation_checkpointing" in given else None,
            precision=train.precision if "train.precision" in given else None,
            schedule=getattr(parallel, "schedule", None) if "parallel.schedule" in given else None,
            chunks=getattr(parallel, "chunks", None) if "parallel.chunks" in given else None,
            offload=parallel.offload if "parallel.offload" in given else None,
        ),
        tuple(dict.fromkeys(precisions)),
    )


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
        if part not in OWN:
            choose(part, 1)  # says what is near
    data = {"zero3": "fsdp", "hsdp": "fsdp", "single": "none"}
    names = tuple(data.get(part, part) for part in parts if part not in ("tensor", "pipeline"))
    return names or ("none", "ddp", "fsdp"), frozenset(parts)


def refuse(config: Config, machine: Machine, held: Held, model: ModelRead) -> None:
    """Raises the sentence that says why no layout is left."""
    batch = config.train.global_batch_size
    if held.data or held.dp_replicate or held.dp_shard or held.tp or held.pp:
        layout = choose(
            config.strategy if held.data else "auto",
            machine.world,
            dp_replicate=held.dp_replicate,
            dp_shard=held.dp_shard,
            tp=held.tp,
            pp=held.pp,
            devices_per_node=machine.per_node,
        )
        check(layout, options(config))
    if held.tp and model.heads and model.heads % held.tp:
        raise LayoutError(f"parallel.tp is {held.tp}, which does not divide the model's {model.heads} heads")
    if held.tp and held.tp > 1 and not model.splittable:
        raise LayoutError(
            f"parallel.tp is {held.tp}, but the model cannot be split: {model.note or 'no linear layers'}"
        )
    if held.pp and held.pp > max(1, len(model.blocks)):
        raise LayoutError(f"parallel.pp is {held.pp}, but the model has only {len(model.blocks)} blocks")
    degrees = [d for d in range(1, batch + 1) if batch % d == 0]
    raise LayoutError(
        f"train.global_batch_size is {batch}, which {machine.world} workers cannot share as they are held: the number "
        f"of data-parallel workers must divide it (the largest that do: {', '.join(map(str, degrees[-4:]))})"
    )


def ways_needed(held: Held, precisions: tuple[str, ...]) -> set[str]:
    """The ways of having precision that the model must be read under."""
    kinds = (held.precision,) if held.precision else precisions
    return {ways_of(sharded, kind) for kind in kinds for sharded in (False, True)}
