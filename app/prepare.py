"""Everything that can be known, and can be wrong, before a worker starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.checkpoint import find
from app.config import Config
from app.data.loader import micro_batch_slices
from app.errors import UserError
from app.job import options
from app.optim import optimizer_class
from app.tasks import load_task
from app.tasks.base import Task
from strategies.compose import Layout, check, choose


@dataclass(frozen=True)
class Prepared:
    layout: Layout
    steps: int
    samples: int  # to train on
    description: str


def read_task(config: Config) -> Task:
    """The task with its data looked at once, so that what is wrong with either is known now.

    Raises:
        UserError: see `app.tasks.load_task` and the task itself.
    """
    optimizer_class(config.optimizer.name)
    if config.checkpoint.load:
        find(config.checkpoint.load)
    task = load_task(config.task, config.task_args)
    task.train_data()
    task.eval_data()
    return task


def prepare(config: Config, task: Task, workers: int, *, devices_per_node: int | None) -> Prepared:
    """The layout and the length of training, checked against the model, the data and the batch.

    Raises:
        UserError, LayoutError: one sentence.
    """
    train, wanted = config.train, config.parallel
    layout = choose(
        config.strategy,
        workers,
        dp_replicate=wanted.dp_replicate,
        dp_shard=wanted.dp_shard,
        tp=wanted.tp,
        pp=wanted.pp,
        devices_per_node=devices_per_node,
    )
    samples = len(task.train_data())  # type: ignore[arg-type]
    if samples < 1:
        raise UserError("the training data is empty: give the task data with at least one sample")
    _check_batch(config, layout.dims.dp)
    check(
        layout,
        options(config),
        global_batch_size=train.global_batch_size,
        heads=task.heads(),
        sequence_length=getattr(task, "sequence_length", None),
    )
    steps = train.steps or max(1, math.ceil((train.epochs or 0) * samples / train.global_batch_size))
    return Prepared(layout, steps, samples, task.describe())


def _check_batch(config: Config, dp: int) -> None:
    batch = config.train.global_batch_size
    if batch % dp:
        below, above = batch - batch % dp, batch - batch % dp + dp
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"train.global_batch_size is {batch}, which does not divide by the {dp} data-parallel workers: "
            f"write {nearest}"
        )
    micro_batch_slices(batch, dp, 0, config.train.micro_batch_size)
