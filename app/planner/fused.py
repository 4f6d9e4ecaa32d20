"""Fused operations, recorded with the memory and arithmetic that they take on a GPU.

Without a GPU, F.scaled_dot_product_attention would be recorded as the products it is made of, with
a score for every pair of positions, none of which the kernels of GPUs keep (Dao et al. 2022,
https://arxiv.org/abs/2205.14135). RMSNorm is one kernel on GPUs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from app.data.loader import map_tensors
from app.models.grouped_linear import grouped_linear


class Recorder(Protocol):
    """What records fused operations: recorder.CostRecorder."""

    def record_attention(
        self,
        *,
        flops: float,
        weight: float,
        kept_bytes: float,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None: ...
    def record_reads(self, inputs: list[Tensor]) -> None: ...
    def count(self, name: str, value: float) -> None: ...


LENGTH_HALF = 480
"""With so many keys an attention kernel runs at half of its speed on long sequences."""
WIDTH_HALF = 14
"""The same for the width of a head.

Both are read off FlashAttention-2's figures for A100 (Dao 2023, https://arxiv.org/abs/2307.08691,
figure 4): at 16,384 keys in heads of 128 it reaches 189 TFLOP/s, in heads of 64 it reaches 171, and
at 512 keys in heads of 128 it reaches 99.
"""


def attention_weight(keys: int, width: int) -> float:
    """How many times as long as at its best an attention kernel takes for a FLOP.

    Args:
        keys: The number of keys.
        width: The width of a head.
    """
    return (1 + LENGTH_HALF / keys) * (1 + WIDTH_HALF / width)


class _Attention(torch.autograd.Function):
    """Attention that saves q, k, v, the output and one number per row, as FlashAttention does."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, recorder: Recorder, keys: float, speed: float
    ) -> Tensor:
        key_width = q.shape[-1]
        value_width = v.shape[-1]
        if key_width == value_width:
            # GPUs' kernels lay the output out as q is, so that heads which were contiguous stay so.
            output = torch.empty_like(q)
        else:
            output = q.new_empty((*q.shape[:-1], value_width))
        row_sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, row_sums)
        queries = q.numel() // key_width
        flops = 2.0 * queries * keys * (key_width + value_width)
        ctx.recorder = recorder
        ctx.flops = flops
        ctx.weight = attention_weight(k.shape[-2], key_width) / speed
        recorder.record_attention(
            flops=flops,
            weight=ctx.weight,
            kept_bytes=float(output.nbytes + row_sums.nbytes),
            inputs=[q, k, v],
            outputs=[output],
        )
        recorder.record_reads([q, k, v])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        # Five products instead of two: the scores are computed again.
        ctx.recorder.record_attention(
            flops=2.5 * ctx.flops,
            weight=ctx.weight,
            kept_bytes=0.0,
            inputs=[gradient],
            outputs=list(gradients),
        )
        return *gradients, None, None, None


GROUPED = tuple(
    function
    for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function
)
"""torch's products of experts, which take no float32 fake tensors."""


def _grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Products of experts, by an operator that works under fake tensors.

    Args:
        rows: (M, K), sorted by expert.
        weights: (E, K, N).
        offs: (E,), the end of each expert's rows.

    Returns:
        (M, N)
    """
    return grouped_linear(rows, weights.transpose(1, 2), offs)


_FLOAT32_NAMES = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh
    cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1
    group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm normalize
    pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss
    softmax softmin softplus tan triplet_margin_loss
"""
AUTOCAST_TO_FLOAT32 = frozenset(_FLOAT32_NAMES.split())
"""The operations that autocast computes in float32 on a GPU, and mostly not on a CPU.

They are those of https://docs.pytorch.org/docs/stable/amp.html ("CUDA Ops that can autocast to
float32"). `sum` is left out: its result is float32, but it reads 16 bits.
"""


class Fused(TorchFunctionMode):
    """While it is active, attention and RMSNorm are recorded as single kernels.

    Products of experts run by an operator that works under fake tensors. In place of a GPU's
    autocast, which a CPU lacks, operations of `AUTOCAST_TO_FLOAT32` get float32 inside autocast.

    Args:
        recorder: Records the operations.
        on_gpu: Whether the kernels are a GPU's. On a CPU torch makes RMSNorm of several, which save
            the normalised input too, and so it does attention with dropout, which saves scores.
    """

    def __init__(self, recorder: Recorder, *, on_gpu: bool = True) -> None:
        super().__init__()
        self.recorder = recorder
        self.on_gpu = on_gpu

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in GROUPED:
            return _grouped_mm(*args, **kwargs)
        if func is F.rms_norm and self.on_gpu:
            return _rms_norm(*args, **kwargs)
        is_widened = self.on_gpu and getattr(func, "__name__", "") in AUTOCAST_TO_FLOAT32
        if is_widened and torch.is_autocast_enabled("cpu"):
            return func(*map_tensors(_widened, args), **map_tensors(_widened, kwargs))
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if dropout_p > 0 and not self.on_gpu:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        if torch.is_autocast_enabled("cpu") and query.device.type == "cpu":
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        # A kernel skips half of the scores only if causality is all that the mask says.
        skips_half = is_causal and attn_mask is None
        keys = key.shape[-2] / 2 if skips_half else key.shape[-2]
        return self._record(query, key, value, keys=keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, keys: float, speed: float) -> Tensor:
        """Attention that another kernel computes.

        Args:
            q: The queries, (B, H, T, K).
            k: The keys, of which several queries may share a head.
            v: The values.
            keys: Of how many keys the kernel computes scores for a query.
            speed: The kernel's, relative to F.scaled_dot_product_attention.
        """
        return self._record(q, k, v, keys=keys, speed=speed)

    def _record(
        self, query: Tensor, key: Tensor, value: Tensor, *, keys: float, speed: float = 1.0
    ) -> Tensor:
        self.recorder.count("queries", query.numel())
        self.recorder.count("keys", key.numel() + value.numel())
        return _Attention.apply(query, key, value, self.recorder, keys, speed)


def _widened(tensor: Tensor) -> Tensor:
    """A tensor of 16 bits as float32; any other as it is."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """One kernel, as LayerNorm is everywhere, if the types agree; otherwise what torch does."""
    if weight is None or weight.dtype == x.dtype:
        return F.layer_norm(x, shape, weight)
    return F.rms_norm(x, shape, weight, eps)
