"""Backward in two halves: the gradient of the input first, the gradients of the weights later.

For y = x·Wᵀ + b, backward is two matrix products of the same size: dx = dy·W and dW = dyᵀ·x. The
stage before waits for dx only. So linear layers whose weight is a parameter compute dx in backward
(B) and keep (x, dy); `finish` computes dW later (W) and adds it to the gradient. The gradients of
everything else, such as norms, biases and convolutions, are computed in B. So this is right for any
model, and helps those that consist mostly of matrix products. The idea is from Qi et al. 2023,
arXiv 2401.10241.

torch.distributed.pipelining splits backward by walking the autograd graph. That keeps all of the
graph until W, and sets gradients without calling the hooks that data parallelism relies on. Here
only x and dy are kept, and of an x that tensor parallelism has gathered only this worker's part.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from strategies.grad_sync import local
from strategies.tensor.ops import StartGather, gather_source, parameter_of

Work = Callable[[], None]
"""Computes the gradient of one weight for one micro-batch."""


class DeferredWeightGrad(TorchFunctionMode):
    """Defers the gradients of the weights of the modules that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred: list[Work] | None = None
        """Where the work goes; None: it is done at once."""
        self._narrow_weights: dict[tuple[int, torch.dtype], Tensor] | None = None
        """Copies of weights in the type of autocast, by the weight's id; None: none are kept."""

    @contextlib.contextmanager
    def deferring_to(self, work: list[Work]) -> Iterator[None]:
        """Append what backward defers to `work`, which `finish` then does."""
        self._deferred = work
        try:
            yield
        finally:
            self._deferred = None

    @contextlib.contextmanager
    def casting_once(self) -> Iterator[None]:
        """Let all micro-batches in flight share one 16-bit copy of each weight.

        Inside, no weight may change. Autocast keeps copies of its own, but only of parameters; here
        it would be given the weight detached from the graph, because its gradient is computed by
        `finish`.
        """
        self._narrow_weights = {}
        try:
            yield
        finally:
            self._narrow_weights = None

    def wrap(self, module: nn.Module) -> None:
        """Let a module's linear layers defer, in place.

        To be called before activation checkpointing replaces the module's forward. The mode sees
        every call of torch inside it, which takes time, so it is put around only those modules that
        have matrices of their own.
        """
        for layer in module.modules():
            has_matrix = any(p.dim() > 1 for p in layer.parameters(recurse=False))
            if has_matrix and not isinstance(layer, nn.Embedding):
                vars(layer)["forward"] = self._in_mode(layer.forward)

    def _in_mode(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def forward_in_mode(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return forward_in_mode

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and func is F.linear:
            output = self._linear(*args, **kwargs)
            if output is not None:
                return output
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """F.linear with a deferred gradient of the weight; None if it is not to be deferred.

        The arguments have the names that F.linear gives them.
        """
        parameter = _deferrable_parameter(input, weight)
        if parameter is None:
            return None
        own_input: Tensor | None = None
        start_gather: StartGather | None = None
        source = gather_source(input, weight)
        if source is not None:
            own_input, start_gather = source
        return _Linear.apply(
            input.to(_product_dtype(input)),
            self._narrow(weight),
            None if bias is None else bias.to(_product_dtype(bias)),
            parameter,
            self,
            own_input,
            start_gather,
        )

    def _narrow(self, weight: Tensor) -> Tensor:
        """The weight in the type of the product, detached."""
        dtype = _product_dtype(weight)
        detached = weight.detach()
        if self._narrow_weights is None or not weight.is_leaf or weight.dtype == dtype:
            return detached.to(dtype)
        key = (id(weight), dtype)
        if key not in self._narrow_weights:
            self._narrow_weights[key] = detached.to(dtype)
        return self._narrow_weights[key]

    def defer(self, work: Work) -> None:
        """Keep work for later, or do it at once if nothing is deferred."""
        if self._deferred is None:
            work()
        else:
            self._deferred.append(work)


class _Linear(torch.autograd.Function):
    """x·Wᵀ + b whose backward computes dx and db, and defers dW.

    If x was gathered, only this worker's part of it (`own_x`) is kept, and `start_gather` gathers
    it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameter: Tensor,
        deferred: DeferredWeightGrad,
        own_x: Tensor | None,
        start_gather: StartGather | None,
    ) -> Tensor:
        ctx.save_for_backward(x if own_x is None else own_x, weight)
        ctx.parameter = parameter
        ctx.deferred = deferred
        ctx.start_gather = start_gather
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        parameter = ctx.parameter
        start_gather = ctx.start_gather
        flat_dy = dy.flatten(0, -2)

        def add_weight_gradient() -> None:
            whole_x = x if start_gather is None else start_gather(x)()
            _add_gradient(parameter, flat_dy, whole_x.flatten(0, -2))

        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        db = flat_dy.sum(0) if ctx.needs_input_grad[2] else None
        ctx.deferred.defer(add_weight_gradient)
        return dx, None, db, None, None, None, None


@torch.no_grad()
def _add_gradient(parameter: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add dyᵀ·x to a parameter's gradient, or to this worker's shard of it.

    Args:
        parameter: (out, in).
        dy: (rows, out).
        x: (rows, in).
    """
    gradient = None if parameter.grad is None else local(parameter.grad)
    if gradient is not None and dy.dtype == x.dtype == gradient.dtype:
        # One operation does both. With a bfloat16 product and a float32 gradient there is none.
        gradient.addmm_(dy.T, x)
        return
    product = dy.T @ x
    dtype = parameter.grad_dtype or parameter.dtype  # type: ignore[attr-defined]
    if gradient is not None:
        gradient.add_(product)
    elif isinstance(parameter, DTensor):
        parameter.grad = DTensor.from_local(
            product.to(dtype).contiguous(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = product.to(dtype)


def _deferrable_parameter(input: object, weight: object) -> Tensor | None:
    """The parameter that the gradient of `weight` goes to.

    Returns:
        None if the weight is not one parameter or its gradient is not to be deferred.
    """
    if type(input) is not Tensor or not isinstance(weight, Tensor) or not weight.requires_grad:
        return None
    if not input.requires_grad:
        # No stage waits for the input's gradient, and autograd would not call backward.
        return None
    if weight.is_leaf:
        return weight if not isinstance(weight, DTensor) else None
    return parameter_of(weight)  # of the part that a split layer computes with


def _product_dtype(x: Tensor) -> torch.dtype:
    """The type in which autocast computes products of `x`."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def finish(deferred: list[Work]) -> None:
    """Do the work that backward has deferred, and empty the list."""
    for work in deferred:
        work()
    deferred.clear()
