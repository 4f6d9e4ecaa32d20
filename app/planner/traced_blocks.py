"""Equal blocks are traced once.

Of blocks with the same class, parameter shapes and inputs the first is traced. The others pass on
tensors of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.data.loader import map_tensors, tensors
from app.planner.part_trace import AFTER, BEFORE
from app.planner.recorder import CostRecorder
from strategies.pipeline.p2p import sent_dtype
from strategies.tree import tree_map


def block_signature(block: nn.Module) -> Hashable:
    """What blocks have in common that cost the same for equal inputs."""
    parameters = tuple((tuple(p.shape), p.requires_grad) for p in block.parameters())
    return type(block), parameters


@dataclass(frozen=True)
class _TensorLike:
    """The shape and type of a tensor, in place of it."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class TracedBlock:
    """A block that was traced: its part, and its output with a _TensorLike for each tensor."""

    part: str
    output: Any


class _Skip(torch.autograd.Function):
    """Stands for a block that equals a traced one: an output of the right shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: _TensorLike) -> Tensor:
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        return x.new_empty(like.shape, dtype=like.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype), None


def _skipped(block_input: Tensor, leaf: Any) -> Any:
    """A value of the output of a skipped block: the input itself if that is like it."""
    if not isinstance(leaf, _TensorLike):
        return leaf
    if (leaf.shape, leaf.dtype) == (block_input.shape, block_input.dtype):
        return block_input
    return _Skip.apply(block_input, leaf)


def traced_forward(
    block: nn.Module,
    recorder: CostRecorder,
    order: list[str],
    traced_blocks: dict[Hashable, TracedBlock],
) -> Callable[..., Any]:
    """A block's forward that is run and traced once for equal blocks, and skipped after that.

    Args:
        block: The block.
        recorder: Records the costs.
        order: Gets the part of each block that is called.
        traced_blocks: Those traced so far, shared by all blocks of the model.
    """
    forward = block.forward
    signature = block_signature(block)
    is_frozen = not all(p.requires_grad for p in block.parameters())

    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = tensors((args, kwargs))
        first_input = inputs[0] if inputs else None
        block_input = next((tensor for tensor in inputs if tensor.requires_grad), first_input)
        has_gradient = block_input is not None and block_input.requires_grad
        # Behind a frozen embedding the first block passes no gradient on to its input.
        ends_backward = is_frozen and not has_gradient
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        key = (signature, ends_backward, shapes)
        traced = traced_blocks.get(key)
        if traced is not None and block_input is not None and has_gradient:
            order.append(traced.part)
            return tree_map(lambda leaf: _skipped(block_input, leaf), traced.output)

        part = f"block{len(traced_blocks)}"
        previous_part = _part_before_block(recorder.part, order)
        order.append(part)
        recorder.part = part
        if block_input is not None:
            values = recorder.parts[part].values
            values["boundary"] = block_input.nbytes
            values["crossing"] = block_input.numel() * _sent_itemsize(block_input)
            recorder.enter_with_gradient(block_input, previous_part)
        output = forward(*args, **kwargs)
        for tensor in tensors(output):
            recorder.enter_with_gradient(tensor, part)
        recorder.part = AFTER
        output_like = map_tensors(lambda tensor: _TensorLike(tensor.shape, tensor.dtype), output)
        traced_blocks[key] = TracedBlock(part, output_like)
        return output

    return call


def _part_before_block(part: str, order: list[str]) -> str:
    """The part that backward enters behind the block that is called now."""
    if part != AFTER:
        return part
    return order[-1] if order else BEFORE


def _sent_itemsize(tensor: Tensor) -> int:
    """Bytes of a number of a tensor that a pipeline sends."""
    autocast_dtype = None
    if torch.is_autocast_enabled("cpu"):
        autocast_dtype = torch.get_autocast_dtype("cpu")
    return sent_dtype(tensor, autocast_dtype).itemsize
