"""Collectives of torch.distributed that several strategies send in the same way."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.torch_internals import reduce_scatter_into


def all_to_all(
    rows: Tensor,
    group: dist.ProcessGroup,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
) -> Tensor:
    """Exchanges rows between the workers of a group. Collective over `group`.

    Args:
        rows: (rows, …) of this worker, those for the first worker first.
        group: The workers.
        send_counts: How many consecutive rows go to each worker. None: the same number to each.
        receive_counts: How many rows come from each worker: this worker's entry in that worker's
            `send_counts`. None: the same number from each.

    Returns:
        The rows that have arrived, those from the first worker first.
    """
    arriving = len(rows) if receive_counts is None else sum(receive_counts)
    arrived = torch.empty((arriving, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    dist.all_to_all_single(
        arrived,
        rows.contiguous(),
        output_split_sizes=None if receive_counts is None else list(receive_counts),
        input_split_sizes=None if send_counts is None else list(send_counts),
        group=group,
    )
    return arrived


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Starts to sum a tensor over the workers of a group, each of which gets a part of the sum.

    Collective over the group.

    Args:
        output: (n / workers,), where this worker's part of the sum is written.
        input: (n,) of this worker.
        group: The workers.

    Returns:
        What to wait for; None if this worker is not in the group.
    """
    return reduce_scatter_into(output, input, group=group, async_op=True)
