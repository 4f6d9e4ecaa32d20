"""Images as GPUs convolve them fastest: the channels of a pixel beside each other in memory (N, H, W, C), though the
tensors' dimensions stay (N, C, H, W).
https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html

A convolution whose input or weight is laid out so gives an output that is, and so do BatchNorm and
what works element by element: converting a model's input and its weights once is enough. Numbers
are the same but for the order of sums. GroupNorm on a GPU takes the usual order alone, so a model
that has it would be converted to and fro at every layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from strategies.tree import tree_map


def use_channels_last(module: nn.Module, *, with_weights: bool) -> None:
    """Lays out a model with two-dimensional convolutions so, in place, and its inputs whenever it is called; any other,
    and one with GroupNorm, stays as it is. with_weights: not those to be sharded, which torch wants
    in the usual order."""
    kinds = {
        kind
        for kind in (nn.Conv2d, nn.GroupNorm)
        if any(isinstance(layer, kind) for layer in module.modules())
    }
    if kinds != {nn.Conv2d}:
        return
    if with_weights:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.register_forward_pre_hook(
        lambda _, args, named: (_laid_out(args), _laid_out(named)), with_kwargs=True
    )


def _laid_out(values: Any) -> Any:
    def converted(value: Any) -> Any:
        images = isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if images else value

    return tree_map(converted, values)
