"""The collectives inside a layer that is split over workers, each with its conjugate for backward.

Megatron-LM's operators (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, figure 3; along the sequence:
Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, figure 5). Where forward copies, backward sums, and the
other way round:

    operator            forward                        backward
    enter      (f)      the input as it is             all-reduce
      of a sequence     all-gather along the sequence  reduce-scatter
    leave      (g)      all-reduce                     as it is
      of a sequence     reduce-scatter                 all-gather along the sequence
    gather_features     all-gather the last dim        keep one's own part
    split_sequence      keep one's own part            all-gather along the sequence

Activations are (…, sequence, features). Parts are those of torch.chunk: equal, rounded up, the last ones smaller.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.dims import LayoutError
from strategies.torch_internals import all_gather_into, functional_collectives

_all_reduce, _all_gather, _reduce_scatter, _ = functional_collectives()

StartGather = Callable[[Tensor], Callable[[], Tensor]]
"""Starts gathering again, from this worker's part; returns what waits for the whole."""
MARK = "is_split_over_peers"
"""The attribute of a tensor of which workers have different parts (randomness.py)."""


def mark(x: Tensor) -> Tensor:
    """The tensor, known as one of which workers have different parts."""
    if not torch.compiler.is_compiling():
        setattr(x, MARK, True)
    return x


def unmark(x: Tensor) -> Tensor:
    """The tensor, known as one that all workers have alike."""
    if not torch.compiler.is_compiling():
        setattr(x, MARK, False)
    return x


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

    def choices(self, chosen: Tensor, own: int) -> tuple[Tensor, Tensor]:
        """Which of the chosen experts are among this worker's `own`, for whose number the host waits; and as which."""
        local = chosen - self.rank * own
        mine = ((local >= 0) & (local < own)).nonzero().squeeze(1)
        return mine, local.index_select(0, mine)

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
        return self._joined(_all_gather(x.contiguous(), self.group), dim, length)

    def _joined(self, whole: Tensor, dim: int, length: int) -> Tensor:
        if dim % whole.dim() == 0 and whole.size(0) == length:
            return whole
        joined = torch.cat(whole.chunk(self.size, 0), dim)
        if joined.size(dim) == length:
            return joined
        return joined.narrow(dim, 0, length).clone()  # the model may write into it, which autograd refuses for a view

    def start_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """As `all_gather` of equal parts, in the background; what waits for it."""
        x = x.contiguous()
        whole = x.new_empty((self.size * x.size(0), *x.shape[1:]))
        work = all_gather_into(whole, x, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return self._joined(whole, dim, self.size * x.size(dim))

        return finish

    def require_divided(self, length: int) -> None:
        """Raises LayoutError unless a sequence of this length can be split."""
        if length % self.size:
            raise LayoutError(
                f"parallel.tp is {self.size}, which does not divide the sequence of {length}: choose a length it "
                "divides, or write parallel.sequence_parallel=false"
            )

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This worker's part, along `dim`, of the sum over all."""
        self.require_divided(x.size(dim))
        stacked = torch.cat(x.chunk(self.size, dim), 0) if dim % x.dim() else x
        return _reduce_scatter(stacked.contiguous(), self.group)


class ShapePeers(Peers):
    """Peers that are not there: every collective gives a tensor of the right shape, and notes what it would send."""

    def __init__(self, ways: int) -> None:
        self.size, self.rank = ways, 0
        self.where: Callable[[], str] = str
        """Names the part of the model that is at work."""
        self.sent: dict[str, float] = defaultdict(float)
        """Bytes that one of them sends by ring algorithms, by part."""
        self.calls: dict[str, int] = defaultdict(int)
        self.again: dict[str, float] = defaultdict(float)
        """Bytes that gathering again saves, by part."""

    def _note(self, whole: Tensor, factor: float) -> None:
        """A collective whose whole tensor is `whole`; rings send factor × (ways - 1) / ways of it."""
        self.sent[self.where()] += factor * whole.numel() * whole.element_size() * (self.size - 1) / self.size
        self.calls[self.where()] += 1

    def choices(self, chosen: Tensor, own: int) -> tuple[Tensor, Tensor]:
        mine = torch.arange(-(-chosen.numel() // self.size), device=chosen.device)  # as many as the others
        return mine, chosen.index_select(0, mine) % own

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        self._note(x, 2)
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = length
        whole = x.new_empty(shape)
        self._note(whole, 1)
        return whole

    def start_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        whole = self.all_gather(x, dim, self.size * x.size(dim))
        self.again[self.where()] += whole.nbytes - x.nbytes
        return lambda: whole

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._note(x, 1)
        shape = list(x.shape)
        shape[dim] //= self.size
        return x.new_empty(shape)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return unmark(x.view_as(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.all_reduce(gradient), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return unmark(peers.all_reduce(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Gather(torch.autograd.Function):
    """All-gather; backward keeps one's own part, or sums the parts of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int, length: int, summed: bool) -> Tensor:
        ctx.peers, ctx.dim, ctx.summed = peers, dim, summed
        return unmark(peers.all_gather(x, dim, length))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.summed:
            return ctx.peers.reduce_scatter(gradient, ctx.dim), None, None, None, None
        return ctx.peers.part(gradient, ctx.dim).contiguous(), None, None, None, None


class Split(torch.autograd.Function):
    """Keeps one's own part, of the sum over all or of what all have; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int, summed: bool) -> Tensor:
        ctx.peers, ctx.dim, ctx.length = peers, dim, x.size(dim)
        return peers.reduce_scatter(x, dim) if summed else peers.part(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.all_gather(gradient, ctx.dim, ctx.length), None, None, None


def gather_features(x: Tensor, peers: Peers, length: int) -> Tensor:
    return Gather.apply(x, peers, -1, length, False)


def split_sequence(x: Tensor, peers: Peers) -> Tensor:
    peers.require_divided(x.size(-2))
    return mark(Split.apply(x, peers, -2, False))


def gathered_from(x: Tensor, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], Callable[[], Tensor]]] | None:
    """Of a gathered input, this worker's part, and what starts gathering it again from that; None where the gradient of
    `weight` will not need it, or it is to be kept."""
    if torch.compiler.is_compiling() or not (weight.requires_grad and torch.is_grad_enabled()):
        return None
    return getattr(x, "gathered_from", None)
