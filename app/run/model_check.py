"""Whether the model fits the layout: looked at on meta, without memory, before a worker starts.

Workers find the same, each of them, seconds later and after a process group; here it is one sentence at once. What can
only be seen with numbers stays with them.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from app.config import Config
from app.data.loader import fetch
from app.errors import UserError
from app.job import strategy_options
from app.tasks.base import Task
from strategies import precision
from strategies.blocks import find_blocks
from strategies.initialization import require_parameters, structure
from strategies.layout import LayoutError
from strategies.parallelize import Layout
from strategies.pipeline.apply import plan_stages
from strategies.tensor.plan import make_plan


def looked_at(task: Task, layout: Layout) -> nn.Module | None:
    """The model's structure; None for one worker, and where it cannot be had without building the model for real.

    Raises:
        LayoutError: nothing in it can be trained; the task names blocks that it does not have.
    """
    if layout.dims.world_size == 1:
        return None
    module = _structure(task, layout.dims.pp > 1)
    if module is not None:
        require_parameters(module)
        find_blocks(module, task.blocks(module))
    return module


def _structure(task: Task, needed: bool) -> nn.Module | None:
    if needed:
        return structure(task.build_model)[0]
    try:
        with torch.device("meta"):
            return task.build_model()
    except Exception:  # whatever a model's own code does with values; the workers build it for real
        return None


def check_devices(config: Config, gpus: float | None) -> None:
    """Raises LayoutError if the workers cannot compute as asked. gpus: how many each has; which, they look at
    themselves."""
    if config.train.precision == "fp8" and not gpus:
        precision.require_float8(torch.device("cpu"))


def count_blocks(task: Task, module: nn.Module | None) -> int | None:
    """How many pieces the model can be cut into."""
    return None if module is None else len(find_blocks(module, task.blocks(module)))


def check_model(config: Config, task: Task, layout: Layout, module: nn.Module | None) -> None:
    """Raises LayoutError, UserError: one sentence, if the layout cannot run this model."""
    chosen = strategy_options(config)
    if module is None:
        return
    if layout.dims.tp > 1:
        make_plan(module, task.tensor_plan(module), chosen.sequence_parallel)
    if layout.dims.pp > 1:
        batch = fetch(task.train_data(), [(0, 0)])
        with _only_sentences():
            device = torch.device("cpu")
            plan_stages(
                module, find_blocks(module, task.blocks(module)), chosen, layout.dims.pp, (task.loss, batch), device
            )


class _only_sentences(contextlib.AbstractContextManager[None]):
    """Leaves what a model's own code raises without numbers to the workers, whose logs say where."""

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return isinstance(error, Exception) and not isinstance(error, LayoutError | UserError)
