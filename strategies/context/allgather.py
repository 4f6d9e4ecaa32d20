"""Attention to gathered keys: the simplest way to split a sequence, and Llama 3's.

    k, v = all-gather(kᵣ, vᵣ) over the C workers        oᵣ = attention(qᵣ, k, v)
    dk, dv of all keys, from the queries here            dkᵣ, dvᵣ = reduce-scatter(dk, dv)

Keys and values exist whole for the time of one attention, on every worker; they are gathered again in backward, not
kept. With grouped key heads that is little: 1/8 of the queries' width in Llama 3. Nothing hides the gathering, and
nothing has to be joined but what a causal query's own piece gives with what the pieces before it give. In zig-zag order
(ring.py) worker r's two pieces of queries, r and 2C-1-r, see r + 1 and 2C - r pieces: 2C + 1 together on every worker.
Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, §3.3.2.

Choose it where key heads are few and one exchange is cheaper than C small ones: fast links, short parts.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.context.attention import Answered, How, attend, attend_backward, join_, operator
from strategies.costs import Number
from strategies.torch_internals import functional_collectives

_all_gather, _reduce_scatter = functional_collectives()[1:3]

ZIGZAG = True
HIDDEN = False


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    causal, scale, group = how
    keys, values = _gather(k, group), _gather(v, group)
    outs, lses = [], []
    for rows, pieces in _seen(group.rank(), group.size(), q.size(2), causal):
        found = [attend(q[:, :, rows], keys[:, :, p], values[:, :, p], own, scale) for p, own in pieces]
        out, lse = found[0][0].to(torch.float32, copy=True), found[0][1].clone()
        for other in found[1:]:
            join_(out, lse, *other)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2).contiguous()


def _backward(of: Answered, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor]:
    (causal, scale, group), q = how, of.q
    keys, values, dq = _gather(k, group), _gather(v, group), torch.zeros_like(q, dtype=torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
    for rows, pieces in _seen(group.rank(), group.size(), q.size(2), causal):
        mine = Answered(*(x[:, :, rows].contiguous() for x in of))
        for p, own in pieces:
            found = attend_backward(mine, keys[:, :, p], values[:, :, p], own, scale)
            dq[:, :, rows] += found[0]
            dk[:, :, p] += found[1]
            dv[:, :, p] += found[2]
    return dq.to(q.dtype), _scatter(dk, k, group), _scatter(dv, v, group)


attention = operator("allgather_attention", _forward, _backward)


def _seen(rank: int, size: int, tokens: int, causal: bool) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """Queries, and which keys in the sequence's order they see; whether each those up to its own place only."""
    if not causal:
        return [(slice(None), [(slice(None), False)])]
    half, found = tokens // 2, []
    for i, piece in enumerate((rank, 2 * size - 1 - rank)):
        own = (slice(piece * half, (piece + 1) * half), True)
        found.append((slice(i * half, (i + 1) * half), [own, *([(slice(piece * half), False)] if piece else [])]))
    return found


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, G, T/C, K) of all workers in the sequence's order: (B, G, T, K)."""
    early, late = _all_gather(x.contiguous(), group).view(group.size(), *x.shape).chunk(2, 3)
    return torch.cat([*early.unbind(0), *late.flip(0).unbind(0)], 2)


def _scatter(whole: Tensor, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over workers of (B, G, T, K), of which each gets its part."""
    pieces = whole.chunk(2 * group.size(), 2)
    by_rank = [torch.cat([pieces[r], pieces[-1 - r]], 2) for r in range(group.size())]
    return _reduce_scatter(torch.cat(by_rank), group).to(like.dtype)


# --- what it costs ----------------------------------------------------------------------------------------------------


def sent_bytes(query: Number, keys: Number, cp: Number, itemsize: Number) -> tuple[Number, Number]:
    """As ring.py's; a ring of C sends C-1 parts for a gathering, and for a reduction."""
    return (cp - 1) * keys * itemsize, (cp - 1) * keys * (itemsize + 4)
