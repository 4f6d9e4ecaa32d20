"""Weights in 16 bits: frozen matrices always, and with train.weight_dtype=bf16 all weights.

A trained weight needs float32, because an optimizer's step is too small for 16 bits, unless the
optimizer rounds at random (app/training/stochastic.py). A frozen weight (beside LoRA's adapters)
needs only the 16 bits that matrix products read. In float32 it would take twice the memory, and a
cast in every forward, since autocast remembers its copies of trained weights only.

Autocast would round the float32 weight in each forward. Here it is rounded once, so the products
are the same to the last bit. An embedding, which autocast does not touch, returns the rows of the
rounded table as float32. Norms and everything else of one dimension stay float32, and so do weights
of classes that may compute in another way than torch's own layers. Sharded layouts cast every
parameter to 16 bits before they gather it, so there only the shards become smaller.

With train.weight_dtype=bf16 all float32 weights are cast, norms included, because `fully_shard`
accepts trained parameters of one type only. Their gradients have the same type.

A checkpoint has the weights in the type that they are trained in, and can be loaded into either.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from strategies.precision import DTYPES
from strategies.tensor.plan import is_transposed_linear

_CLASSES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CASTS_WEIGHTS = "casts_weights"
"""The attribute of a module of another class whose forward casts its weights to autocast's type."""


def narrowed(
    build: Callable[[], nn.Module], precision: str, weight_dtype: str = "fp32"
) -> Callable[[], nn.Module]:
    """A function that builds a model with its weights in the types that they are kept in.

    Args:
        build: Builds the model, in float32.
        precision: A key of `DTYPES`; with fp32 nothing changes.
        weight_dtype: One of `WEIGHT_DTYPES`.
    """

    def build_narrowed() -> nn.Module:
        module = build()
        narrow(module, precision, weight_dtype)
        return module

    return build if precision == "fp32" else build_narrowed


def narrow(module: nn.Module, precision: str, weight_dtype: str = "fp32") -> None:
    """Cast a model's frozen matrices, or all its weights, to the type of products, in place.

    Args:
        module: The model, for real or on the meta device.
        precision: A key of `DTYPES`; with fp32 nothing changes.
        weight_dtype: One of `WEIGHT_DTYPES`.
    """
    if precision == "fp32":
        return
    names = narrow_parameters(module, weight_dtype)
    for name, parameter in module.named_parameters():
        if name in names:
            parameter.data = parameter.data.to(DTYPES[precision])
    for layer in module.modules():
        if type(layer) is nn.Embedding and layer.weight.dtype != torch.float32:
            layer.register_forward_hook(_widen)


def narrow_parameters(module: nn.Module, weight_dtype: str = "fp32") -> set[str]:
    """The names of the parameters that `narrow` casts.

    A frozen one that several layers share is cast if all of them allow it.

    Args:
        module: The model, for real or on the meta device.
        weight_dtype: One of `WEIGHT_DTYPES`.
    """
    if weight_dtype != "fp32":
        return {
            name
            for name, parameter in module.named_parameters()
            if parameter.dtype == torch.float32
        }
    allowed: dict[nn.Parameter, bool] = {}
    for layer in module.modules():
        casts = type(layer) in _CLASSES or is_transposed_linear(layer)
        casts = casts or getattr(layer, CASTS_WEIGHTS, False)
        for parameter in layer.parameters(recurse=False):
            allowed[parameter] = allowed.get(parameter, True) and casts
    return {
        name
        for name, parameter in module.named_parameters()
        if allowed[parameter]
        and not parameter.requires_grad
        and parameter.dim() > 1
        and parameter.dtype == torch.float32
    }


def _widen(_: nn.Module, __: object, rows: Tensor) -> Tensor | None:
    """The rows of an embedding as float32, as autocast leaves them; else as they are."""
    if rows.dtype == torch.float32 or not torch.is_autocast_enabled(rows.device.type):
        return None
    return rows.float()
