"""The memory layout in which GPUs convolve images fastest: channels last.

The channels of a pixel lie beside each other in memory (N, H, W, C), though the tensors' dimensions
stay (N, C, H, W). https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html

A convolution whose input or weight has this layout gives an output that has it, and so do BatchNorm
and element-wise operations, so it is enough to convert a model's weights and its input once.
Numbers are the same except for the order of sums. GroupNorm on a GPU works only in the usual
layout: a model that has it would be converted back and forth at every layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from strategies.tree import tree_map


def use_channels_last(module: nn.Module, *, with_weights: bool) -> None:
    """Gives a model with two-dimensional convolutions, and its inputs, this layout.

    It is changed in place. Any other model, and one with GroupNorm, stays as it is.

    Args:
        module: The model.
        with_weights: Whether to convert the weights, too; not those that will be sharded, which
            torch needs in the usual layout.
    """
    has_convolution = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    has_group_norm = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
    if not has_convolution or has_group_norm:
        return
    if with_weights:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def convert_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tree_map(_converted, args), tree_map(_converted, kwargs)

    module.register_forward_pre_hook(convert_inputs, with_kwargs=True)


def _converted(value: Any) -> Any:
    is_images = isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if is_images else value
