"""Modules for traces, made of one that was built on `meta` and has no numbers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from app.planner.traced_blocks import block_signature


def replace_by_fakes(module: nn.Module, dtype: torch.dtype | None, fake: Any) -> None:
    """Put fake tensors of the same shapes in the place of parameters and buffers.

    Args:
        module: The module, which is changed.
        dtype: The type of floating tensors; None: they keep theirs.
        fake: The mode that makes fake tensors.
    """
    fakes: dict[Tensor, Tensor] = {}  # a tensor that is used in two places stays one
    for owner in module.modules():
        tensors_of_owner = [
            *owner.named_parameters(recurse=False),
            *owner.named_buffers(recurse=False),
        ]
        for name, tensor in tensors_of_owner:
            if tensor not in fakes:
                fakes[tensor] = _fake_copy(tensor, dtype, fake)
            setattr(owner, name, fakes[tensor])


def _fake_copy(tensor: Tensor, dtype: torch.dtype | None, fake: Any) -> Tensor:
    """A fake tensor of the same shape; of `dtype` if that is given and the tensor is floating."""
    casts = dtype is not None and tensor.is_floating_point()
    with fake:
        empty = torch.empty(tensor.shape, dtype=dtype if casts else tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


def share_equal_blocks(module: nn.Module, blocks: list[str], styles: dict[str, str]) -> None:
    """Put one block in the place of all that are equal and split alike, in place.

    Of eighty blocks only one or two have to be copied and split for a trace.

    Args:
        module: The model.
        blocks: The names of its blocks.
        styles: How the tensor plan splits modules, by name.
    """
    first: dict[Hashable, nn.Module] = {}
    for name in blocks:
        block = module.get_submodule(name)
        # What is inside equal blocks is split alike.
        key = (block_signature(block), styles.get(name))
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, first.setdefault(key, block))
