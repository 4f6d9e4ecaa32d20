"""Activation checkpointing: free a block's activations after forward, recompute them in backward.

Backward needs the inputs of every operation, O(blocks × activations of a block). Keeping only the
inputs of *blocks* and recomputing one block at a time needs O(blocks × block input + activations of
one block). It costs one more forward, which is a third more arithmetic. Chen et al. 2016,
https://arxiv.org/abs/1604.06174.

- `full` recomputes every block, `every_N` only every N-th one. Recomputing fewer blocks is faster,
  and takes more memory.
- `selective` recomputes every block too, but keeps the results of the operators that cost most:
  matrix products, attention and collectives that sum. What it recomputes is cheap: norms,
  activation functions, dropout, and what tensor parallelism gathers, which is large. Korthikanti et
  al. 2022, https://arxiv.org/abs/2205.05198;
  `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

Without torch.compile the host pays as well. What a recomputed block saves is kept in Python, and
`selective` calls Python for each operation, in forward and again in backward. For an operation that
takes 5 µs to call, `full` adds 3 µs in forward and 6 when it is called again, `selective` 14 and 13
(`python -m experiments.benchmarks recomputation`). A small model on a fast GPU waits for that.

The results are the same, because the recomputation repeats the forward with the same random
numbers. Meanwhile BatchNorm writes its running statistics into copies, so that no batch is counted
twice. A block's `forward` is replaced in place, so that no name changes, and hooks around the block
(those of sharding) run only once, outside the recomputed part.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from strategies.dims import checkpoint_every
from strategies.state import BATCH_NORMS
from strategies.torch_internals import functional_collectives

_SELECTIVE_KEEPS = (
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
"""The operators of torch.ops whose results `selective` keeps, beside collectives that sum."""


def apply(module: nn.Module, blocks: list[str], mode: str) -> None:
    """Make blocks recompute their activations, by replacing their forward in place.

    Args:
        module: The model.
        blocks: The names of its repeating blocks. Without any, the whole module is one block.
        mode: none, full, every_N or selective.

    Raises:
        LayoutError: There is no such mode.
    """
    if mode == "none":
        return
    every = checkpoint_every(mode) or 1
    for name in (blocks or [""])[::every]:
        block = module.get_submodule(name)
        norms = [part for part in block.modules() if isinstance(part, BATCH_NORMS)]
        block.forward = _recomputed_forward(
            block.forward, norms=norms, is_selective=mode == "selective"
        )


def _recomputed_forward(
    forward: Callable[..., Any], *, norms: Sequence[nn.Module], is_selective: bool
) -> Callable[..., Any]:
    """A forward whose activations are recomputed in backward.

    Args:
        forward: The block's forward.
        norms: The block's batch normalisations.
        is_selective: Whether to keep the results of some operators.
    """
    selective_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)

    def contexts_of_norms() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the first forward and of the recomputation."""
        if is_selective:
            first, recomputation = selective_contexts()
        else:
            first = recomputation = contextlib.nullcontext()
        return first, _CopiedStatistics(norms, recomputation)

    @functools.wraps(forward)
    def recomputed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A compiled forward does not run again, and does not recompute what it writes into buffers.
        if norms and not torch.compiler.is_compiling():
            return checkpoint(
                forward, *args, use_reentrant=False, context_fn=contexts_of_norms, **kwargs
            )
        if is_selective:
            return checkpoint(
                forward, *args, use_reentrant=False, context_fn=selective_contexts, **kwargs
            )
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed_forward


class _CopiedStatistics(AbstractContextManager[None]):
    """Gives batch normalisations copies of their running statistics to write into.

    It can be entered several times, because a loss that takes a gradient itself makes backward
    recompute a block twice.

    Args:
        norms: The batch normalisations.
        inner: A context to enter as well.
    """

    def __init__(self, norms: Sequence[nn.Module], inner: AbstractContextManager[Any]) -> None:
        self._norms = norms
        self._inner = inner
        self._statistics: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        self._statistics = [
            (norm, name, buffer)
            for norm in self._norms
            for name, buffer in norm.named_buffers(recurse=False)
        ]
        for norm, name, buffer in self._statistics:
            setattr(norm, name, buffer.clone())
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._inner.__exit__(*error)
        finally:
            for norm, name, buffer in self._statistics:
                setattr(norm, name, buffer)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if is_kept(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(operator: Any) -> bool:
    """Whether `selective` keeps the results of an operator of torch.ops."""
    return operator in _kept_operators()


@functools.cache
def _kept_operators() -> frozenset[Any]:
    """The operators of `_SELECTIVE_KEEPS` that this torch has, and collectives that sum."""
    operators = list(functional_collectives().summing_operators)
    for qualified_name in _SELECTIVE_KEEPS:
        namespace, name, overload = qualified_name.split(".")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None and hasattr(packet, overload):
            operators.append(getattr(packet, overload))
    return frozenset(operators)


def recomputed_blocks(mode: str, blocks: int) -> int:
    """How many of a model's blocks are recomputed."""
    if mode == "none":
        return 0
    every = checkpoint_every(mode) or 1
    return -(-blocks // every)


def kept_bytes(
    mode: str, *, saved_bytes: float, selective_bytes: float, input_bytes: float
) -> float:
    """The bytes that a recomputed block keeps for backward.

    Args:
        mode: full, every_N or selective.
        saved_bytes: What it would keep if it were not recomputed.
        selective_bytes: The results for which `is_kept` is true.
        input_bytes: Its input.
    """
    if checkpoint_every(mode):
        return input_bytes
    return min(selective_bytes + input_bytes, saved_bytes)
