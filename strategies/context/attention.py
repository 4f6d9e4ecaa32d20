"""Attention to some of the keys, whose results are joined to that for all keys.

Take one query with scores sⱼ = q·kⱼ/√K. For a set S of keys, let

    l(S) = log Σ exp sⱼ        o(S) = Σ exp(sⱼ - l(S))·vⱼ                        (sums over j in S)

The softmax's denominator needs nothing of S but exp l(S). So the results for two disjoint sets can
be joined without their scores:

    l(S ∪ T) = log(exp l(S) + exp l(T))
    o(S ∪ T) = exp(l(S) - l(S ∪ T))·o(S) + exp(l(T) - l(S ∪ T))·o(T)

Backward takes one set after another too. With l and o of *all* keys, p = exp(s - l) and δ = do·o,

    dvⱼ = pⱼ·do        dsⱼ = pⱼ·(do·vⱼ - δ)        dq = Σ dsⱼ·kⱼ/√K        dkⱼ = dsⱼ·q/√K

so that dq, dk and dv of one set need nothing of another. Milakov and Gimelshein 2018, arXiv
1805.02867; Dao et al. 2022, arXiv 2205.14135.

A kernel of torch that returns l is used where there is one for the tensors: on GPUs in 16 bits
cuDNN's or flash attention, and on CPUs their own. Otherwise attention is computed by matrix
products, a few queries at a time, so that the scores never exist as a whole. `operator` registers a
method's forward and backward as an operator of torch, which compiled code can call and whose
results selective recomputation keeps.

Shapes: q is (B, H, T, K); k and v are (B, G, S, K), where H/G heads of queries share one of keys; o
is like q; l is (B, H, T), float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from strategies.costs import Number
from strategies.torch_internals import flash_attention

ATTENTION = F.scaled_dot_product_attention
"""torch's attention. While a model attends across workers, its name is another function's
(apply.py)."""
MAX_SCORES = 1 << 24
"""How many scores the products compute at once: 64 MiB in float32."""


# --- what a method of context parallelism is ------------------------------------------------------


class Attention(Protocol):
    """Attention of a worker's part of a sequence to the whole sequence."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, group: int
    ) -> Tensor:
        """Attend; collective over the workers.

        Args:
            q: (B, H, T/C, K) of this worker.
            k: (B, G, T/C, K) of this worker.
            v: (B, G, T/C, K) of this worker.
            is_causal: Whether a query sees only keys up to its own place in the sequence.
            scale: Factor of the scores.
            group: The number of the workers' group (`register_group`).

        Returns:
            (B, H, T/C, K).
        """


class SentBytes(Protocol):
    """The bytes that a worker sends in forward and in backward of one attention."""

    def __call__(
        self, *, queries: Number, keys: Number, cp: Number, itemsize: Number
    ) -> tuple[Number, Number]:
        """Count them.

        Args:
            queries: Number of elements of a worker's part of q.
            keys: Number of elements of its parts of k and v together.
            cp: Number of workers.
            itemsize: Bytes of an element.
        """


@dataclass(frozen=True, kw_only=True)
class ContextMethod:
    """A way to attend across workers.

    Args:
        attention: Attends.
        sent_bytes: What it costs.
        is_zigzag: Whether a worker's part of a sequence is two pieces, an early and a late one
            (ring.py says why).
        hides_sending: Whether it sends while it computes.
    """

    attention: Attention
    sent_bytes: SentBytes
    is_zigzag: bool
    hides_sending: bool


