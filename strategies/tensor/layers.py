"""What the layers of one model share that are split over workers: how their inputs come and their outputs go.

What enters a layer split by columns is gathered along the sequence, and the gradient of its weight needs it again.
Kept, it would be the one thing in a block that is not divided by R: `_Columns` keeps one's own part and gathers the
others' again, while the gradient of the input is computed (Korthikanti et al., section 4.2.2). Compiled code is told to
recompute it.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from strategies.precision import Product
from strategies.tensor import ops, overlap
from strategies.tensor.plan import Plan


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


def _as_computed(x: Tensor) -> Tensor:
    """`x` in the type that autocast computes in, if it does."""
    narrows = torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
    return x.to(torch.get_autocast_dtype(x.device.type)) if narrows else x


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
        peers: ops.Peers,
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
        source = None if self.in_halves else ops.gathered_from(whole, weight)
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
        ops.unmark(whole)
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
        return ops.mark(overlap.rows(_as_computed(x), _as_computed(weight), self.peers.group, product))

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
            return ops.Enter.apply(x, self.peers)
        if self.keeps or not torch.is_grad_enabled():
            return self._whole(x)
        if torch.compiler.is_compiling():  # it would make one of a gathering in forward and the same in backward
            return checkpoint(self._whole, x, use_reentrant=False)
        whole = self._whole(x)
        whole.gathered_from = x.detach(), functools.partial(self._gather_again, object())  # type: ignore[attr-defined]
        return whole

    def _whole(self, x: Tensor) -> Tensor:
        return ops.Gather.apply(x, self.peers, -2, x.size(-2) * self.peers.size, True)

    def _gather_again(self, which: object, own: Tensor) -> Callable[[], Tensor]:
        """Starts it in backward, once for all layers that shared it; what waits for it."""
        if self._again is None or self._again[0] is not which:
            self._again = None  # the one before is no longer needed
            self._again = (which, self.peers.start_gather(own, -2))
        return self._again[1]

    def share(self, x: Tensor) -> Tensor:
        """What every worker has alike, for a part of what is computed with it: its gradient is the workers' sum."""
        return ops.Enter.apply(x, self.peers)

    def leave(self, x: Tensor, *, whole: bool = False) -> Tensor:
        """The sum over workers, or this worker's part of it along the sequence."""
        split = self.plan.sequence and not whole
        return ops.mark(ops.Split.apply(x, self.peers, -2, True)) if split else ops.Leave.apply(x, self.peers)

    def forget(self) -> None:
        self._seen = self._entered = self._again = None
