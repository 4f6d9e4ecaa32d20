"""Attention to gathered keys: the simplest way to split a sequence, and that of Llama 3.

    k, v = all-gather(kᵣ, vᵣ) over the C workers       oᵣ = attention(qᵣ, k, v)
    dk, dv of all keys, by the queries of worker r     dkᵣ, dvᵣ = reduce-scatter(dk, dv)

During one attention, every worker has the whole keys and values. They are not kept for backward,
which gathers them again. They take little memory if several query heads share one key head: in
Llama 3, 1/8 of what the queries take. The gathering is not hidden behind computation. Only a causal
query has results to join: that for its own piece and that for the pieces before it. In zig-zag
order (ring.py) worker r has the pieces r and 2C-1-r of the queries, which see r + 1 and 2C - r
pieces of the keys: together 2C + 1, on every worker. Grattafiori et al. 2024, arXiv 2407.21783,
§3.3.2.

Choose it if key heads are few and one exchange is cheaper than C small ones, that is, with fast
links and short parts.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.context.attention import (
    Attended,
    AttentionOptions,
    ContextMethod,
    attend,
    attend_backward,
    join_,
    operator,
)
from strategies.costs import Number
from strategies.torch_internals import functional_collectives

_collectives = functional_collectives()


def _forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    all_k = _gather(k, options.group)
    all_v = _gather(v, options.group)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for rows, visible in _visible(options.group, q.size(2), options.is_causal):
        results = [
            attend(
                q[:, :, rows],
                all_k[:, :, columns],
                all_v[:, :, columns],
                is_causal=is_diagonal,
                scale=options.scale,
            )
            for columns, is_diagonal in visible
        ]
        first_out, first_lse = results[0]
        out = first_out.to(torch.float32, copy=True)
        lse = first_lse.clone()
        for other_out, other_lse in results[1:]:
            join_(out, lse, other_out, other_lse)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2).contiguous()


def _backward(
    attended: Attended, k: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    q = attended.q
    all_k = _gather(k, options.group)
    all_v = _gather(v, options.group)
    dq = torch.zeros_like(q, dtype=torch.float32)
    all_dk = torch.zeros_like(all_k, dtype=torch.float32)
    all_dv = torch.zeros_like(all_v, dtype=torch.float32)
    for rows, visible in _visible(options.group, q.size(2), options.is_causal):
        attended_rows = attended.of_rows(rows)
        for columns, is_diagonal in visible:
            part_dq, part_dk, part_dv = attend_backward(
                attended_rows,
                all_k[:, :, columns],
                all_v[:, :, columns],
                is_causal=is_diagonal,
                scale=options.scale,
            )
            dq[:, :, rows] += part_dq
            all_dk[:, :, columns] += part_dk
            all_dv[:, :, columns] += part_dv
    dk = _reduce_scattered(all_dk, options.group).to(k.dtype)
    dv = _reduce_scattered(all_dv, options.group).to(v.dtype)
    return dq.to(q.dtype), dk, dv


VisibleKeys = list[tuple[slice, bool]]
"""(keys in the sequence's order, whether query i sees only the first i + 1 of them)."""


def _visible(
    group: dist.ProcessGroup, tokens: int, is_causal: bool
) -> list[tuple[slice, VisibleKeys]]:
    """The keys that each of this worker's pieces of queries sees.

    Args:
        group: The workers.
        tokens: Number of tokens of a worker.
        is_causal: Whether a query sees only keys up to its own place.
    """
    if not is_causal:
        return [(slice(None), [(slice(None), False)])]
    rank = group.rank()
    half = tokens // 2
    visible: list[tuple[slice, VisibleKeys]] = []
    for index, piece in enumerate((rank, 2 * group.size() - 1 - rank)):
        start = piece * half
        keys: VisibleKeys = [(slice(start, start + half), True)]
        if piece > 0:
            keys.append((slice(start), False))
        visible.append((slice(index * half, (index + 1) * half), keys))
    return visible


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, G, T/C, K) of every worker → (B, G, T, K), in the sequence's order."""
    by_rank = _collectives.all_gather(x.contiguous(), group).view(group.size(), *x.shape)
    early, late = by_rank.chunk(2, 3)
    return torch.cat([*early.unbind(0), *late.flip(0).unbind(0)], 2)


def _reduce_scattered(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, G, T, K) of every worker → the sum over workers of this worker's tokens."""
    size = group.size()
    pieces = whole.chunk(2 * size, 2)
    by_rank = [torch.cat([pieces[rank], pieces[-1 - rank]], 2) for rank in range(size)]
    return _collectives.reduce_scatter(torch.cat(by_rank), group)


def _sent_bytes(
    *, queries: Number, keys: Number, cp: Number, itemsize: Number
) -> tuple[Number, Number]:
    # A ring of C workers sends C-1 parts for a gathering, and for a reduction, which is in float32.
    return (cp - 1) * keys * itemsize, (cp - 1) * keys * (itemsize + 4)


METHOD = ContextMethod(
    attention=operator("allgather_attention", _forward, _backward),
    sent_bytes=_sent_bytes,
    is_zigzag=True,
    hides_sending=False,
)