# --- attention to some keys -----------------------------------------------------------------------


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to these keys: (o, l).

    Args:
        q: (B, H, T, K).
        k: (B, G, S, K).
        v: (B, G, S, K).
        is_causal: Whether query i sees keys 0 to i only; T is S then.
        scale: Factor of the scores.
    """
    k = _for_each_head(k, q)
    v = _for_each_head(v, q)
    kernel = flash_attention(q, v)
    if kernel is not None:
        return kernel.forward(q, k, v, is_causal=is_causal, scale=scale)
    out = q.new_empty((*q.shape[:-1], v.size(-1)))
    lse = _empty_lse(q)
    for rows, scores in _scores(q, k, is_causal=is_causal, scale=scale):
        lse[:, :, rows] = scores.logsumexp(-1)
        probabilities = (scores - lse[:, :, rows, None]).exp()
        out[:, :, rows] = probabilities.to(v.dtype) @ v
    return out, lse


class Attended(NamedTuple):
    """Queries that have attended to *all* keys, as backward needs them.

    Args:
        grad: The gradient of `out`.
        q: The queries.
        out: o.
        lse: l.
    """

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def of_rows(self, rows: slice) -> "Attended":
        """Some of the queries, contiguous in memory."""
        return Attended(
            grad=self.grad[:, :, rows].contiguous(),
            q=self.q[:, :, rows].contiguous(),
            out=self.out[:, :, rows].contiguous(),
            lse=self.lse[:, :, rows].contiguous(),
        )


def attend_backward(
    attended: Attended, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of the attention to these keys: (dq, dk, dv), dq being their part of it.

    Args:
        attended: The queries.
        k: (B, G, S, K).
        v: (B, G, S, K).
        is_causal: See `attend`.
        scale: See `attend`.
    """
    grad, q, out, lse = attended
    key_heads = k.size(1)
    k = _for_each_head(k, q)
    v = _for_each_head(v, q)
    kernel = flash_attention(q, v)
    if kernel is not None:
        dq, dk, dv = kernel.backward(
            grad, q=q, k=k, v=v, out=out, lse=lse, is_causal=is_causal, scale=scale
        )
    else:
        dq, dk, dv = _backward_by_products(attended, k, v, is_causal=is_causal, scale=scale)
    return dq, _summed_over_shared_heads(dk, key_heads), _summed_over_shared_heads(dv, key_heads)


