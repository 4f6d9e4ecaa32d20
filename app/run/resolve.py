"""Decides what a configuration leaves open; after that it is only read.

A start resolves its configuration once, and again for any other number of workers that it goes on
with after a failure (app/launchers/elastic.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.config import Config
from app.config.io import with_values
from app.data.loader import micro_batch_slices
from app.errors import UserError
from app.tasks.base import Task
from strategies import registry
from strategies.context.apply import choose_method
from strategies.dims import DEGREES
from strategies.options import Options
from strategies.parallelize import Layout, choose

if TYPE_CHECKING:
    from app.planner.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration in which nothing is left open, and what it means.

    Attributes:
        config: With the values that were decided.
        layout: How the work is split.
        notes: Remarks for the user on what was decided, one sentence each.
        prediction: What the planner expects, where it has chosen the layout.
    """

    config: Config
    layout: Layout
    notes: tuple[str, ...] = ()
    prediction: Estimate | None = None


def resolve(
    config: Config,
    task: Task,
    workers: int,
    *,
    devices_per_node: int | None,
    is_kept: Callable[[Layout, Options], bool],
) -> Resolved:
    """The one place where a configuration gets values that nobody has written.

    Decided are the layout (`strategy: auto`, with the batch in memory and recomputation), the
    micro-batches of a pipeline, and how attention is split over sequences (`parallel.context`).

    Args:
        config: As it was written.
        task: What is trained.
        workers: How many there are.
        devices_per_node: Of them on one machine; None where that is not known.
        is_kept: Whether a layout trains the task as one device would.

    Raises:
        UserError, LayoutError: What is written cannot be run so; one sentence.
    """
    laid_out = _lay_out(config, task, workers, devices_per_node, is_kept)
    config = laid_out.config
    dims = laid_out.layout.dims
    registry.require_installed(laid_out.layout)
    _check_batch(config, dims.dp)
    notes = list(laid_out.notes)
    values: dict[str, Any] = {}
    if dims.pp > 1 and config.train.micro_batch_size is None:
        share = config.train.global_batch_size // dims.dp
        size = default_micro_batch_size(share, dims.pp, config.parallel.schedule)
        count = len(micro_batch_slices(share, size))
        values["train.micro_batch_size"] = size
        notes.append(
            f"each step is {count} micro-batches of {size} through {dims.pp} stages "
            f"({config.parallel.schedule}): train.micro_batch_size decides"
        )
    if dims.cp > 1:
        asked = config.parallel.context
        values["parallel.context"] = choose_method(
            asked, heads=task.heads(), dims=dims, workers_per_node=devices_per_node
        )
    return replace(laid_out, config=with_values(config, values), notes=tuple(notes))


def _lay_out(
    config: Config,
    task: Task,
    workers: int,
    devices_per_node: int | None,
    is_kept: Callable[[Layout, Options], bool],
) -> Resolved:
    """Decides the layout; `auto` asks the planner. Under torchrun only rank 0 is here."""
    if config.strategy == "auto":
        from app.planner.auto import choose_layout

        choice = choose_layout(config, task, workers, per_node=devices_per_node, is_kept=is_kept)
        return Resolved(
            config=with_values(config, choice.values),
            layout=choice.layout,
            notes=(choice.sentence,) if choice.sentence else (),
            prediction=choice.prediction,
        )
    degrees = {name: getattr(config.parallel, name) for name in DEGREES}
    layout = choose(config.strategy, workers, **degrees, devices_per_node=devices_per_node)
    return Resolved(config=config, layout=layout)


def _check_batch(config: Config, dp: int) -> None:
    batch = config.train.global_batch_size
    if batch % dp:
        below = batch - batch % dp
        above = below + dp
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"train.global_batch_size is {batch}, which does not divide by the {dp} data-parallel "
            f"workers: write {nearest}"
        )


def default_micro_batch_size(share: int, stages: int, schedule: str) -> int:
    """Samples per micro-batch that a pipeline computes best with.

    About four micro-batches per stage: the bubble (p-1)/(m+p-1) is then below a fifth, and more
    would only make the matrix products smaller. Equal ones, and as many as the schedule can use, if
    the share allows it.

    Args:
        share: A worker's samples of the global batch.
        stages: Of the pipeline.
        schedule: Its name.
    """
    most = 4 * stages
    for count in range(min(most, share), 0, -1):
        grouped = schedule != "interleaved_1f1b" or count % stages == 0
        if share % count == 0 and count >= min(stages, share) and grouped:
            return share // count
    return max(1, share // most)
