"""Fused operations as memory and arithmetic see them, whatever the device that a model is watched on.

Without a GPU, F.scaled_dot_product_attention would be watched as the products it is made of, with a score for every
pair of positions; GPUs (and CPUs) have kernels that keep none of them. Dao et al. 2022, https://arxiv.org/abs/2205.14135.
A softmax of 16-bit numbers that is asked for in float32 is one operation on GPUs, a cast and an operation elsewhere.
RMSNorm is one kernel on GPUs, too, and is counted as one everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Count = Callable[[float, float], None]
"""Is told the FLOPs of an attention, and the bytes of its results."""


class _Attention(torch.autograd.Function):
    """Saves q, k, v, the output and one number per row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, count: Count, causal: bool) -> Tensor:
        output = q.new_empty((*q.shape[:-1], v.shape[-1]))
        rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, rows)
        products = 2.0 * (q.numel() // q.shape[-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        ctx.count, ctx.flops = count, products / 2 if causal else products
        count(ctx.flops, float(output.nbytes + rows.nbytes))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, _, _ = ctx.saved_tensors
        ctx.count(2.5 * ctx.flops, 0.0)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


class _RmsNorm(torch.autograd.Function):
    """Saves its input, its weight and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x + x.new_zeros(1)  # any one operation that reads and writes as much

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return gradient + x, None if weight is None else gradient.flatten(0, -2).sum(0)


class Fused(TorchFunctionMode):
    """While it is active, attention and RMSNorm are the above, and softmax(dtype=…) is one operation."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        widens = func in (F.softmax, F.log_softmax) and kwargs.get("dtype") is torch.float32 and args[0].itemsize == 2
        if widens and not torch.is_grad_enabled():  # any one operation that reads and writes as much
            return args[0] + args[0].new_zeros((*args[0].shape[:-1], 1), dtype=torch.float32)
        if func is F.rms_norm:
            return _norm(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu") and q.device.type == "cpu":
            q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        return _Attention.apply(q, k, v, self.count, is_causal and attn_mask is None)


def _norm(func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel where the last dimension is normalised and types agree; else what torch does."""
    alike = weight is None or (weight.dtype == x.dtype and weight.dim() == 1)
    return _RmsNorm.apply(x, weight) if alike and x.dim() > 1 and len(shape) == 1 else func(x, shape, weight, eps)