def _backward_by_products(
    attended: Attended, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend_backward` with keys and values for each head, without a kernel."""
    grad, q, out, lse = attended
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    for rows, scores in _scores(q, k, is_causal=is_causal, scale=scale):
        probabilities = (scores - lse[:, :, rows, None]).exp()
        of_probabilities = (grad[:, :, rows] @ v.mT).float()
        of_scores = probabilities * (of_probabilities - delta[:, :, rows]) * scale
        dv += probabilities.to(v.dtype).mT @ grad[:, :, rows]
        dq[:, :, rows] = of_scores.to(k.dtype) @ k
        dk += of_scores.to(q.dtype).mT @ q[:, :, rows]
    return dq, dk, dv


def join_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Join the result for other keys to `out` and `lse`, which are float32, in place."""
    joined_lse = torch.logaddexp(lse, other_lse)
    out.mul_((lse - joined_lse).exp_().unsqueeze(-1))
    out.addcmul_(other_out.to(out.dtype), (other_lse - joined_lse).exp_().unsqueeze(-1))
    lse.copy_(joined_lse)


def _scores(
    q: Tensor, k: Tensor, *, is_causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their scores (B, H, rows, S) in float32), a few queries at a time.

    Scores of keys that a causal query does not see are -inf.
    """
    tokens = q.size(2)
    scores_per_query = q.size(0) * q.size(1) * k.size(2)
    step = max(1, MAX_SCORES // max(1, scores_per_query))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        scores = (q[:, :, rows] @ k.mT).float() * scale
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores.masked_fill_(later.triu_(start + 1), -torch.inf)
        yield rows, scores


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values repeated, so that each head of queries has its own."""
    if x.size(1) == q.size(1):
        return x
    return x.repeat_interleave(q.size(1) // x.size(1), 1)


def _summed_over_shared_heads(x: Tensor, key_heads: int) -> Tensor:
    """Gradients of repeated keys or values, added up for those that there are."""
    if x.size(1) == key_heads:
        return x
    return x.unflatten(1, (key_heads, -1)).sum(2)


def kept_bytes(*, queries: Number, keys: Number, rows: Number, itemsize: Number) -> Number:
    """What backward keeps of a worker's attention, whichever the method: q, k, v, o and l.

    Args:
        queries: Number of elements of a worker's part of q.
        keys: Number of elements of its parts of k and v together.
        rows: Number of elements of l, one for each head and token.
        itemsize: Bytes of an element of q.
    """
    return (2 * queries + keys) * itemsize + 4 * rows


# --- operations of torch's own --------------------------------------------------------------------

_GROUPS: list[dist.ProcessGroup] = []
"""The arguments of an operation are tensors and numbers, so groups are numbered."""


def register_group(group: dist.ProcessGroup) -> int:
    """The number by which operations know a group."""
    _GROUPS.append(group)
    return len(_GROUPS) - 1


def registered_group(number: int) -> dist.ProcessGroup:
    """The group of that number."""
    return _GROUPS[number]


class AttentionOptions(NamedTuple):
    """How a sequence attends.

    Args:
        is_causal: Whether query i of the whole sequence sees keys 0 to i only.
        scale: Factor of the scores.
        group: The workers of the sequence.
    """

    is_causal: bool
    scale: float
    group: dist.ProcessGroup


Forward = Callable[[Tensor, Tensor, Tensor, AttentionOptions], tuple[Tensor, Tensor]]
"""(q, k, v, options) of this worker's part → (o, l)."""
Backward = Callable[[Attended, Tensor, Tensor, AttentionOptions], tuple[Tensor, Tensor, Tensor]]
"""(this worker's queries, its k, its v, options) → (dq, dk, dv)."""


_INPUTS = "Tensor q, Tensor k, Tensor v"
_SETTINGS = "bool causal, float scale, int group"
"""Of both operations, after their tensors; `AttentionOptions`, in types that a schema has."""
_FORWARD_SCHEMA = f"({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    f"(Tensor grad, {_INPUTS}, Tensor out, Tensor lse, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)


def operator(name: str, forward: Forward, backward: Backward) -> Attention:
    """Make an operation of torch's own from a method's forward and backward.

    Args:
        name: The operation's; that of backward has `_backward` behind it.
        forward: Computes o and l.
        backward: Computes the gradients.
    """

    # The results have the layout that the operations' shapes promise.
    def run(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: int
    ) -> tuple[Tensor, Tensor]:
        options = AttentionOptions(causal, scale, registered_group(group))
        out, lse = forward(q, k, v, options)
        return out.contiguous(), lse.contiguous()

    def run_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        group: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = AttentionOptions(causal, scale, registered_group(group))
        attended = Attended(grad=grad, q=q, out=out, lse=lse)
        dq, dk, dv = backward(attended, k, v, options)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()

    forward_op: Any = torch.library.custom_op(
        f"trireme::{name}", mutates_args=(), schema=_FORWARD_SCHEMA
    )(run)
    forward_op.register_fake(_forward_shapes)
    backward_op: Any = torch.library.custom_op(
        f"trireme::{name}_backward", mutates_args=(), schema=_BACKWARD_SCHEMA
    )(run_backward)
    backward_op.register_fake(_backward_shapes)

    def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *settings = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.settings = settings

    def gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        dq, dk, dv = backward_op(grad.contiguous(), *ctx.saved_tensors, *ctx.settings)
        return dq, dk, dv, None, None, None

    forward_op.register_autograd(gradients, setup_context=save_for_backward)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, group: int
    ) -> Tensor:
        out, _ = forward_op(q, k, v, is_causal, scale, group)
        return out

    return attention


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The results of the operation, without values."""
    return q.new_empty((*q.shape[:-1], v.size(-1))), _empty_lse(q)


def _backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of the operation's backward, without values."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
