"""Asynchronous tensor parallelism: what a split layer sends travels while it multiplies.

Along the sequence, a layer that is split by columns waits for its input to be gathered, and the
reduce-scatter of a layer that is split by rows waits for its product (ops.py). Here both are cut
into R pieces of the sequence, one for each of the R workers, which go round a ring:

    gather, multiply     multiply one piece, while it is sent on to r+1 and another comes from r-1
    multiply, scatter    multiply a piece, while the sum of another so far is sent on to r+1 and
                         that of this piece comes from r-1

Either sends what the collective sends, (R-1)/R of the whole, in R-1 transfers beside R products of
1/R of the rows. Each is the other's backward. With gather and scatter along the sequence:

    by columns    y = gather(x)·Wᵀ     dx = scatter(dy·W + what other layers add to d gather(x))
    by rows       y = scatter(x·Wᵀ)    dx = gather(dy)·W

Layers that are called with the same input (queries, keys and values) share its gathering: the input
is gathered while the first one multiplies, and the sum of all their gradients is scattered in that
one's backward, which is the last. The gradients of weights gather the input again, as in layers.py.
Sums go round in a fixed order, so results are the same every time. The method is that of Wang et
al. 2023, https://doi.org/10.1145/3567955.3567959.

Choose it if the links take about as long as the products, and pieces have some hundred rows or
more: smaller products reach less of a GPU's peak. On CPUs it hides nothing, since the same cores
send and multiply. Compiled blocks leave the compiler for these layers and enter it again.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.passing import Passing
from strategies.precision import Product
from strategies.tensor.ops import StartGather


def _gather(
    own_piece: Tensor, group: dist.ProcessGroup, multiply: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Gather a tensor along the sequence while multiplying its pieces.

    Args:
        own_piece: (…, S/R, K) of this worker.
        group: The workers.
        multiply: (…, S/R, K) → (…, S/R, N).

    Returns:
        (…, S, K), and the products joined: (…, S, N).
    """
    rank = group.rank()
    size = group.size()
    pieces = [own_piece.contiguous()] * size
    products = [own_piece] * size
    for step in range(size):
        position = (rank - step) % size
        passing = Passing([pieces[position]], group) if step < size - 1 else None
        products[position] = multiply(pieces[position])
        if passing is not None:
            (pieces[position - 1],) = passing.arrived()
    return torch.cat(pieces, -2), torch.cat(products, -2)


def _scatter(group: dist.ProcessGroup, compute_piece: Callable[[int], Tensor]) -> Tensor:
    """Sum a tensor over workers while computing its pieces, and scatter it along the sequence.

    Args:
        group: The workers.
        compute_piece: Position → what this worker adds to the piece there, (…, S/R, N).

    Returns:
        The sum for this worker's piece, (…, S/R, N).
    """
    rank = group.rank()
    size = group.size()
    total = compute_piece((rank - 1) % size).contiguous()
    for step in range(2, size + 1):
        passing = Passing([total], group)
        addend = compute_piece((rank - step) % size)
        (total,) = passing.arrived()
        total.add_(addend)
    return total


def _piece(x: Tensor, position: int, size: int) -> Tensor:
    """One of `size` pieces along the sequence."""
    length = x.size(-2) // size
    return x.narrow(-2, position * length, length)


class _Columns(torch.autograd.Function):
    """(gather(x), gather(x)·Wᵀ + b); without `start_gather`, gather(x) is kept until backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        product: type[Product],
        start_gather: StartGather | None,
    ) -> tuple[Tensor, Tensor]:
        gathered, y = _gather(x, group, lambda piece: product.forward(piece, weight, bias))
        ctx.save_for_backward(gathered if start_gather is None else x, weight)
        ctx.group = group
        ctx.product = product
        ctx.start_gather = start_gather
        ctx.set_materialize_grads(False)
        return gathered, y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_gathered: Tensor | None, of_y: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = ctx.product
        size = ctx.group.size()
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        wait_for_x: Callable[[], Tensor] | None = None
        if ctx.start_gather is not None and of_y is not None and needs_weight:
            wait_for_x = ctx.start_gather(x)

        def gradient_piece(position: int) -> Tensor:
            """What this worker adds to a piece of the gradient of gather(x)."""
            if of_y is None:
                assert of_gathered is not None, "backward comes with a gradient"
                return _piece(of_gathered, position, size)
            product_gradient = product.input_gradient(_piece(of_y, position, size), weight)
            if of_gathered is None:
                return product_gradient
            return _piece(of_gathered, position, size) + product_gradient

        of_x = _scatter(ctx.group, gradient_piece) if needs_x else None
        of_weight = None
        of_bias = None
        if of_y is not None and needs_weight:
            gathered = x if wait_for_x is None else wait_for_x()
            of_weight = product.weight_gradient(of_y, gathered)
        if of_y is not None and needs_bias:
            of_bias = of_y.flatten(0, -2).sum(0)
        return of_x, of_weight, of_bias, None, None, None


class _Rows(torch.autograd.Function):
    """scatter(x·Wᵀ)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, product: type[Product]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.product = product
        number = _number_of(group, product)
        return torch.ops.trireme.linear_scatter(x, weight, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = ctx.product
        gathered, of_x = _gather(
            gradient, ctx.group, lambda piece: product.input_gradient(piece, weight)
        )
        of_weight = product.weight_gradient(gathered, x) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None, None


# --- the product and reduce-scatter as one operation ----------------------------------------------

_NUMBERED: list[tuple[dist.ProcessGroup, type[Product]]] = []
"""The arguments of an operation are tensors and numbers, so groups and products are numbered."""


def _number_of(group: dist.ProcessGroup, product: type[Product]) -> int:
    pair = (group, product)
    if pair not in _NUMBERED:
        _NUMBERED.append(pair)
    return _NUMBERED.index(pair)


@torch.library.custom_op("trireme::linear_scatter", mutates_args=())
def _linear_scatter(x: Tensor, weight: Tensor, number: int) -> Tensor:
    """scatter(x·Wᵀ), as an operation whose result selective recomputation keeps."""
    group, product = _NUMBERED[number]
    size = group.size()
    return _scatter(
        group, lambda position: product.forward(_piece(x, position, size), weight, None)
    )


# --- layers ---------------------------------------------------------------------------------------


def columns(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    group: dist.ProcessGroup,
    product: type[Product],
    start_gather: StartGather | None,
) -> tuple[Tensor, Tensor]:
    """A layer that is split by columns.

    Args:
        x: (…, S/R, K), this worker's part of the sequence.
        weight: (N/R, K).
        bias: (N/R,).
        group: The R workers.
        product: How it multiplies.
        start_gather: Gathers `x` again in backward; None: the gathered `x` is kept.

    Returns:
        The gathered x, (…, S, K), and x·Wᵀ + b, (…, S, N/R).
    """
    return _Columns.apply(x, weight, bias, group, product, start_gather)


def rows(x: Tensor, weight: Tensor, *, group: dist.ProcessGroup, product: type[Product]) -> Tensor:
    """A layer that is split by rows.

    Args:
        x: (…, S, K/R).
        weight: (N, K/R).
        group: The R workers.
        product: How it multiplies.

    Returns:
        This worker's part, (…, S/R, N), of the sum of x·Wᵀ over workers.
    """
    return _Rows.apply(x, weight, group, product)
