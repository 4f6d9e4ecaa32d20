"""What the split layers of one model share: how their inputs are gathered and their outputs summed.

The input of a layer that is split by columns is gathered along the sequence, and the gradient of
its weight needs the gathered input again. If it were kept until backward, it would be the one thing
in a block that is not divided by the number of workers. So only the worker's own part is kept, and
the other parts are gathered again in backward, while the gradient of the input is computed
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). Compiled code is made to recompute the
gathering.

Layers that are called with one input (queries, keys and values; gate and up) share its gathering in
forward, and one sum of their gradients in backward. The backward of the first one comes last: it
adds the others' gradients to its own, starts to sum over workers, and multiplies for its weight's
gradient meanwhile.
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

StartSum = Callable[[Tensor], Callable[[], Tensor]]
"""Starts a sum over workers of what each has; returns a function that waits for it."""


class _ColumnsOfGathered(torch.autograd.Function):
    """x·Wᵀ + b of a gathered x, which backward gathers again from this worker's part."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        own_part: Tensor,
        start_gather: ops.StartGather,
        weight: Tensor,
        bias: Tensor | None,
        product: type[Product],
    ) -> Tensor:
        ctx.save_for_backward(own_part, weight)
        ctx.start_gather = start_gather
        ctx.product = product
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, None, None, Tensor, Tensor | None, None]:
        own_part, weight = ctx.saved_tensors
        wait_for_x = ctx.start_gather(own_part)
        of_x = ctx.product.input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
        of_weight = ctx.product.weight_gradient(gradient, wait_for_x())
        return of_x, None, None, of_weight, of_bias, None


class _FirstColumns(torch.autograd.Function):
    """(entered, entered·Wᵀ + b) of the first layer that is called with an input.

    `entered` is the input x of all workers, without a gradient of its own: that of the result is
    what other layers add. Backward gathers it again from x, or keeps it without `start_gather`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        entered: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: type[Product],
        start_sum: StartSum,
        start_gather: ops.StartGather | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(entered if start_gather is None else x, weight)
        ctx.product = product
        ctx.start_sum = start_sum
        ctx.start_gather = start_gather
        ctx.set_materialize_grads(False)
        return entered.view_as(entered), product.forward(entered, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, of_entered: Tensor | None, of_y: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        wait_for_x: Callable[[], Tensor] | None = None
        if ctx.start_gather is not None and of_y is not None and needs_weight:
            wait_for_x = ctx.start_gather(x)
        total = of_entered
        if of_y is not None and needs_x:
            total = ctx.product.input_gradient(of_y, weight)
            if of_entered is not None:
                total = total + of_entered
        wait_for_sum: Callable[[], Tensor] | None = None
        if needs_x and total is not None:
            wait_for_sum = ctx.start_sum(total)
        of_weight = None
        of_bias = None
        if of_y is not None and needs_weight:
            entered = x if wait_for_x is None else wait_for_x()
            of_weight = ctx.product.weight_gradient(of_y, entered)
        if of_y is not None and needs_bias:
            of_bias = of_y.flatten(0, -2).sum(0)
        of_x = None if wait_for_sum is None else wait_for_sum()
        return of_x, None, of_weight, of_bias, None, None, None


class _SharedInput:
    """The input that a split layer was called with last, and what became of it.

    Attributes:
        entered: The whole input as it has entered layers, by whether it is stacked (ops.py).
    """

    def __init__(self) -> None:
        self._input: Any = None
        self.entered: dict[bool, Tensor] = {}

    def is_of(self, x: Tensor) -> bool:
        """Whether `x` is that input."""
        if torch.compiler.is_compiling():
            return self._input is x
        return self._input is not None and self._input() is x

    def begin(self, x: Tensor) -> None:
        """Note another input."""
        # A graph ends before anything is kept for long, and cannot have weak references.
        self._input = x if torch.compiler.is_compiling() else weakref.ref(x)
        self.entered = {}

    def forget(self) -> None:
        """Let go of it."""
        self._input = None
        self.entered = {}


def _as_computed(x: Tensor) -> Tensor:
    """The tensor in the type in which autocast computes, if it does."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.is_floating_point():
        return x.to(torch.get_autocast_dtype(device_type))
    return x


def _as_types_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The parameters of a layer in the type of its input, if autocast would cast them.

    Backward multiplies in this type too, which autocast does not see to.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return weight, bias
    return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)


