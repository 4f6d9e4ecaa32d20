"""Everything that can be known, and can be wrong, before a worker starts.

The model is looked at on meta, without memory. Workers find the same, each of them, seconds later and after a process
group; here it is one sentence at once. What can only be seen with numbers stays with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from app.checkpoint import find
from app.config import Config
from app.data.loader import fetch, is_reproducible, length, micro_batch_slices, pipeline_example, tensors
from app.data.randomness import seed_everything
from app.data.stream import continues_exactly, is_stream
from app.errors import UserError
from app.run.first_step import FirstStep, take_first_step
from app.run.inputs import inputs
from app.run.rehearse import rehearse, require_data, require_methods
from app.run.resolve import resolve
from app.tasks import load_task
from app.tasks.base import Task
from app.tasks.build import build_model
from app.tasks.sources import task_sources
from app.training import batch_gather, hooks
from app.training.job import strategy_options
from app.training.optimizer import optimizer_class
from strategies import precision, registry
from strategies.blocks import find_blocks
from strategies.context.apply import check_length, require_positions
from strategies.expert.apply import require as require_experts
from strategies.layout import LayoutError
from strategies.parallelize import Layout, ParallelDims, check
from strategies.pipeline.apply import plan_stages
from strategies.state import build_on_meta, require_trainable_parameters
from strategies.tensor.plan import SYNONYMS, make_plan

if TYPE_CHECKING:
    from app.planner.estimate import Estimate


@dataclass(frozen=True)
class Prepared:
    config: Config  # resolved, and from here on only read
    layout: Layout
    steps: int
    samples: int | None  # to train on; None: a stream
    notes: tuple[str, ...] = ()  # remarks for the user on what was decided, one sentence each
    prediction: Estimate | None = None  # of the planner, where it chose the layout
    inputs: tuple[dict[str, str], ...] = ()  # what the data is, for MLflow
    sources: dict[str, str] = field(default_factory=dict)  # digests of the task's own code


def read_task(config: Config) -> Task:
    """The task with its data looked at once, so that what is wrong with either is known now.

    Raises:
        UserError: see `app.tasks.load_task` and the task itself.
    """
    optimizer_class(config.optimizer.name)
    if config.checkpoint.load:
        find(config.checkpoint.load)
    seed_everything(config.train.seed)  # as workers do
    task = load_task(config.task, config.task_args)
    require_methods(task)
    require_data(config, task)
    return task


def prepare(config: Config, task: Task, workers: int, *, devices_per_node: int | None) -> Prepared:
    """The layout and the length of training, checked against the model, the data and the batch.

    Raises:
        UserError, LayoutError: one sentence.
    """
    samples = length(task.train_data())
    if samples == 0:
        raise UserError("the training data is empty: give the task data with at least one sample")
    first_step = _first_step(config, task, workers)
    resolved = resolve(
        config,
        task,
        workers,
        devices_per_node=devices_per_node,
        is_kept=first_step.is_kept_by,
    )
    config = resolved.config
    layout = resolved.layout
    train = config.train
    here = min(layout.dims.dp, devices_per_node or os.cpu_count() or 1)
    with batch_gather.watched(task) as gathered:
        logged = rehearse(config, task, train.global_batch_size // layout.dims.dp, here)
    on_gathering = tuple(batch_gather.check(config, task, layout)) if gathered else ()
    module = looked_at(task, layout)
    if layout.dims.cp > 1:
        _check_sequences(config, task, layout, module)
    micro_batches = _count_micro_batches(config, layout.dims.dp)
    check(
        layout,
        strategy_options(config),
        global_batch_size=train.global_batch_size,
        heads=task.heads(),
        blocks=len(find_blocks(module, task.blocks(module))) if module is not None and layout.dims.pp > 1 else None,
        sequence_length=_split_length(task, layout, module),
        micro_batches=micro_batches,
    )
    slices = micro_batch_slices(train.global_batch_size // layout.dims.dp, train.micro_batch_size)
    smallest = min(part.stop - part.start for part in slices)
    options = hooks.options(config, task)
    first_step.require_kept(layout, options, smallest=smallest, micro_batches=micro_batches)
    check_model(config, task, layout, module)
    notes = (
        *resolved.notes,
        *hooks.check(config, task, layout, logged),
        *first_step.notes(layout, micro_batches, gathers=bool(gathered)),
        *on_gathering,
        *_remarks(config, layout.dims, samples),
        *_randomness(config, task, layout.dims),
    )
    return Prepared(
        config,
        layout,
        train.steps_for(samples),
        samples,
        notes,
        resolved.prediction,
        inputs=tuple(inputs(config, task)),
        sources=task_sources(task),
    )


def _first_step(config: Config, task: Task, workers: int) -> FirstStep:
    """What the task's first step shows; nothing where one device trains it in one piece, as it is written."""
    train = config.train
    in_pieces = train.micro_batch_size is not None and train.micro_batch_size < train.global_batch_size
    recomputes = train.activation_checkpointing != "none"
    copies = config.strategy != "auto" and any(record.cannot_keep for record in registry.records(config.strategy))
    if workers == 1 and not (in_pieces or recomputes or copies):
        return FirstStep()
    return take_first_step(config, task)


def _split_length(task: Task, layout: Layout, module: nn.Module | None) -> int | None:
    """The length that sequence parallelism cuts; None where the task's plan splits no sequence."""
    if layout.dims.tp == 1 or module is None:
        return None
    plan = task.tensor_plan(module) or {}
    splits = any(SYNONYMS.get(value, value) == "sequence" for value in plan.values())
    return getattr(task, "sequence_length", None) if splits else None


