"""Builds a task's model, with the sizes that lazy layers take from their first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from app.data.loader import fetch, map_tensors
from app.errors import UserError
from app.tasks.base import Task
from strategies import training_mode


def build_model(task: Task) -> nn.Module:
    """A task's new model, in training mode, in which every parameter has a size.

    Frozen parts that `build_model` has put into evaluation mode stay in it
    (strategies/training_mode.py).

    If the model has lazy layers (such as torch.nn.LazyLinear), they get their sizes from the loss
    of one sample, computed in evaluation mode. Under `torch.device("meta")` that takes no
    arithmetic. Whatever else this changes in the model is undone, so that it is like a new one.

    Raises:
        UserError: The loss of one sample cannot be computed, or leaves layers without a size.
    """
    model = training_mode.begin(task.build_model())
    unsized = _unsized_tensors(model)
    if not unsized:
        return model
    with torch.device("cpu"):
        batch = fetch(task.train_data(), [(0, 0)])
    device = torch.get_default_device()
    restore_attributes = _remember_attributes(model)
    try:
        with training_mode.evaluating(model), torch.no_grad():
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
        restore_attributes()
    still_unsized = _unsized_tensors(model)
    if still_unsized:
        raise UserError(
            f"the loss of one sample gives {still_unsized[0]} no size, "
            "because it does not call that lazy layer: give it one in build_model"
        )
    return model


def _remember_attributes(model: nn.Module) -> Callable[[], None]:
    """Remember what modules keep beside their tensors, such as a count or a block's last output.

    Lazy layers are left out, because they become other layers.

    Returns:
        A function that restores the attributes of all modules.
    """
    of_any_module = vars(nn.Module()).keys()
    remembered: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        if _unsized_tensors(module, recurse=False):
            continue
        values = {key: value for key, value in vars(module).items() if key not in of_any_module}
        contents = {
            key: value.copy()
            for key, value in values.items()
            if isinstance(value, (dict, list, set))
        }
        remembered.append((vars(module), values, contents))

    def restore() -> None:
        for attributes, values, contents in remembered:
            for key in attributes.keys() - of_any_module - values.keys():
                del attributes[key]
            attributes.update(values)
            for key, content in contents.items():
                container = values[key]
                container.clear()
                if isinstance(container, list):
                    container.extend(content)
                else:
                    container.update(content)

    return restore


def _unsized_tensors(model: nn.Module, *, recurse: bool = True) -> list[str]:
    """Names of the parameters and buffers that have no size yet."""
    tensors = [*model.named_parameters(recurse=recurse), *model.named_buffers(recurse=recurse)]
    unsized_types = (UninitializedParameter, UninitializedBuffer)
    return [name for name, tensor in tensors if isinstance(tensor, unsized_types)]
