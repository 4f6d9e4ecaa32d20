"""Tries a task out before a worker starts: its methods, its data, its loss and its metrics.

The model runs on the meta device, without data. Code that reads values of tensors cannot be tried
there and is left to the workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from app.config import CheckpointConfig, Config
from app.data.loader import Batch, fetch, length, map_tensors, tensors
from app.data.stream import is_stream
from app.errors import UserError, nearest, own_code, return_line, with_line
from app.tasks.base import Task
from app.tasks.returned import derived_metrics, require_metrics
from app.training.hooks import is_users_task, losses_of_step, overrides, watches_metric
from strategies.parallel import Loss, LossError, require_loss

SAMPLES = 4
"""Samples in the batch that the task is tried with."""
MAX_PARAMETERS = 20_000_000
"""Parameters up to which a model is built with real data, which takes less than a second."""
PICK_BYTES = 200
"""Bytes that a sample's number and position take in a worker, besides its tensors."""


def require_methods(task: Task) -> None:
    """Checks that a task has the three methods that it must have.

    Raises:
        UserError: One is missing.
    """
    task_class = type(task)
    missing = [
        name
        for name in ("build_model", "train_data", "loss")
        if getattr(task_class, name) is getattr(Task, name)
    ]
    if missing:
        raise UserError(
            f"{task_class.__name__} has no {' and no '.join(missing)}: app/tasks/base.py shows "
            "what a task has"
        )


def require_data(config: Config, task: Task) -> None:
    """Checks that samples can be read from a task's data, and that its epochs have a length.

    Raises:
        UserError: They cannot, or they have none.
    """
    data: Any = task.train_data()
    kind = type(data).__name__
    if isinstance(data, DataLoader) or not (is_stream(data) or hasattr(data, "__getitem__")):
        raise UserError(
            f"the training data is a {kind}: give a data set of samples, with __len__ and "
            "__getitem__ or with __iter__, from which batches are made as train.global_batch_size "
            "says"
        )
    if length(data) == 0:
        raise UserError("the training data is empty: give the task data with at least one sample")
    if is_stream(data) and config.train.steps is None:
        raise UserError(
            f"train.epochs needs data with a length, and the training data is a stream ({kind}): "
            "write train.steps"
        )
    held_out = task.eval_data() or ()
    if is_stream(held_out):
        raise UserError(
            f"the held-out data is a {type(held_out).__name__}, which cannot be asked for a sample "
            "by its number: give a map-style data set, with __len__ and __getitem__, or a list of "
            "samples"
        )


def rehearse(
    config: Config, task: Task, *, samples_per_worker: int, workers_per_machine: int
) -> list[str]:
    """Makes a batch, and computes its loss and metrics as far as they need no values of tensors.

    Args:
        config: The resolved configuration.
        task: With its data.
        samples_per_worker: Samples of a step that a worker has.
        workers_per_machine: Workers that a machine may have.

    Returns:
        The names of what the task's loss logs.

    Raises:
        UserError: Every mistake found, a sentence each.
    """
    batch, samples = read_batch(task)
    _check_memory(
        config,
        bytes_per_sample=sum(tensor.nbytes for tensor in tensors(batch)) / samples + PICK_BYTES,
        samples_per_machine=samples_per_worker * workers_per_machine,
    )
    task.recorded = {}
    mistakes = [*_mistakes_on_meta(config, task, batch), *_mistakes_of_updates(task, batch)]
    logged_names = list(task.recorded)
    task.recorded = None
    if mistakes:
        raise UserError("\n".join(mistakes))
    return logged_names


