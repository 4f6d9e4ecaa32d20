"""The layout that `strategy: auto` means.

A layout that fits for certain is preferred to one that may fit. If the memory of a layout is close
to the device's, its batch is tried before it is started (trial.py), provided that the devices are
this machine's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from app.config import Config
from app.config.layout_requirement import ANY_LAYOUT, Requirement
from app.errors import UserError
from app.planner.advice import infeasible, size_text
from app.planner.estimate import Estimate
from app.planner.machine import Machine, is_here, machine_of_run
from app.planner.output import experiment
from app.planner.plan import Plan, make_plan, ranked
from app.planner.trial import run as run_trial
from app.tasks.base import Task
from app.training.job import strategy_options
from strategies.dims import DEGREES, Degree, Layout
from strategies.layout import choose
from strategies.options import Options

MOST_TRIALS = 4
"""Layouts that are tried, at most: each trial starts all processes."""


class NoLayoutFits(UserError):
    """No layout of the model fits the machine's memory."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What auto has chosen.

    Args:
        layout: The layout.
        sentence: Why, for the user; "" if the configuration left no choice.
        values: What the choice sets in the configuration, by key.
        prediction: The estimate of the layout; None without a plan.
        plan: All layouts that auto may choose; None without a plan.
    """

    layout: Layout
    sentence: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    prediction: Estimate | None = None
    plan: Plan | None = None


def choose_layout(
    config: Config,
    task: Task,
    workers: int,
    machine: Machine | None = None,
    per_node: int | None = None,
    is_kept: Callable[[Layout, Options], bool] = lambda layout, options: True,
    requirement: Requirement = ANY_LAYOUT,
) -> Choice:
    """The layout that `strategy: auto` means.

    Degrees, micro-batch and precision stay as the configuration has them. Activations are
    recomputed, pipelines used, and state kept in host memory, only if nothing fits otherwise. If
    planning is impossible, the layout is what the degrees say, and the sentence says so.

    Args:
        config: The run's configuration.
        task: Its task.
        workers: The number of workers.
        machine: The machine; None for that of the run's workers.
        per_node: Workers of a node, if known.
        is_kept: Whether a layout trains the model as one device would.
        requirement: What is known of the layout.

    Raises:
        NoLayoutFits: The message says what is needed, what is there, and what would do.
    """
    degrees = {name: getattr(config.parallel, name) for name in DEGREES}
    deciding: tuple[Degree, ...] = ("dp_replicate", "dp_shard", "tp", "pp")
    if all(degrees[name] is not None for name in deciding):
        return Choice(layout=choose("auto", workers, **degrees))
    try:
        return _planned_choice(
            config,
            task,
            machine or machine_of_run(workers, per_node),
            is_kept=is_kept,
            requirement=requirement,
        )
    except NoLayoutFits:
        raise
    except Exception as error:  # whatever is wrong with a plan, the run itself may be right
        layout = choose("auto", workers, **degrees)
        reason = str(error) or type(error).__name__
        return Choice(
            layout=layout, sentence=f"strategy auto is {layout}, without a plan: {reason}"
        )


def _planned_choice(
    config: Config,
    task: Task,
    machine: Machine,
    *,
    is_kept: Callable[[Layout, Options], bool],
    requirement: Requirement,
) -> Choice:
    has_pipeline = config.parallel.pp is not None
    plan = make_plan(config, task, machine, fixed_keys=_fixed_keys(config, machine))
    options = strategy_options(config)

    def keeps_training(row: Estimate) -> bool:
        mode = row.candidate.checkpointing
        return is_kept(row.candidate.layout, replace(options, activation_checkpointing=mode))

    plan.rows = [row for row in plan.rows if keeps_training(row)] or plan.rows
    if requirement.memory_below is not None:
        plan.rows = [row for row in plan.rows if row.memory_bytes < requirement.memory_below]
    row, remark = None, ""
    if requirement.key:
        row = next((row for row in plan.rows if row.candidate.key == requirement.key), None)
    if row is None:
        row, remark = _choose(plan, has_pipeline=has_pipeline)
    elif requirement.stages:
        row = replace(row, stages=requirement.stages)
    if row is None:
        reasons = " ".join(infeasible(plan))
        raise NoLayoutFits(f"strategy auto finds no layout that fits{remark}. {reasons}")
    candidate = row.candidate
    values: dict[str, Any] = {
        "train.micro_batch_size": candidate.micro_batch,
        "train.activation_checkpointing": candidate.checkpointing,
        "parallel.offload": candidate.offload,
    }
    if row.reduces_each_microbatch is not None:
        values["parallel.accumulate_sharded"] = row.reduces_each_microbatch
    if candidate.dims.pp > 1 and not has_pipeline:
        values["parallel.schedule"] = candidate.schedule
        values["parallel.chunks"] = candidate.chunks
    if candidate.dims.pp > 1 and not config.parallel.stages:
        values["parallel.stages"] = list(row.stages or ())
    sentence = (
        f"strategy auto is {candidate.layout}, micro-batches of {candidate.micro_batch}, "
        f"activation checkpointing {candidate.checkpointing}: predicted {row.step_seconds:.3g} s "
        f"per step, {size_text(row.memory_bytes)} per worker{remark}"
    )
    return Choice(
        layout=candidate.layout, sentence=sentence, values=values, prediction=row, plan=plan
    )


def alternatives(plan: Plan, chosen: Estimate) -> list[Estimate]:
    """The layouts that fit and change the configuration no more than the chosen one."""
    has_pipeline = plan.config.parallel.pp is not None
    most = _change(plan, chosen, has_pipeline=has_pipeline)
    return [
        row
        for row in plan.rows
        if row.verdict == "fits" and _change(plan, row, has_pipeline=has_pipeline) <= most
    ]


def _fixed_keys(config: Config, machine: Machine) -> frozenset[str]:
    """The keys of the configuration whose values auto leaves as they are."""
    fixed_keys = {"train.precision"}
    fixed_keys |= {
        f"parallel.{name}" for name in DEGREES if getattr(config.parallel, name) is not None
    }
    if config.train.micro_batch_size is not None:
        fixed_keys.add("train.micro_batch_size")
    if config.train.activation_checkpointing != "none":
        fixed_keys.add("train.activation_checkpointing")
    if config.parallel.offload or machine.device.is_cpu:
        fixed_keys.add("parallel.offload")
    if config.parallel.pp is not None:
        fixed_keys |= {"parallel.schedule", "parallel.chunks"}
    return frozenset(fixed_keys)


def _choose(
    plan: Plan,
    *,
    has_pipeline: bool,
    attempt: Callable[[Plan, Estimate], str] | None = None,
) -> tuple[Estimate | None, str]:
    """The layout that a run takes.

    Args:
        plan: All layouts.
        has_pipeline: Whether the configuration says how many stages there are.
        attempt: Tries a layout, and says why it does not run; "" if it does.

    Returns:
        (the layout, None if none fits; a remark for the sentence about it)
    """
    certain = [row for row in plan.rows if row.verdict == "fits"]
    row = _least_change(plan, certain, has_pipeline=has_pipeline)
    if row is not None:
        return row, ""
    close = [row for row in plan.rows if row.verdict == "close"]
    if not close:
        return None, ""
    if not is_here(plan.machine):
        row = max(close, key=lambda row: row.fit_probability)
        return row, (
            ": close to the GPU's memory, and not tried, because "
            f"{plan.machine.name} is not this machine"
        )
    failures: list[str] = []
    while len(failures) < MOST_TRIALS:
        row = _least_change(plan, close, has_pipeline=has_pipeline)
        if row is None:
            break
        failure = (attempt or _attempt)(plan, row)
        if not failure:
            return row, ": close to the device's memory, and its batch was tried"
        failures.append(failure)
        tried_bytes = row.memory_bytes
        close = [smaller for smaller in close if smaller.memory_bytes < tried_bytes]
    return None, (
        f" ({len(failures)} that are close to the device's memory were tried: {failures[-1]})"
    )


def _attempt(plan: Plan, row: Estimate) -> str:
    """Why a few steps of a layout do not run on this machine; "" if they do."""
    tree = experiment(plan, row)
    tree["train"]["data_workers"] = 0
    tree["checkpoint"]["load"] = None
    return run_trial(tree, plan.machine.world, plan.machine.device.capacity).failure


def _least_change(plan: Plan, rows: list[Estimate], *, has_pipeline: bool) -> Estimate | None:
    """The best layout of those that change the configuration least; None if there are no rows."""
    changes = [_change(plan, row, has_pipeline=has_pipeline) for row in rows]
    least = min(changes, default=0)
    best_first = ranked([row for row, change in zip(rows, changes) if change == least])
    return best_first[0] if best_first else None


def _change(plan: Plan, row: Estimate, *, has_pipeline: bool) -> int:
    """How much a layout changes the configuration.

    Recomputation is a smaller change than a pipeline, and that a smaller one than state in host
    memory.
    """
    config = plan.config
    candidate = row.candidate
    if candidate.offload != config.parallel.offload:
        return 3
    if candidate.dims.pp > 1 and not has_pipeline:
        return 2
    return int(candidate.checkpointing != config.train.activation_checkpointing)
