"""Evaluation on the held-out data, shared by all data-parallel workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from app.data.loader import eval_batches

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from app.tasks.base import Task
    from strategies.compose import Parallel


@torch.no_grad()
def evaluate(
    task: Task,
    parallel: Parallel,
    data: Dataset[Any],
    batch_size: int,
    data_rank: int,
    dp: int,
    device: torch.device,
) -> dict[str, float]:
    """The task's metrics as means over all items of `data`; every rank gets the same numbers.

    Every rank runs the model equally often (sharded models need that); padding batches weigh nothing.
    """
    parallel.module.eval()
    sums: dict[str, torch.Tensor] = {}
    items = torch.zeros((), dtype=torch.float64, device=device)
    for batch, weight in eval_batches(data, batch_size=batch_size, dp_rank=data_rank, dp_size=dp, device=device):
        with parallel.micro_step(last=True), parallel.autocast():
            values = task.metrics(parallel.module, batch)
        count = torch.as_tensor(task.items(batch) if weight else 0, dtype=torch.float64, device=device)
        items += count
        for name, value in values.items():
            # A padding batch may give nan (mean over no items), and nan times 0 is nan.
            part = torch.where(count > 0, whole(value).double() * count, 0.0)
            sums[name] = sums.get(name, torch.zeros_like(items)) + part
    parallel.module.train()
    together = parallel.total(torch.stack([items, *sums.values()]))
    means = (together[1:] / together[0]).tolist()
    result = dict(zip(sums, means, strict=True))
    return result | task.derived(result)


def whole(value: torch.Tensor) -> torch.Tensor:
    """A plain tensor from one that tensor parallelism may have left distributed."""
    full_tensor = getattr(value, "full_tensor", None)
    return full_tensor() if full_tensor is not None else value
