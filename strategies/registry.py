"""Every name that a user may write, and its record, which the strategy's own file declares.

A strategy's name stands in its own file, in this one, and in rows of tests, nowhere else.
strategy.py says what a record is.
"""

import importlib.util
from collections.abc import Mapping

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
"""All strategies by name, in the order in which lists show them."""

INSTEAD = {
    "dp": "ddp",
    "model_parallel": "pipeline",
    "ddp_model_parallel": "pipeline",
    "zero1": "fsdp",
    "zero2": "fsdp",
    "deepspeed": "zero2 or fsdp",
}
"""What to write where a strategy does not work or is not planned."""

_BY_DEGREES: dict[tuple[str, ...], str] = {
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
    """The record of a single name.

    Raises:
        LayoutError: There is no such strategy; the message names the most similar one.
    """
    if name not in STRATEGIES:
        raise LayoutError(unknown_strategy(name))
    return STRATEGIES[name]


def records(name: str) -> list[Strategy]:
    """The records of a name or a combination such as ddp+tensor, the data-parallel one first.

    Raises:
        LayoutError: A name is unknown, or the names do not combine.
    """
    named = [find(part) for part in _split(name)]
    data_strategies = [record for record in named if not record.splits_model]
    model_strategies = [record for record in named if record.splits_model]
    model_strategies.sort(key=_RECORDS.index)

    has_duplicates = len({record.name for record in named}) < len(named)
    is_refused = any(
        not set(model_strategy.degrees) <= set(data_strategy.combines_with)
        for data_strategy in data_strategies
        for model_strategy in model_strategies
    )
    if has_duplicates or len(data_strategies) > 1 or is_refused:
        combinable = ", ".join(record.name for record in _RECORDS if _combines_freely(record))
        raise LayoutError(
            f"strategy {name!r} does not combine: write one of {combinable}, then +tensor or "
            "+pipeline or both"
        )
    if [record.degrees for record in named] == [("ep",)]:
        raise LayoutError(
            "strategy expert splits experts over data-parallel workers: write ddp+expert, "
            "fsdp+expert or hsdp+expert"
        )
    return data_strategies + model_strategies


def _combines_freely(record: Strategy) -> bool:
    combines = {"tp", "pp"} <= set(record.combines_with)
    return combines and not record.splits_model and not record.alias_of


def known_records(name: str) -> list[Strategy]:
    """The records of those names in a combination that exist; none for auto."""
    return [STRATEGIES[part] for part in _split(name) if part in STRATEGIES]


def _split(name: str) -> list[str]:
    return [part.strip() for part in name.replace("×", "+").split("+")]


def require_installed(name: str) -> None:
    """Checks that the packages of a strategy, or of a combination, are installed.

    They are not imported, which would take seconds.

    Raises:
        LayoutError: A package is not installed.
    """
    for record in records(name):
        package = record.required_package
        if package and importlib.util.find_spec(package) is None:
            raise LayoutError(
                f"strategy {record.name} needs the {package} package, which is not installed: "
                f"pip install {package}, or write strategy={INSTEAD[record.name]}"
            )


def by_degrees(*degrees: str) -> Strategy:
    """The plain strategy that has exactly these degrees.

    Raises:
        LayoutError: There is none.
    """
    if degrees not in _BY_DEGREES:
        names = " and ".join(f"parallel.{degree}" for degree in degrees)
        raise LayoutError(f"no strategy has {names}: leave it out")
    return STRATEGIES[_BY_DEGREES[degrees]]


def data_strategy(layout: Layout, *, offload: bool = False) -> Strategy:
    """What a layout does with its data-parallel workers.

    It is what the layout's name says. If the name says nothing about them, or there is nothing to
    shard, it is what the degrees say. One worker alone shards if its state is in host memory.

    Args:
        layout: The layout.
        offload: Whether state is kept in host memory.
    """
    first = find(layout.parts[0])
    dims = layout.dims.for_parameters(first.is_sharded)
    is_one_shard = offload and dims.world_size == 1
    has_nothing_to_shard = first.is_sharded and dims.dp_shard == 1 and not is_one_shard
    if first.splits_model or has_nothing_to_shard:
        degrees = [name for name in ("dp_replicate", "dp_shard") if getattr(dims, name) > 1]
        return by_degrees(*degrees)
    return first


def automatic(world_size: int, degrees: Mapping[str, int | None]) -> Strategy:
    """What `auto` means without a planner.

    Args:
        world_size: Number of workers.
        degrees: All degrees; None for those that are not written.
    """
    size = {name: degree or 1 for name, degree in degrees.items()}
    model_workers = size["cp"] * size["tp"] * size["pp"]
    if size["dp_shard"] > 1:
        has_workers_left = world_size > size["dp_shard"] * model_workers
        fills_with_replicas = degrees["dp_replicate"] is None and has_workers_left
        if fills_with_replicas or size["dp_replicate"] > 1:
            return by_degrees("dp_replicate", "dp_shard")
        return by_degrees("dp_shard")
    if size["dp_replicate"] > 1 or world_size > model_workers:
        return by_degrees("dp_replicate")
    for name in ("tp", "pp", "cp"):
        if size[name] > 1:
            return by_degrees(name)
    return by_degrees()
