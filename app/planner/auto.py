"""What a run asks the planner: the layout that `strategy: auto` means, and how it compares with what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.config import Config
from app.errors import UserError
from app.planner.advice import infeasible
from app.planner.estimate import Estimate
from app.planner.layouts import Candidate
from app.planner.machine import Machine, running
from app.planner.plan import GIB, Plan, estimator_of, make_plan, ranked, reader_of
from app.planner.read import Reader
from app.tasks.base import Task
from strategies.dims import NAMES, Layout
from strategies.layout import choose
from strategies.pipeline.schedules import chunks_of


def predict(
    config: Config, task: Task, layout: Layout, machine: Machine | None = None, reader: Reader | None = None
) -> Estimate:
    """Memory and time of a configuration under a layout. machine: None is what a run's workers are on."""
    machine = machine or running(layout.dims.world_size)
    return estimator_of(config, reader or reader_of(config, task), machine).estimate(candidate_of(config, layout))


def candidate_of(config: Config, layout: Layout) -> Candidate:
    """The layout with the rest of the configuration."""
    dims, train, parallel = layout.dims, config.train, config.parallel
    share = max(1, train.global_batch_size // dims.dp)
    size = min(train.micro_batch_size or share, share)
    pipeline = (parallel.schedule, chunks_of(parallel.schedule, parallel.chunks)) if dims.pp > 1 else ("", 1)
    mode, precision = train.activation_checkpointing, train.precision
    return Candidate(layout, size, -(-share // size), mode, precision, *pipeline, parallel.offload)


class NoLayoutFits(UserError):
    """No layout of the model fits the machine's memory."""


@dataclass(frozen=True)
class Choice:
    """What auto decided."""

    layout: Layout
    sentence: str = ""
    """Why, for a person."""
    values: dict[str, Any] = field(default_factory=dict)
    """What it sets of the configuration, by key."""
    prediction: Estimate | None = None


def choose_layout(
    config: Config, task: Task, workers: int, machine: Machine | None = None, per_node: int | None = None
) -> Choice:
    """The layout that `strategy: auto` means, for a number of workers where they run, or on a machine.

    Degrees, micro-batch and precision that are written stay; activations are recomputed, pipelines used, and state
    kept in host memory, only if nothing fits otherwise. Where planning is impossible the layout is what the degrees
    say, and the sentence says so. per_node: workers of one node, where that is known.
    Raises:
        NoLayoutFits: what is needed, what is there, and what would do.
    """
    degrees = {name: getattr(config.parallel, name) for name in NAMES}
    written = {f"parallel.{name}" for name, value in degrees.items() if value is not None}
    if len(written) == len(degrees):
        return Choice(choose("auto", workers, **degrees))
    try:
        return _planned(config, task, machine or running(workers, per_node), written)
    except NoLayoutFits:
        raise
    except Exception as error:  # whatever is wrong with a plan, the run itself may be right
        layout = choose("auto", workers, **degrees)
        return Choice(layout, f"strategy auto is {layout}, without a plan: {str(error) or type(error).__name__}")


def _planned(config: Config, task: Task, machine: Machine, given: set[str]) -> Choice:
    train, cut = config.train, "parallel.pp" in given
    given |= {"train.precision"}
    given |= {"train.micro_batch_size"} if train.micro_batch_size is not None else set()
    given |= {"train.activation_checkpointing"} if train.activation_checkpointing != "none" else set()
    given |= {"parallel.offload"} if config.parallel.offload or machine.device.is_cpu else set()
    given |= {"parallel.schedule", "parallel.chunks"} if cut else set()
    plan = make_plan(config, task, machine, given=frozenset(given))
    row = _least_change(plan, cut)
    if row is None:
        raise NoLayoutFits("strategy auto finds no layout that fits. " + " ".join(infeasible(plan)))
    candidate = row.candidate
    values: dict[str, Any] = {
        "train.micro_batch_size": candidate.micro_batch,
        "train.activation_checkpointing": candidate.checkpointing,
        "parallel.offload": candidate.offload,
    }
    if row.reduces_each is not None:
        values["parallel.accumulate_sharded"] = row.reduces_each
    if candidate.dims.pp > 1 and not cut:
        values |= {"parallel.schedule": candidate.schedule, "parallel.chunks": candidate.chunks}
        values["parallel.stages"] = list(row.stages or ())
    sentence = (
        f"strategy auto is {candidate.layout}, micro-batches of {candidate.micro_batch}, activation checkpointing "
        f"{candidate.checkpointing}: predicted {row.step_seconds:.3g} s per step and "
        f"{row.memory_bytes / GIB:.2f} GiB per worker"
    )
    return Choice(candidate.layout, sentence, values, row)


def _least_change(plan: Plan, cut: bool) -> Estimate | None:
    """The best of those that fit without recomputing, pipelines and state in host memory; each in turn if none does."""
    asked, moved = plan.config.train.activation_checkpointing, plan.config.parallel.offload

    def change(row: Estimate) -> int:
        one = row.candidate
        return max(one.checkpointing != asked, 2 * (one.dims.pp > 1 and not cut), 3 * (one.offload != moved))

    fitting = [row for row in plan.rows if row.fits]
    least = min(map(change, fitting), default=0)
    return next(iter(ranked([row for row in fitting if change(row) == least])), None)
