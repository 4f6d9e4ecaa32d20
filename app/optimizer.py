"""Optimizers and learning-rate schedules, both functions of the configuration alone."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from app.config import OptimizerConfig, ScheduleConfig
from app.errors import UserError

BUILT_IN = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class that `optimizer.name` means; needs no parameters, so it can be asked before a run starts."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(
            f"optimizer.name is {name!r}, but it must be one of {', '.join(BUILT_IN)} or an import path "
            "such as my_package.my_module:MyOptimizer"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"optimizer.name is {name!r}, which does not import: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"optimizer.name is {name!r}, which is not a torch.optim.Optimizer class")
    return found


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over `parameters`; biases and norms (fewer than two dimensions) are not decayed.

    The built-in ones run as one fused kernel over all parameters, on GPUs and CPUs alike.
    """
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.lr, **config.args}
    if config.name in ("adam", "adamw"):
        options |= {"betas": (config.betas[0], config.betas[1]), "eps": config.eps, "fused": True}
    elif config.name == "sgd":
        options |= {"momentum": config.momentum, "fused": True}
    try:
        return optimizer_class(config.name)([group for group in groups if group["params"]], **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {config.name} does not take these arguments: {error}") from error


def learning_rate(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, step: int, steps: int, batch: int | None = None
) -> float:
    """Learning rate of step `step` (0-based) of `steps`: linear warm-up, then the schedule's own curve.

    batch: the global batch size, for optimizer.lr_scaling. A rate that was scaled up is warmed up from the unscaled
    one, as Goyal et al. 2017, section 2.2; others from 0.
    """
    top, warmup = peak_rate(optimizer, batch), schedule.warmup_steps
    if step < warmup:
        bottom = optimizer.lr if top > optimizer.lr else 0.0
        return bottom + (top - bottom) * (step + 1) / warmup
    if schedule.name == "constant":
        return top
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    fraction = 1 - done if schedule.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return top * (schedule.final_fraction + (1 - schedule.final_fraction) * fraction)


def peak_rate(optimizer: OptimizerConfig, batch: int | None) -> float:
    """optimizer.lr, scaled from the batch size it is meant for to this one: in proportion (Goyal et al. 2017, for SGD),
    or to the square root (Krizhevsky 2014; Malladi et al. 2022, for Adam)."""
    if optimizer.lr_scaling == "none" or batch is None or optimizer.lr_batch_size is None:
        return optimizer.lr
    return optimizer.lr * (batch / optimizer.lr_batch_size) ** (1.0 if optimizer.lr_scaling == "linear" else 0.5)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
