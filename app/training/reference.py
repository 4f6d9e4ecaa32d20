"""What a loss needs to know of the model before the first step, computed once for each sample.

Preference tuning compares a model with what it was before training (`Task.reference`). Where the
loss needs only a few numbers per sample of that model, they are computed by one forward over the
data, in evaluation mode and on the layout of the run, so that no second model is needed. The data
sets keep them in their attribute `reference`, and put them into batches.

They belong to the state of a run: every checkpoint has them, so that a resumed run, on any layout,
and a forked one have exactly the same numbers. A run that begins from the weights of another
(`checkpoint.load`) computes a reference of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from app.data.loader import eval_batches
from app.data.order import shares
from app.errors import UserError
from app.tasks.base import Task
from app.training.hooks import overrides
from app.training.job import Heartbeat
from strategies.parallelize import Parallel
from strategies.training_mode import evaluating


class Reference:
    """The reference of a task's data sets; without any it does nothing.

    Args:
        task: Computes the reference. If it has none, its data is not read here.
        train_data: The task's.

    Attributes:
        values: The data sets' own tensors, by `train` and `eval`, with the data's digest if it has
            one, so that a checkpoint of other data does not fit. Loading a checkpoint fills them.
    """

    def __init__(self, task: Task, train_data: Dataset[Any]) -> None:
        self.task = task
        self._data: dict[str, Dataset[Any]] = {}
        self.values: dict[str, Tensor] = {}
        if not overrides(task, "reference"):
            return
        for name, data in (("train", train_data), ("eval", task.eval_data())):
            values = getattr(data, "reference", None)
            if data is not None and isinstance(values, Tensor):
                digest = getattr(data, "digest", "")
                key = f"{name}-{digest}" if digest else name
                self._data[key] = data
                self.values[key] = values

    @torch.no_grad()
    def compute(
        self,
        parallel: Parallel,
        *,
        batch_size: int,
        data_rank: int,
        device: torch.device,
        heartbeat: Heartbeat,
    ) -> None:
        """Set the values by the model's present weights. Collective over all ranks.

        Args:
            parallel: The model under its layout.
            batch_size: Samples of a batch.
            data_rank: This rank's number among those that have different data.
            device: Where to move the batches.
            heartbeat: Ticks with each batch.

        Raises:
            UserError: A value is not finite.
        """
        if not self._data:
            return
        phase = heartbeat.phase
        heartbeat.phase = "evaluating"
        dp = parallel.layout.dims.dp
        with evaluating(parallel.module):
            for name, data in self._data.items():
                reference = self.values[name]
                # A rank that has not computed a sample's value holds -inf, so that the maximum over
                # ranks is the value, whether one rank or several have computed it.
                values = torch.full(
                    reference.shape, -torch.inf, dtype=reference.dtype, device=device
                )
                begin = shares(len(reference), dp)[data_rank].start
                batches = eval_batches(
                    data, batch_size=batch_size, dp_rank=data_rank, dp_size=dp, device=device
                )
                for batch, weight in batches:
                    rows = parallel.forward(self.task.reference, batch)
                    heartbeat.ticks += 1
                    if rows is None:  # only the last stage of a pipeline has them
                        continue
                    end = begin + int(weight)  # 0 for a batch that only takes part in collectives
                    values[begin:end] = rows[: end - begin]
                    begin = end
                if dist.is_initialized():
                    dist.all_reduce(values, dist.ReduceOp.MAX)
                reference.copy_(values)
                self._require_finite(reference, name)
        heartbeat.phase = phase

    @staticmethod
    def _require_finite(values: Tensor, name: str) -> None:
        is_finite = values.isfinite().flatten(1).all(1)
        if not is_finite.all():
            number = int(is_finite.int().argmin())
            raise UserError(
                f"before the first step the model gives {values[number].tolist()} for sample "
                f"{number} of {name}, but that must be finite, since the loss compares with it: "
                "begin from weights that are finite, or write train.precision=fp32"
            )
