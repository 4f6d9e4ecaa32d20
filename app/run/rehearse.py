"""A task tried out before a worker starts: what its methods, its data, its loss and its metrics are.

The model is run on the meta device, without numbers; code that looks at numbers cannot be tried there, and is left to
the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from app.config import CheckpointConfig, Config
from app.data.loader import fetch, length, map_tensors, tensors
from app.data.stream import is_stream
from app.errors import UserError, nearest
from app.tasks.base import Task

TRIED = 4  # samples that are put into a batch
PICK_BYTES = 200  # that a sample's number and position take in a worker, besides its tensors


def require_methods(task: Task) -> None:
    """Raises UserError for a task without one of the three that it must have."""
    own = type(task)
    missing = [name for name in ("build_model", "train_data", "loss") if getattr(own, name) is getattr(Task, name)]
    if missing:
        raise UserError(f"{own.__name__} has no {' and no '.join(missing)}: app/tasks/base.py shows what a task has")


def require_data(config: Config, task: Task) -> None:
    """Raises UserError for data that samples cannot be read from, or whose epochs have no length."""
    data: Any = task.train_data()
    if isinstance(data, DataLoader) or not (is_stream(data) or hasattr(data, "__getitem__")):
        raise UserError(
            f"the training data is a {type(data).__name__}: give a data set of samples, with __len__ and __getitem__ "
            "or with __iter__, from which batches are made as train.global_batch_size says"
        )
    if is_stream(data) and config.train.steps is None:
        raise UserError(
            f"train.epochs needs data with a length, and the training data is a stream ({type(data).__name__}): write "
            "train.steps"
        )
    if is_stream(held_out := task.eval_data() or ()):
        raise UserError(
            f"the held-out data is a {type(held_out).__name__}, which cannot be asked for a sample by its number: give "
            "a map-style data set, with __len__ and __getitem__, or a list of samples"
        )


def rehearse(config: Config, task: Task, share: int, here: int) -> list[str]:
    """The names of what the task's loss logs, as far as it runs without numbers.

    share: samples of a step that a worker has. here: workers that a machine may have.

    Raises:
        UserError: every mistake found, a sentence each.
    """
    data: Any = task.train_data()
    samples = length(data) or TRIED
    at = range(0, samples, max(1, samples // TRIED))
    try:
        batch = fetch(data, [(index, index) for index in at])
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise UserError(
            f"samples of the training data do not make a batch ({type(error).__name__}: {said}): give tensors of the "
            "same shape in every sample, or make whole batches in __getitems__"
        ) from error
    each = sum(t.nbytes for t in tensors(batch)) / len(at) + PICK_BYTES
    memory = psutil.virtual_memory().total
    if share * here * each > memory / 2:
        raise UserError(
            f"train.global_batch_size is {config.train.global_batch_size:,}: {share * here:,} samples on a machine "
            f"take {share * here * each / 1e9:,.0f} GB, and this one has {memory / 1e9:,.0f} GB: write a smaller one"
        )
    task.recorded = {}
    mistakes = list(_on_meta(config, task, batch))
    logged, task.recorded = list(task.recorded), None
    if mistakes:
        raise UserError("\n".join(mistakes))
    return logged


def _on_meta(config: Config, task: Task, batch: Any) -> Iterator[str]:
    try:
        with torch.device("meta"), torch.no_grad():
            model, batch = task.build_model(), map_tensors(lambda tensor: tensor.to("meta"), batch)
            loss = task.loss(model, batch)
            figures = task.metrics(model.eval(), batch) if task.eval_data() is not None else {}
            names = [*figures, *task.derived(dict.fromkeys(figures, 1.0))]
    except Exception:  # whatever the task's own code does with numbers
        return
    for name, value in [("loss", loss), *figures.items()]:
        if isinstance(value, Tensor) and value.dim():
            yield f"the task's {name} has shape {tuple(value.shape)}, but it must be one number: its mean, say"
    metric = config.checkpoint.metric
    if not names and metric != CheckpointConfig.metric:
        yield f"checkpoint.metric is {metric!r}, but the task has no eval_data to measure it on: leave it out"
    if names and metric not in names and config.checkpoint.keep_best:
        yield (
            f"checkpoint.metric is {metric!r}, which the evaluation does not give{nearest(metric, names)}: write "
            f"one of {', '.join(names)}"
        )