def _rearranged(
    start_gather: ops.StartGather, change: Callable[[Tensor], Tensor]
) -> ops.StartGather:
    """Gathers as `start_gather` does, and changes the order of rows."""

    def start(own_part: Tensor) -> Callable[[], Tensor]:
        wait = start_gather(own_part)
        return lambda: change(wait())

    return start


class SplitLayers:
    """What the split layers of one model share."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        plan: Plan,
        peers: ops.Peers,
        *,
        loss_parallel: bool,
        keeps_gathered: bool = False,
        splits_backward: bool = False,
        shares_narrow_weights: bool = False,
        overlaps: bool = False,
    ) -> None:
        """Describe how the layers compute.

        Args:
            mesh: The workers that layers are split over; None without processes (`one_part`).
            plan: Which module is split how.
            peers: The same workers.
            loss_parallel: Whether logits stay split for the loss.
            keeps_gathered: Whether gathered inputs are kept until backward.
            splits_backward: Whether backward is in two halves (pipeline/weight_grad.py), which look
                up themselves what was gathered.
            shares_narrow_weights: Whether micro-batches that are in flight at the same time share
                the copies of matrices in the type of autocast.
            overlaps: Whether linear layers send in pieces while they multiply (overlap.py).
        """
        self.mesh = mesh
        self.plan = plan
        self.peers = peers
        self.loss_parallel = loss_parallel
        self.overlaps = overlaps and plan.splits_sequence
        self._overlapped_columns = self._columns_while_gathering
        self._overlapped_rows = self._rows_while_scattering
        if self.overlaps:
            # `disable` imports torch's compiler, 0.7 s, which a run without these can do without.
            self._overlapped_columns = torch.compiler.disable(self._columns_while_gathering)
            self._overlapped_rows = torch.compiler.disable(self._rows_while_scattering)
        self._keeps_gathered = keeps_gathered
        self._splits_backward = splits_backward
        self._shares_narrow_weights = shares_narrow_weights
        self._narrow_weights: dict[nn.Module, Tensor] = {}
        """The matrices of layers in the type of autocast, until the end of the step."""
        self._shared = _SharedInput()
        self._traced = _SharedInput()
        """The same while a block is compiled; it is cleared after each block."""
        self._regathering: tuple[object, Callable[[], Tensor]] | None = None
        """The gathering that backward started last: its key, and what waits for its result."""

    # --- layers split by columns ------------------------------------------------------------------

    def columns(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        is_gathered: bool,
        product: type[Product],
    ) -> Tensor:
        """x·Wᵀ + b of a layer that is split by columns.

        Args:
            x: (…, S, K), or this worker's part of it along the sequence.
            weight: (N/R, K).
            bias: (N/R,).
            is_gathered: Whether `x` has been gathered for a module around the layer.
            product: How it multiplies.

        Returns:
            (…, S, N/R).
        """
        if is_gathered:
            return self._columns_of_gathered(x, weight, bias, product=product)
        if self.overlaps:
            return self._overlapped_columns(x, weight, bias, product=product)
        # If the product makes rows shorter, reordering them afterwards costs less.
        stacks = self._stacks(x) and weight.size(0) <= weight.size(1)
        shared = self._current_input()
        if shared.is_of(x):
            entered = self._entered(x, is_stacked=stacks)
            y = self._columns_of_gathered(entered, weight, bias, product=product)
        elif self._is_plain():
            entered = self.enter(x, is_stacked=stacks)
            y = self._columns_of_gathered(entered, weight, bias, product=product)
        else:
            y = self._first_columns(x, weight, bias, product=product, stacks=stacks)
        return self.peers.unstack(y) if stacks else y

    def _stacks(self, x: Tensor) -> bool:
        return self.plan.splits_sequence and x.dim() > 2

    def _is_plain(self) -> bool:
        """Whether autograd, or the code that defers gradients, must see the product itself."""
        # The compiler would keep until backward what an autograd.Function has gathered.
        is_traced = torch.compiler.is_compiling()
        return self._splits_backward or not torch.is_grad_enabled() or is_traced

    def _current_input(self) -> _SharedInput:
        return self._traced if torch.compiler.is_compiling() else self._shared

    def _columns_of_gathered(
        self, gathered: Tensor, weight: Tensor, bias: Tensor | None, *, product: type[Product]
    ) -> Tensor:
        source = None if self._splits_backward else ops.gather_source(gathered, weight)
        if source is None:
            return product.forward(gathered, weight, bias)
        weight, bias = _as_types_of(gathered, weight, bias)
        return _ColumnsOfGathered.apply(
            gathered, source.own_part, source.start_gather, weight, bias, product
        )

    def _first_columns(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        product: type[Product],
        stacks: bool,
    ) -> Tensor:
        """As `columns`, of the first layer that is called with `x`; others may follow."""
        own_part = _as_computed(x)
        weight, bias = _as_types_of(own_part, weight, bias)
        start_gather: ops.StartGather | None = None
        with torch.no_grad():
            if self.plan.splits_sequence:
                entered, start_gather = self._gathered_once(own_part.detach(), is_stacked=stacks)
            else:
                entered = own_part.detach()
        entered, y = _FirstColumns.apply(
            own_part,
            entered,
            weight,
            bias,
            product,
            functools.partial(self._start_sum, stacks),
            start_gather,
        )
        ops.mark_replicated(entered)
        if start_gather is not None:
            ops.set_gather_source(entered, own_part.detach(), start_gather)
        shared = self._current_input()
        shared.begin(x)
        shared.entered[stacks] = entered
        return y

    def _gathered_once(
        self, own_part: Tensor, *, is_stacked: bool
    ) -> tuple[Tensor, ops.StartGather | None]:
        """The whole input, and what gathers it again if it is not to be kept until backward."""
        entered = self._gather_in(own_part, is_stacked=is_stacked)
        if self._keeps_gathered:
            return entered, None
        return entered, functools.partial(self._gather_again, object(), is_stacked)

    def _gather_in(self, own_part: Tensor, *, is_stacked: bool) -> Tensor:
        stacked = ops.gather_stacked(own_part, self.peers)
        return stacked if is_stacked else ops.mark_replicated(self.peers.unstack(stacked))

    def _start_sum(self, is_stacked: bool, total: Tensor) -> Callable[[], Tensor]:
        """Start to sum the gradient of an input that has entered over workers."""
        if not self.plan.splits_sequence:
            return self.peers.start_all_reduce(total)
        return self.peers.start_reduce_scatter(total if is_stacked else self.peers.stack(total))

    def _columns_while_gathering(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, product: type[Product]
    ) -> Tensor:
        """As `columns`; the first layer that is called with `x` gathers it while it multiplies."""
        if self._shared.is_of(x):
            entered = self._entered(x, is_stacked=False)
            return self._columns_of_gathered(entered, weight, bias, product=product)
        own_part = _as_computed(x)
        start_gather = None
        if not self._keeps_gathered:
            start_gather = functools.partial(self._gather_again, object(), False)
        gathered, y = overlap.columns(
            own_part,
            _as_computed(weight),
            None if bias is None else _as_computed(bias),
            group=self.peers.group,
            product=product,
            start_gather=start_gather,
        )
        ops.mark_replicated(gathered)
        if start_gather is not None:
            ops.set_gather_source(gathered, own_part.detach(), start_gather)
        self._shared.begin(x)
        self._shared.entered[False] = gathered
        return y

    def enter(self, x: Tensor, *, is_stacked: bool = False) -> Tensor:
        """The whole input of a layer that is split by columns.

        Layers that are called with the same input one after another share one gathering.

        Args:
            x: The input, or this worker's part of it along the sequence.
            is_stacked: Whether the parts are to lie one after another (ops.py).
        """
        shared = self._current_input()
        if not shared.is_of(x):
            entered = self.gather(x, is_stacked=is_stacked)
            shared.begin(x)
            shared.entered[is_stacked] = entered
        return self._entered(x, is_stacked=is_stacked)

    def _entered(self, x: Tensor, *, is_stacked: bool) -> Tensor:
        """The shared input in one of the two orders of rows."""
        entered = self._current_input().entered
        if is_stacked not in entered:
            other = entered[not is_stacked]
            change = self.peers.stack if is_stacked else self.peers.unstack
            changed = ops.mark_replicated(change(other))
            source = getattr(other, "gather_source", None)
            if source is not None:
                ops.set_gather_source(
                    changed, source.own_part, _rearranged(source.start_gather, change)
                )
            entered[is_stacked] = changed
        return entered[is_stacked]

    def gather(self, x: Tensor, *, is_stacked: bool = False) -> Tensor:
        """An activation as split layers take it: gathered along the sequence if that is split.

        It is cast to the type in which they compute before it is sent, so that 16 bits are sent.
        """
        x = _as_computed(x)
        if not self.plan.splits_sequence:
            return ops.enter(x, self.peers)
        if self._keeps_gathered or not torch.is_grad_enabled():
            return self._gather_in(x, is_stacked=is_stacked)
        if torch.compiler.is_compiling():
            # The compiler would merge a second gathering in backward with that of forward.
            gather = functools.partial(self._gather_in, is_stacked=is_stacked)
            return checkpoint(gather, x, use_reentrant=False)
        gathered = self._gather_in(x, is_stacked=is_stacked)
        start_gather = functools.partial(self._gather_again, object(), is_stacked)
        ops.set_gather_source(gathered, x.detach(), start_gather)
        return gathered

    def _gather_again(
        self, key: object, is_stacked: bool, own_part: Tensor
    ) -> Callable[[], Tensor]:
        """Start gathering in backward, once for all layers that have shared the gathering `key`.

        Returns:
            A function that waits for the gathered tensor.
        """
        if self._regathering is None or self._regathering[0] is not key:
            self._regathering = None  # frees the one before, which is no longer needed
            self._regathering = (key, self.peers.start_gather(own_part, 0))
        wait = self._regathering[1]
        return wait if is_stacked else lambda: self.peers.unstack(wait())

    # --- layers split by rows ---------------------------------------------------------------------

    def rows(self, x: Tensor, weight: Tensor, *, product: type[Product]) -> Tensor:
        """x·Wᵀ, summed over workers, of a layer that is split by rows.

        Args:
            x: (…, S, K/R).
            weight: (N, K/R).
            product: How it multiplies.

        Returns:
            (…, S, N), or this worker's part of it along the sequence.
        """
        if self.overlaps:
            return self._overlapped_rows(x, weight, product=product)
        if not self._stacks(x) or weight.size(1) > weight.size(0):
            return self.leave(product.forward(x, weight, None))
        # If the product makes rows longer, reordering them before it costs less.
        y = product.forward(self.peers.stack(x), weight, None)
        return ops.scatter_stacked(y, self.peers)

    def _rows_while_scattering(
        self, x: Tensor, weight: Tensor, *, product: type[Product]
    ) -> Tensor:
        self.peers.require_divides(x.size(-2))
        own_part = overlap.rows(
            _as_computed(x), _as_computed(weight), group=self.peers.group, product=product
        )
        return ops.mark_split(own_part)

    def leave(self, x: Tensor, *, keeps_whole: bool = False) -> Tensor:
        """The sum over workers, or this worker's part of it along the sequence.

        Args:
            x: What this worker adds.
            keeps_whole: Whether the sum stays whole even if the sequence is split.
        """
        if self.plan.splits_sequence and not keeps_whole:
            return ops.scatter_sequence(x, self.peers)
        return ops.leave(x, self.peers)

    # --- both -------------------------------------------------------------------------------------

    def share(self, x: Tensor) -> Tensor:
        """A tensor that is the same on all workers; each computes a term of its gradient."""
        return ops.enter(x, self.peers)

    def narrow_weight(self, layer: nn.Module, weight: Tensor) -> Tensor:
        """A layer's matrix in the type of autocast, if copies of it are shared.

        Autocast remembers the copies it makes of parameters, but this is a part of one.
        """
        is_cast = torch.is_grad_enabled() and torch.is_autocast_enabled(weight.device.type)
        if not self._shares_narrow_weights or not is_cast or torch.compiler.is_compiling():
            return weight
        narrow = self._narrow_weights.get(layer)
        if narrow is None:
            narrow = _as_computed(weight)
            ops.set_parameter(narrow, ops.parameter_of(weight))
            self._narrow_weights[layer] = narrow
        return narrow

    def forget_inputs(self) -> None:
        """Let go of gathered inputs; to be called after forward and after backward."""
        self._shared.forget()
        self._regathering = None

    def forget_traced(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a block that will be compiled; it clears what tracing has kept."""

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self._traced.forget()
            return output

        return call

    def share_within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a block that may be recomputed, whose layers share no input with others.

        In backward blocks run again in another order. A layer would then find its input shared that
        was the first one with it in forward, or the other way round, and save other tensors.
        """

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._shared.forget()
            try:
                return forward(*args, **kwargs)
            finally:
                self._shared.forget()

        return call

    def forget_narrow_weights(self) -> None:
        """Let go of copies of matrices, which the optimizer is about to change."""
        self._narrow_weights.clear()
