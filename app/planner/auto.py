"""The layout that `strategy: auto` means.

A layout that surely fits goes before one that may: of those whose memory is close to the GPU's none is started before
its batch has been tried (trial.py), where the devices are this machine's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from app.config import Config
from app.errors import UserError
from app.planner.advice import infeasible, size_text
from app.planner.estimate import Estimate
from app.planner.machine import Machine, is_here, running
from app.planner.output import experiment
from app.planner.plan import Plan, make_plan, ranked
from app.planner.trial import run as run_trial
from app.tasks.base import Task
from app.training.job import strategy_options
from strategies.dims import DEGREES, Layout
from strategies.layout import choose
from strategies.options import Options

TRIES = 4
"""Layouts that are tried, at most: a try is a start of all processes."""


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
    config: Config,
    task: Task,
    workers: int,
    machine: Machine | None = None,
    per_node: int | None = None,
    is_kept: Callable[[Layout, Options], bool] = lambda layout, options: True,
) -> Choice:
    """The layout that `strategy: auto` means, for a number of workers where they run, or on a machine.

    Degrees, micro-batch and precision that are written stay; activations are recomputed, pipelines used, and state
    kept in host memory, only if nothing fits otherwise. Where planning is impossible the layout is what the degrees
    say, and the sentence says so.

    Args:
        config: Of the run.
        task: Of which the model is.
        workers: How many there are.
        machine: None where the run's workers are.
        per_node: Workers of one node, where that is known.
        is_kept: Whether a layout trains the model as one device would.

    Raises:
        NoLayoutFits: what is needed, what is there, and what would do.
    """
    degrees = {name: getattr(config.parallel, name) for name in DEGREES}
    written = {f"parallel.{name}" for name, value in degrees.items() if value is not None}
    if all(degrees[name] is not None for name in ("dp_replicate", "dp_shard", "tp", "pp")):
        return Choice(choose("auto", workers, **degrees))
    try:
        return _planned(config, task, machine or running(workers, per_node), written, is_kept)
    except NoLayoutFits:
        raise
    except Exception as error:  # whatever is wrong with a plan, the run itself may be right
        layout = choose("auto", workers, **degrees)
        return Choice(layout, f"strategy auto is {layout}, without a plan: {str(error) or type(error).__name__}")


def _planned(
    config: Config, task: Task, machine: Machine, given: set[str], is_kept: Callable[[Layout, Options], bool]
) -> Choice:
    train, cut = config.train, "parallel.pp" in given
    given |= {"train.precision"}
    given |= {"train.micro_batch_size"} if train.micro_batch_size is not None else set()
    given |= {"train.activation_checkpointing"} if train.activation_checkpointing != "none" else set()
    given |= {"parallel.offload"} if config.parallel.offload or machine.device.is_cpu else set()
    given |= {"parallel.schedule", "parallel.chunks"} if cut else set()
    plan = make_plan(config, task, machine, given=frozenset(given))
    options = strategy_options(config)

    def keeps(row: Estimate) -> bool:
        mode = row.candidate.checkpointing
        return is_kept(row.candidate.layout, replace(options, activation_checkpointing=mode))

    plan.rows = [row for row in plan.rows if keeps(row)] or plan.rows
    row, tried = _chosen(plan, cut)
    if row is None:
        raise NoLayoutFits(f"strategy auto finds no layout that fits{tried}. " + " ".join(infeasible(plan)))
    candidate = row.candidate
    values: dict[str, Any] = {
        "train.micro_batch_size": candidate.micro_batch,
        "train.activation_checkpointing": candidate.checkpointing,
        "parallel.offload": candidate.offload,
    }
    if row.reduces_each_microbatch is not None:
        values["parallel.accumulate_sharded"] = row.reduces_each_microbatch
    if candidate.dims.pp > 1 and not cut:
        values |= {"parallel.schedule": candidate.schedule, "parallel.chunks": candidate.chunks}
        values["parallel.stages"] = list(row.stages or ())
    sentence = (
        f"strategy auto is {candidate.layout}, micro-batches of {candidate.micro_batch}, activation checkpointing "
        f"{candidate.checkpointing}: predicted {row.step_seconds:.3g} s per step, {size_text(row.memory_bytes)} per "
        f"worker{tried}"
    )
    return Choice(candidate.layout, sentence, values, row)


def _chosen(
    plan: Plan, cut: bool, attempt: Callable[[Plan, Estimate], str] | None = None
) -> tuple[Estimate | None, str]:
    """The layout that a run takes, and what is to be said of it.

    Args:
        plan: All layouts.
        cut: Whether the person has asked for a pipeline.
        attempt: Tries a layout and says why it does not run; "" if it does.
    """
    sure = _least_change(plan, [row for row in plan.rows if row.verdict == "fits"], cut)
    if sure is not None:
        return sure, ""
    close = [row for row in plan.rows if row.verdict == "close"]
    if not close:
        return None, ""
    if not is_here(plan.machine):
        row = max(close, key=lambda one: one.chance)
        return row, f": close to the GPU's memory, and not tried, because {plan.machine.name} is not this machine"
    attempt = attempt or _attempt
    failures = list[str]()
    while (nearest := _least_change(plan, close, cut)) and len(failures) < TRIES:
        failure = attempt(plan, nearest)
        if not failure:
            return nearest, ": close to the device's memory, and its batch was tried"
        failures.append(failure)
        size = nearest.memory_bytes
        close = [one for one in close if one.memory_bytes < size]
    return None, f" ({len(failures)} that are close to the device's memory were tried: {failures[-1]})"


def _attempt(plan: Plan, row: Estimate) -> str:
    """Why a few steps of the layout do not run here; "" if they do."""
    tree = experiment(plan, row)
    tree["train"]["data_workers"], tree["checkpoint"]["load"] = 0, None
    return run_trial(tree, plan.machine.world, plan.machine.device.capacity).failure


def _least_change(plan: Plan, rows: list[Estimate], cut: bool) -> Estimate | None:
    """The best of those without recomputing, pipelines and state in host memory; each in turn if there is none."""
    asked, moved = plan.config.train.activation_checkpointing, plan.config.parallel.offload

    def change(row: Estimate) -> int:
        one = row.candidate
        return max(one.checkpointing != asked, 2 * (one.dims.pp > 1 and not cut), 3 * (one.offload != moved))

    least = min(map(change, rows), default=0)
    return next(iter(ranked([row for row in rows if change(row) == least])), None)
