"""Builds a task's model, with the sizes that lazy layers take from their first batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from app.data.loader import fetch, map_tensors
from app.errors import UserError
from app.tasks.base import Task


def build_model(task: Task) -> nn.Module:
    """A task's new model, in which every parameter has a size.

    If the model has lazy layers (such as torch.nn.LazyLinear), they get their sizes from the loss
    of one sample, computed in evaluation mode. Under `torch.device("meta")` that takes no
    arithmetic.

    Raises:
        UserError: The loss of one sample cannot be computed, or leaves layers without a size.
    """
    model = task.build_model()
    unsized = _unsized_tensors(model)
    if not unsized:
        return model
    with torch.device("cpu"):
        batch = fetch(task.train_data(), [(0, 0)])
    device = torch.get_default_device()
    model.eval()
    try:
        with torch.no_grad():
            task.loss(model, map_tensors(lambda tensor: tensor.to(device), batch))
    except Exception as error:
        # If every layer has its size by now, name the first that needed one.
        lazy_layer = [*_unsized_tensors(model), *unsized][0]
        first_line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        raise UserError(
            f"the model has lazy layers, such as {lazy_layer}, which take their sizes "
            f"from the loss of one sample, but that fails ({type(error).__name__}: {first_line}): "
            "give them their sizes in build_model"
        ) from error
    finally:
        model.train()
    still_unsized = _unsized_tensors(model)
    if still_unsized:
        raise UserError(
            f"the loss of one sample gives {still_unsized[0]} no size, "
            "because it does not call that lazy layer: give it one in build_model"
        )
    return model


def _unsized_tensors(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers that have no size yet."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    unsized_types = (UninitializedParameter, UninitializedBuffer)
    return [name for name, tensor in tensors if isinstance(tensor, unsized_types)]
