"""Many linear layers at once, each over its own rows: what the experts of a mixture compute.

    rows (M, K), sorted by expert    weights (E, N, K)    ends (E,), one past each expert's last row
    y[ends[e-1]:ends[e]] = rows[ends[e-1]:ends[e]] · weights[e]ᵀ                            y (M, N)

On a GPU in bfloat16, if N and K are multiples of 8, it is one kernel,
`torch.nn.functional.grouped_mm`, and the host does not need the number of rows of each expert.
Otherwise it is a loop of matrix products, which on a CPU is as fast.

It is an operator of its own, so that it works under fake tensors (for planning, and for cutting a
pipeline), recomputation can keep its result, and its FLOPs are counted. Its gradient is an
autograd.Function, because `torch.library.custom_op` would add a tenth of a millisecond to each
call: https://docs.pytorch.org/docs/stable/library.html
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from app.models.linear import product_dtype
from strategies.mixtures import permute_rows, sorted_by_expert

DEVICES = ("cpu", "cuda")
torch.library.define(
    "trireme::grouped_linear", "(Tensor rows, Tensor weights, Tensor ends) -> Tensor"
)
torch.library.define(
    "trireme::grouped_linear_weights", "(Tensor gradient, Tensor rows, Tensor ends) -> Tensor"
)


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """A linear layer for each group of rows.

    Args:
        rows: (M, K), sorted by expert.
        weights: (E, N, K).
        ends: (E,), int32, one past the last row of each expert.

    Returns:
        (M, N)
    """
    return _GroupedLinear.apply(rows, weights, ends)


def by_expert(
    compute: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    index: Tensor,
    weights: Tensor | None,
    experts: int,
) -> Tensor:
    """The sum over each token's k experts of weight · result.

    Args:
        compute: From (rows sorted by expert (M, D), ends (E,)) to the results (M, D).
        x: (…, D), the tokens.
        index: (…, k), the experts of each token.
        weights: (…, k), how much each counts; None for 1.
        experts: E.

    Returns:
        (…, D), in the type of x.
    """
    k = index.size(-1)
    tokens = x.flatten(0, -2).to(product_dtype(x))
    order, place, counts = sorted_by_expert(index.flatten(), experts)
    sorted_tokens = permute_rows(tokens, order, place, repeats=k)
    results = compute(sorted_tokens, counts.cumsum(0).int())
    results = permute_rows(results, place, order).view(*index.shape, -1)
    if weights is not None:
        results = results * weights.unsqueeze(-1)
    y = results.squeeze(-2) if k == 1 else results.sum(-2)
    return y.to(x.dtype)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return torch.ops.trireme.grouped_linear(rows, weights, ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        rows_gradient = None
        weights_gradient = None
        if ctx.needs_input_grad[0]:
            transposed = weights.transpose(1, 2)
            rows_gradient = torch.ops.trireme.grouped_linear(gradient, transposed, ends)
        if ctx.needs_input_grad[1]:
            weights_gradient = torch.ops.trireme.grouped_linear_weights(gradient, rows, ends)
        return rows_gradient, weights_gradient, None


# --- the operators --------------------------------------------------------------------------------


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
    """The gradient of each expert's weight: (M, N), (M, K), (E,) to (E, N, K)."""
    if _has_kernel(rows, gradient.size(1)):
        return F.grouped_mm(gradient.t(), rows, offs=ends)
    weights_gradient = rows.new_empty(ends.numel(), gradient.size(1), rows.size(1))
    for (start, end), weight_gradient in zip(_spans(ends), weights_gradient.unbind()):
        torch.mm(gradient[start:end].t(), rows[start:end], out=weight_gradient)
    return weights_gradient


def _has_kernel(rows: Tensor, features: int) -> bool:
    """Whether grouped_mm can compute it: its rows begin at multiples of 16 bytes."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16:
        return False
    if rows.size(1) % 8 or features % 8:
        return False
    return torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    """The first row of each expert, and one past its last."""
    last = ends.tolist()
    return list(zip([0, *last], last))


@torch.library.register_fake("trireme::grouped_linear")
def _fake_forward(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.size(0), weights.size(1))


@torch.library.register_fake("trireme::grouped_linear_weights")
def _fake_weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.numel(), gradient.size(1), rows.size(1))


@register_flop_formula([torch.ops.trireme.grouped_linear, torch.ops.trireme.grouped_linear_weights])
def _flops(first_shape: Any, second_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """2·M·N·K, which both operators have from the shapes of their first two tensors."""
    return 2 * first_shape[0] * first_shape[1] * second_shape[1]
