"""Training and evaluation mode: the parts of a model that train in evaluation mode stay in it.

A loop by hand calls `model.train()` before its first step. So does `begin`, for two reasons: a
model that a library has read from a file is in evaluation mode, and a model may have a `train()` of
its own, which keeps a frozen encoder's BatchNorm as it is. What has been put into evaluation mode
inside of a model in training mode, such as a teacher with dropout, was meant to be, and stays so.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def begin(module: nn.Module) -> nn.Module:
    """Put a new model into training mode, but the parts that its author put into evaluation mode.

    Returns:
        The model.
    """
    kept = []
    if module.training:
        kept = [part for part in module.modules() if not part.training]
    module.train()
    for part in kept:
        part.training = False
    return module


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
