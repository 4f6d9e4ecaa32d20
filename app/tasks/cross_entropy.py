"""The mean cross entropy over a large vocabulary, without a float32 copy of all the logits.

With N tokens and V words a model in 16 bits gives N·V logits, and the plain loss makes float32 copies of all of them:
the cast, its log-softmax and two gradients, some 16 bytes per number beside the 2 of the logits. For 16,384 tokens of
50,000 words that is 13 GB, often more than all blocks keep. Here rows are taken a chunk at a time:

    forward:   -Σ log softmax(lᵢ)[targetᵢ] / N           float32 within the chunk, nothing kept but the logits
    backward:  (softmax(lᵢ) - [j = targetᵢ]) · g / N     computed again per chunk, in the logits' own type and place

The softmax is computed twice instead of kept: both passes read memory, which costs less than the copies did. The
gradient is written over the logits where they come straight from a matrix product, whose backward does not look at
them; where something else may (a last tanh, say), beside them. So do not read a large model's logits after backward;
a second backward through them is an error of torch's, not a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

LARGE_VOCABULARY = 8192
"""From so many words on the logits are worth it. A question of the vocabulary alone, so that memory grows evenly with
the batch, as the planner takes it to."""
CHUNK_NUMBERS = 1 << 24
"""Logits of a chunk: 64 MiB in float32, large enough to fill a GPU."""
MOST_CHUNKS = 64
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
PRODUCTS = ("MmBackward0", "AddmmBackward0", "LinearBackward0", "_DDPSinkBackward")
"""DDP's own node hands on a copy."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(N, V) logits of any floating type, (N,) targets → the mean loss, float32, as F.cross_entropy's in float32.

    Logits that are split over workers, or of a small vocabulary, go to F.cross_entropy as they are.
    """
    plain = type(logits) in (Tensor, FakeTensor)  # a subclass may know better: strategies/tensor/loss.py's does
    if not plain or logits.size(-1) < LARGE_VOCABULARY:
        return F.cross_entropy(logits.float(), targets)
    return _ChunkedCrossEntropy.apply(logits, targets, _nobody_else_needs(logits))


def _nobody_else_needs(logits: Tensor) -> bool:
    """Whether logits are a product's result, at most seen in another shape: no other backward uses their values."""
    node = logits.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in PRODUCTS


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, over: bool) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.over = over
        total = torch.zeros((), device=logits.device)
        for rows in _chunks(logits):
            logarithms = F.log_softmax(logits[rows], 1, dtype=torch.float32)
            total += F.nll_loss(logarithms, targets[rows], reduction="sum")
            del logarithms  # before the next chunk's are made
        return total / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        found, scale = logits.detach() if ctx.over else torch.empty_like(logits), gradient / len(targets)
        for rows in _chunks(logits):
            slope = F.softmax(logits[rows], 1, dtype=torch.float32)
            column = targets[rows].unsqueeze(1)
            slope.scatter_add_(1, column, slope.new_full((), -1.0).expand_as(column))
            torch.mul(slope, scale, out=found[rows])
            del slope
        return found, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Rows that are worked on together: `CHUNK_NUMBERS` logits, more where that would be over `MOST_CHUNKS` chunks."""
    count, vocabulary = logits.shape
    size = max(1, CHUNK_NUMBERS // vocabulary, -(-count // MOST_CHUNKS))
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))
