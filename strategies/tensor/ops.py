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

What enters a layer split by columns is gathered along the sequence, and the gradient of its weight needs it again.
Kept, it would be the one thing in a block that is not divided by R: `_Columns` keeps one's own part and gathers the
others' again, while the gradient of the input is computed (Korthikanti et al., section 4.2.2). Compiled code is told to
recompute it.

Activations are (…, sequence, features). Parts are those of torch.chunk: equal, rounded up, the last ones smaller.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from strategies.dims import LayoutError
from strategies.precision import Product
from strategies.tensor import overlap
from strategies.tensor.plan import Plan
from strategies.torch_internals import all_gather_into, functional_collectives

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
        return torch.cat(whole.chunk(self.size, 0), dim).narrow(dim, 0, length)

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


class _Columns(torch.autograd.Function):
    """x·Wᵀ + b of a gathered x, of which backward has only one's `own` part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor, again: Callable[[Tensor], Any], weight: Tensor, bias: Any, product: Any
    ) -> Tensor:
        ctx.save_for_backward(own, weight)
        ctx.again, ctx.product = again, product
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor | None, None]:
        own, weight = ctx.saved_tensors
        gathered = ctx.again(own)
        of_x = ctx.product.of_input(gradient, weight) if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
        return of_x, None, None, ctx.product.of_weight(gradient, gathered()), of_bias, None


def gather_features(x: Tensor, peers: Peers, length: int) -> Tensor:
    return _Gather.apply(x, peers, -1, length, False)


def split_sequence(x: Tensor, peers: Peers) -> Tensor:
    peers.require_divided(x.size(-2))
    return _Split.apply(x, peers, -2, False)


def _as_computed(x: Tensor) -> Tensor:
    """`x` in the type that autocast computes in, if it does."""
    narrows = torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
    return x.to(torch.get_autocast_dtype(x.device.type)) if narrows else x


def gathered_from(x: Tensor, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], Callable[[], Tensor]]] | None:
    """Of a gathered input, this worker's part, and what starts gathering it again from that; None where the gradient of
    `weight` will not need it, or it is to be kept."""
    if torch.compiler.is_compiling() or not (weight.requires_grad and torch.is_grad_enabled()):
        return None
    return getattr(x, "gathered_from", None)


class SplitLayers:
    """What the split layers of one model share. mesh: None where the workers are only supposed (`apply.one_part`).

    keeps: until backward, the gathered input of layers split by columns. in_halves: backward is
    (pipeline/weight_grad.py), and each half is told what was gathered by `gathered_from`. in_flight: several micro-
    batches are, which share what autocast makes of a matrix. overlaps: what linear layers send goes in pieces beside
    their products (overlap.py)."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        plan: Plan,
        loss_parallel: bool,
        peers: Peers,
        *,
        keeps: bool = False,
        in_halves: bool = False,
        in_flight: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.in_flight = in_flight
        self.narrow: dict[nn.Module, Tensor] = {}
        """The matrices of layers in 16 bits, until the step's end."""
        self.overlaps = overlaps and plan.sequence
        self.mesh, self.plan, self.loss_parallel, self.peers = mesh, plan, loss_parallel, peers
        self.keeps, self.in_halves = keeps, in_halves
        self._seen: weakref.ref[Tensor] | None = None
        self._entered: Tensor | None = None
        self._again: tuple[object, Callable[[], Tensor]] | None = None
        """The gathering that backward did last, and what waits for its result."""

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None, gathered: bool, product: type[Product]) -> Tensor:
        """x·Wᵀ + b of a layer split by columns. gathered: `x` is whole already."""
        if self.overlaps and not gathered:
            return self._columns_beside(x, weight, bias, product)
        return self._columns_of(x if gathered else self.enter(x), weight, bias, product)

    def _columns_of(self, whole: Tensor, weight: Tensor, bias: Tensor | None, product: type[Product]) -> Tensor:
        source = None if self.in_halves else gathered_from(whole, weight)
        if source is None:
            return product.forward(whole, weight, bias)
        if torch.is_autocast_enabled(whole.device.type):
            weight, bias = weight.to(whole.dtype), None if bias is None else bias.to(whole.dtype)
        return _Columns.apply(whole, *source, weight, bias, product)

    @torch.compiler.disable
    def _columns_beside(self, x: Tensor, weight: Tensor, bias: Tensor | None, product: type[Product]) -> Tensor:
        """The same, the first layer that is called with `x` gathering it beside its product."""
        if self._entered is not None and self._seen is not None and self._seen() is x:
            return self._columns_of(self._entered, weight, bias, product)
        own = _as_computed(x)
        weight, bias = _as_computed(weight), None if bias is None else _as_computed(bias)
        again = None if self.keeps else functools.partial(self._gather_again, object())
        whole, y = overlap.columns(own, weight, bias, self.peers.group, product, again)
        if again is not None:
            whole.gathered_from = own.detach(), again  # type: ignore[attr-defined]
        self._seen, self._entered = weakref.ref(x), whole
        return y

    def rows(self, x: Tensor, weight: Tensor, product: type[Product]) -> Tensor:
        """What `leave` makes of x·Wᵀ, of a layer split by rows."""
        return self._rows_beside(x, weight, product) if self.overlaps else self.leave(product.forward(x, weight, None))

    @torch.compiler.disable
    def _rows_beside(self, x: Tensor, weight: Tensor, product: type[Product]) -> Tensor:
        self.peers.require_divided(x.size(-2))
        return overlap.rows(_as_computed(x), _as_computed(weight), self.peers.group, product)

    def narrowed(self, layer: nn.Module, weight: Tensor) -> Tensor:
        """A layer's matrix as autocast computes with it. Of a parameter autocast itself remembers that; this is a part
        of one."""
        narrows = self.in_flight and torch.is_grad_enabled() and torch.is_autocast_enabled(weight.device.type)
        if not narrows or torch.compiler.is_compiling():
            return weight
        narrow = self.narrow.get(layer)
        if narrow is None:
            narrow = _as_computed(weight)
            narrow.of_parameter = getattr(weight, "of_parameter", None)  # type: ignore[attr-defined]
            self.narrow[layer] = narrow
        return narrow

    def enter(self, x: Tensor) -> Tensor:
        """The whole input of a layer split by columns. Layers called with the same input share one gathering."""
        if torch.compiler.is_compiling():
            return self.gather(x)
        if self._entered is None or self._seen is None or self._seen() is not x:
            self._seen, self._entered = weakref.ref(x), self.gather(x)
        return self._entered

    def gather(self, x: Tensor) -> Tensor:
        """`x` for split layers, in the type that they compute in: cast before it is sent, so that 16 bits are sent."""
        x = _as_computed(x)
        if not self.plan.sequence:
            return _Enter.apply(x, self.peers)
        if self.keeps or not torch.is_grad_enabled():
            return self._whole(x)
        if torch.compiler.is_compiling():  # it would make one of a gathering in forward and the same in backward
            return checkpoint(self._whole, x, use_reentrant=False)
        whole = self._whole(x)
        whole.gathered_from = x.detach(), functools.partial(self._gather_again, object())  # type: ignore[attr-defined]
        return whole

    def _whole(self, x: Tensor) -> Tensor:
        return _Gather.apply(x, self.peers, -2, x.size(-2) * self.peers.size, True)

    def _gather_again(self, which: object, own: Tensor) -> Callable[[], Tensor]:
        """Starts it in backward, once for all layers that shared it; what waits for it."""
        if self._again is None or self._again[0] is not which:
            self._again = None  # the one before is no longer needed
            self._again = (which, self.peers.start_gather(own, -2))
        return self._again[1]

    def share(self, x: Tensor) -> Tensor:
        """What every worker has alike, for a part of what is computed with it: its gradient is the workers' sum."""
        return _Enter.apply(x, self.peers)

    def leave(self, x: Tensor, *, whole: bool = False) -> Tensor:
        """The sum over workers, or this worker's part of it along the sequence."""
        split = self.plan.sequence and not whole
        return _Split.apply(x, self.peers, -2, True) if split else _Leave.apply(x, self.peers)

    def forget(self) -> None:
        self._seen = self._entered = self._again = None
