"""The optimizer, its learning rate at each step, and the loss scale of fp16."""

import inspect
import itertools
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
SMALLEST_SCALE = 2.0**-10  # of the loss
LARGEST_SCALE = 2.0**24


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class that `optimizer.name` names.

    Args:
        name: A built-in one such as `adamw`, or `module:Class`.

    Raises:
        UserError: There is no such optimizer.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(unknown_optimizer(name))
    try:
        chosen = getattr(user_module(module, attribute), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"optimizer.name is {name!r}, which does not import: {error}") from error
    if not (inspect.isclass(chosen) and issubclass(chosen, torch.optim.Optimizer)):
        raise UserError(f"optimizer.name is {name!r}, which is not a torch.optim.Optimizer class")
    return chosen


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The configured optimizer over the parameters that are trained.

    Biases and norms, which have fewer than two dimensions, get no weight decay. A built-in
    optimizer updates all parameters in one fused kernel, on GPUs and CPUs alike.

    Args:
        config: The optimizer's name and arguments.
        parameters: Those of the model.

    Raises:
        UserError: The optimizer does not take the arguments.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    options: dict[str, Any] = {"lr": config.lr, **config.args}
    if config.name in ("adam", "adamw"):
        options["betas"] = (config.betas[0], config.betas[1])
        options["eps"] = config.eps
        options["fused"] = True
    elif config.name == "sgd":
        options["momentum"] = config.momentum
        options["fused"] = True
    try:
        return optimizer_class(config.name)(_parameter_groups(config, trainable), **options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optimizer {config.name} does not take these arguments: {error}"
        ) from error


def _parameter_groups(
    config: OptimizerConfig, trainable: list[nn.Parameter]
) -> list[dict[str, Any]]:
    """The parameters in groups of one kind, since a kernel takes only one kind."""
    # Scalars are never sharded, so they have groups of their own; under ddp a mixture of experts
    # has both distributed and plain parameters.
    kinds = itertools.product((2, 1, 0), (False, True), (False, True))
    groups: list[dict[str, Any]] = []
    for dim, is_distributed, is_complex in kinds:
        kind = (dim, is_distributed, is_complex)
        members = [parameter for parameter in trainable if _kind(parameter) == kind]
        if not members:
            continue
        weight_decay = config.weight_decay if dim == 2 else 0.0
        kernels = _kernels(config.name, is_distributed=is_distributed, is_complex=is_complex)
        groups.append({"params": members, "weight_decay": weight_decay, **kernels})
    return groups or [{"params": []}]  # a stage of a pipeline may have nothing to train


def _kind(parameter: nn.Parameter) -> tuple[int, bool, bool]:
    """(dimensions, at most 2; whether it is distributed; whether it is complex)"""
    return min(parameter.dim(), 2), isinstance(parameter, DTensor), parameter.is_complex()


def _kernels(name: str, *, is_distributed: bool, is_complex: bool) -> dict[str, bool]:
    """Arguments of a parameter group that a built-in optimizer's fused kernel does not take.

    No fused kernel takes complex parameters, and torch 2.13 has no rule for SGD's with distributed
    ones.
    """
    if name in BUILT_IN and is_complex:
        return {"fused": False}
    if name == "sgd" and is_distributed:
        return {"fused": False, "foreach": True}
    return {}


# --- the learning rate ----------------------------------------------------------------------------


def learning_rate(
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    step: float,
    *,
    steps: int,
    batch_size: int | None = None,
) -> float:
    """The learning rate of a step: linear warm-up, then the schedule's curve.

    A peak rate that optimizer.lr_scaling has raised is warmed up from optimizer.lr (Goyal et al.
    2017, section 2.2), any other from 0.

    Args:
        optimizer: Has the base rate, and how it scales with the batch.
        schedule: Has the warm-up and the curve.
        step: The step, counted from 0; between two steps where batches differ.
        steps: Steps of the whole run.
        batch_size: The global batch size in samples; None means that the rate is not scaled.
    """
    peak = peak_rate(optimizer, batch_size)
    warmup = schedule.warmup_steps
    if step < warmup:
        start = optimizer.lr if peak > optimizer.lr else 0.0
        return start + (peak - start) * (step + 1) / warmup
    if schedule.name == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    remaining = 1 - done
    if schedule.name == "cosine":
        remaining = (1 + math.cos(math.pi * done)) / 2
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * remaining)


def peak_rate(optimizer: OptimizerConfig, batch_size: int | None) -> float:
    """optimizer.lr, scaled from optimizer.lr_batch_size to another batch size.

    The rate grows in proportion to the batch (Goyal et al. 2017, for SGD) or to its square root
    (Krizhevsky 2014; Malladi et al. 2022, for Adam).

    Args:
        optimizer: Has the rate, the batch size that it is meant for, and how it scales.
        batch_size: The global batch size in samples; None means that the rate is not scaled.
    """
    if optimizer.lr_scaling == "none" or batch_size is None or optimizer.lr_batch_size is None:
        return optimizer.lr
    exponent = 1.0 if optimizer.lr_scaling == "linear" else 0.5
    return optimizer.lr * (batch_size / optimizer.lr_batch_size) ** exponent


# --- fp16 -----------------------------------------------------------------------------------------


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018).

    The loss is multiplied by the scale, and the gradients are divided by it. The scale halves after
    an overflow, and doubles after `growth_interval` steps without one.

    The usual scaler checks each rank's gradients for an overflow. This one checks the total norm of
    the gradient, which is the same number on every rank in every layout, so that all ranks skip the
    same steps without another collective. Reading the norm makes the host wait for the device once
    per step, in fp16 only.

    Args:
        enabled: Whether the precision is fp16; if not, the scale is 1 and every step is accepted.
        growth_interval: Steps without an overflow after which the scale doubles.
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
        """Divide the gradients by the scale, which is exact because the scale is a power of two."""
        if not self.enabled:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)

    def accepts(self, grad_norm: torch.Tensor | None, step: int) -> bool:
        """Whether the optimizer may take this step; the scale adapts to the answer.

        Args:
            grad_norm: The norm of the whole gradient; None accepts the step.
            step: The step, for the error.

        Raises:
            NonFiniteError: The gradient overflows at every scale: the loss itself is not finite.
        """
        if not self.enabled or grad_norm is None:
            return True
        if bool(torch.isfinite(grad_norm)):
            self.good_steps += 1
            if self.good_steps % self.growth_interval == 0:
                self.scale = min(LARGEST_SCALE, self.scale * 2)
            return True
        self.good_steps = 0
        self.scale /= 2
        if self.scale < SMALLEST_SCALE:
            raise NonFiniteError(
                f"at step {step} the fp16 gradient overflows at every loss scale, on all ranks; "
                "the last good checkpoint is intact: try train.precision=bf16, a lower "
                "optimizer.lr or train.clip_norm=1.0"
            )
        return False

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from what `state` has returned."""
        if self.enabled and state:
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
