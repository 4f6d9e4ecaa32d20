"""What the split layers of one model share: how their inputs are gathered and their outputs summed.

The input of a layer that is split by columns is gathered along the sequence, and the gradient of
its weight needs the gathered input again. If it were kept until backward, it would be the one thing
in a block that is not divided by the number of workers. So only the worker's own part is kept, and
the other parts are gathered again in backward, while the gradient of the input is computed
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). Compiled code is told to recompute the
gathering.
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


def _as_computed(x: Tensor) -> Tensor:
    """The tensor in the type in which autocast computes, if it does."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.is_floating_point():
        return x.to(torch.get_autocast_dtype(device_type))
    return x


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
        self._keeps_gathered = keeps_gathered
        self._splits_backward = splits_backward
        self._shares_narrow_weights = shares_narrow_weights
        self._narrow_weights: dict[nn.Module, Tensor] = {}
        """The matrices of layers in the type of autocast, until the end of the step."""
        self._last_input: weakref.ref[Tensor] | None = None
        """The input that was gathered last."""
        self._last_gathered: Tensor | None = None
        """What became of it."""
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
            return self._columns_while_gathering(x, weight, bias, product=product)
        return self._columns_of_gathered(self.enter(x), weight, bias, product=product)

    def _columns_of_gathered(
        self, gathered: Tensor, weight: Tensor, bias: Tensor | None, *, product: type[Product]
    ) -> Tensor:
        source = None if self._splits_backward else ops.gather_source(gathered, weight)
        if source is None:
            return product.forward(gathered, weight, bias)
        if torch.is_autocast_enabled(gathered.device.type):
            # Backward multiplies in this type too, which autocast does not see to.
            weight = weight.to(gathered.dtype)
            bias = None if bias is None else bias.to(gathered.dtype)
        return _ColumnsOfGathered.apply(
            gathered, source.own_part, source.start_gather, weight, bias, product
        )

    @torch.compiler.disable
    def _columns_while_gathering(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, product: type[Product]
    ) -> Tensor:
        """As `columns`; the first layer that is called with `x` gathers it while it multiplies."""
        if self._last_gathered is not None and self._is_last_input(x):
            return self._columns_of_gathered(self._last_gathered, weight, bias, product=product)
        own_part = _as_computed(x)
        start_gather = None
        if not self._keeps_gathered:
            start_gather = functools.partial(self._gather_again, object())
        gathered, y = overlap.columns(
            own_part,
            _as_computed(weight),
            None if bias is None else _as_computed(bias),
            group=self.peers.group,
            product=product,
            start_gather=start_gather,
        )
        ops.mark_alike(gathered)
        if start_gather is not None:
            ops.set_gather_source(gathered, own_part.detach(), start_gather)
        self._last_input = weakref.ref(x)
        self._last_gathered = gathered
        return y

    def enter(self, x: Tensor) -> Tensor:
        """The whole input of a layer that is split by columns.

        Layers that are called with the same input one after another share one gathering.
        """
        if torch.compiler.is_compiling():
            return self.gather(x)
        if self._last_gathered is None or not self._is_last_input(x):
            self._last_input = weakref.ref(x)
            self._last_gathered = self.gather(x)
        return self._last_gathered

    def _is_last_input(self, x: Tensor) -> bool:
        return self._last_input is not None and self._last_input() is x

    def gather(self, x: Tensor) -> Tensor:
        """An activation as split layers take it: gathered along the sequence if that is split.

        It is cast to the type in which they compute before it is sent, so that 16 bits are sent.
        """
        x = _as_computed(x)
        if not self.plan.splits_sequence:
            return ops.enter(x, self.peers)
        if self._keeps_gathered or not torch.is_grad_enabled():
            return ops.gather_sequence(x, self.peers)
        if torch.compiler.is_compiling():
            # A second gathering in backward the compiler would merge with that of forward.
            gather = functools.partial(ops.gather_sequence, peers=self.peers)
            return checkpoint(gather, x, use_reentrant=False)
        gathered = ops.gather_sequence(x, self.peers)
        start_gather = functools.partial(self._gather_again, object())
        ops.set_gather_source(gathered, x.detach(), start_gather)
        return gathered

    def _gather_again(self, key: object, own_part: Tensor) -> Callable[[], Tensor]:
        """Start gathering in backward, once for all layers that have shared the gathering `key`.

        Returns:
            A function that waits for the gathered tensor.
        """
        if self._regathering is None or self._regathering[0] is not key:
            self._regathering = None  # frees the one before, which is no longer needed
            self._regathering = (key, self.peers.start_gather(own_part, -2))
        return self._regathering[1]

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
            return self._rows_while_scattering(x, weight, product=product)
        return self.leave(product.forward(x, weight, None))

    @torch.compiler.disable
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
        """A tensor that all workers have alike, of which each computes a part of the gradient."""
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
        self._last_input = None
        self._last_gathered = None
        self._regathering = None

    def forget_narrow_weights(self) -> None:
        """Let go of copies of matrices, which the optimizer is about to change."""
        self._narrow_weights.clear()
