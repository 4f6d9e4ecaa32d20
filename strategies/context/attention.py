"""Attention of some queries to some keys, so that the results for all keys can be joined afterwards.

For one query with scores sⱼ = q·kⱼ/√K against a set S of keys,

    l(S) = log Σ exp sⱼ        o(S) = Σ exp(sⱼ - l(S))·vⱼ                                    (sums over j in S)

Two disjoint sets are joined without going back to their scores, since exp l(S) is all that the softmax's denominator
needs of S:

    l(S ∪ T) = log(exp l(S) + exp l(T))        o(S ∪ T) = exp(l(S) - l(S ∪ T))·o(S) + exp(l(T) - l(S ∪ T))·o(T)

Backward takes sets one by one too: with l and o of *all* keys, pⱼ = exp(sⱼ - l) and δ = do·o,

    dvⱼ = pⱼ·do        dsⱼ = pⱼ·(do·vⱼ - δ)        dq = Σ dsⱼ·kⱼ/√K        dkⱼ = dsⱼ·q/√K

so one set's dq, dk and dv need nothing of another. Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867;
Dao et al. 2022, https://arxiv.org/abs/2205.14135.

Where torch has a kernel for the tensors that gives l (on GPUs in 16 bits: cuDNN's or flash; on CPUs), that computes;
else products of a few queries at a time, so that the scores never exist whole. `operator` makes of a method's forward
and backward an operation of torch's own: compiled code calls it, and selective recomputation keeps what it gave.

Shapes: q (B, H, T, K); k, v (B, G, S, K), where H/G query heads share a key head; o as q; l (B, H, T), float32.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from strategies.costs import Number
from strategies.torch_internals import flash_attention

ATTENTION = F.scaled_dot_product_attention
"""torch's own: while a model attends across workers, that name is another function's (apply.py)."""
SCORES = 1 << 24
"""Of products, as many scores at once: 64 MiB in float32."""


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(o, l). causal: query i sees keys 0 to i; T = S then."""
    k, v = _for_each_head(k, q), _for_each_head(v, q)
    kernel = flash_attention(q, v)
    if kernel is not None:
        return kernel[0](q, k, v, causal, scale)
    out, lse = q.new_empty((*q.shape[:-1], v.size(-1))), _lse_like(q)
    for rows, scores in _scores(q, k, causal, scale):
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = (scores - lse[:, :, rows, None]).exp().to(v.dtype) @ v
    return out, lse


class Answered(NamedTuple):
    """Queries, what attending to *all* keys has given for them, and the gradient of that."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


def attend_backward(of: Answered, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of these keys."""
    grad, q, out, lse = of
    groups, k, v = k.size(1), _for_each_head(k, q), _for_each_head(v, q)
    kernel = flash_attention(q, v)
    if kernel is not None:
        dq, dk, dv = kernel[1](grad, q, k, v, out, lse, causal, scale)
    else:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        for rows, scores in _scores(q, k, causal, scale):
            shares = (scores - lse[:, :, rows, None]).exp()
            slopes = shares * ((grad[:, :, rows] @ v.mT).float() - delta[:, :, rows]) * scale
            dv += shares.to(v.dtype).mT @ grad[:, :, rows]
            dq[:, :, rows] = slopes.to(k.dtype) @ k
            dk += slopes.to(q.dtype).mT @ q[:, :, rows]
    return dq, _of_shared_heads(dk, groups), _of_shared_heads(dv, groups)


class How(NamedTuple):
    """causal: query i of the whole sequence sees keys 0 to i. scale: of scores. group: the workers of the sequence."""

    causal: bool
    scale: float
    group: dist.ProcessGroup


def join_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Joins the result for other keys to `out` and `lse`, float32, in place."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.addcmul_(other_out.to(out.dtype), (other_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def kept_bytes(query: Number, keys: Number, rows: Number, itemsize: Number) -> Number:
    """What backward keeps of a worker's attention, whichever the method: q, k, v, o and l. query, keys: numbers of its
    part of q, and of k and v together. rows: of l, one for each head and token."""
    return (2 * query + keys) * itemsize + 4 * rows


def operator(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function (q, k, v, causal, scale, number of a group) → o of this worker's part of a sequence.

    forward: (q, k, v, How) → (o, l). backward: (Answered, k, v, How) → (dq, dk, dv).
    """
    rest, results = "bool causal, float scale, int group", "Tensor o, Tensor l"

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: int) -> tuple[Tensor, ...]:
        """Results have the memory layout that `register_fake` says."""
        return tuple(x.contiguous() for x in forward(q, k, v, How(causal, scale, GROUPS[group])))

    def run_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *how: Any) -> Any:
        causal, scale, group = how
        found = backward(Answered(grad, q, out, lse), k, v, How(causal, scale, GROUPS[group]))
        return tuple(x.contiguous() for x in found)

    def kept(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.rest = inputs[3:]

    def gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
        return (*backwards(grad.contiguous(), *ctx.saved_tensors, *ctx.rest), None, None, None)

    tensors = "Tensor q, Tensor k, Tensor v"
    op = torch.library.custom_op(f"trireme::{name}", mutates_args=(), schema=f"({tensors}, {rest}) -> (Tensor, Tensor)")
    forwards: Any = op(run)
    op = torch.library.custom_op(
        f"trireme::{name}_backward",
        mutates_args=(),
        schema=f"(Tensor grad, {tensors}, {results}, {rest}) -> (Tensor, Tensor, Tensor)",
    )
    backwards: Any = op(run_back)
    forwards.register_fake(lambda q, k, v, *_: (q.new_empty((*q.shape[:-1], v.size(-1))), _lse_like(q)))
    backwards.register_fake(lambda grad, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)))
    forwards.register_autograd(gradients, setup_context=kept)

    return lambda *given: forwards(*given)[0]


GROUPS: list[dist.ProcessGroup] = []
"""An operation's arguments are tensors and numbers: a group's is its place here."""


def number_of(group: dist.ProcessGroup) -> int:
    """Registers a group, and returns the number by which operations are told of it."""
    GROUPS.append(group)
    return len(GROUPS) - 1


def _lse_like(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """(B, H, rows, S) of a few rows at a time, float32; of what causal queries do not see, -inf."""
    tokens, step = q.size(2), max(1, SCORES // max(1, q.size(0) * q.size(1) * k.size(2)))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        scores = (q[:, :, rows] @ k.mT).float() * scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(start + 1)
            scores.masked_fill_(hidden, -torch.inf)
        yield rows, scores


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    return x if x.size(1) == q.size(1) else x.repeat_interleave(q.size(1) // x.size(1), 1)


def _of_shared_heads(x: Tensor, groups: int) -> Tensor:
    return x if x.size(1) == groups else x.unflatten(1, (groups, -1)).sum(2)
