"""The collectives inside a layer that is split over workers, each with its conjugate for backward.

Megatron-LM's operators (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, figure 3; along the sequence:
Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, figure 5). Where forward copies, backward sums, and the
other way round:

    operator            forward                        backward
    enter      (f)      the input as it is             all-reduce
    leave      (g)      all-reduce                     as it is
    gather_features     all-gather the last dim        keep one's own part
    gather_sequence     all-gather along the sequence  reduce-scatter
    scatter_sequence    reduce-scatter                 all-gather along the sequence
    split_sequence      keep one's own part            all-gather along the sequence

Activations are (…, sequence, features). Parts are those of torch.chunk: equal, rounded up, the last ones smaller.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.dims import LayoutError
from strategies.torch_internals import functional_collectives

_all_reduce, _all_gather, _reduce_scatter, _ = functional_collectives()


class Peers:
    """The workers that one layer is split over, and this worker's place among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size: int = group.size()
        self.rank: int = group.rank()

    def bounds(self, length: int) -> tuple[int, int]:
        """First and one-past-last index of this worker's part."""
        part = -(-length // self.size)
        return min(length, part * self.rank), min(length, part * (self.rank + 1))

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        return _all_reduce(x.contiguous(), operation, self.group)

    def part(self, x: Tensor, dim: int) -> Tensor:
        start, end = self.bounds(x.size(dim))
        return x.narrow(dim, start, end - start)

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        """The parts of all, along `dim`, `length` in all."""
        part = -(-length // self.size)
        if x.size(dim) < part:  # the last parts are smaller
            shape = list(x.shape)
            shape[dim] = part - x.size(dim)
            x = torch.cat([x, x.new_zeros(shape)], dim)
        whole = _all_gather(x.contiguous(), self.group)
        parts = whole.chunk(self.size, 0)
        if dim % x.dim() == 0 and part * self.size == length:
            return whole
        return torch.cat(parts, dim).narrow(dim, 0, length)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This worker's part, along `dim`, of the sum over all."""
        if x.size(dim) % self.size:
            raise LayoutError(
                f"parallel.tp is {self.size}, which does not divide the sequence of {x.size(dim)}: choose a length it "
                "divides, or write parallel.sequence_parallel=false"
            )
        stacked = torch.cat(x.chunk(self.size, dim), 0) if dim % x.dim() else x
        return _reduce_scatter(stacked.contiguous(), self.group)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.all_reduce(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return peers.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """All-gather; backward keeps one's own part, or sums the parts of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int, length: int, summed: bool) -> Tensor:
        ctx.peers, ctx.dim, ctx.summed = peers, dim, summed
        return peers.all_gather(x, dim, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.summed:
            return ctx.peers.reduce_scatter(gradient, ctx.dim), None, None, None, None
        return ctx.peers.part(gradient, ctx.dim).contiguous(), None, None, None, None


class _Split(torch.autograd.Function):
    """Keeps one's own part, of the sum over all or of what all have; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int, summed: bool) -> Tensor:
        ctx.peers, ctx.dim, ctx.length = peers, dim, x.size(dim)
        return peers.reduce_scatter(x, dim) if summed else peers.part(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.all_gather(gradient, ctx.dim, ctx.length), None, None, None


def enter(x: Tensor, peers: Peers) -> Tensor:
    return _Enter.apply(x, peers)


def leave(x: Tensor, peers: Peers) -> Tensor:
    return _Leave.apply(x, peers)


def gather_features(x: Tensor, peers: Peers, length: int) -> Tensor:
    return _Gather.apply(x, peers, -1, length, False)


def gather_sequence(x: Tensor, peers: Peers) -> Tensor:
    return _Gather.apply(x, peers, -2, x.size(-2) * peers.size, True)


def scatter_sequence(x: Tensor, peers: Peers) -> Tensor:
    return _Split.apply(x, peers, -2, True)


def split_sequence(x: Tensor, peers: Peers) -> Tensor:
    if x.size(-2) % peers.size:
        peers.reduce_scatter(x, -2)  # says what is wrong
    return _Split.apply(x, peers, -2, False)
