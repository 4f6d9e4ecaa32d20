"""The mean cross entropy over a large vocabulary, with less memory than all logits in float32.

With N rows, logits lᵢ of V words and targets tᵢ,

    loss = Σᵢ (log Σⱼ exp lᵢⱼ - lᵢ,tᵢ) / N
    sᵢⱼ = softmax(lᵢ)ⱼ - [j = tᵢ]
    ∂loss/∂lᵢⱼ = sᵢⱼ / N

The plain loss makes float32 copies of all logits: 13 GB for 16,384 tokens of 50,000 words. Here
rows are taken a chunk at a time.

- `cross_entropy` gets the logits, and keeps s in their type. If no other backward needs the logits,
  it overwrites them: do not read the logits of a large model after the loss.
- `linear_cross_entropy` gets the input of the last layer, l = W·h. As ∂loss/∂h = s·W / N is
  separate for each row and ∂loss/∂W = sᵀ·h / N is a sum over rows, the logits of a chunk are made,
  used for both, and dropped. After Hsu et al. 2024 (Liger Kernel, https://arxiv.org/abs/2410.10989,
  §3.2).

On a GPU the arithmetic of a chunk is compiled. Operation by operation it moves at least 18 bytes
for each bfloat16 logit (read; float32 logarithms written; read and written again as exponentials;
read and written as s). Compiled, float32 numbers stay in registers: each logit is read two to four
times, and s is written.

Both functions compute their gradients in forward. Backward only multiplies them by the incoming
gradient, in place: a second backward is an error of torch, not a wrong gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.models.linear import add_product, product_dtype
from app.models.one_kernel import compiles, one_kernel
from strategies.row_chunks import current_observer, row_chunks

LARGE_VOCABULARY = 8192
"""From here on chunks are worth it for any batch, because memory grows with it."""
CHUNKS = 8
"""Chunks of logits that are made here; few, so that their products are large."""
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
"""Nodes of autograd for another shape of the same tensor."""
PRODUCTS = ("MmBackward0", "AddmmBackward0", "LinearBackward0", "_DDPSinkBackward")
"""Nodes of autograd that do not need their output; DDP's own node passes on a copy."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss, as F.cross_entropy of float32 logits.

    Logits of a small vocabulary, and those of a tensor type with a loss of its own
    (strategies/tensor/loss.py), go to F.cross_entropy.

    Args:
        logits: (N, V), of any floating type.
        targets: (N,).

    Returns:
        The loss, 0-dimensional, float32.
    """
    if _has_own_functions(logits) or logits.size(-1) < LARGE_VOCABULARY:
        return F.cross_entropy(logits.float(), targets)
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    return _CrossEntropy.apply(logits, targets, _can_overwrite(logits), needs_gradient)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of the last layer's input, without all logits.

    It is F.cross_entropy(F.linear(hidden, weight).float(), targets), to rounding, and computes in
    autocast's type inside autocast. In float16, in which sums over many rows would overflow, all
    logits are made at once.

    Args:
        hidden: (…, D).
        weight: (V, D).
        targets: (…).

    Returns:
        The loss, 0-dimensional, float32.
    """
    dtype = product_dtype(hidden)
    rows = hidden.reshape(-1, hidden.size(-1))
    row_targets = targets.reshape(-1)
    if dtype == torch.float16:
        return cross_entropy(F.linear(rows, weight), row_targets)
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(
            rows.to(dtype), weight.to(dtype), row_targets, needs_gradient
        )


def _has_own_functions(tensor: Tensor) -> bool:
    """Whether the type of a tensor decides what functions do with it.

    torch.overrides.has_torch_function is also true inside any mode, such as `with device:`.
    """
    functions_of_type = type(tensor).__torch_function__
    return functions_of_type not in (Tensor.__torch_function__, nn.Parameter.__torch_function__)


def _can_overwrite(logits: Tensor) -> bool:
    """Whether no other backward uses the logits: they are a product, perhaps in another shape."""
    node = logits.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in PRODUCTS


def _chunk_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, by the function that suits the device.

    Returns:
        (the sum of the rows' losses, float32; s, (N, V), in float32 or in the logits' type)
    """
    if logits.is_cuda and compiles(logits.device):
        return _compiled_chunk_loss(logits, targets)
    observer = current_observer()
    if observer is None or not observer.compiles_kernels:
        return eager_chunk_loss(logits, targets)
    with observer.kernel():
        return fusible_chunk_loss(logits, targets)


def fusible_chunk_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, for a compiler.

    There is no gather or scatter, which would need all logarithms in memory.

    Returns:
        (the sum of the rows' losses, float32; s, (N, V), in the logits' type)
    """
    is_target = torch.arange(logits.size(1), device=logits.device) == targets.unsqueeze(1)
    logarithms = F.log_softmax(logits, 1, dtype=torch.float32)
    loss = -torch.where(is_target, logarithms, 0.0).sum(1).sum()
    return loss, (logarithms.exp() - is_target.float()).to(logits.dtype)


def eager_chunk_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, with as few and small operations as possible without a compiler.

    Returns:
        (the sum of the rows' losses, s, (N, V)), both float32
    """
    column = targets.unsqueeze(1)
    logarithms = F.log_softmax(logits, 1, dtype=torch.float32)
    loss = -logarithms.gather(1, column).sum()
    slope = logarithms.exp_()
    minus_one = slope.new_full((), -1.0).expand_as(column)
    return loss, slope.scatter_add_(1, column, minus_one)


_compiled_chunk_loss = one_kernel(fusible_chunk_loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, can_overwrite: bool, needs_gradient: bool
    ) -> Tensor:
        total = torch.zeros((), device=logits.device)
        if can_overwrite or not needs_gradient:
            slopes = logits.detach()
        else:
            slopes = torch.empty_like(logits)
        for rows in row_chunks(*logits.shape):
            loss, slope = _chunk_loss(logits[rows], targets[rows])
            total += loss
            if needs_gradient:
                slopes[rows] = slope
            del slope  # before that of the next chunk is made
        if needs_gradient:
            ctx.save_for_backward(slopes)
        return total / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes.mul_(gradient / len(slopes)), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_gradient: bool
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros(weight.shape if needs_gradient else (), device=weight.device)
        for rows in row_chunks(len(hidden), len(weight), chunks=CHUNKS):
            loss, slope = _chunk_loss(F.linear(hidden[rows], weight), targets[rows])
            total += loss
            if needs_gradient:
                slope = slope.to(hidden.dtype)
                torch.mm(slope, weight, out=hidden_gradient[rows])
                add_product(weight_gradient, slope.t(), hidden[rows])
            del slope  # before that of the next chunk is made
        if needs_gradient:
            ctx.save_for_backward(hidden_gradient, weight_gradient)
            ctx.weight_dtype = weight.dtype
        return total / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        scale = gradient / len(hidden_gradient)
        return (
            hidden_gradient.mul_(scale),
            weight_gradient.mul_(scale).to(ctx.weight_dtype),
            None,
            None,
        )
