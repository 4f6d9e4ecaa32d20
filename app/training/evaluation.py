"""Evaluation on the held-out data, shared by all data-parallel workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from app.checkpoint.ranks import Ranks
from app.config import Config, TrainConfig
from app.data.loader import eval_batches
from app.data.randomness import seed_step
from app.tasks.base import Task
from app.tasks.returned import derived_metrics, require_metrics
from app.training import hooks
from app.training.average import Average
from app.training.batch_gather import may_gather
from app.training.events import FilesWritten
from app.training.job import Channel, Heartbeat, Place
from strategies.parallelize import Parallel
from strategies.training_mode import evaluating


class Evaluator:
    """Evaluates the model during training; every rank calls each method alike.

    Args:
        config: The run's configuration.
        task: Has the held-out data and the metrics.
        parallel: The model under its layout.
        average: The moving average of the weights, which is evaluated too; None without one.
        place: This rank's place.
        channel: To the driver.
        folder: The run's folder, for what the task logs.
    """

    def __init__(
        self,
        *,
        config: Config,
        task: Task,
        parallel: Parallel,
        average: Average | None,
        place: Place,
        channel: Channel,
        folder: str,
    ) -> None:
        self.config = config
        self.task = task
        self.parallel = parallel
        self.average = average
        self.place = place
        self.channel = channel
        self.folder = folder
        dims = parallel.layout.dims
        self.data_rank = dims.data_rank(place.rank)
        self.calls_on_evaluation = hooks.overrides(task, "on_evaluation") and dims.pp * dims.cp == 1

    def run(self, step: int) -> dict[str, float]:
        """Evaluate the weights after a step, and their average under the names `ema_…`.

        `Task.on_evaluation` is called while the model has the average, if there is one.

        Args:
            step: The step just taken.

        Returns:
            The metrics by name, those that the task logs among them.
        """
        metrics = self.held_out_metrics(step)
        with self.average.in_place() if self.average else contextlib.nullcontext():
            if self.average is not None:
                averaged = self.held_out_metrics(step)
                metrics |= {f"ema_{name}": value for name, value in averaged.items()}
            if self.calls_on_evaluation:
                metrics |= self._call_on_evaluation(step)
        return metrics

    def held_out_metrics(self, step: int) -> dict[str, float]:
        """The task's metrics of the model's present weights; {} without held-out data."""
        train = self.config.train
        data = self.task.eval_data()
        if data is None:
            return {}
        # Some metrics draw random numbers.
        seed_step(train.seed, step, data_rank=self.data_rank, device=self.place.device)
        return evaluate(
            self.task,
            self.parallel,
            data,
            batch_size=evaluation_batch_size(train, self.parallel.layout.dims.dp),
            data_rank=self.data_rank,
            device=self.place.device,
            heartbeat=self.channel.heartbeat,
        )

    def _call_on_evaluation(self, step: int) -> Mapping[str, float]:
        log = hooks.call_on_evaluation(
            self.task,
            self.parallel,
            self.channel.heartbeat,
            folder=self.folder,
            step=step,
            is_first_rank=self.place.rank == 0,
        )
        if log.has_files:
            self.channel.emit(FilesWritten(folder=log.folder))
        return log.numbers


def evaluation_batch_size(train: TrainConfig, dp: int) -> int:
    """Samples that a worker evaluates at once.

    Args:
        train: The configuration.
        dp: The number of data-parallel workers.
    """
    written = train.eval_batch_size or train.micro_batch_size
    return written or max(1, train.global_batch_size // dp)


def evaluate(
    task: Task,
    parallel: Parallel,
    data: Dataset[Any],
    *,
    batch_size: int,
    data_rank: int,
    device: torch.device,
    heartbeat: Heartbeat,
) -> dict[str, float]:
    """The task's metrics as means over all items of the data.

    Every rank runs the model equally often, because the collectives of a sharded model need it:
    a rank whose data has ended gets padding batches, which count nothing.

    Args:
        task: Has the metrics.
        parallel: The model under its layout.
        data: Map-style.
        batch_size: Samples of a batch.
        data_rank: This rank's number among those that have different data.
        device: Where to move the batches.
        heartbeat: Ticks with each batch.

    Returns:
        The same metrics on every rank, without those whose names begin with _.
    """
    dims = parallel.layout.dims
    sums = metric_sums(
        task,
        parallel,
        data,
        batch_size=batch_size,
        share=data_rank,
        shares=dims.dp,
        device=device,
        heartbeat=heartbeat,
    )
    metrics: dict[str, float] | None = None
    if parallel.has_loss:
        metrics = means_of(sums, parallel.total(torch.stack([*sums.values()])))
    if dims.pp > 1:  # the ranks of the last stage tell the others
        metrics = next(each for each in Ranks().all_gather(metrics) if each is not None)
    assert metrics is not None
    return shown(metrics | derived_metrics(task, metrics))


ITEMS = ""
"""The name of the number of items among the sums of metrics."""


@torch.no_grad()
def metric_sums(
    task: Task,
    parallel: Parallel,
    data: Dataset[Any],
    *,
    batch_size: int,
    share: int,
    shares: int,
    device: torch.device,
    heartbeat: Heartbeat,
) -> dict[str, Tensor]:
    """The sums of the task's metrics over the items of one share of the data.

    Args:
        task: Has the metrics.
        parallel: The model under its layout.
        data: Map-style.
        batch_size: Samples of a batch.
        share: The number of the share.
        shares: In how many the data is divided.
        device: Where to move the batches.
        heartbeat: Ticks with each batch.

    Returns:
        By name, in float64; the number of items under `ITEMS`.
    """
    items = torch.zeros((), dtype=torch.float64, device=device)
    sums: dict[str, Tensor] = {}
    batches = eval_batches(
        data,
        batch_size=batch_size,
        dp_rank=share,
        dp_size=shares,
        device=device,
        # Where samples meet in a metric, which of them are in a batch decides what it is.
        whole_batches=may_gather(task),
    )
    with evaluating(parallel.module):
        for batch, weight in batches:
            means = parallel.forward(task.metrics, batch)
            heartbeat.ticks += 1
            if means is None:  # only the last stage of a pipeline has them
                continue
            count = torch.as_tensor(
                task.items(batch) if weight else 0, dtype=torch.float64, device=device
            )
            items += count
            for name, mean in require_metrics(means).items():
                # The mean of a padding batch may be nan, and nan times 0 is nan.
                batch_sum = torch.where(count > 0, mean.double() * count, 0.0)
                sums[name] = sums.get(name, torch.zeros_like(items)) + batch_sum
    return {ITEMS: items, **sums}


def means_of(names: Iterable[str], totals: Tensor) -> dict[str, float]:
    """The metrics as means over all items.

    Args:
        names: As `metric_sums` has them: the first is `ITEMS`.
        totals: The sum of each.
    """
    _, *metrics = names
    return dict(zip(metrics, (totals[1:] / totals[0]).tolist(), strict=True))


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those that only others are derived from, whose names begin with _."""
    return {name: value for name, value in metrics.items() if not name.startswith("_")}
