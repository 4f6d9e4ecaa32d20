"""A task's model as everything else takes it: with the sizes that lazy layers take from their first batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from app.data.loader import fetch, map_tensors
from app.errors import UserError
from app.tasks.base import Task


def build_model(task: Task) -> nn.Module:
    """`task.build_model()`, and where it has lazy layers (torch.nn.LazyLinear) their parameters: the loss of one sample
    is computed in evaluation mode. Under torch.device("meta") without numbers.

    Raises:
        UserError: The loss of one sample cannot be computed, or leaves layers without a size.
    """
    model = task.build_model()
    if not _without_size(model):
        return model
    with torch.device("cpu"):
        batch = fetch(task.train_data(), [(0, 0)])
    device = torch.get_default_device()
    model.eval()
    try:
        with torch.no_grad():
            task.loss(model, map_tensors(lambda tensor: tensor.to(device), batch))
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        raise UserError(
            f"the model has lazy layers, such as {_without_size(model)[0]}, which take their sizes "
            f"from the loss of one sample, but that fails ({type(error).__name__}: {first}): give "
            "them their sizes in build_model"
        ) from error
    finally:
        model.train()
    left = _without_size(model)
    if left:
        raise UserError(
            f"the loss of one sample gives {left[0]} no size, because it does not call that lazy layer: give it one in "
            "build_model"
        )
    return model


def _without_size(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers that have no size yet."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))]
