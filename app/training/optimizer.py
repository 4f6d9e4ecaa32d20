"""What makes a step of gradients: the optimizer, its learning rate at each step, and fp16's loss scale."""

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from app.config import OptimizerConfig, ScheduleConfig
from app.config.check import unknown_optimizer
from app.errors import NonFiniteError, UserError
from app.tasks.user_code import user_module

BUILT_IN = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
SMALLEST, LARGEST = 2.0**-10, 2.0**24
"""Loss scales."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class that `optimizer.name` means; needs no parameters, so it can be asked before a run starts."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(unknown_optimizer(name))
    try:
        found = getattr(user_module(module, attribute), attribute)
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
    groups = []
    for dim in (2, 1, 0):  # scalars, which are never sharded, apart from what is
        for split in (False, True):  # a kernel takes one kind; a mixture under ddp has both
            for is_complex in (False, True):
                group: dict[str, Any] = {
                    "params": [p for p in trainable if _kind(p) == (dim, split, is_complex)],
                    "weight_decay": config.weight_decay if dim == 2 else 0.0,
                }
                groups.append(group | _kernels(config.name, split=split, is_complex=is_complex))
    options: dict[str, Any] = {"lr": config.lr, **config.args}
    if config.name in ("adam", "adamw"):
        options |= {"betas": (config.betas[0], config.betas[1]), "eps": config.eps, "fused": True}
    elif config.name == "sgd":
        options |= {"momentum": config.momentum, "fused": True}
    filled = [group for group in groups if group["params"]]
    nothing: list[dict[str, Any]] = [{"params": []}]  # a pipeline's stage may have nothing to train
    try:
        return optimizer_class(config.name)(filled or nothing, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {config.name} does not take these arguments: {error}") from error


def _kernels(name: str, *, split: bool, is_complex: bool) -> dict[str, Any]:
    """What a group of a built-in optimizer says of its kernels, where the fused one does not take its parameters:
    none takes complex ones, and torch 2.13 has no rule for the distributed ones of SGD."""
    if name in BUILT_IN and is_complex:
        return {"fused": False}
    if name == "sgd" and split:
        return {"fused": False, "foreach": True}
    return {}


def _kind(parameter: nn.Parameter) -> tuple[int, bool, bool]:
    """Dimensions (at most 2), whether it is distributed, whether it is complex."""
    return min(parameter.dim(), 2), isinstance(parameter, DTensor), parameter.is_complex()


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


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018): multiplies the loss, divides the gradients; halves
    after an overflow, doubles after `growth_interval` steps.

    The usual scaler asks each rank's gradients whether they overflowed. Here the question is put to the total gradient
    norm, which is the same number on every rank whatever the layout, so all ranks skip the same steps without another
    collective. Reading it costs one synchronisation per step, in fp16 only.
    """

    def __init__(self, enabled: bool, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.scale = 2.0**16 if enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    @property
    def factor(self) -> float:
        """What the loss is multiplied by before backward."""
        return self.scale if self.enabled else 1.0

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divides the gradients by the scale, a power of two and therefore exactly."""
        for parameter in parameters if self.enabled else ():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)

    def accepts(self, grad_norm: torch.Tensor | None, step: int) -> bool:
        """Whether the optimizer may take this step; adapts the scale.

        Raises:
            NonFiniteError: the gradients overflow at every scale, so the loss itself is not finite.
        """
        if not self.enabled or grad_norm is None:
            return True
        if bool(torch.isfinite(grad_norm)):
            self.good_steps += 1
            if self.good_steps % self.growth_interval == 0:
                self.scale = min(LARGEST, self.scale * 2)
            return True
        self.good_steps = 0
        self.scale /= 2
        if self.scale < SMALLEST:
            raise NonFiniteError(
                f"at step {step} the fp16 gradient overflows at every loss scale, on all ranks; the last good "
                "checkpoint is intact: try train.precision=bf16, a lower optimizer.lr or train.clip_norm=1.0"
            )
        return False

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
