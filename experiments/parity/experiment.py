"""`trireme parity`: an experiment's own model, loss and data through the parity matrix."""

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import torch

from app.config import Config
from app.config.io import from_dict, to_dict
from app.data.loader import fetch
from app.data.mixture import order_of
from app.data.randomness import seed_everything
from app.data.stream import is_stream
from app.errors import UserError, nearest
from app.run.first_step import FirstStep, take_first_step
from app.tasks import load_task
from app.tasks.build import build_model
from app.training import hooks
from app.training.batch_gather import obstacle_of, watched
from app.training.optimizer import build_optimizer
from experiments.parity.curves import Trial
from experiments.parity.matrix import Progress, Result, run_matrix
from experiments.parity.rows import (
    DEEPSPEED,
    MIXTURES,
    MIXTURES_OF_MORE_DIMENSIONS,
    ROWS,
    THREE_DIMENSIONS,
    Row,
)
from strategies.layout import Layout, LayoutError
from strategies.mixtures import find_mixtures
from strategies.options import Options
from strategies.parallel import Parallel

MIN_EPS = 1e-5
"""The optimizer's epsilon is at least this.

With Adam's usual one, a gradient that is zero but for rounding would be scaled up to a step of full
size in a random direction, on one device too.
"""

UNKNOWN = FirstStep()
"""If no first step was taken."""


def make_trial(
    values: dict[str, Any],
    steps: int,
    *,
    first_step: FirstStep = UNKNOWN,
    gathers: bool = False,
) -> Trial:
    """The trial of an experiment; called in every worker.

    Args:
        values: The experiment's configuration, as `to_dict` returns it.
        steps: How many steps are trained.
        first_step: What the task's first step has shown.
        gathers: Whether the task calls self.gather.

    Raises:
        UserError: The data are a stream.
    """
    config = from_dict(values)
    seed = config.train.seed
    batch_size = config.train.global_batch_size
    seed_everything(seed)
    task = load_task(config.task, config.task_args)
    data = task.train_data()
    if is_stream(data):
        problem = "parity takes the same samples again and again"
        raise UserError(f"{problem}: give a map-style data set, not a stream")
    order = order_of(data, seed)
    optimizer = replace(config.optimizer, eps=max(config.optimizer.eps, MIN_EPS))

    def build() -> torch.nn.Module:
        seed_everything(seed)
        return build_model(task)

    def batch(step: int) -> Any:
        start = step * batch_size
        indices = order.indices(start, batch_size).tolist()
        positions = range(start, start + batch_size)
        return fetch(data, list(zip(indices, positions, strict=True)))

    def task_optimizer(parallel: Parallel) -> torch.optim.Optimizer:
        built = hooks.build_optimizers(config, task, parallel, widths={})
        for group in built.param_groups:
            if "eps" in group:
                group["eps"] = max(group["eps"], MIN_EPS)
        return built

    def require(layout: Layout, options: Options, smallest: int, micro_batches: int) -> None:
        if layout.dims.world_size == 1:
            return  # which the others are compared with
        obstacle = obstacle_of(layout)
        if gathers and obstacle:
            raise LayoutError(f"the task calls self.gather, but {obstacle}")
        try:
            deque(hooks.check(config, task, layout), maxlen=0)
        except UserError as error:
            raise LayoutError(str(error)) from error
        first_step.require_kept(layout, options, smallest=smallest, micro_batches=micro_batches)

    has_training_step = hooks.overrides(task, "training_step")
    return Trial(
        build=build,
        loss=task.loss,
        batch=batch,
        items=task.items,
        steps=steps,
        clip=config.train.clip_norm,
        blocks=task.blocks,
        tensor_plan=task.tensor_plan,
        context_plan=task.context_plan,
        heads=task.heads(),
        optimizer=lambda parameters: build_optimizer(
            optimizer, parameters, weight_dtype=config.train.weight_dtype, seed=seed
        ),
        task=task,
        training_step=task.training_step if has_training_step else None,
        task_optimizer=task_optimizer if hooks.overrides(task, "optimizer") else None,
        require=require,
        notes=lambda layout, count: first_step.notes(layout, count, gathers=gathers),
    )


def measure(
    config: Config,
    *,
    steps: int,
    rows: Iterable[Row],
    checkpoints: bool,
    progress: Progress | None = None,
) -> list[Result]:
    """Compares rows with one device.

    Precision, clipping, recomputation, what train.* and parallel.* say of how layouts behave, and
    the task's own optimizer and training_step are the experiment's. The exceptions are what is
    lossy by design (reduce_dtype), and what a row decides itself (schedule, stages).

    Args:
        config: The experiment.
        steps: The steps of each training.
        rows: The rows.
        checkpoints: Whether every row also continues the checkpoint of every row.
        progress: Hears how far it is; None: nobody does.

    Raises:
        UserError: There are too few steps.
        LayoutError: One device cannot train this.
    """
    min_steps = 2 if checkpoints else 1
    if steps < min_steps:
        raise UserError(f"--steps is {steps}: write at least {min_steps}")
    task = load_task(config.task, config.task_args)
    options = replace(hooks.options(config, task), reduce_dtype="fp32", stages=None)
    with watched(task) as gathered:
        first_step = take_first_step(config, task)
    trial = functools.partial(
        make_trial,
        to_dict(config),
        steps,
        first_step=first_step,
        gathers=bool(gathered or task.gathers),
    )
    return run_matrix(trial, rows, options=options, checkpoints=checkpoints, progress=progress)


