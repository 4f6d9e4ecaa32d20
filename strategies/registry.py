"""Every name that a user may write, and what belongs to it: the records that the strategies' own files declare.

A strategy's name stands in its own file, here, and in rows of tests, nowhere else. strategy.py says what a record is.
"""

import importlib.util

from strategies import ddp, deepspeed, fsdp, one_process
from strategies.context import apply as context
from strategies.dims import Layout, LayoutError, unknown_strategy
from strategies.expert import apply as expert
from strategies.pipeline import apply as pipeline
from strategies.strategy import Strategy
from strategies.tensor import apply as tensor

_RECORDS = (
    one_process.SINGLE,
    one_process.DP,
    one_process.MODEL_PARALLEL,
    ddp.STRATEGY,
    one_process.DDP_MODEL_PARALLEL,
    fsdp.ZERO1,
    fsdp.ZERO2,
    fsdp.ZERO3,
    fsdp.STRATEGY,
    fsdp.HSDP,
    tensor.STRATEGY,
    pipeline.STRATEGY,
    context.STRATEGY,
    expert.STRATEGY,
    deepspeed.STRATEGY,
)

STRATEGIES: dict[str, Strategy] = {record.name: record for record in _RECORDS}
"""By name, in the order in which they are told."""

INSTEAD = {
    "dp": "ddp",
    "model_parallel": "pipeline",
    "ddp_model_parallel": "pipeline",
    "zero1": "fsdp",
    "zero2": "fsdp",
    "deepspeed": "zero2 or fsdp",
}
"""What to write where a strategy does not work or is not planned."""

_BY_DEGREES = {
    (): "single",
    ("dp_replicate",): "ddp",
    ("dp_shard",): "fsdp",
    ("dp_replicate", "dp_shard"): "hsdp",
    ("tp",): "tensor",
    ("pp",): "pipeline",
    ("cp",): "context",
    ("ep",): "expert",
}


def find(name: str) -> Strategy:
    """The record of one name (no combination).

    Raises:
        LayoutError: no such strategy; the nearest is named.
    """
    if name not in STRATEGIES:
        raise LayoutError(unknown_strategy(name))
    return STRATEGIES[name]


def records(name: str) -> list[Strategy]:
    """The records of a combination such as ddp+tensor, the data-parallel one first.

    Raises:
        LayoutError: a name that is not known, or names that do not combine.
    """
    found = [find(written.strip()) for written in name.replace("×", "+").split("+")]
    data = [record for record in found if not record.splits_model]
    model = sorted((record for record in found if record.splits_model), key=_RECORDS.index)
    refused = any(not set(other.degrees) <= set(record.also) for record in data for other in model)
    if len({record.name for record in found}) != len(found) or len(data) > 1 or refused:
        first = [r.name for r in _RECORDS if {"tp", "pp"} <= {*r.also} and not r.splits_model and not r.alias_of]
        raise LayoutError(
            f"strategy {name!r} does not combine: write one of {', '.join(first)}, then +tensor or +pipeline or both"
        )
    if [record.degrees for record in found] == [("ep",)]:
        raise LayoutError(
            "strategy expert splits experts over data-parallel workers: write ddp+expert, fsdp+expert or hsdp+expert"
        )
    return data + model


def written(name: str) -> list[Strategy]:
    """The records that a configuration's strategy names, as far as they are known; of auto none."""
    names = [part.strip() for part in name.replace("×", "+").split("+")]
    return [STRATEGIES[part] for part in names if part in STRATEGIES]


def require_installed(layout: Layout) -> None:
    """Raises LayoutError if a package that the layout needs is not there. (It is not imported, which takes seconds.)"""
    for record in records(layout.name):
        if record.requires and importlib.util.find_spec(record.requires) is None:
            raise LayoutError(
                f"strategy {record.name} needs the {record.requires} package, which is not installed: pip install "
                f"{record.requires}, or write strategy={INSTEAD[record.name]}"
            )


def by_degrees(*degrees: str) -> Strategy:
    """The plain strategy that has exactly these degrees.

    Raises:
        LayoutError: there is none.
    """
    if degrees not in _BY_DEGREES:
        raise LayoutError(f"no strategy has parallel.{' and parallel.'.join(degrees)}: leave it out")
    return STRATEGIES[_BY_DEGREES[degrees]]


def data_strategy(layout: Layout) -> Strategy:
    """What a layout does with its data-parallel workers: what its name says, if there is anything to shard."""
    first = find(layout.parts[0])
    dims = layout.dims.for_parameters(first.is_sharded)
    if first.splits_model or (first.is_sharded and dims.dp_shard == 1):
        return by_degrees(*(name for name in ("dp_replicate", "dp_shard") if getattr(dims, name) > 1))
    return first


def automatic(world_size: int, given: dict[str, int | None]) -> Strategy:
    """What `auto` means without a planner, for the degrees that are written."""
    size = {name: degree or 1 for name, degree in given.items()}
    others = size["cp"] * size["tp"] * size["pp"]
    if size["dp_shard"] > 1:
        free = given["dp_replicate"] is None and world_size > size["dp_shard"] * others
        return by_degrees(*(["dp_replicate"] if free or size["dp_replicate"] > 1 else []), "dp_shard")
    if size["dp_replicate"] > 1 or world_size > others:
        return by_degrees("dp_replicate")
    return by_degrees(*[name for name in ("tp", "pp", "cp") if size[name] > 1][:1])
