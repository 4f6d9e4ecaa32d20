"""Several linear layers of one input as one operation; and the type that products are computed in.

    yᵢ = x·Wᵢᵀ        ∂x = Σᵢ ∂yᵢ·Wᵢ        ∂Wᵢ = ∂yᵢᵀ·x

On its own each layer casts x for itself and keeps what it has cast, and autograd writes each term of ∂x, casts it back
and adds them up. Together x is cast and kept once, and each product of ∂x is added to the one before as it is written
(addmm). One product with all weights in one matrix would read x less often still, but a product is bound by its
arithmetic; and backward would first copy all ∂yᵢ into one tensor, which moves more than is spared, and keep q and k
from before they are turned for as long as v (experiments/LOG.md). So weights stay parameters of their own, under their
own names.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def product_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes `x` in: autocast's type within it, else its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def is_plain(layer: nn.Module) -> bool:
    """Whether it is a linear layer that nothing has changed: whole here, and computing as torch does."""
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def linears(x: Tensor, layers: Sequence[nn.Module], fused: bool) -> Iterable[Tensor]:
    """(…, D) → each layer's (…, out).

    fused: together, but where a compiler fuses by itself, and where a layer has a bias or computes in a way of its own
    (split over workers, in float8, its weight's gradient put off).
    """
    if (
        not fused
        or torch.compiler.is_compiling()
        or not all(is_plain(layer) and layer.bias is None for layer in layers)
    ):
        return [layer(x) for layer in layers]
    dtype = product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        return _Linears.apply(x.to(dtype), *(layer.weight.to(dtype) for layer in layers))  # type: ignore[operator]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left·right, in place; total is float32, the others may have 16 bits.

    On a GPU the product itself adds to `total`. Written out in 16 bits first, it would be rounded, and both be read
    once more.
    """
    if total.is_cuda and torch.version.hip is None and left.dtype in (torch.bfloat16, torch.float16):
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
        rows, slopes = x.flatten(0, -2), [gradient.flatten(0, -2) for gradient in gradients]
        to_x = slopes[0] @ weights[0]
        for slope, weight in zip(slopes[1:], weights[1:]):
            torch.addmm(to_x, slope, weight, out=to_x)
        return to_x.view_as(x), *(slope.t() @ rows for slope in slopes)
