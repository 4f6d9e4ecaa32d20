"""Everything that can be known, and can be wrong, before a worker starts.

The model is built on the meta device, without memory. Workers would find the same mistakes, each of
them, seconds later and after joining a process group; here a mistake is one sentence at once. What
shows only on real data is left to the workers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from app.checkpoint import find
from app.config import Config
from app.config.layout_requirement import ANY_LAYOUT, Requirement
from app.data.loader import (
    fetch,
    is_reproducible,
    length,
    pipeline_example,
    tensors,
)
from app.data.order import micro_batch_slices
from app.data.randomness import seed_everything
from app.data.stream import continues_exactly, is_stream
from app.errors import UserError, nearest, own_code
from app.run.base_model import widths_of
from app.run.first_step import FirstStep, take_first_step
from app.run.inputs import inputs
from app.run.rehearse import (
    read_batch,
    rehearse,
    require_data,
    require_methods,
    require_metric,
)
from app.run.resolve import resolve
from app.tasks import load_task
from app.tasks.base import Task
from app.tasks.build import build_model
from app.tasks.sources import task_sources
from app.training import batch_gather, hooks
from app.training.batch_growth import MOST_MEASURING, Growth
from app.training.job import strategy_options
from app.training.optimizer import check_optimizer, require_matches, unused_options
from app.training.task_optimizer import left_out, require_optimizer
from app.training.width_transfer import Widths
from strategies import precision, registry, state
from strategies.blocks import find_blocks
from strategies.context.apply import check_length, require_positions
from strategies.dims import DEGREES
from strategies.expert.apply import require as require_experts
from strategies.layout import LayoutError, choose
from strategies.options import Options
from strategies.parallelize import Layout, ParallelDims, check
from strategies.pipeline.apply import plan_stages
from strategies.state import require_trainable_parameters
from strategies.tensor.plan import SYNONYMS, make_plan

if TYPE_CHECKING:
    from app.planner.estimate import Estimate
    from app.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is ready to start.

    Args:
        config: The resolved configuration; from here on it is only read.
        layout: How the work is split.
        steps: Optimizer steps of the whole run.
        samples: Training samples; None for a stream.
        task: The task, whose data has been read.
        notes: Remarks for the user on what was decided, one sentence each.
        prediction: What the planner expects, if it has chosen the layout.
        plan: What it has chosen from; None if it has not.
        inputs: The data sets, as `Tracker.inputs` takes them.
        sources: Digests of the task's own source files.
        widths: The model's parameters beside those of the base model, by name.
        gathers: Whether the task's losses call self.gather.
    """

    config: Config
    layout: Layout
    steps: int
    samples: int | None
    task: Task | None = None
    notes: tuple[str, ...] = ()
    prediction: Estimate | None = None
    plan: Plan | None = None
    inputs: tuple[dict[str, str], ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    widths: Widths = field(default_factory=dict)
    gathers: bool = False


@own_code("the task's data cannot be read")
def read_task(config: Config) -> Task:
    """Loads the task and its data, so that what is wrong with either is known now.

    Raises:
        UserError: See `app.tasks.load_task` and the task itself, also for what its code raises.
    """
    check_optimizer(config.optimizer, config.train.weight_dtype)
    _check_strategy(config)
    if config.checkpoint.load:
        try:
            find(config.checkpoint.load)
        except OSError as error:  # a storage that cannot be reached
            raise UserError(
                f"checkpoint.load is {config.checkpoint.load!r}, which cannot be read: {error}"
            ) from error
    seed_everything(config.train.seed)  # as workers do
    task = load_task(config.task, config.task_args)
    require_methods(task)
    require_data(config, task)
    read_batch(task)
    require_metric(config, task)
    _check_compiler(config)
    return task


def _check_strategy(config: Config) -> None:
    """Checks what the strategy's name says, and with a number of workers the degrees.

    Raises:
        LayoutError: Its parts do not combine, a package is missing, or the degrees do not multiply
            to the number of workers.
    """
    if config.strategy == "auto":
        return
    records = registry.records(config.strategy)
    registry.require_installed(config.strategy)
    # How many shards a node has is known only where the machines are.
    shards_a_node = records[0].degrees == ("dp_replicate", "dp_shard")
    if config.workers != "auto" and not shards_a_node:
        degrees = {name: getattr(config.parallel, name) for name in DEGREES}
        choose(config.strategy, int(config.workers), **degrees)


def _check_compiler(config: Config) -> None:
    """Checks that the compiler exists; the task's own module may have registered it.

    Raises:
        UserError: It does not.
    """
    backend = config.train.compile_backend
    if config.train.compile and backend not in torch.compiler.list_backends(exclude_tags=()):
        known = torch.compiler.list_backends()  # without those for debugging
        raise UserError(
            f"train.compile_backend is {backend!r}, which torch does not have"
            f"{nearest(backend, known)}: write one of {', '.join(known)}"
        )


@own_code("the task does not work")
def prepare(
    config: Config,
    task: Task,
    workers: int,
    *,
    devices_per_node: int | None,
    requirement: Requirement = ANY_LAYOUT,
) -> Prepared:
    """Decides the layout and the number of steps, and checks them.

    They are checked against the model, the data and the batch.

    Args:
        config: As it was written.
        task: As `read_task` returns it.
        workers: How many there are.
        devices_per_node: How many workers a node may have; None if that is not known.
        requirement: What is known beforehand of the layout that auto chooses.

    Raises:
        UserError: What is written cannot be run so; one sentence.
        LayoutError: See UserError.
    """
    samples = length(task.train_data())
    widths = widths_of(config, task)
    with batch_gather.watched(task) as gathered:
        first_step = _first_step(config, task, workers)
    gathers = bool(gathered or task.gathers)

    def is_kept(layout: Layout, options: Options) -> bool:
        if hooks.step_obstacle(task, layout) or (gathers and batch_gather.obstacle_of(layout)):
            return False
        return first_step.is_kept_by(layout, options)

    resolved = resolve(
        config,
        task,
        workers,
        devices_per_node=devices_per_node,
        is_kept=is_kept,
        requirement=requirement,
    )
    config = resolved.config
    layout = resolved.layout
    dims = layout.dims
    train = config.train
    logged_names, rehearsal_gathers = _rehearse(
        config,
        task,
        samples_per_worker=max(requirement.batches, default=train.global_batch_size) // dims.dp,
        workers_per_machine=min(dims.dp, devices_per_node or os.cpu_count() or 1),
    )
    gathers = gathers or rehearsal_gathers  # where no first step was taken
    gather_notes = tuple(batch_gather.check(config, task, layout)) if gathers else ()
    hook_notes = tuple(hooks.check(config, task, layout, logged_names))
    model = build_on_meta(task, layout)
    if dims.cp > 1:
        _check_sequences(config, task, layout, model)
    slices_of_batch = {
        batch: micro_batch_slices(batch // dims.dp, train.micro_batch_size)
        for batch in _batches_of(config, samples, requirement)
    }
    micro_batches_of = {batch: len(slices) for batch, slices in slices_of_batch.items()}
    _check_batches(config, task, layout, model, micro_batches_of=micro_batches_of)
    micro_batches = max(micro_batches_of.values())
    micro_batch_sizes = [
        part.stop - part.start for slices in slices_of_batch.values() for part in slices
    ]
    first_step.require_kept(
        layout,
        hooks.options(config, task),
        smallest=min(micro_batch_sizes),
        micro_batches=micro_batches,
    )
    check_model(config, task, layout, model)
    notes = (
        *resolved.notes,
        *hook_notes,
        *first_step.notes(layout, micro_batches, gathers=gathers),
        *gather_notes,
        *_notes_on_optimizer(config, task, model, samples),
        *_notes_on_batches(config, samples),
        *_notes_on_sizes(config, dims, samples),
        *_notes_on_data(config, task, dims),
    )
    return Prepared(
        config=config,
        layout=layout,
        steps=train.steps_for(samples),
        samples=samples,
        task=task,
        notes=notes,
        prediction=resolved.prediction,
        plan=resolved.plan,
        inputs=tuple(inputs(config, task)),
        sources=task_sources(task),
        widths=widths,
        gathers=gathers,
    )


def _first_step(config: Config, task: Task, workers: int) -> FirstStep:
    """What the task's first step shows; nothing if one device trains it unsplit and unchanged."""
    train = config.train
    has_micro_batches = (
        train.micro_batch_size is not None and train.micro_batch_size < train.global_batch_size
    )
    changes_blocks = train.activation_checkpointing != "none" or train.activation_offloading
    strategy_is_limited = config.strategy != "auto" and any(
        record.cannot_keep for record in registry.records(config.strategy)
    )
    if workers == 1 and not (has_micro_batches or changes_blocks or strategy_is_limited):
        return FirstStep()
    return take_first_step(config, task)


def _rehearse(
    config: Config, task: Task, *, samples_per_worker: int, workers_per_machine: int
) -> tuple[list[str], bool]:
    """Takes a small step with the task.

    Args:
        config: The resolved configuration.
        task: Its task.
        samples_per_worker: See `rehearse`.
        workers_per_machine: See `rehearse`.

    Returns:
        The names that the loss logs, and whether it gathers tensors of the whole batch.
    """
    with batch_gather.watched(task) as gathered:
        logged_names = rehearse(
            config,
            task,
            samples_per_worker=samples_per_worker,
            workers_per_machine=workers_per_machine,
        )
    # A loss that reads values of tensors cannot be tried there, and shows nothing.
    return logged_names, bool(gathered or task.gathers)


def _check_batches(
    config: Config,
    task: Task,
    layout: Layout,
    model: nn.Module | None,
    *,
    micro_batches_of: Mapping[int, int],
) -> None:
    """Checks the layout with each global batch that the run may have.

    Args:
        config: The resolved configuration.
        task: Its task.
        layout: The layout.
        model: The whole model on the meta device, if it has been built there.
        micro_batches_of: For each global batch, the first one first, the number of micro-batches
            of a worker.

    Raises:
        LayoutError: The layout cannot train with one of them.
    """
    blocks: int | None = None
    if model is not None and layout.dims.pp > 1:
        blocks = len(find_blocks(model, task.blocks(model)))
    sequence_length = _split_length(task, layout, model)
    present_batch = next(iter(micro_batches_of))
    for batch, micro_batches in micro_batches_of.items():
        try:
            check(
                layout,
                strategy_options(config),
                global_batch_size=batch,
                heads=task.heads(),
                blocks=blocks,
                sequence_length=sequence_length,
                micro_batches=micro_batches,
            )
        except LayoutError as error:
            if batch == present_batch:
                raise
            place = f"with the batch of {batch} in train.batch_schedule"
            raise LayoutError(f"{place}: {error}") from error


def _split_length(task: Task, layout: Layout, model: nn.Module | None) -> int | None:
    """The length that sequence parallelism splits; None if the task's plan splits no sequence."""
    if layout.dims.tp == 1 or model is None:
        return None
    plan = task.tensor_plan(model) or {}
    splits_sequences = any(SYNONYMS.get(value, value) == "sequence" for value in plan.values())
    return getattr(task, "sequence_length", None) if splits_sequences else None


def _check_sequences(config: Config, task: Task, layout: Layout, model: nn.Module | None) -> None:
    """Checks that the model and a sample's length can be split by context parallelism.

    Raises:
        LayoutError: They cannot.
    """
    plan = None
    if model is not None:
        plan = task.context_plan(model)
        require_positions(model, plan)
    data = task.train_data()
    number = getattr(data, "longest_sample", 0)
    sample = fetch(data, [(number, number)])
    sequence_lengths = [tensor.size(1) for tensor in tensors(sample) if tensor.dim() > 1]
    if plan is not None and plan.cut is not None:
        sequence_lengths = []

        def note_length(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            sequence_lengths.append(tensor.size(dim))
            return tensor

        plan.cut(sample, note_length)
    if sequence_lengths:
        check_length(sequence_lengths[0], layout.dims.cp, config.parallel.context)


def _notes_on_optimizer(
    config: Config, task: Task, model: nn.Module | None, samples: int | None
) -> Iterator[str]:
    """A sentence on each option that the optimizer does not get, and on what no optimizer has.

    Args:
        config: The resolved configuration.
        task: Its task, whose own optimizer is made here with parameters on meta.
        model: The whole model on the meta device, if it has been built there.
        samples: The number of training samples; None for a stream.

    Raises:
        UserError: The task's own `optimizer` or `schedule` returns something that cannot train the
            model.
    """
    if hooks.overrides(task, "schedule"):
        steps = config.train.steps_for(samples)
        with own_code("the task's schedule fails"):
            for step in (0, steps // 2, steps - 1):
                hooks.schedule_factor(task, step, steps)
    if not hooks.overrides(task, "optimizer"):
        yield from unused_options(config.optimizer)
        return
    try:
        if model is None:
            with torch.device("meta"):
                model = build_model(task)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        returned = task.optimizer(trained)
    except Exception:  # the task's own code may need real data; the workers run it
        return
    if returned is None:
        return
    names = left_out(require_optimizer(returned, trained), trained)
    if names:
        yield (
            f"the task's optimizer() leaves out {len(names)} of {len(trained)} parameters, which "
            f"stay as they are, the first {names[0]}: if that is meant, set their requires_grad to "
            "False in build_model, which saves their gradients"
        )


def _growth_of(config: Config, samples: int | None) -> Growth:
    """When a run that decides on its batch tests whether to double it."""
    return Growth.of(
        batch=config.train.global_batch_size,
        steps=config.train.steps_for(samples),
        warmup_steps=config.schedule.warmup_steps,
    )


def _batches_of(config: Config, samples: int | None, requirement: Requirement) -> list[int]:
    """The global batches that a run has from now on, or may reach."""
    present = requirement.batches
    if config.train.grows_by_itself:
        possible = _growth_of(config, samples).possible_batches()
        return [batch for batch in possible if not present or batch >= present[0]]
    return list(present) or config.train.batches.batches


def _notes_on_batches(config: Config, samples: int | None) -> Iterator[str]:
    """A sentence on when the batch changes, and one on rows that the run does not reach."""
    train = config.train
    if not train.batch_schedule:
        return
    if train.grows_by_itself:
        yield _note_on_growth(config, samples)
        return
    batches = train.batches
    changes = []
    for begin, batch in batches.rows[1:]:
        changes.append(f"{batch:,} from step {batches.steps_until(begin) + 1:,}")
    yield f"the global batch is {batches.rows[0][1]:,}" + "".join(f", {each}" for each in changes)
    steps = train.steps_for(samples)
    seen = batches.samples_after(steps)
    last_begin, last_batch = batches.rows[-1]
    if last_begin >= seen:
        yield (
            f"train.batch_schedule reaches a batch of {last_batch:,} after {last_begin:,} samples, "
            f"but {steps:,} steps see {seen:,}: raise train.steps, or write train.epochs"
        )


def _note_on_growth(config: Config, samples: int | None) -> str:
    growth = _growth_of(config, samples)
    first, *others = growth.possible_batches()
    if not others:
        least = Growth.least_steps(config.schedule.warmup_steps)
        return (
            f"the global batch stays {first:,}, since the run is too short to try twice as many: "
            f"auto needs {least:,} steps of the first batch, or a smaller one"
        )
    return (
        f"the global batch is {first:,}, and may grow to {others[-1]:,}; twice the batch is tried "
        f"first after {growth.first_samples:,} samples, and the dropped branches have at most "
        f"{MOST_MEASURING:.0%} of {growth.total:,} samples; a worker computes up to "
        f"{config.train.micro_batch_size:,} at once (train.micro_batch_size)"
    )


def _notes_on_sizes(config: Config, dims: ParallelDims, samples: int | None) -> Iterator[str]:
    """Sentences on sizes and steps that are slow, or may not be meant so."""
    batch = config.train.global_batch_size
    steps = config.train.steps_for(samples)
    if dims.dp > 1 and batch // dims.dp == 1:
        yield (
            f"each of the {dims.dp} data-parallel workers computes one sample per step, so most of "
            "its time is communication: raise train.global_batch_size"
        )
    if samples is not None and samples < batch:
        yield (
            f"a step takes {batch:,} samples, but the data has {samples:,}: each step repeats some"
        )
    patience = config.train.patience
    evaluations = math.ceil(steps / (config.train.eval_every or steps))
    if patience is not None and evaluations <= patience:
        yield (
            f"train.patience is {patience:,} evaluations, but the run has {evaluations:,}: it "
            "cannot end early"
        )
    warmup_steps = config.schedule.warmup_steps
    if warmup_steps > steps:
        yield (
            f"schedule.warmup_steps is {warmup_steps:,}, but the run has {steps:,} steps: the "
            "learning rate does not reach optimizer.lr"
        )
    profile = config.profile
    if profile.steps:
        if profile.steps[0] > steps:
            yield (
                f"profile.steps begins at {profile.steps[0]:,}, but the run has {steps:,} steps: "
                "none is profiled"
            )
        missing_ranks = [rank for rank in profile.ranks if rank >= dims.world_size]
        if missing_ranks:
            yield (
                f"profile.ranks has {missing_ranks}, but the run has {dims.world_size} workers, "
                "from 0 on"
            )
    trace_step = config.parallel.trace_step
    if trace_step is not None and dims.pp > 1 and trace_step > steps:
        yield (
            f"parallel.trace_step is {trace_step:,}, but the run has {steps:,} steps: no step is "
            "traced"
        )


def _notes_on_data(config: Config, task: Task, dims: ParallelDims) -> Iterator[str]:
    """Sentences on data that workers, or a resumed run, read otherwise than it may be meant.

    Raises:
        UserError: Workers that need the same sample would get different ones.
    """
    data: Any = task.train_data()
    is_never_evaluated = task.eval_data() is None and not hooks.overrides(task, "on_evaluation")
    if config.train.eval_every is not None and is_never_evaluated:
        yield (
            f"train.eval_every is {config.train.eval_every:,}, but the task has no eval_data: "
            "nothing is evaluated"
        )
    if is_stream(data):
        if dims.dp > 1:
            yield (
                f"the training data is a stream: each of the {dims.dp} data-parallel workers reads "
                "all of it"
            )
        if config.train.data_workers:
            yield (
                "train.data_workers read map-style data sets only; the training data is a stream"
            )
        if not continues_exactly(data):
            yield (
                f"the training data, a {type(data).__name__}, has no state (state_dict, "
                "load_state_dict) that brings back the samples that follow: a resumed run reads it "
                "again up to where it was"
            )
    if is_reproducible(data):
        return
    problem = (
        "the training data draws from a random generator of its own: a sample differs each time it "
        "is made"
    )
    advice = (
        "draw from torch's, NumPy's or Python's global generator, which is seeded for each sample"
    )
    workers_per_sample = dims.tp * dims.pp
    if workers_per_sample > 1:
        raise UserError(
            f"{problem}, but here {workers_per_sample} workers need the same one: {advice}"
        )
    yield f"{problem}, and a resumed run does not see what it would have seen; {advice}"


def with_idle_gpus(
    prepared: Prepared, *, workers: int, gpus_per_worker: float, gpus: float, pool: str
) -> Prepared:
    """Adds a note if the workers leave GPUs of the cluster or machine unused.

    Args:
        prepared: The prepared run.
        workers: Of the run, in this pool.
        gpus_per_worker: GPUs that each worker takes; 0 for workers on CPUs.
        gpus: GPUs that the pool has.
        pool: Names the pool, for example "the cluster".
    """
    used = workers * gpus_per_worker
    unused = gpus - used
    if unused < 1:
        return prepared
    if gpus_per_worker:
        note = (
            f"{unused:g} of {pool}'s {gpus:g} GPUs are not used: workers={workers} takes {used:g}"
        )
    else:
        note = (
            f"this run computes on CPUs, but {pool} has {gpus:g} GPUs: "
            "write resources_per_worker.GPU=1"
        )
    return replace(prepared, notes=(*prepared.notes, note))


# --- the model ------------------------------------------------------------------------------------


def build_on_meta(task: Task, layout: Layout) -> nn.Module | None:
    """The model's structure, without memory.

    Returns:
        None for one worker, and if the model's own code does not run on the meta device.

    Raises:
        LayoutError: Nothing in the model can be trained, or it lacks blocks that the task names.
    """
    if layout.dims.world_size == 1:
        return None
    if layout.dims.pp > 1:
        model = state.build_on_meta(lambda: build_model(task))[0]
    else:
        try:
            with torch.device("meta"):
                model = build_model(task)
        except Exception:  # a model's own code may need values; the workers build it for real
            return None
    require_trainable_parameters(model)
    find_blocks(model, task.blocks(model))
    return model


def check_devices(config: Config, device: str) -> None:
    """Checks that the workers' type of device can compute in the configured precision.

    Args:
        config: Names the precision.
        device: cuda or cpu.

    Raises:
        LayoutError: It cannot.
    """
    if config.train.precision == "fp8" and device == "cpu":
        precision.require_float8(torch.device(device))


def check_model(config: Config, task: Task, layout: Layout, model: nn.Module | None) -> None:
    """Checks that the layout can run this model.

    Args:
        config: The resolved configuration.
        task: What is trained.
        layout: How the work is split.
        model: On the meta device; None checks nothing.

    Raises:
        LayoutError: The layout cannot run the model; one sentence.
        UserError: See LayoutError.
    """
    if model is None:
        return
    if not hooks.overrides(task, "optimizer"):
        trained = (name for name, p in model.named_parameters() if p.requires_grad)
        require_matches(config.optimizer, trained)
    options = strategy_options(config)
    dims = layout.dims
    if dims.tp > 1:
        make_plan(
            model,
            task.tensor_plan(model),
            sequence_parallel=options.sequence_parallel,
            tp=dims.tp,
            ep=dims.ep,
        )
    if dims.ep > 1:
        require_experts(model, dims.ep)
    if dims.pp > 1:
        _check_stages(config, task, dims.pp, model)


def _check_stages(config: Config, task: Task, stages: int, model: nn.Module) -> None:
    """Checks that the model can be split into stages, with its loss and its metrics.

    Raises:
        LayoutError: It cannot.
        UserError: See LayoutError.
    """
    batch = pipeline_example(task.train_data(), config.train.micro_batch_size)
    blocks = find_blocks(model, task.blocks(model))
    held_out = task.eval_data()
    try:
        tracer, *_ = plan_stages(
            model,
            blocks,
            options=strategy_options(config),
            stages=stages,
            example=(task.loss, batch),
            device=torch.device("cpu"),
        )
        if held_out is not None:
            tracer.trace(task.metrics, fetch(held_out, [(0, 0)]), training=False)
    except (LayoutError, UserError):
        raise
    except Exception:
        # The model's own code may fail without real data. The workers find its mistakes too, and
        # their logs say where.
        pass
