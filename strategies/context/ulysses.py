"""Ulysses: from a part of the sequence with all heads to the whole sequence with a part of the heads, and back.

Attention is the one place where tokens meet, and its heads do not. So before it an all-to-all sends each worker the
heads that are its own, of all tokens; every worker runs ordinary attention on H/C heads; a second all-to-all brings the
results back to where the tokens live:

    (B, H, T/C, K)  →  all-to-all  →  (B, H/C, T, K)  →  attention  →  all-to-all  →  (B, H, T/C, K)

An all-to-all is a permutation, so its backward is the all-to-all back. Each worker sends (C-1)/C of its q, k, v and o
whatever C is: per token less than a ring from C = 3 on (with as many key as query heads), but with nothing to hide it
behind. Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.

Choose it within a node and where C divides the heads: attention is one call of torch's own kernel on the whole
sequence, so there is nothing to join, and any order of tokens is even work. Key heads that C does not divide are
repeated as far as needed.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from strategies.context.attention import GROUPS
from strategies.costs import Number
from strategies.dims import LayoutError

ZIGZAG = False
HIDDEN = False


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: int) -> Tensor:
    """This worker's part (B, H, T/C, K) of the attention of all T tokens; shapes as attention.py's. group: its number.

    Raises:
        LayoutError: heads that the workers do not divide."""
    ways = GROUPS[group].size()
    if q.size(1) % ways:
        raise LayoutError(
            f"parallel.context=ulysses splits heads over parallel.cp={ways}, which does not divide the {q.size(1)} "
            "heads of a worker: write parallel.context=ring"
        )
    if k.size(1) % ways:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    grouped = k.size(1) != q.size(1)
    q, k, v = _exchange([q, k, v], True, group)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return _exchange([out], False, group)[0]


@torch.library.custom_op("trireme::exchange", mutates_args=())
def _exchange(tensors: list[Tensor], to_heads: bool, group: int) -> list[Tensor]:
    """(B, H, T/C, K) of several tensors to (B, H/C, T, K), or back. One all-to-all for all of them."""
    ways, (cut, joined) = GROUPS[group].size(), (1, 2) if to_heads else (2, 1)
    parts = [torch.stack(x.chunk(ways, cut)) for x in tensors]  # (C, B, H/C, T/C, K): whose they will be
    sent = torch.cat([part.flatten(1) for part in parts], 1)
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=GROUPS[group])
    columns = arrived.split([part[0].numel() for part in parts], 1)
    return [torch.cat(x.view(p.shape).unbind(0), joined).contiguous() for x, p in zip(columns, parts)]


@_exchange.register_fake
def _shapes(tensors: list[Tensor], to_heads: bool, group: int) -> list[Tensor]:
    ways, (cut, joined) = GROUPS[group].size(), (1, 2) if to_heads else (2, 1)
    return [torch.cat([x.chunk(ways, cut)[0]] * ways, joined).contiguous() for x in tensors]


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.to_heads, ctx.group = inputs[1:]


def _exchange_back(ctx: Any, gradients: Any) -> Any:
    return _exchange(gradients, not ctx.to_heads, ctx.group), None, None


_exchange.register_autograd(_exchange_back, setup_context=_remember)


# --- what it costs ----------------------------------------------------------------------------------------------------


def sent_bytes(query: Number, keys: Number, cp: Number, itemsize: Number) -> tuple[Number, Number]:
    """As ring.py's; where C divides the key heads."""
    once = (2 * query + keys) * itemsize * (cp - 1) / cp
    return once, once
