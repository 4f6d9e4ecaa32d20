"""FlexAttention of the `transformers` library in a trace, as the kernel that torch compiles of it.

Models whose attention has sinks (gpt-oss) have no attention of F.scaled_dot_product_attention: by
default the library keeps their scores in memory. With `task_args.attention=flex_attention` torch
compiles a kernel that keeps none (Dong et al. 2024, https://arxiv.org/abs/2412.05496). What the
library does there needs a GPU, so that a trace has the kernel's costs in place of it:

    FLOPs       of the blocks of 128 × 128 scores that the mask does not leave out: half of all if
                each token sees all before it, a band of blocks under a sliding window
    afterwards  each row times 1 / (1 + exp(sink - log of the row's sum)), which sinks come to
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

NAME = "flex_attention"
"""What the library calls it, in `task_args.attention` too."""
BLOCK = 128
"""Queries, and keys, of a block of scores that the kernel computes or leaves out as a whole."""
SHARE_OF_FLASH = 0.86
"""Its speed relative to FlashAttention-2, forward and backward together.

"90 % of FlashAttention2's performance in the forward pass and 85 % in the backward pass"
(https://pytorch.org/blog/flexattention/), of which backward has five products and forward two.
"""


class FusedAttention(Protocol):
    """What records the kernel: fused.Fused."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, keys: float, speed: float) -> Tensor: ...


@contextlib.contextmanager
def traced_flex_attention(fused: FusedAttention) -> Iterator[None]:
    """While it is active, the library's FlexAttention is recorded instead of computed.

    Args:
        fused: Records it.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        is_causal = getattr(module, "is_causal", True)
        keys = computed_keys(key.shape[-2], sliding_window, is_causal=is_causal)
        output = fused.attend(query, key, value, keys=keys, speed=SHARE_OF_FLASH)
        if s_aux is not None:
            row_sums = output.new_empty(*output.shape[:-1], 1)
            output = output * torch.sigmoid(row_sums - s_aux.view(1, -1, 1, 1)).to(output.dtype)
        return output.transpose(1, 2).contiguous(), None

    def no_mask(*_: Any, **__: Any) -> None:
        """The kernel reads which blocks to compute, of which there are few."""

    attention = AttentionInterface()[NAME]
    mask = AttentionMaskInterface()[NAME]
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, no_mask)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)


def computed_keys(length: int, window: int | None, *, is_causal: bool) -> float:
    """Of how many keys the kernel computes scores for a query, on average over the queries.

    Args:
        length: The number of keys, which is that of queries.
        window: The number of keys that a query sees; None for all.
        is_causal: Whether a query sees no keys after it.
    """
    keys = float(length)
    if is_causal:
        keys = (length + BLOCK) / 2
    if window is not None:
        # A block of queries sees the last ones of a further block of keys.
        sides = 1 if is_causal else 2
        keys = min(keys, sides * window + BLOCK)
    return min(keys, float(length))
