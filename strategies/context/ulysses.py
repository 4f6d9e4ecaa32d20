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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.collectives import all_to_all
from strategies.context.attention import ATTENTION, GROUPS
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
    if v.size(-1) == q.size(-1):
        q, k, v = _to_heads((q, k, v), group)
    else:
        (q, k), (v,) = _to_heads((q, k), group), _to_heads((v,), group)
    out = ATTENTION(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    parts = out.unflatten(2, (ways, -1)).permute(2, 0, 3, 1, 4)  # (C, B, T/C, H/C, K): whose tokens they are
    return _all_to_all(parts, group).movedim(0, 2).flatten(2, 3).transpose(1, 2)


def _to_heads(tensors: Sequence[Tensor], group: int) -> list[Tensor]:
    """(B, H, T/C, K) of several tensors to (B, H/C, T, K). One all-to-all for all of them; in memory tokens come before
    heads, as projections give and take them."""
    parts = [x.transpose(1, 2).unflatten(2, (GROUPS[group].size(), -1)).movedim(2, 0) for x in tensors]
    whole = _all_to_all(torch.cat(parts, 3), group).movedim(0, 1).flatten(1, 2)  # (B, T, heads of all tensors, K)
    return [x.transpose(1, 2) for x in whole.split([part.size(3) for part in parts], 2)]


def _all_to_all(parts: Tensor, group: int) -> Tensor:
    """Row i to worker i; of what arrives, row i is from worker i. Backward is the same."""
    if torch.compiler.is_compiling():
        return _operator(parts, group)
    return _AllToAll.apply(parts, group)  # the operator takes several times as long on the host


def _send(parts: Tensor, group: int) -> Tensor:
    return all_to_all(parts, GROUPS[group])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: int) -> Tensor:
        ctx.group = group
        return _send(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _send(gradient, ctx.group), None


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.group = inputs[1]


_operator: Any = torch.library.custom_op("trireme::all_to_all", _send, mutates_args=())
_operator.register_fake(lambda parts, group: parts.new_empty(parts.shape))
_operator.register_autograd(lambda ctx, gradient: (_operator(gradient, ctx.group), None), setup_context=_remember)


# --- what it costs ----------------------------------------------------------------------------------------------------


def sent_bytes(query: Number, keys: Number, cp: Number, itemsize: Number) -> tuple[Number, Number]:
    """As ring.py's; where C divides the key heads."""
    once = (2 * query + keys) * itemsize * (cp - 1) / cp
    return once, once
