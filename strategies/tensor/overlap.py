"""Asynchronous tensor parallelism: what a split layer sends travels while it multiplies.

Along the sequence a layer that is split by columns waits for its input to be gathered, and the reduce-scatter of one
that is split by rows waits for its product (ops.py). Here both are cut into the R workers' pieces of the sequence,
which go round a ring:

    gather, multiply     send the piece that is here on to r+1, receive another from r-1   while multiplying this one
    multiply, scatter    send a piece's sum so far on to r+1, receive another's from r-1   while multiplying the next

Each sends what the collective sends, (R-1)/R of the whole, in R-1 transfers beside R products of 1/R of the rows. One
is the other's backward, s being a worker's part of the sequence:

    by columns    y = gather(x)·Wᵀ       dx = scatter(dy·W + what other layers give back for the gathered x)
    by rows       y = scatter(x·Wᵀ)      dx = gather(dy)·W

Layers called with the same input (queries, keys, values) share its gathering: beside the first one's product it comes,
and beside that one's backward, which is last, the sum of all their gradients goes. What the gradients of weights need
again is gathered as in ops.py. Sums go round in a fixed order, so results are the same every time. Wang et al. 2023,
https://doi.org/10.1145/3567955.3567959.

Choose it where links take about as long as products, from some hundred rows a piece on: smaller products reach less of
a GPU's peak. On CPUs it hides nothing, since the same cores send and multiply. Compiled blocks leave the compiler for
these layers, and enter it again.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.passing import Passing
from strategies.precision import Product

Again = Callable[[Tensor], Callable[[], Tensor]]
"""Starts gathering a part of the sequence again; what waits for the whole (ops.gathered_from)."""


def _gather(own: Tensor, group: dist.ProcessGroup, use: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """own: (…, S/R, K). The whole, (…, S, K), and what `use` makes of its pieces, joined as they are."""
    rank, size = group.rank(), group.size()
    pieces, made = [own.contiguous()] * size, [own] * size
    for i in range(size):
        place = (rank - i) % size
        passing = Passing([pieces[place]], group) if i < size - 1 else None
        made[place] = use(pieces[place])
        if passing is not None:
            (pieces[place - 1],) = passing.arrived()
    return torch.cat(pieces, -2), torch.cat(made, -2)


def _scatter(group: dist.ProcessGroup, make: Callable[[int], Tensor]) -> Tensor:
    """The sum over workers of what their `make` gives, (…, S/R, N), for this worker's place."""
    rank, size = group.rank(), group.size()
    total = make((rank - 1) % size).contiguous()
    for i in range(2, size + 1):
        passing = Passing([total], group)
        own = make((rank - i) % size)
        (total,) = passing.arrived()
        total.add_(own)
    return total


def _piece(x: Tensor, place: int, size: int) -> Tensor:
    return x.narrow(-2, place * (x.size(-2) // size), x.size(-2) // size)


class _Columns(torch.autograd.Function):
    """(the gathered x, x·Wᵀ + b). again: None where the gathered x is kept until backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Any, group: Any, product: type[Product], again: Again | None
    ) -> tuple[Tensor, Tensor]:
        whole, y = _gather(x, group, lambda piece: product.forward(piece, weight, bias))
        ctx.save_for_backward(whole if again is None else x, weight)
        ctx.group, ctx.product, ctx.again = group, product, again
        ctx.set_materialize_grads(False)
        return whole, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: Tensor | None, of_y: Tensor | None) -> tuple[Tensor | None, ...]:
        (given, weight), size = ctx.saved_tensors, ctx.group.size()
        of_x = of_weight = of_bias = None
        waits = ctx.again(given) if ctx.again is not None and of_y is not None and ctx.needs_input_grad[1] else None

        def gradient(place: int) -> Tensor:
            parts = [] if of_whole is None else [_piece(of_whole, place, size)]
            if of_y is not None:
                parts.append(ctx.product.of_input(_piece(of_y, place, size), weight))
            return parts[0] if len(parts) == 1 else parts[0] + parts[1]

        if ctx.needs_input_grad[0]:
            of_x = _scatter(ctx.group, gradient)
        if of_y is not None and ctx.needs_input_grad[1]:
            of_weight = ctx.product.of_weight(of_y, given if waits is None else waits())
        if of_y is not None and ctx.needs_input_grad[2]:
            of_bias = of_y.flatten(0, -2).sum(0)
        return of_x, of_weight, of_bias, None, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any, product: type[Product]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.product = group, product
        return torch.ops.trireme.linear_scatter(x, weight, _number(group, product))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole, of_x = _gather(gradient, ctx.group, lambda piece: ctx.product.of_input(piece, weight))
        return of_x, ctx.product.of_weight(whole, x) if ctx.needs_input_grad[1] else None, None, None


_KINDS: list[tuple[dist.ProcessGroup, type[Product]]] = []
"""An operation's arguments are tensors and numbers: a group's and a product's is their place here."""


def _number(group: dist.ProcessGroup, product: type[Product]) -> int:
    kind = group, product
    if kind not in _KINDS:
        _KINDS.append(kind)
    return _KINDS.index(kind)


@torch.library.custom_op("trireme::linear_scatter", mutates_args=())
def _linear_scatter(x: Tensor, weight: Tensor, kind: int) -> Tensor:
    """An operation of torch's own, so that selective recomputation keeps what it gave, as of a reduce-scatter."""
    group, product = _KINDS[kind]
    return _scatter(group, lambda place: product.forward(_piece(x, place, group.size()), weight, None))


def columns(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup,
    product: type[Product],
    again: Again | None,
) -> tuple[Tensor, Tensor]:
    """x (…, S/R, K), weight (N/R, K), bias (N/R) → the gathered x, (…, S, K), and x·Wᵀ + b, (…, S, N/R)."""
    return _Columns.apply(x, weight, bias, group, product, again)


def rows(x: Tensor, weight: Tensor, group: dist.ProcessGroup, product: type[Product]) -> Tensor:
    """x (…, S, K/R), weight (N, K/R) → this worker's part, (…, S/R, N), of the workers' sum of x·Wᵀ."""
    return _Rows.apply(x, weight, group, product)
