"""Fused operations, watched as a GPU's memory and arithmetic see them, whatever the device.

Without a GPU, F.scaled_dot_product_attention would be the products it is made of, with a score for every pair of
positions, none of which GPUs' kernels keep (Dao et al. 2022, https://arxiv.org/abs/2205.14135). RMSNorm is one kernel
on GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from app.planner.trace import Watcher


class _Attention(torch.autograd.Function):
    """Saves q, k, v, the output and one number per row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, watcher: Watcher, causal: bool) -> Tensor:
        output = q.new_empty((*q.shape[:-1], v.shape[-1]))
        rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, rows)
        products = 2.0 * (q.numel() // q.shape[-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        ctx.watcher, ctx.flops = watcher, products / 2 if causal else products
        watcher.attended(ctx.flops, float(output.nbytes + rows.nbytes))
        watcher.read_whole([q, k, v])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, _, _ = ctx.saved_tensors
        ctx.watcher.attended(2.5 * ctx.flops, 0.0)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


class Fused(TorchFunctionMode):
    """While it is active, attention is the above, and RMSNorm one kernel."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return (_norm if func is F.rms_norm else func)(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu") and query.device.type == "cpu":
            query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
        self.watcher.count("queries", query.numel())
        self.watcher.count("keys", key.numel() + value.numel())
        return _Attention.apply(query, key, value, self.watcher, is_causal and attn_mask is None)


def _norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel, as a LayerNorm is everywhere, where types agree; else what torch does."""
    alike = weight is None or weight.dtype == x.dtype
    return F.layer_norm(x, shape, weight) if alike else F.rms_norm(x, shape, weight, eps)
