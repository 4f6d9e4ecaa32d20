"""Evaluation on the held-out data, shared by all data-parallel workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from app.checkpoint.ranks import Ranks
from app.data.loader import eval_batches

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from app.tasks.base import Task
    from app.training.job import Heartbeat
    from strategies.parallelize import Parallel


@torch.no_grad()
def evaluate(
    task: Task,
    parallel: Parallel,
    data: Dataset[Any],
    batch_size: int,
    data_rank: int,
    device: torch.device,
    heartbeat: Heartbeat,
) -> dict[str, float]:
    """The task's metrics as means over all items of `data`; every rank gets the same numbers.

    Every rank runs the model equally often (sharded models need that); padding batches weigh nothing.
    """
    parallel.module.eval()
    sums: dict[str, torch.Tensor] = {}
    items = torch.zeros((), dtype=torch.float64, device=device)
    dims = parallel.layout.dims
    for batch, weight in eval_batches(data, batch_size=batch_size, dp_rank=data_rank, dp_size=dims.dp, device=device):
        values = parallel.forward(task.metrics, batch)
        heartbeat.ticks += 1
        if values is None:  # a pipeline's last stage has them
            continue
        count = torch.as_tensor(task.items(batch) if weight else 0, dtype=torch.float64, device=device)
        items += count
        for name, value in values.items():
            # A padding batch may give nan (mean over no items), and nan times 0 is nan.
            part = torch.where(count > 0, value.double() * count, 0.0)
            sums[name] = sums.get(name, torch.zeros_like(items)) + part
    parallel.module.train()
    result: dict[str, float] | None = None
    if parallel.has_loss:
        together = parallel.total(torch.stack([items, *sums.values()]))
        result = dict(zip(sums, (together[1:] / together[0]).tolist(), strict=True))
    if dims.pp > 1:  # the ranks with the loss tell the others
        result = next(found for found in Ranks().all(result) if found is not None)
    assert result is not None
    return result | task.derived(result)
