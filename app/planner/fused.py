"""Fused operations, watched as a GPU's memory and arithmetic see them, whatever the device.

Without a GPU, F.scaled_dot_product_attention would be the products it is made of, with a score for every pair of
positions, none of which GPUs' kernels keep (Dao et al. 2022, https://arxiv.org/abs/2205.14135). RMSNorm is one kernel
on GPUs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from app.models.grouped_linear import grouped_linear


class Watcher(Protocol):
    """What is told of fused operations: trace.py's."""

    def attended(
        self, flops: float, weight: float, kept: float, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None: ...
    def read_whole(self, given: list[Tensor]) -> None: ...
    def count(self, name: str, value: float) -> None: ...


LENGTH_HALF = 480
"""Keys at which an attention kernel runs at half of its speed on long sequences."""
WIDTH_HALF = 14
"""The same of the width of a head. Both are read off FlashAttention-2's figures for A100 (Dao 2023,
https://arxiv.org/abs/2307.08691, figure 4): of 189 TFLOP/s at 16,384 keys in heads of 128 it has 99 at 512, and of
those 171 are left in heads of 64."""


def attention_weight(keys: int, width: int) -> float:
    """How many times as long as at its best an attention kernel takes for a FLOP."""
    return (1 + LENGTH_HALF / keys) * (1 + WIDTH_HALF / width)


class _Attention(torch.autograd.Function):
    """Saves q, k, v, the output and one number per row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, watcher: Watcher, causal: bool) -> Tensor:
        # As GPUs' kernels do: laid out as q is, so that heads which lay beside each other still do.
        output = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
        rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, rows)
        products = 2.0 * (q.numel() // q.shape[-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        ctx.watcher, ctx.flops = watcher, products / 2 if causal else products
        ctx.weight = attention_weight(k.shape[-2], q.shape[-1])
        watcher.attended(ctx.flops, ctx.weight, float(output.nbytes + rows.nbytes), [q, k, v], [output])
        watcher.read_whole([q, k, v])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, _, _ = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ctx.watcher.attended(2.5 * ctx.flops, ctx.weight, 0.0, [gradient], list(gradients))
        return *gradients, None, None


GROUPED = tuple(
    function for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if function
)
"""torch's products of experts, which take no float32 tensors without numbers."""


def _grouped(rows: Tensor, weights: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """rows (M, K), sorted by expert up to `offs`, weights (E, K, N) → (M, N), by an operator that shapes can follow."""
    return grouped_linear(rows, weights.transpose(1, 2), offs)


class Fused(TorchFunctionMode):
    """While it is active, attention is the above, RMSNorm one kernel, and products of experts can be followed."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in GROUPED:
            return _grouped(*args, **kwargs)
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
