"""Many linear layers at once, each over its own rows: what the experts of a mixture compute.

    rows (M, K), sorted by expert     weights (E, N, K)     ends (E,): one past each expert's last row
    y[ends[e-1]:ends[e]] = rows[ends[e-1]:ends[e]] · weights[e]ᵀ                       y (M, N)

On a GPU in bfloat16, where N and K are multiples of 8, it is one kernel, `torch.nn.functional.grouped_mm`, and the host
does not learn how many rows an expert has; elsewhere a loop of matrix products, which on a CPU is as fast. An operator
of its own, so that shapes can be followed without numbers (planning, dividing a pipeline), recomputation can keep its
result, and its products are counted. Its gradient is an autograd.Function, since `torch.library.custom_op` would take a
tenth of a millisecond for each call: https://docs.pytorch.org/docs/stable/library.html
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from app.models.linear import product_dtype
from strategies.mixtures import sorted_by_expert, spread

DEVICES = ("cpu", "cuda")
torch.library.define("trireme::grouped_linear", "(Tensor rows, Tensor weights, Tensor ends) -> Tensor")
torch.library.define("trireme::grouped_linear_weights", "(Tensor gradient, Tensor rows, Tensor ends) -> Tensor")


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """(M, K), (E, N, K), (E,) int32 → (M, N)."""
    return _GroupedLinear.apply(rows, weights, ends)


def by_expert(
    compute: Callable[[Tensor, Tensor], Tensor], x: Tensor, index: Tensor, weights: Tensor | None, experts: int
) -> Tensor:
    """Σ over a token's k experts of weight · result: x (…, D), index and weights (…, k), None for 1, → (…, D).

    compute: (rows sorted by expert, ends) → results (M, D). experts: how many there are here.
    """
    chosen, rows, k = index.flatten(), x.flatten(0, -2).to(product_dtype(x)), index.size(-1)
    order, place, counts = sorted_by_expert(chosen, experts)
    y = compute(spread(rows, order, place, k), counts.cumsum(0).int())
    y = spread(y, place, order).view(*index.shape, -1)
    y = y if weights is None else y * weights.unsqueeze(-1)
    return (y.squeeze(-2) if k == 1 else y.sum(-2)).to(x.dtype)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return torch.ops.trireme.grouped_linear(rows, weights, ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows, weights, ends), gradient, ops = ctx.saved_tensors, gradient.contiguous(), torch.ops.trireme
        to_rows = ops.grouped_linear(gradient, weights.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
        return to_rows, ops.grouped_linear_weights(gradient, rows, ends) if ctx.needs_input_grad[1] else None, None


@torch.library.impl("trireme::grouped_linear", DEVICES)
def _forward(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(rows, weights.size(1)):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    y = rows.new_empty(rows.size(0), weights.size(1))
    for (start, end), weight in zip(_spans(ends), weights.unbind()):
        torch.mm(rows[start:end], weight.t(), out=y[start:end])
    return y


@torch.library.impl("trireme::grouped_linear_weights", DEVICES)
def _weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """(M, N), (M, K), (E,) → (E, N, K): of each expert, over its own rows."""
    if _has_kernel(rows, gradient.size(1)):
        return F.grouped_mm(gradient.t(), rows, offs=ends)
    found = rows.new_empty(ends.numel(), gradient.size(1), rows.size(1))
    for (start, end), own in zip(_spans(ends), found.unbind()):
        torch.mm(gradient[start:end].t(), rows[start:end], out=own)
    return found


def _has_kernel(rows: Tensor, features: int) -> bool:
    """Its matrices' rows are whole pieces of 16 bytes."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or rows.size(1) % 8 or features % 8:
        return False
    return torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    last = ends.tolist()
    return list(zip([0, *last], last))


@torch.library.register_fake("trireme::grouped_linear")
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.size(0), weights.size(1))


@torch.library.register_fake("trireme::grouped_linear_weights")
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.numel(), gradient.size(1), rows.size(1))


@register_flop_formula([torch.ops.trireme.grouped_linear, torch.ops.trireme.grouped_linear_weights])
def _flops(a_shape: Any, b_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """2·M·N·K: of the two matrices with M rows, and the third with neither."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]
