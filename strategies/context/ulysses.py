"""Ulysses: exchange a part of the sequence with all heads for the whole sequence with some heads.

Attention combines tokens, but never heads. So before it, an all-to-all gives each worker all tokens
of some heads. Every worker runs ordinary attention on H/C heads, and a second all-to-all sends the
results back to the workers of the tokens:

    (B, H, T/C, K)  →  all-to-all  →  (B, H/C, T, K)  →  attention  →  all-to-all  →  (B, H, T/C, K)

An all-to-all is a permutation, so its backward is the reverse all-to-all. Each worker sends (C-1)/C
of its q, k, v and o. With as many key heads as query heads, this is less than a ring sends from
C = 3 on, but no computation hides it. Jacobs et al. 2023, arXiv 2309.14509.

Choose it within a node if C divides the heads: attention is one call of torch's own kernel for the
whole sequence, so nothing has to be joined, and any order of tokens is even work. Key heads that C
does not divide are repeated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.collectives import all_to_all
from strategies.context.attention import ATTENTION, ContextMethod, registered_group
from strategies.costs import Number
from strategies.dims import LayoutError


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, group: int
) -> Tensor:
    workers = registered_group(group).size()
    query_heads = q.size(1)
    if query_heads % workers:
        raise LayoutError(
            f"parallel.context=ulysses splits heads over parallel.cp={workers}, which does not "
            f"divide the {query_heads} heads of a worker: write parallel.context=ring"
        )
    if k.size(1) % workers:
        repeats = query_heads // k.size(1)
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
    shares_keys = k.size(1) != query_heads
    if v.size(-1) == q.size(-1):
        q, k, v = _exchange_tokens_for_heads((q, k, v), group)
    else:
        q, k = _exchange_tokens_for_heads((q, k), group)
        (v,) = _exchange_tokens_for_heads((v,), group)
    out = ATTENTION(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=shares_keys)
    by_owner = out.unflatten(2, (workers, -1)).permute(2, 0, 3, 1, 4)  # (C, B, T/C, H/C, K)
    by_heads = _all_to_all(by_owner, group)  # (C, B, T/C, H/C, K): the heads of each worker
    return by_heads.movedim(0, 2).flatten(2, 3).transpose(1, 2)


def _exchange_tokens_for_heads(tensors: Sequence[Tensor], group: int) -> list[Tensor]:
    """(B, H, T/C, K) of each tensor → (B, H/C, T, K), by one all-to-all for all of them.

    In memory tokens come before heads, as projections return and take them.
    """
    workers = registered_group(group).size()
    by_worker = [
        tensor.transpose(1, 2).unflatten(2, (workers, -1)).movedim(2, 0) for tensor in tensors
    ]  # (C, B, T/C, H/C, K) each
    arrived = _all_to_all(torch.cat(by_worker, 3), group)
    whole_sequence = arrived.movedim(0, 1).flatten(1, 2)  # (B, T, H/C of all tensors, K)
    heads = [part.size(3) for part in by_worker]
    return [part.transpose(1, 2) for part in whole_sequence.split(heads, 2)]


def _all_to_all(rows: Tensor, group: int) -> Tensor:
    """Send row i to worker i; in the result row i is from worker i. Backward does the same."""
    if torch.compiler.is_compiling():
        return _all_to_all_op(rows, group)
    return _AllToAll.apply(rows, group)  # the operation takes several times as long on the host


def _send(rows: Tensor, group: int) -> Tensor:
    return all_to_all(rows, registered_group(group))


class _AllToAll(torch.autograd.Function):
    """An all-to-all, whose backward is another."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: int) -> Tensor:
        ctx.group = group
        return _send(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _send(gradient, ctx.group), None


_all_to_all_op: Any = torch.library.custom_op("trireme::all_to_all", _send, mutates_args=())


@_all_to_all_op.register_fake
def _shape(rows: Tensor, group: int) -> Tensor:
    return rows.new_empty(rows.shape)


def _save_group(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    _, ctx.group = inputs


def _op_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _all_to_all_op(gradient, ctx.group), None


_all_to_all_op.register_autograd(_op_backward, setup_context=_save_group)


def _sent_bytes(
    *, queries: Number, keys: Number, cp: Number, itemsize: Number
) -> tuple[Number, Number]:
    # q, k and v there and o back, if C divides the heads of keys.
    one_way = (2 * queries + keys) * itemsize * (cp - 1) / cp
    return one_way, one_way


METHOD = ContextMethod(
    attention=_attention,
    sent_bytes=_sent_bytes,
    is_zigzag=False,
    hides_sending=False,
)
