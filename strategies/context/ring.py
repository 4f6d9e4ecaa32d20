"""Ring attention: queries stay where they are, keys and values pass round.

Worker r of C holds T/C tokens of every sequence. In C steps each worker holds the keys and values
of every worker once, attends to them, and joins the results by their log-sum-exp (attention.py).
This is the softmax over all T keys, exactly.

    for step in 0 … C-1:   attend to (k, v) of worker (r - step) mod C,
                           while sending it to r+1 and receiving the next from r-1

In backward keys and values pass round once more, and their gradients follow them in the same type:
each worker adds its queries' part, and after C steps the gradients are back with their owner. Liu
et al. 2023, arXiv 2310.01889.

*Causal work is even in zig-zag order.* The sequence is cut into 2C pieces, of which worker r holds
pieces r and 2C-1-r, an early one and a late one. Of the keys of another worker s,

    if s < r:   all queries see the first half (piece s) and none the second       (2 pieces × 1)
    if s > r:   the second half of the queries sees both, and the first none       (1 piece × 2)

so every step after the first is the same work on every worker, half of what it would be without the
mask. With consecutive parts instead, worker 0 would be idle in every step after the first, while
worker C-1 computes in all of them. Brandon et al. 2023, arXiv 2311.09431.

Choose it if the activations of a sequence do not fit; it works with any number of workers and
heads. From some thousand tokens per worker on, sending is hidden behind attention. What is sent
grows with the number of key heads.
"""

import torch
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
from strategies.passing import Passing

_ALL = slice(None)
_KEYS_TAG = 0
"""Keys and values travel with tags 0 and 1."""
_GRADIENTS_TAG = 2
"""Their gradients, which are under way at the same time, with 2 and 3."""


def _forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    rank = options.group.rank()
    size = options.group.size()
    keys_and_values = [k.contiguous(), v.contiguous()]
    joined: tuple[Tensor, Tensor] | None = None
    for step in range(size):
        is_last = step == size - 1
        passing = None if is_last else Passing(keys_and_values, options.group, _KEYS_TAG)
        source = (rank - step) % size
        rows, columns, is_diagonal = _visible(
            rank, source, tokens=q.size(2), is_causal=options.is_causal
        )
        step_k, step_v = keys_and_values
        step_out, step_lse = attend(
            q[:, :, rows],
            step_k[:, :, columns],
            step_v[:, :, columns],
            is_causal=is_diagonal,
            scale=options.scale,
        )
        if joined is None:
            # The first keys are this worker's own, which all its queries see.
            first_lse = step_lse.clone(memory_format=torch.contiguous_format)
            joined = step_out.to(torch.float32, copy=True), first_lse
        else:
            out, lse = joined
            join_(out[:, :, rows], lse[:, :, rows], step_out, step_lse)
        if passing is not None:
            keys_and_values = passing.arrived()
    assert joined is not None, "a group has a worker"
    out, lse = joined
    return out.to(q.dtype), lse


def _backward(
    attended: Attended, k: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    q = attended.q
    rank = options.group.rank()
    size = options.group.size()
    keys_and_values = [k.contiguous(), v.contiguous()]
    dq = torch.zeros_like(q, dtype=torch.float32)
    gradients: list[Tensor] = []  # of the keys and values that are here
    passing_gradients: Passing | None = None
    for step in range(size):
        is_last = step == size - 1
        passing = None if is_last else Passing(keys_and_values, options.group, _KEYS_TAG)
        source = (rank - step) % size
        rows, columns, is_diagonal = _visible(
            rank, source, tokens=q.size(2), is_causal=options.is_causal
        )
        step_k, step_v = keys_and_values
        step_dq, step_dk, step_dv = attend_backward(
            attended.of_rows(rows),
            step_k[:, :, columns],
            step_v[:, :, columns],
            is_causal=is_diagonal,
            scale=options.scale,
        )
        dq[:, :, rows] += step_dq
        if passing_gradients is None:
            gradients = [step_dk.to(k.dtype).contiguous(), step_dv.to(v.dtype).contiguous()]
        else:
            gradients = passing_gradients.arrived()
            # torch adds 16-bit numbers in float32, and rounds the sum.
            gradients[0][:, :, columns] += step_dk
            gradients[1][:, :, columns] += step_dv
        if size > 1:
            passing_gradients = Passing(gradients, options.group, _GRADIENTS_TAG)
        if passing is not None:
            keys_and_values = passing.arrived()
    if passing_gradients is not None:
        gradients = passing_gradients.arrived()
    dk, dv = gradients
    return dq.to(q.dtype), dk, dv


def _visible(rank: int, source: int, *, tokens: int, is_causal: bool) -> tuple[slice, slice, bool]:
    """What the queries of a worker see of the keys of another.

    Args:
        rank: The worker of the queries.
        source: The worker of the keys.
        tokens: Number of tokens of a worker.
        is_causal: Whether a query sees only keys up to its own place.

    Returns:
        Which queries see which keys, and whether query i sees only the first i + 1 of them.
    """
    half = tokens // 2
    if not is_causal or source == rank:
        return _ALL, _ALL, is_causal
    if source < rank:
        return _ALL, slice(half), False
    return slice(half, None), _ALL, False


def _sent_bytes(
    *, queries: Number, keys: Number, cp: Number, itemsize: Number
) -> tuple[Number, Number]:
    # Gradients travel once more than the keys: back to their owner.
    forward = (cp - 1) * keys * itemsize
    return forward, forward + (cp > 1) * cp * keys * itemsize


METHOD = ContextMethod(
    attention=operator("ring_attention", _forward, _backward),
    sent_bytes=_sent_bytes,
    is_zigzag=True,
    hides_sending=True,
)
