"""The mean cross entropy over a large vocabulary, without a float32 copy of all the logits, or without all the logits.

With N rows, logits lᵢ of V words and targets tᵢ,

    loss = Σᵢ (log Σⱼ exp lᵢⱼ - lᵢ,tᵢ) / N        sᵢⱼ = softmax(lᵢ)ⱼ - [j = tᵢ]        ∂loss/∂lᵢⱼ = sᵢⱼ / N

The plain loss makes float32 copies of all logits: 13 GB for 16,384 tokens of 50,000 words. Here rows are taken a chunk
at a time.

- `cross_entropy` is given the logits, and keeps s in their type and, where no other backward needs them, place: do not
  read a large model's logits after the loss.
- `linear_cross_entropy` is given what the last layer is given, l = W·h. As ∂loss/∂h = s·W / N is separate for each row
  and ∂loss/∂W = sᵀ·h / N a sum over rows, a chunk's logits are made, used for both, and dropped. After Hsu et al. 2024
  (Liger Kernel, https://arxiv.org/abs/2410.10989, §3.2).

On a GPU a chunk's arithmetic is compiled. One operation after the other moves at least 18 bytes for each bfloat16 logit
(read; float32 logarithms written; read and written again as exponentials; read and written as s). Compiled, float32
numbers stay in registers: it is read two to four times, and s written.

Both find their gradients in forward, and only multiply them by what comes in, in place: a second backward is torch's
error, not a wrong gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.models.linear import add_product, product_dtype
from app.models.one_kernel import compiles, one_kernel

LARGE_VOCABULARY = 8192  # from here on chunks are worth it, whatever the batch: memory grows with it
CHUNK_NUMBERS = 1 << 24  # logits of a chunk that are given: 64 MiB in float32, large enough to fill a GPU
CHUNKS = 8  # of logits that are made: a chunk's product should be large
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
PRODUCTS = ("MmBackward0", "AddmmBackward0", "LinearBackward0", "_DDPSinkBackward")  # DDP's own node hands on a copy


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(N, V) logits of any floating type, (N,) targets → the mean loss, float32, as F.cross_entropy's in float32.

    Logits of a small vocabulary, and of a tensor type with a loss of its own (strategies/tensor/loss.py), go to
    F.cross_entropy.
    """
    if torch.overrides.has_torch_function((logits,)) or logits.size(-1) < LARGE_VOCABULARY:
        return F.cross_entropy(logits.float(), targets)
    return _CrossEntropy.apply(logits, targets, _is_free(logits), torch.is_grad_enabled() and logits.requires_grad)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """(…, D) of any shape, (V, D), (…) targets → the mean loss, float32; computed in autocast's type within it.

    As F.cross_entropy(F.linear(hidden, weight).float(), targets), to rounding. In float16, where sums over many rows
    would overflow, the logits are made at once.
    """
    dtype = product_dtype(hidden)
    rows, column = hidden.reshape(-1, hidden.size(-1)), targets.reshape(-1)
    if dtype == torch.float16:
        return cross_entropy(F.linear(rows, weight), column)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(rows.to(dtype), weight.to(dtype), column, wanted)


def _is_free(logits: Tensor) -> bool:
    """Whether logits are a product's result, at most seen in another shape: no other backward uses their values."""
    node = logits.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in PRODUCTS


def _chunk(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the rows' losses, float32; s, in float32 or in the logits' type)."""
    return (_fused if logits.is_cuda and compiles(logits.device) else one_by_one)(logits, targets)


def fusible(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As `one_by_one`, for a compiler: without a scatter or a gather, which would need all logarithms in memory; s in
    the logits' type."""
    is_target = torch.arange(logits.size(1), device=logits.device) == targets.unsqueeze(1)
    logarithms = F.log_softmax(logits, 1, dtype=torch.float32)
    loss = -torch.where(is_target, logarithms, 0.0).sum(1).sum()
    return loss, (logarithms.exp() - is_target.float()).to(logits.dtype)


def one_by_one(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the rows' losses, s), float32: as few and small operations as there can be without a compiler."""
    column = targets.unsqueeze(1)
    logarithms = F.log_softmax(logits, 1, dtype=torch.float32)
    loss = -logarithms.gather(1, column).sum()
    slope = logarithms.exp_()
    return loss, slope.scatter_add_(1, column, slope.new_full((), -1.0).expand_as(column))


_fused = one_kernel(fusible)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, free: bool, wanted: bool) -> Tensor:
        total = torch.zeros((), device=logits.device)
        slopes = logits.detach() if free or not wanted else torch.empty_like(logits)
        parts = -(-logits.numel() // CHUNK_NUMBERS)
        for rows, column, out in zip(*(each.chunk(parts) for each in (logits, targets, slopes))):
            loss, slope = _chunk(rows, column)
            total += loss
            if wanted:
                out.copy_(slope)
            del slope  # before the next chunk's is made
        if wanted:
            ctx.save_for_backward(slopes)
        return total / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes.mul_(gradient / len(slopes)), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, wanted: bool) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape if wanted else (), device=weight.device)
        for rows, column, out in zip(*(each.chunk(CHUNKS) for each in (hidden, targets, to_hidden))):
            loss, slope = _chunk(F.linear(rows, weight), column)
            total += loss
            if wanted:
                slope = slope.to(hidden.dtype)
                torch.mm(slope, weight, out=out)
                add_product(to_weight, slope.t(), rows)
            del slope
        if wanted:
            ctx.save_for_backward(to_hidden, to_weight)
            ctx.dtype = weight.dtype
        return total / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        to_hidden, to_weight = ctx.saved_tensors
        scale = gradient / len(to_hidden)
        return to_hidden.mul_(scale), to_weight.mul_(scale).to(ctx.dtype), None, None
