"""Training and evaluation mode: frozen parts that are in evaluation mode stay in it.

A loop by hand calls `model.train()` before its first step. So does `begin`, for two reasons: a
model, or an encoder in it, that a library has read from a file is in evaluation mode, and a model
may have a `train()` of its own, which keeps a frozen encoder's BatchNorm as it is. A part that
trains nothing and has been put into evaluation mode inside of a model in training mode, such as a
teacher with dropout, was meant to be, and stays so.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def begin(module: nn.Module) -> nn.Module:
    """Put a new model into training mode, but the frozen parts that are in evaluation mode.

    Returns:
        The model.
    """
    kept = list(_kept_parts(module)) if module.training else []
    module.train()
    for part in kept:
        part.eval()
    return module


def _kept_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts of a module in training mode that are in evaluation mode and frozen."""
    for child in module.children():
        if child.training:
            yield from _kept_parts(child)
        elif not any(parameter.requires_grad for parameter in child.parameters()):
            yield child


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and after that every part into the mode that it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train()  # which may do more than to set the modes
        for part, mode in modes:
            part.training = mode
