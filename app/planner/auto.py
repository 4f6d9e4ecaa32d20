"""What a run asks the planner: the layout that `strategy: auto` means, and predictions beside what was measured."""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import dataclass, field
from typing import Any

from app.config import Config
from app.config_io import with_values
from app.errors import UserError
from app.planner.estimate import Estimate
from app.planner.history import LEAST_SECONDS, remember_run
from app.planner.layouts import Candidate
from app.planner.machine import Machine, running
from app.planner.plan import Plan, estimator_of, make_plan, model_name, ranked, reader_of
from app.planner.read import Reader
from app.tasks import load_task
from app.tasks.base import Task
from strategies import registry
from strategies.dims import NAMES, Layout
from strategies.layout import choose
from strategies.pipeline.schedules import chunks_of

LEAST_BYTES = 2**28
"""Of memory, before a run corrects anything: below that what a process takes beside the model is most of it."""
FIRST_USE = 50 * 2**20
"""Bytes of torch's libraries that a process on a CPU loads with the first step that it trains."""


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
    strategy, mode = registry.data_strategy(layout), train.activation_checkpointing
    return Candidate(layout, strategy, size, -(-share // size), mode, train.precision, *pipeline, parallel.offload)


class FitsNowhere(UserError):
    """No layout of the model fits the machine's memory."""


@dataclass(frozen=True)
class Choice:
    """What auto decided: the layout, why, in a sentence, and what of the configuration it sets."""

    layout: Layout
    sentence: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """By key of the configuration."""

    def in_config(self, config: Config) -> Config:
        """The configuration with what was chosen in it."""
        return with_values(config, self.values)


def choose_layout(
    config: Config, task: Task, workers: int, machine: Machine | None = None, per_node: int | None = None
) -> Choice:
    """The layout that `strategy: auto` means, for a number of workers where they run, or on a machine.

    Degrees, micro-batch and precision that are written stay; activations are recomputed, pipelines used, and state
    kept in host memory, only if nothing fits otherwise. Where planning is impossible the layout is what the degrees
    say, and the sentence says so. per_node: workers of one node, where that is known.
    Raises:
        FitsNowhere: what is needed, what is there, and what would do.
    """
    degrees = {name: getattr(config.parallel, name) for name in NAMES}
    written = {f"parallel.{name}" for name, value in degrees.items() if value is not None}
    if len(written) == len(degrees):
        return Choice(choose("auto", workers, **degrees))
    try:
        return _planned(config, task, machine or running(workers, per_node), written)
    except FitsNowhere:
        raise
    except Exception as error:  # whatever is wrong with a plan, the run itself may be right
        layout = choose("auto", workers, **degrees)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Choice(layout, f"strategy auto is {layout}, unplanned: {first}")


def _planned(config: Config, task: Task, machine: Machine, given: set[str]) -> Choice:
    train, cut = config.train, "parallel.pp" in given
    for key, is_fixed in (
        ("train.precision", True),
        ("train.micro_batch_size", train.micro_batch_size is not None),
        ("train.activation_checkpointing", train.activation_checkpointing != "none"),
        ("parallel.offload", config.parallel.offload or machine.device.is_cpu),
        ("parallel.schedule", cut),
        ("parallel.chunks", cut),
    ):
        given = given | {key} if is_fixed else given
    plan = make_plan(config, task, machine, given=frozenset(given))
    row = _least_change(plan, cut)
    if row is None:
        from app.planner.advice import infeasible

        raise FitsNowhere("strategy auto finds no layout that fits. " + " ".join(infeasible(plan)))
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
        f"{row.memory_bytes / 2**30:.2f} GiB per worker"
    )
    return Choice(candidate.layout, sentence, values)


def _least_change(plan: Plan, cut: bool) -> Estimate | None:
    """The best of those that fit without recomputing, pipelines and state in host memory; each in turn if none does."""
    asked, moved = plan.config.train.activation_checkpointing, plan.config.parallel.offload
    rows = [row for row in plan.rows if row.fits]
    for changes in range(4):
        found = [
            row
            for row in rows
            if (changes > 0 or row.candidate.checkpointing == asked)
            and (changes > 1 or cut or row.candidate.dims.pp == 1)
            and (changes > 2 or row.candidate.offload == moved)
        ]
        if found:
            return ranked(found, "time")[0]
    return None


def record(config: Config, layout: Layout, seconds: float, memory: float, trained: float) -> dict[str, float]:
    """What a run took beside what was predicted: figures to log. Empty where the model cannot be planned.

    seconds: measured per step. memory: bytes that the model brought on the fullest worker, 0 where that is not known.
    trained: seconds the training took; a long one corrects the next prediction.
    """
    if seconds <= 0:
        return {}
    try:
        machine, parallel = running(layout.dims.world_size), config.parallel
        arguments = json.dumps(config.task_args, default=str)
        reader = _reader(config.task, arguments, parallel.sequence_parallel, parallel.loss_parallel)
        estimator = estimator_of(config, reader, machine)
        found = estimator.estimate(candidate_of(config, layout))
    except Exception:  # whatever is wrong with a prediction, the run itself was right
        return {}
    figures = {
        "plan/step_seconds": found.step_seconds,
        "plan/step_seconds_measured": seconds,
        "plan/step_error": found.step_seconds / seconds - 1,
        "plan/memory_bytes": found.memory_bytes,
    }
    ratios = {"seconds": estimator.correction * seconds / found.step_seconds}
    memory -= FIRST_USE if machine.device.is_cpu else 0
    if memory > 0:
        figures |= {"plan/memory_bytes_measured": memory, "plan/memory_error": found.memory_bytes / memory - 1}
    if memory > LEAST_BYTES:
        ratios["bytes"] = estimator.memory_correction * memory / found.memory_bytes
    if trained >= LEAST_SECONDS:
        with contextlib.suppress(OSError):
            remember_run(machine.device.gpu.name, model_name(config), ratios)
    return figures


@functools.lru_cache(maxsize=1)
def _reader(task: str, arguments: str, sequence_parallel: bool, loss_parallel: bool) -> Reader:
    """The model as plans read it, which takes as long as training a small one; kept for the next trial of a sweep."""
    loaded = load_task(task, json.loads(arguments))
    return Reader(loaded, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
