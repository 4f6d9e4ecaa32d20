"""Several linear layers of one input as one operation, and the type that products are computed in.

    yᵢ = x·Wᵢᵀ        ∂x = Σᵢ ∂yᵢ·Wᵢ        ∂Wᵢ = ∂yᵢᵀ·x

Under autocast each layer on its own casts x and keeps the copy, and autograd writes each term of
∂x, casts it back and adds the terms up. Together the layers cast and keep x once, and each product
of ∂x is added to the one before as it is written (addmm).

One product with all weights in one matrix would read x less often still, but a product is bound by
its arithmetic. Backward would have to copy all ∂yᵢ into one tensor first, which moves more bytes
than are saved, and q and k before their rotation would be kept for as long as v
(experiments/LOG.md). So weights stay parameters of their own, under their own names.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which a linear layer computes: autocast's inside it, otherwise that of x."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def is_plain(layer: nn.Module) -> bool:
    """Whether it is an unchanged linear layer: not split, and computing as torch does."""
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def linears(x: Tensor, layers: Sequence[nn.Module], fused: bool) -> Iterable[Tensor]:
    """The outputs of several linear layers.

    Args:
        x: (…, D), the input of all of them.
        layers: The layers.
        fused: Whether to compute them as one operation. They are not fused while torch compiles,
            which fuses by itself, or if a layer has a bias or computes in a way of its own (split
            over workers, in float8, with the gradient of its weight deferred).

    Returns:
        (…, out) of each layer.
    """
    if not fused or torch.compiler.is_compiling() or not _can_fuse(layers):
        return [layer(x) for layer in layers]
    dtype = product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        weights = [layer.weight.to(dtype) for layer in layers]  # type: ignore[operator]
        return _Linears.apply(x.to(dtype), *weights)


def _can_fuse(layers: Sequence[nn.Module]) -> bool:
    return all(is_plain(layer) and layer.bias is None for layer in layers)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left · right, in place.

    On a GPU the product itself adds to `total`. A product in 16 bits would be rounded first, and
    both tensors read once more.

    Args:
        total: (M, N), float32.
        left: (M, K), of float32 or 16 bits.
        right: (K, N), of the same type.
    """
    is_16_bit = left.dtype in (torch.bfloat16, torch.float16)
    if total.is_cuda and torch.version.hip is None and is_16_bit:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.flatten(0, -2)
        row_gradients = [gradient.flatten(0, -2) for gradient in gradients]
        x_gradient = row_gradients[0] @ weights[0]
        for gradient, weight in zip(row_gradients[1:], weights[1:]):
            torch.addmm(x_gradient, gradient, weight, out=x_gradient)
        weight_gradients = [gradient.t() @ rows for gradient in row_gradients]
        return x_gradient.view_as(x), *weight_gradients