def has_experts(config: Config) -> bool:
    """Whether the experiment's model is a mixture of experts."""
    with torch.device("meta"):
        model = load_task(config.task, config.task_args).build_model()
    return bool(find_mixtures(model))


def choose_rows(names: str | None, workers: str | None, *, has_experts: bool = False) -> list[Row]:
    """Chooses rows of the matrix.

    Args:
        names: Strategies, separated by commas; None for all.
        workers: Numbers of workers, separated by commas; None for all.
        has_experts: Whether rows for mixtures of experts are among all.

    Raises:
        UserError: There is no such row.
    """
    chosen_names = _split(names)
    chosen_counts = _split(workers)
    rows = [*ROWS, *THREE_DIMENSIONS]
    for row in (*MIXTURES, *MIXTURES_OF_MORE_DIMENSIONS):
        if has_experts or row.name in chosen_names:
            rows.append(row)
    if find_spec("deepspeed") or DEEPSPEED.name in chosen_names:
        rows.append(DEEPSPEED)
    all_rows = (*rows, *MIXTURES, *MIXTURES_OF_MORE_DIMENSIONS, DEEPSPEED)
    known_names = {row.name for row in all_rows}
    unknown_names = chosen_names - known_names
    if unknown_names:
        known = ", ".join(sorted(known_names))
        unknown = min(unknown_names)
        if unknown == "single":
            raise UserError("every row is compared with single, which has no row: leave it out")
        hint = nearest(unknown, known_names)
        raise UserError(f"there is no row {unknown!r}{hint}: write some of {known}")
    named = [row for row in rows if not chosen_names or row.name in chosen_names]
    chosen = [row for row in named if not chosen_counts or str(row.workers) in chosen_counts]
    if not chosen:
        counts = ", ".join(sorted({str(row.workers) for row in named}))
        problem = f"these strategies have no row with {workers} workers"
        raise UserError(f"{problem}: write some of {counts}")
    return chosen


def _split(text: str | None) -> set[str]:
    """The words of a comma-separated list."""
    return {word for word in (text or "").split(",") if word}


# --- the table ------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """The results for a person.

    One line per row and variant: the largest relative differences, and what is allowed if it is
    exceeded. Of the checkpoints that a row has continued, the one after which it was furthest off,
    and all that differ. Then what strategies have reported.
    """
    width = max((len(str(result.row)) for result in results), default=3)
    lines = [f"{'row':<{width}} {'variant':<32} {'loss':>8} {'norm':>8} {'weights':>8} {'s':>6}"]
    continued: dict[str, list[Result]] = {}
    notes: dict[tuple[str, str], None] = {}
    for result in results:
        if result.after is None:
            lines.append(_line(result, result.variant, width))
        else:
            continued.setdefault(str(result.row), []).append(result)
        if result.curve is not None:
            notes.update(dict.fromkeys((note, str(result.row)) for note in result.curve.notes))
    for pairs in continued.values():
        worst = max(pairs, key=_share_of_bound)
        lines.append(_line(worst, f"after {len(pairs)} others, worst: {worst.after}", width))
        for result in pairs:
            if not result.passed and result is not worst:
                lines.append(_line(result, f"after {result.after}", width))
    lines += [f"{note} ({row})" for note, row in notes]
    return "\n".join(lines)


def _share_of_bound(result: Result) -> float:
    """How much of what is allowed the loss differs by; infinite without a curve."""
    if result.difference is None:
        return float("inf")
    return result.difference.loss / result.bound.loss


def _line(result: Result, variant: str, width: int) -> str:
    start = f"{result.row!s:<{width}} {variant:<32}"
    difference = result.difference
    if difference is None:
        return f"{start} {result.verdict}: {result.refused or result.error}"
    figures = f"{difference.loss:8.1e} {difference.norm:8.1e} {difference.weights:8.1e}"
    line = f"{start} {figures} {result.seconds:6.1f}"
    if result.passed:
        return line
    bound = result.bound
    allowed = f"(allowed {bound.loss:.0e} {bound.norm:.0e} {bound.weights:.0e})"
    return f"{line}  {result.verdict} {allowed}"


def as_dicts(results: Sequence[Result]) -> list[dict[str, object]]:
    """The results as `--json` prints them."""
    return [_as_dict(result) for result in results]


def _as_dict(result: Result) -> dict[str, object]:
    return {
        "row": str(result.row),
        "workers": result.row.workers,
        "variant": result.variant,
        "after": str(result.after) if result.after else None,
        "verdict": result.verdict,
        "why": result.refused or result.error,
        "notes": list(result.curve.notes) if result.curve else [],
        "allowed": asdict(result.bound),
        "seconds": result.seconds,
        "difference": asdict(result.difference) if result.difference else None,
    }
