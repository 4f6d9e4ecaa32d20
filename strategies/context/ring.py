"""Ring attention: queries stay, keys and values pass round.

Worker r of C holds T/C tokens of every sequence. In C steps each holds every worker's keys and values once, attends to
them, and joins the results by their log-sum-exp (attention.py): the softmax over all T keys, exactly.

    for i in 0 … C-1:   send (k, v) to r+1, receive from r-1      while attending to those of worker (r - i) mod C

Backward passes keys and values round once more, and their gradients with them, each worker adding its queries' part;
after C steps the gradients are back with their owner. Liu et al. 2023, https://arxiv.org/abs/2310.01889.

*Causal work is even in zig-zag order.* Cut into 2C pieces, worker r holds pieces r and 2C-1-r: an early and a late one.
Then of another worker s's keys

    s < r   all queries see the first half (piece s), none the second       (2 pieces × 1)
    s > r   the second half of the queries sees both, the first none        (1 piece × 2)

and every step after the first is the same work on every worker: half of what it would be without the mask. In plain
order worker 0 would be idle while worker C-1 computes every step. Brandon et al. 2023,
https://arxiv.org/abs/2311.09431.

Choose it when a sequence's activations do not fit, on any number of workers and heads. Sending hides behind attending
from some thousand tokens per worker on; it sends most where key heads are many.
"""

import torch
from torch import Tensor

from strategies.context.attention import Answered, How, attend, attend_backward, join_, operator
from strategies.costs import Number
from strategies.passing import Passing

ZIGZAG = True
_ALL = slice(None)


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    causal, scale, group = how
    rank, size, held = group.rank(), group.size(), [k.contiguous(), v.contiguous()]
    for i in range(size):
        passing = Passing(held, group, 0) if i < size - 1 else None
        rows, keys, diagonal = _seen(rank, (rank - i) % size, q.size(2), causal)
        part, part_lse = attend(q[:, :, rows], held[0][:, :, keys], held[1][:, :, keys], diagonal, scale)
        if i == 0:
            out, lse = part.to(torch.float32, copy=True), part_lse.clone(memory_format=torch.contiguous_format)
        else:
            join_(out[:, :, rows], lse[:, :, rows], part, part_lse)
        held = passing.arrived() if passing is not None else held
    return out.to(q.dtype), lse


def _backward(of: Answered, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor]:
    (causal, scale, group), q = how, of.q
    rank, size, held = group.rank(), group.size(), [k.contiguous(), v.contiguous()]
    dq, returning = torch.zeros_like(q, dtype=torch.float32), None
    for i in range(size):
        passing = Passing(held, group, 0) if i < size - 1 else None
        rows, keys, diagonal = _seen(rank, (rank - i) % size, q.size(2), causal)
        mine, (their_k, their_v) = Answered(*(x[:, :, rows].contiguous() for x in of)), held
        found = attend_backward(mine, their_k[:, :, keys], their_v[:, :, keys], diagonal, scale)
        dq[:, :, rows] += found[0]
        if returning is None:
            gradients = [x.float().contiguous() for x in found[1:]]
        else:
            gradients = returning.arrived()
            for total, part in zip(gradients, found[1:]):
                total[:, :, keys] += part
        returning = Passing(gradients, group, 2) if size > 1 else None
        held = passing.arrived() if passing is not None else held
    dk, dv = returning.arrived() if returning is not None else gradients
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


attention = operator("ring_attention", _forward, _backward)


def _seen(rank: int, source: int, tokens: int, causal: bool) -> tuple[slice, slice, bool]:
    """Of worker `source`'s keys: which queries see which of them, and whether each query those up to its own place."""
    half = tokens // 2
    if not causal or source == rank:
        return _ALL, _ALL, causal
    return (_ALL, slice(half), False) if source < rank else (slice(half, None), _ALL, False)


# --- what it costs ----------------------------------------------------------------------------------------------------


def sent_bytes(query: Number, keys: Number, cp: Number, itemsize: Number) -> tuple[Number, Number]:
    """Bytes that a rank sends in forward and in backward of one attention. query, keys: numbers of its part of q, and
    of k and v together. Gradients travel in float32."""
    return (cp - 1) * keys * itemsize, (cp - 1) * keys * itemsize + (cp > 1) * cp * keys * 4


HIDDEN = True
"""Whether sending goes on while attention is computed."""