def _check_sequences(config: Config, task: Task, layout: Layout, module: nn.Module | None) -> None:
    """Raises LayoutError unless the model and a sample's length can be split over context parallelism."""
    if module is not None:
        require_positions(module, task.context_plan(module))
    sample = fetch(task.train_data(), [(0, 0)])
    length = next((t.size(1) for t in tensors(sample) if t.dim() > 1), None)
    if length is not None:
        check_length(length, layout.dims.cp, config.parallel.context)


def _remarks(config: Config, dims: ParallelDims, samples: int | None) -> Iterator[str]:
    """What will be slow, or is not as it may be meant."""
    batch, dp, trace = config.train.global_batch_size, dims.dp, config.parallel.trace_step
    steps = config.train.steps_for(samples)
    if dp > 1 and batch // dp == 1:
        yield (
            f"each of the {dp} data-parallel workers computes one sample per step, so most of its time is "
            "communication: raise train.global_batch_size"
        )
    if samples is not None and samples < batch:
        yield f"a step takes {batch:,} samples, but the data has {samples:,}: each step repeats some"
    if (warmup := config.schedule.warmup_steps) > steps:
        yield (
            f"schedule.warmup_steps is {warmup:,}, but the run has {steps:,} steps: the learning rate does not reach "
            "optimizer.lr"
        )
    profile = config.profile
    if profile.steps and profile.steps[0] > steps:
        yield f"profile.steps begins at {profile.steps[0]:,}, but the run has {steps:,} steps: none is profiled"
    if profile.steps and (beyond := [rank for rank in profile.ranks if rank >= dims.world_size]):
        yield f"profile.ranks has {beyond}, but the run has {dims.world_size} workers, from 0 on"
    if trace is not None and dims.pp > 1 and trace > steps:
        yield f"parallel.trace_step is {trace:,}, but the run has {steps:,} steps: no step is traced"


def _randomness(config: Config, task: Task, dims: ParallelDims) -> Iterator[str]:
    """Raises UserError where workers that must see the same samples would not."""
    data: Any = task.train_data()
    if is_stream(data) and dims.dp > 1:
        yield f"the training data is a stream: each of the {dims.dp} data-parallel workers reads all of it"
    if is_stream(data) and config.train.data_workers:
        yield "train.data_workers read data that is asked by number; the training data is a stream"
    if is_stream(data) and not continues_exactly(data):
        yield (
            f"the training data, a {type(data).__name__}, has no state (state_dict, load_state_dict) that brings back "
            "the samples that follow: a resumed run reads it again up to where it was"
        )
    if is_reproducible(data):
        return
    said = "the training data draws from a random generator of its own: a sample is another whenever it is made"
    instead = "draw from torch's, NumPy's or Python's global generator, which is seeded for each sample"
    if dims.tp * dims.pp > 1:
        raise UserError(f"{said}, but here {dims.tp * dims.pp} workers need the same one: {instead}")
    yield f"{said}, and a resumed run does not see what it would have seen; {instead}"


def with_idle_gpus(prepared: Prepared, workers: int, each: float, gpus: float, pool: str) -> Prepared:
    """With a remark where the pool (cluster or machine) has `gpus` GPUs, and workers with `each` of them leave some."""
    left = gpus - workers * each
    note = f"{left:g} of {pool}'s {gpus:g} GPUs are not used: workers={workers} takes {workers * each:g}"
    if gpus and not each:
        note = f"this run computes on CPUs, but {pool} has {gpus:g} GPUs: write resources_per_worker.GPU=1"
    return prepared if left < 1 else replace(prepared, notes=(*prepared.notes, note))


def _count_micro_batches(config: Config, dp: int) -> int:
    return len(micro_batch_slices(config.train.global_batch_size // dp, config.train.micro_batch_size))


# --- the model --------------------------------------------------------------------------------------------------------


def looked_at(task: Task, layout: Layout) -> nn.Module | None:
    """The model's structure; None for one worker, and where it cannot be had without building the model for real.

    Raises:
        LayoutError: nothing in it can be trained; the task names blocks that it does not have.
    """
    if layout.dims.world_size == 1:
        return None
    if layout.dims.pp > 1:
        module = build_on_meta(lambda: build_model(task))[0]
    else:
        try:
            with torch.device("meta"):
                module = build_model(task)
        except Exception:  # whatever a model's own code does with values; the workers build it for real
            return None
    require_trainable_parameters(module)
    find_blocks(module, task.blocks(module))
    return module


def check_devices(config: Config, device: str) -> None:
    """Raises LayoutError if the workers' type of device (cuda, cpu) cannot compute as asked."""
    if config.train.precision == "fp8" and device == "cpu":
        precision.require_float8(torch.device(device))


def check_model(config: Config, task: Task, layout: Layout, module: nn.Module | None) -> None:
    """Raises LayoutError, UserError: one sentence, if the layout cannot run this model."""
    chosen = strategy_options(config)
    if module is None:
        return
    if layout.dims.tp > 1:
        make_plan(module, task.tensor_plan(module), chosen.sequence_parallel, layout.dims.tp, layout.dims.ep)
    if layout.dims.ep > 1:
        require_experts(module, layout.dims.ep)
    if layout.dims.pp > 1:
        batch = pipeline_example(task.train_data(), config.train.micro_batch_size)
        blocks, cpu = find_blocks(module, task.blocks(module)), torch.device("cpu")
        try:
            tracer, *_ = plan_stages(module, blocks, chosen, layout.dims.pp, (task.loss, batch), cpu)
            if (held_out := task.eval_data()) is not None:
                tracer.trace(task.metrics, fetch(held_out, [(0, 0)]), training=False)
        except (LayoutError, UserError):
            raise
        except Exception:  # what the model's own code raises without numbers the workers meet too: their logs say where
            pass
