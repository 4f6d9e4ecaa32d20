"""Sending tokens to the workers that have their experts, and the results back.

Worker j of R has the E/R experts from number j·E/R on. Each of a worker's N tokens, of D elements,
chose k experts, so that the worker has N·k rows to compute:

    step                     sends            what it does
    sort the rows by expert                   rows for one worker are then next to each other
    all-to-all of counts     E elements       tells each worker how many rows come for each expert
    all-to-all of rows       N·k·D elements   sends the rows to their experts, in uneven sizes
    the model's own experts                   compute each row like a token with one choice
    all-to-all of results    N·k·D elements   sends the results back to where the rows came from
    weighted sum                              y = Σₖ weightₖ · resultₖ, in the order of the tokens

Experts have no capacity: no row is padded or dropped. Backward makes the same two exchanges of rows
in the other direction. The router's weights are not sent, so its gradient is computed where the
token is. Lepikhin et al. 2020, arXiv 2006.16668; without capacities: Gale et al. 2022, arXiv
2211.15841.

The host has to know the sizes, so it waits for the counts once in each layer and forward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.collectives import all_to_all
from strategies.mixtures import apply_experts, permute_rows, sorted_by_expert

ComputeExperts = Callable[..., Tensor]
"""(rows (M, D), expert of each row (M, 1), weights (M, 1), which may be left out) → (M, D)."""


class Exchange:
    """Computes tokens by experts that are split over workers."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        """Describe the workers.

        Args:
            group: The workers.
            experts: Number of experts of all of them.
        """
        self.group = group
        self.size = group.size()
        self.own_experts = experts // self.size
        self.passes_weights = True
        """Whether the experts' code has to be given weights."""

    def __call__(
        self, compute: ComputeExperts, x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """What the chosen experts make of this worker's tokens. Collective over the workers.

        Args:
            compute: Computes rows by this worker's experts, whose numbers start at 0.
            x: (…, D), the tokens.
            index: (…, k), the experts that each token chose.
            weights: (…, k).

        Returns:
            (…, D).
        """
        tokens = x.flatten(0, -2)
        if torch.is_autocast_enabled(x.device.type):
            # Cast before they are sent, so that 16 bits are sent.
            tokens = tokens.to(torch.get_autocast_dtype(x.device.type))
        experts = self.size * self.own_experts
        order, place, counts = sorted_by_expert(index.flatten(), experts)
        arriving_counts = all_to_all(counts, self.group)
        by_worker = torch.stack([counts, arriving_counts]).view(2, self.size, self.own_experts)
        sent, received = by_worker.sum(2).tolist()  # the host waits
        rows = permute_rows(tokens, order, place, repeats=index.size(-1))
        arrived = _AllToAll.apply(rows, sent, received, self.group)
        results = self._compute_arrived(compute, arrived, arriving_counts)
        returned = _AllToAll.apply(results, received, sent, self.group)
        y = permute_rows(returned, place, order).view(*index.shape, -1)
        return (y * weights.unsqueeze(-1)).sum(-2).to(x.dtype)

    def _compute_arrived(self, compute: ComputeExperts, rows: Tensor, counts: Tensor) -> Tensor:
        """What this worker's experts make of the rows that have arrived.

        Args:
            compute: As in `__call__`.
            rows: Sorted by the worker that they come from, and then by expert.
            counts: (workers · own experts,), how many rows each worker sent for each expert.
        """
        experts = torch.arange(self.own_experts, device=rows.device).repeat(self.size)
        index = experts.repeat_interleave(counts, output_size=len(rows))
        weights = rows.new_ones(len(rows)) if self.passes_weights else None
        return apply_experts(compute, rows, index=index, weights=weights)


class _AllToAll(torch.autograd.Function):
    """Sends `sent[j]` consecutive rows to worker j, and receives `received[j]` rows from it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        return all_to_all(rows, group, send_counts=sent, receive_counts=received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        of_rows = all_to_all(gradient, ctx.group, send_counts=ctx.received, receive_counts=ctx.sent)
        return of_rows, None, None, None


def exchanged_bytes(tokens: int, top_k: int, width: int, itemsize: int) -> int:
    """The bytes of a layer's four exchanges of a micro-batch: two in forward, two in backward.

    A recomputed block has half as many more. If experts are chosen equally often, (R - 1)/R of the
    bytes go to other workers, and a worker's experts get as many.

    Args:
        tokens: Number of a worker's tokens.
        top_k: Number of experts that each token chooses.
        width: D.
        itemsize: Bytes of an element.
    """
    return 4 * tokens * top_k * width * itemsize
