"""Decides what a configuration leaves open; after that it is only read.

A start resolves its configuration once, and again whenever it continues with another number of
workers after a failure (app/launchers/elastic.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.config import Config
from app.config.io import with_values
from app.config.layout_requirement import ANY_LAYOUT, Requirement
from app.data.order import micro_batch_slices
from app.errors import UserError
from app.tasks.base import Task
from strategies import registry
from strategies.context.apply import choose_method
from strategies.dims import DEGREES
from strategies.options import Options
from strategies.parallelize import Layout, choose

if TYPE_CHECKING:
    from app.planner.estimate import Estimate
    from app.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration in which nothing is left open, and what it means.

    Args:
        config: With the values that were decided.
        layout: How the work is split.
        notes: Remarks for the user on what was decided, one sentence each.
        prediction: What the planner expects, if it has chosen the layout.
        plan: What it has chosen from; None if it has not.
    """

    config: Config
    layout: Layout
    notes: tuple[str, ...] = ()
    prediction: Estimate | None = None
    plan: Plan | None = None


def resolve(
    config: Config,
    task: Task,
    workers: int,
    *,
    devices_per_node: int | None,
    is_kept: Callable[[Layout, Options], bool],
    requirement: Requirement = ANY_LAYOUT,
) -> Resolved:
    """Gives a configuration the values that nobody has written; no other place does.

    It decides the layout (`strategy: auto`, with the batch in memory and recomputation), the
    micro-batches of a pipeline, and how attention is split over sequences (`parallel.context`).

    Args:
        config: As it was written.
        task: What is trained.
        workers: How many there are.
        devices_per_node: How many workers a node may have; None if that is not known.
        is_kept: Whether a layout trains the task as one device would.
        requirement: What is known beforehand of the layout that auto chooses.

    Raises:
        UserError: What is written cannot be run so; one sentence.
        LayoutError: See UserError.
    """
    resolved = _choose_layout(
        config,
        task,
        workers,
        devices_per_node=devices_per_node,
        is_kept=is_kept,
        requirement=requirement,
    )
    config = resolved.config
    dims = resolved.layout.dims
    registry.require_installed(resolved.layout.name)
    batches = requirement.batches or tuple(config.train.batches.batches)
    _check_batches(config, batches, dims.dp)
    notes = list(resolved.notes)
    values: dict[str, object] = {}
    if dims.pp > 1 and config.train.micro_batch_size is None:
        # A size that suits the smallest batch gives larger ones more micro-batches.
        micro_batch_size = default_micro_batch_size(
            min(batches) // dims.dp, dims.pp, config.parallel.schedule
        )
        samples_per_worker = max(batches) // dims.dp
        micro_batches = len(micro_batch_slices(samples_per_worker, micro_batch_size))
        values["train.micro_batch_size"] = micro_batch_size
        at_most = "" if len(set(batches)) == 1 else "at most "
        notes.append(
            f"each step is {at_most}{micro_batches} micro-batches of {micro_batch_size} through "
            f"{dims.pp} stages ({config.parallel.schedule}): train.micro_batch_size decides"
        )
    if config.train.grows_by_itself and config.train.micro_batch_size is None:
        # Whatever the run decides, it needs no more memory than at its beginning.
        values.setdefault("train.micro_batch_size", batches[0] // dims.dp)
    if dims.cp > 1:
        values["parallel.context"] = choose_method(
            config.parallel.context,
            heads=task.heads(),
            dims=dims,
            workers_per_node=devices_per_node,
        )
    return replace(resolved, config=with_values(config, values), notes=tuple(notes))


def _choose_layout(
    config: Config,
    task: Task,
    workers: int,
    *,
    devices_per_node: int | None,
    is_kept: Callable[[Layout, Options], bool],
    requirement: Requirement,
) -> Resolved:
    """Decides the layout; `auto` asks the planner.

    Under torchrun only rank 0 calls this, so nothing here may be collective.
    """
    if config.strategy == "auto":
        from app.planner.auto import choose_layout

        choice = choose_layout(
            with_batches(config, requirement.batches),
            task,
            workers,
            per_node=devices_per_node,
            is_kept=is_kept,
            requirement=requirement,
        )
        return Resolved(
            config=with_values(config, choice.values),
            layout=choice.layout,
            notes=(choice.sentence,) if choice.sentence else (),
            prediction=choice.prediction,
            plan=choice.plan,
        )
    degrees = {name: getattr(config.parallel, name) for name in DEGREES}
    layout = choose(config.strategy, workers, **degrees, devices_per_node=devices_per_node)
    return Resolved(config=config, layout=layout)


def with_batches(config: Config, batches: tuple[int, ...]) -> Config:
    """The configuration for a plan, with no other global batches than these, if there are any."""
    if not batches:
        return config
    rows = [[number, batch] for number, batch in enumerate(batches)]
    values = {"train.batch_schedule": rows, "train.global_batch_size": max(batches)}
    return with_values(config, values)


def _check_batches(config: Config, batches: tuple[int, ...], dp: int) -> None:
    for batch in batches:
        if batch % dp == 0:
            continue
        below = batch - batch % dp
        above = below + dp
        nearest = f"{below} or {above}" if below else f"{above}"
        has = f"train.global_batch_size is {batch}"
        if config.train.batch_schedule:
            has = f"train.batch_schedule has a batch of {batch}"
        raise UserError(
            f"{has}, which does not divide by the {dp} data-parallel workers: write {nearest}"
        )


def default_micro_batch_size(samples: int, stages: int, schedule: str) -> int:
    """Samples per micro-batch that a pipeline computes best with.

    With four micro-batches per stage the bubble (p-1)/(m+p-1) is below a fifth, and more of them
    would only make the matrix products smaller. If the number of samples allows it, micro-batches
    are of equal size and as many as the schedule can use.

    Args:
        samples: A worker's samples of the global batch.
        stages: How many stages the pipeline has.
        schedule: The schedule's name.
    """
    most = 4 * stages
    least = max(1, min(stages, samples))
    for micro_batches in range(min(most, samples), least - 1, -1):
        fits_schedule = schedule != "interleaved_1f1b" or micro_batches % stages == 0
        if samples % micro_batches == 0 and fits_schedule:
            return samples // micro_batches
    return max(1, samples // most)
