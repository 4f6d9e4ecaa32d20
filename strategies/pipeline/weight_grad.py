"""Backward in two halves: the gradient of the input now, for which the stage before waits; those of the weights later.

For y = x·Wᵀ + b, backward is two matrix products of the same size: dx = dy·W, and dW = dyᵀ·x. Only dx is needed to go
on. While DeferredWeightGrad has a list to fill, linear layers whose weight is a parameter compute dx in backward and
note (x, dy); `finish` does the dW of one micro-batch, added into the gradients. What remains in B (norms, biases,
convolutions, whatever else has parameters) is right wherever it is: this works for any model, and pays for those made
of matrix products. Qi et al. 2023, https://arxiv.org/abs/2401.10241.

torch.distributed.pipelining splits by walking the autograd graph, which keeps all of it until W and sets gradients
past the hooks that data parallelism relies on. Here x and dy are all that waits; of an x that tensor parallelism
gathered, this worker's part.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from strategies.grad_sync import local
from strategies.tensor.ops import gathered_from


class DeferredWeightGrad(TorchFunctionMode):
    """What the backward of the modules under it leaves for `finish` is appended to `waiting`."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] | None = None
        """None: nothing is deferred."""
        self.narrow: dict[tuple[int, torch.dtype], Tensor] | None = None
        """Weights as autocast computes with them, by id; None: they are cast whenever they are used."""

    @contextlib.contextmanager
    def casting_once(self) -> Iterator[None]:
        """Within it, during which no weight changes, all micro-batches in flight share one 16-bit copy of each weight.

        Autocast remembers its own copies, but only of what it is given as a parameter. Here it would be given the
        weight without its gradient, which is found by itself."""
        self.narrow = {}
        try:
            yield
        finally:
            self.narrow = None

    def wrap(self, module: nn.Module) -> None:
        """In place, and inside of whatever recomputes the module's forward in backward.

        The mode looks at every call under it, so it is put around the modules that hold matrices, and no others.
        """
        for each in module.modules():
            if any(p.dim() > 1 for p in each.parameters(recurse=False)) and not isinstance(each, nn.Embedding):
                vars(each)["forward"] = self._under(each.forward)

    def _under(self, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def under(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return under

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = None
        if torch.is_grad_enabled() and func is F.linear:
            found = self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        parameter = _parameter(input, weight)
        if parameter is None:
            return None
        source = gathered_from(input, weight)
        x = input.to(_product_dtype(input))
        b = None if bias is None else bias.to(_product_dtype(bias))
        return _Linear.apply(x, self._narrowed(weight), b, parameter, self, *(source or (None, None)))

    def _narrowed(self, weight: Tensor) -> Tensor:
        """The weight as autocast computes with it, without a gradient of its own."""
        dtype, plain = _product_dtype(weight), weight.detach()
        if self.narrow is None or not weight.is_leaf or weight.dtype == dtype:
            return plain.to(dtype)
        key = (id(weight), dtype)
        if key not in self.narrow:
            self.narrow[key] = plain.to(dtype)
        return self.narrow[key]

    def put(self, work: Callable[[], None]) -> None:
        if self.waiting is None:
            work()
        else:
            self.waiting.append(work)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, parameter: Tensor, deferred: Any, own: Any, again: Any
    ) -> Tensor:
        ctx.save_for_backward(x if own is None else own, w)
        ctx.parameter, ctx.deferred, ctx.again = parameter, deferred, again
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = dy.matmul(w) if ctx.needs_input_grad[0] else None
        flat_dy, parameter, again = dy.flatten(0, -2), ctx.parameter, ctx.again
        db = flat_dy.sum(0) if ctx.needs_input_grad[2] else None
        ctx.deferred.put(lambda: _add(parameter, flat_dy, (x if again is None else again(x)()).flatten(0, -2)))
        return dx, None, db, None, None, None, None


@torch.no_grad()
def _add(parameter: Tensor, dy: Tensor, x: Tensor) -> None:
    """Adds dyᵀ·x to the parameter's gradient (to this worker's shard of it)."""
    own = None if parameter.grad is None else local(parameter.grad)
    if own is not None and dy.dtype == x.dtype == own.dtype:  # not the gradient of a product in bfloat16
        own.addmm_(dy.T, x)
        return
    found, dtype = dy.T @ x, parameter.grad_dtype or parameter.dtype  # type: ignore[attr-defined]
    if own is not None:
        own.add_(found)
    elif isinstance(parameter, DTensor):
        spec: dict[str, Any] = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
        found = found.to(dtype).contiguous()
        parameter.grad = DTensor.from_local(found, parameter.device_mesh, parameter.placements, **spec)
    else:
        parameter.grad = found.to(dtype)


def _parameter(input: Any, weight: Any) -> Tensor | None:
    """The parameter that the gradient of `weight` goes to; None if that is not one parameter, or is not to be deferred.

    `of_parameter`: of a slice that tensor parallelism computes with (tensor/apply.py)."""
    if type(input) is not Tensor or not isinstance(weight, Tensor) or not weight.requires_grad:
        return None
    if not input.requires_grad:  # no stage waits for its gradient, and autograd would not come by
        return None
    if weight.is_leaf:
        return weight if not isinstance(weight, DTensor) else None
    return getattr(weight, "of_parameter", None)


def _product_dtype(x: Tensor) -> torch.dtype:
    """What autocast computes products of `x` in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def finish(waiting: list[Callable[[], None]]) -> None:
    """Computes what was deferred."""
    for work in waiting:
        work()
    waiting.clear()
