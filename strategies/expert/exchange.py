"""Sending tokens to the workers that have their experts, and the results back.

Of E experts worker j of R has E/R: those from j·E/R on. A worker's N tokens chose k experts each, so it has N·k rows:

    sort rows by expert                          so that what goes to one worker lies together
    all-to-all of counts      E numbers          how many rows each worker sends for each of one's experts
    all-to-all of rows        N·k·D numbers      uneven: as many as were chosen
    the model's own experts, over what arrived   as if each row were a token with one choice, of weight 1
    all-to-all of results     back the same way, to the rows' own places; y = Σₖ weightₖ · resultₖ

No expert has a capacity: nothing is padded, nothing dropped. Backward is the same two exchanges the other way round.
Weights stay at home, so the router's gradient does too. Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668; without
capacities: Gale et al. 2022, https://arxiv.org/abs/2211.15841.

The sizes have to be known to the host, which waits for the counts once per layer and forward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.collectives import all_to_all
from strategies.mixtures import computed, sorted_by_expert, spread

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Experts: rows, indices, weights → rows."""


class Exchange:
    """Computes with experts that are split over the workers of `group`, `count` in all; collective in every call.
    unweighted: their code can be called without weights."""

    def __init__(self, group: dist.ProcessGroup, count: int, unweighted: bool = False) -> None:
        self.group = group
        self.size = group.size()
        self.own = count // self.size
        self.unweighted = unweighted

    def __call__(self, compute: Compute, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """(…, D), (…, k), (…, k) → (…, D). compute: this worker's experts, by indices from 0."""
        chosen, rows = index.flatten(), x.flatten(0, -2)
        if torch.is_autocast_enabled(x.device.type):  # before it is sent, so that 16 bits are sent
            rows = rows.to(torch.get_autocast_dtype(x.device.type))
        order, place, counts = sorted_by_expert(chosen, self.size * self.own)
        arriving = all_to_all(counts, self.group)
        sizes = torch.stack([counts, arriving]).view(2, self.size, self.own).sum(2).tolist()
        arrived = _AllToAll.apply(spread(rows, order, place, index.size(-1)), *sizes, self.group)
        results = _AllToAll.apply(self._computed(compute, arrived, arriving), *reversed(sizes), self.group)
        y = spread(results, place, order).view(*index.shape, -1)
        return (y * weights.unsqueeze(-1)).sum(-2).to(x.dtype)

    def _computed(self, compute: Compute, rows: Tensor, counts: Tensor) -> Tensor:
        """counts: (workers · own experts,), how many rows came from each worker for each expert."""
        experts, arrived = torch.arange(self.own, device=rows.device).repeat(self.size), len(rows)
        index = experts.repeat_interleave(counts, output_size=arrived)
        return computed(compute, rows, index, None if self.unweighted else rows.new_ones(arrived))


class _AllToAll(torch.autograd.Function):
    """Sends `gives[j]` consecutive rows to worker j, and gets `takes[j]` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gives: list[int], takes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.gives = gives
        ctx.takes = takes
        ctx.group = group
        return all_to_all(rows, group, gives=gives, takes=takes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, ctx.group, gives=ctx.takes, takes=ctx.gives), None, None, None


def exchanged_bytes(tokens: int, top_k: int, width: int, itemsize: int) -> int:
    """Bytes that a worker's tokens are in one layer's four exchanges of one micro-batch: there and back, in forward and
    backward; a block that is recomputed has half as many more. With even use (R - 1)/R of them go to other workers;
    what a worker gets for its experts is as much on average."""
    return 4 * tokens * top_k * width * itemsize