def read_batch(task: Task) -> tuple[Batch, int]:
    """A batch of samples from all over the training data.

    Returns:
        The batch, and how many samples it has.

    Raises:
        UserError: The samples do not make one.
    """
    data: Any = task.train_data()
    samples = length(data) or SAMPLES
    positions = range(0, samples, max(1, samples // SAMPLES))
    try:
        with own_code("a sample of the training data cannot be read"):
            batch = fetch(data, [(position, position) for position in positions])
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise UserError(
            "samples of the training data do not make a batch "
            f"({type(error).__name__}: {lines[0].rstrip('.')}): give tensors of the same shape in "
            "every sample, or a method collate_fn(samples) to the data set, as DataLoader's"
        ) from error
    return batch, len(positions)


def _check_memory(config: Config, *, bytes_per_sample: float, samples_per_machine: int) -> None:
    """Checks that a step's samples fit into half of a machine's memory.

    Raises:
        UserError: They do not.
    """
    needed = samples_per_machine * bytes_per_sample
    memory = psutil.virtual_memory().total
    if needed > memory / 2:
        raise UserError(
            f"train.global_batch_size is {config.train.global_batch_size:,}: "
            f"{samples_per_machine:,} samples on a machine take {needed / 1e9:,.0f} GB, and this "
            f"one has {memory / 1e9:,.0f} GB: write a smaller one"
        )


def _mistakes_on_meta(config: Config, task: Task, batch: Batch) -> Iterator[str]:
    """A sentence for each mistake in what the loss and the metrics return."""
    try:
        with torch.device("meta"), torch.no_grad():
            model = task.build_model()
            batch = map_tensors(lambda tensor: tensor.to("meta"), batch)
            loss = task.loss(model, batch)
            metrics: dict[str, Any] = {}
            if task.eval_data() is not None:
                metrics = dict(require_metrics(task.metrics(model.eval(), batch)))
    except UserError as error:  # what is wrong with what it logs or gives
        yield str(error)
        return
    except Exception:  # the task's own code may need values
        return
    yield from _mistakes_of_loss(task.loss, loss)
    yield from _mistakes_of_shape({"loss": loss})
    yield from _mistakes_of_shape(metrics)  # which may have a loss too
    mistake = _metric_mistake(config, task, metrics)
    if mistake:
        yield mistake


def _mistakes_of_updates(task: Task, batch: Batch) -> Iterator[str]:
    """The same for the losses that a training_step of the task's own updates with."""
    if not overrides(task, "training_step"):
        return
    batch = map_tensors(lambda tensor: tensor.to("meta"), batch)
    for loss in losses_of_step(copy.copy(task)):
        if loss == task.loss:  # tried already
            continue
        try:
            with torch.device("meta"):
                value = loss(task.build_model(), batch)
        except UserError as error:  # what is wrong with what it logs
            yield str(error)
            continue
        except Exception:  # the task's own code may need values
            continue
        yield from _mistakes_of_loss(loss, value)
        yield from _mistakes_of_shape({getattr(loss, "__name__", "loss"): value})


def _mistakes_of_loss(loss: Loss, value: object) -> Iterator[str]:
    """A sentence if a loss returns something else than a tensor."""
    if isinstance(value, Tensor):
        return
    try:
        require_loss(value)
    except LossError as error:
        yield with_line(str(error), return_line(loss, error.suspicious))


def _mistakes_of_shape(values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each value that is not one number."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dim():
            yield (
                f"the task's {name} has shape {tuple(value.shape)}, but it must be one number: "
                "return, for instance, its mean"
            )


def require_metric(config: Config, task: Task) -> None:
    """Checks that the evaluation gives the metric that checkpoint.metric names.

    Only a metric that somebody has written is looked for: the task's metrics are then taken of a
    batch without data, which takes as long as building the model.

    Raises:
        UserError: It does not, or train.patience waits for evaluations that there are not, or
            these are to have a worker of their own.
    """
    if config.train.patience is not None and task.eval_data() is None:
        raise UserError(
            f"train.patience is {config.train.patience} evaluations, but the task has no "
            "eval_data: leave it out, or give the task an eval_data"
        )
    is_evaluated = task.eval_data() is not None or overrides(task, "on_evaluation")
    if config.train.eval_separate and not is_evaluated:
        raise UserError(
            "train.eval_separate evaluates checkpoints, but the task has no eval_data: leave it "
            "out, or give the task an eval_data"
        )
    if config.checkpoint.metric == CheckpointConfig.metric:
        return
    metrics: dict[str, Any] = {}
    try:
        if task.eval_data() is not None:
            metrics = _metrics_of_batch(task)
        mistake = _metric_mistake(config, task, metrics)
    except UserError:
        raise
    except Exception:  # the workers meet what is wrong with the task's own code
        return
    if mistake:
        raise UserError(mistake)


def _metrics_of_batch(task: Task) -> dict[str, Any]:
    """The task's metrics of a batch: on meta, or on real data if its code needs values.

    Raises:
        Exception: Whatever the task's code raises; or the model is too large to be built with real
            data.
    """
    batch, _ = read_batch(task)
    with torch.device("meta"):
        model = task.build_model().eval()
    try:
        with torch.device("meta"), torch.no_grad():
            return task.metrics(model, map_tensors(lambda tensor: tensor.to("meta"), batch))
    except Exception:
        if sum(parameter.numel() for parameter in model.parameters()) > MAX_PARAMETERS:
            raise
    with torch.random.fork_rng(devices=()), torch.no_grad():
        return task.metrics(task.build_model().eval(), batch)


def _metric_mistake(config: Config, task: Task, metrics: Mapping[str, Any]) -> str:
    """The sentence that the evaluation does not give checkpoint.metric; "" if it may give it.

    Args:
        config: Has its name.
        task: What is trained.
        metrics: Those of a batch of the held-out data; empty if there is none.
    """
    wanted = config.checkpoint.metric
    derived: dict[str, float] = {}
    if metrics:  # without held-out data a run derives nothing
        try:
            derived = derived_metrics(task, dict.fromkeys(metrics, 1.0))
        except UserError:
            raise
        except Exception:  # the task's own code may need the values of an evaluation
            return ""
    names = [name for name in (*metrics, *derived) if not name.startswith("_")]
    if config.train.ema_decay is not None:
        names += [f"ema_{name}" for name in names]
    # A person's on_evaluation may log numbers under names that only the evaluation shows.
    is_open = is_users_task(task) and overrides(task, "on_evaluation")
    if wanted in names or is_open or not watches_metric(config):
        return ""
    if names:
        return (
            f"checkpoint.metric is {wanted!r}, which the evaluation does not give"
            f"{nearest(wanted, names)}: write one of {', '.join(names)}"
        )
    if wanted == CheckpointConfig.metric:  # nobody has written it
        return ""
    return (
        f"checkpoint.metric is {wanted!r}, but the task has no eval_data to measure it on: "
        "leave it out"
    )
