"""Activation checkpointing: forget what a block computed in forward, compute it again in backward.

Backward needs every operation's inputs, O(blocks × activations of a block). Keeping only what flows
*between* blocks and recomputing one block at a time needs O(blocks × boundary + activations of one
block), for one more forward: a third more arithmetic. Chen et al. 2016,
https://arxiv.org/abs/1604.06174.

- `full`: every block; `every_N`: every N-th block, trading memory for time by block;
- `selective`: by operator: every block is recomputed, except the results of matrix products,
  attention and collectives that sum, which cost most and are kept; what is recomputed (norms,
  activations, dropout; what tensor parallelism gathers, which is large) is cheap. Korthikanti et
  al. 2022, https://arxiv.org/abs/2205.05198;
  `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

The numbers are the same: the recomputation repeats the forward, its random numbers included, and
leaves alone what BatchNorm has counted in the first (its running statistics, on which training does
not depend). A block's `forward` is replaced in place, so no name changes, and hooks around the
block (of sharding) run once, outside of it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from strategies.dims import LayoutError
from strategies.state import BATCH_NORMS
from strategies.torch_internals import functional_collectives

_KEPT_NAMES = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten.baddbmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "trireme.float8_product.default",
    "trireme.linear_scatter.default",
    "trireme.ring_attention.default",
    "trireme.allgather_attention.default",
    "trireme.grouped_linear.default",
)


def checkpoint_every(value: str) -> int | None:
    """For "every_N" the N, for "full" 1, else None (none, selective)."""
    if value in ("none", "selective"):
        return None
    if value == "full":
        return 1
    head, _, number = value.partition("_")
    if head == "every" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise LayoutError(
        f"train.activation_checkpointing is {value!r}: write none, full, selective, or every_2 for "
        "every second block"
    )


def apply(module: nn.Module, blocks: list[str], mode: str) -> None:
    """Replaces the forward of the blocks (of the whole module if there are none), in place."""
    if mode == "none":
        return
    every = checkpoint_every(mode) or 1
    for i, name in enumerate(blocks or [""]):
        if i % every == 0:
            block = module.get_submodule(name)
            norms = [part for part in block.modules() if isinstance(part, BATCH_NORMS)]
            block.forward = _recomputed(block.forward, norms, selective=mode == "selective")


def _recomputed(
    forward: Callable[..., Any], norms: Sequence[nn.Module], *, selective: bool
) -> Callable[..., Any]:
    selected = functools.partial(create_selective_checkpoint_contexts, _keep)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around forward and around its repetition."""
        if not selective:
            return contextlib.nullcontext(), _without_counting(norms, contextlib.nullcontext())
        first, again = selected()
        return first, _without_counting(norms, again)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if norms and not torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if selective:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=selected, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


@contextlib.contextmanager
def _without_counting(
    norms: Sequence[nn.Module], inner: AbstractContextManager[Any]
) -> Iterator[None]:
    """While this lasts, what batch normalisations count goes into copies. (A compiled forward is not run again: what it
    writes is no part of what is recomputed.)"""
    counted = [
        (norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)
    ]
    try:
        for norm, name, buffer in counted:
            setattr(norm, name, buffer.clone())
        with inner:
            yield
    finally:
        for norm, name, buffer in counted:
            setattr(norm, name, buffer)


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(operator: Any) -> bool:
    """Whether `selective` keeps what this operator (of torch.ops) computes."""
    return operator in _kept()


@functools.cache
def _kept() -> frozenset[Any]:
    """The operators of `_KEPT_NAMES` that this torch has, and collectives that sum."""
    found = list(functional_collectives()[3])
    for name in _KEPT_NAMES:
        space, operator, overload = name.split(".")
        packet = getattr(getattr(torch.ops, space), operator, None)
        if packet is not None and hasattr(packet, overload):
            found.append(getattr(packet, overload))
    return frozenset(found)


def recomputed_blocks(mode: str, blocks: int) -> int:
    """How many of a model's blocks are recomputed."""
    every = checkpoint_every(mode)
    return 0 if mode == "none" else -(-blocks // every) if every else blocks


def kept_bytes(mode: str, saved: float, kept: float, boundary: float) -> float:
    """What a block that is recomputed keeps of the `saved` bytes: its input, and under selective what `is_kept` says
    (`kept`)."""
    return boundary if checkpoint_every(mode) else min(kept + boundary, saved)
