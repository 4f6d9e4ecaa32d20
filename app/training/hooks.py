"""What a task may add to training, called from one place, on all ranks alike:

training_step, log, optimizer, schedule     in a step          (Updates, build_optimizers)
on_evaluation, stop_early                   after each one     (EvaluationLog, stops_early)
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from app.config import Config
from app.errors import UserError
from app.storage.storage import Storage
from app.tasks.base import Task
from app.training.job import Heartbeat, strategy_options
from app.training.optimizer import build_optimizer, learning_rate
from strategies import registry
from strategies.layout import Layout
from strategies.parallelize import Options, Parallel
from strategies.zero_weight import has_no_weight

LossFunction = Callable[[Any, Any], Tensor]
"""(model, batch) → the mean loss, 0-dimensional."""


def overrides(task: Task, name: str) -> bool:
    return getattr(type(task), name) is not getattr(Task, name)


def check(config: Config, task: Task, layout: Layout, logged: Sequence[str] = ()) -> Iterator[str]:
    """Remarks for the user on what the layout leaves out, such as what the loss logs. Raises UserError for what it
    cannot do."""
    dims, engine = layout.dims, any(record.required_package for record in registry.records(layout.name))
    if overrides(task, "training_step") and (dims.pp > 1 or engine):
        why = "the stages of a pipeline take the steps" if dims.pp > 1 else f"{layout.name} takes the steps itself"
        raise UserError(f"the task has a training_step of its own, but {why}: use ddp or fsdp")
    if config.train.ema_decay is not None and engine:
        raise UserError(f"train.ema_decay is not for {layout.name}, which keeps the weights itself: use fsdp")
    if config.train.patience is not None and (task.eval_data() is None or config.train.eval_every is None):
        raise UserError("train.patience counts evaluations: write train.eval_every, and give the task eval_data")
    if dims.pp * dims.cp > 1 and logged:
        yield f"{', '.join(f'train/{name}' for name in logged)}: not shown, since no worker has whole outputs here"
    if dims.pp * dims.cp > 1 and overrides(task, "on_evaluation") and not type(task).__module__.startswith("app."):
        yield "on_evaluation is not called: no worker has the whole model or whole sequences here"


# --- a step -----------------------------------------------------------------------------------------------------------


def options(config: Config, task: Task) -> Options:
    """What strategies are told."""
    found = replace(strategy_options(config), float_output=task.float_output)
    unused = found.find_unused_parameters or overrides(task, "training_step")  # by updates of the other weights
    return replace(found, find_unused_parameters=unused)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, config: Config, task: Task, *, step: int, steps: int
) -> dict[str, float]:
    """Gives the optimizer the rate of a step; returns what it has, see `learning_rates`.

    Args:
        optimizer: of the run.
        config: the schedule, which the task's own takes precedence over.
        task: with a schedule of its own, or without.
        step: steps that have been taken.
        steps: of the whole run.
    """
    rate = learning_rate(config.optimizer, config.schedule, step, steps, config.train.global_batch_size)
    if (factor := task.schedule(step, steps)) is not None:
        rate = config.optimizer.lr * factor
    for group in optimizer.param_groups:  # initial_lr: of an optimizer of the task's own
        group["lr"] = rate * group["initial_lr"] / (config.optimizer.lr or 1.0) if "initial_lr" in group else rate
    return learning_rates(optimizer)


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The rates that the optimizer steps with, by name.

    "lr" is the first parameter group's. Beside it are those of several optimizers, "lr_NAME", and of groups that differ
    from the first, "lr_group_1" and so on.
    """
    groups = optimizer.param_groups
    rates = {"lr": float(groups[0]["lr"])}
    if isinstance(optimizer, Optimizers):
        return rates | {f"lr_{name}": float(each.param_groups[0]["lr"]) for name, each in optimizer.named.items()}
    differing = {f"lr_group_{i}": float(group["lr"]) for i, group in enumerate(groups)}
    return rates | {name: rate for name, rate in differing.items() if rate != rates["lr"]}


class Updates:
    """What a task's training_step is given: each call is one update of the weights from the whole global batch.

    Args:
        take: the loop's update: (loss, name of one of several optimizers or "") → this worker's part of the mean loss
            over the global batch, and the gradient's norm where it is known.
    """

    def __init__(self, take: Callable[[LossFunction, str], tuple[Tensor, Tensor | None]]) -> None:
        self._take = take
        self.loss: Tensor | None = None
        """Of all updates, this worker's part; None before the first."""
        self.grad_norm: Tensor | None = None
        """Of the first update's gradient."""

    def __call__(self, loss: LossFunction, optimizer: str = "") -> Tensor:
        """Updates the weights.

        Args:
            loss: (model, batch) → its mean over the batch's items, 0-dimensional.
            optimizer: the name of one of several, which changes its own parameters alone.

        Returns:
            This worker's part of the mean over the global batch, detached.
        """
        value, grad_norm = self._take(loss, optimizer)
        self.loss = value if self.loss is None else self.loss + value
        self.grad_norm = grad_norm if self.grad_norm is None else self.grad_norm
        return value


def logged_losses(task: Task, weights: Sequence[Any], *, in_parts: bool) -> dict[str, Tensor]:
    """This worker's part of what the task's loss has logged in a step, by name; nothing is kept of it.

    Args:
        task: its `recorded` has the values of each call.
        weights: of the step's micro-batches.
        in_parts: whether micro-batches may have been cut in two, as they are where the noise scale is measured.

    Raises:
        UserError: the loss did not log a name once in each micro-batch.
    """
    recorded = task.recorded or {}
    task.recorded = None
    uneven = [name for name, values in recorded.items() if len(values) != len(weights)]
    if uneven and in_parts:
        return {}
    if uneven:
        raise UserError(
            f"the task logs {uneven[0]!r} not once in each micro-batch: log it once whenever loss is called"
        )
    return {name: _weighted(values, weights) for name, values in recorded.items()}


def _weighted(values: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    """The values' sum, each times its micro-batch's weight; one of weight 0 may be nan, and has no part in it."""
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        if not has_no_weight(weight):
            total = total + value * weight
    return total


class Optimizers(torch.optim.Optimizer):
    """Several, each of its own parameters, as one. named: by name."""

    def __init__(self, named: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__([group for each in named.values() for group in each.param_groups], {})
        self.named = dict(named)
        self.param_groups = [group for each in named.values() for group in each.param_groups]

    @property
    def state(self) -> Any:
        return {p: held for each in self.named.values() for p, held in each.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """Torch's constructor sets an empty one."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.named.values():
            each.step()


def one_of_several(optimizer: torch.optim.Optimizer, name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of a name; gradients of parameters that are not its own are dropped."""
    if not isinstance(optimizer, Optimizers) or name not in optimizer.named:
        named = ", ".join(optimizer.named) if isinstance(optimizer, Optimizers) else "none by name"
        raise UserError(f"training_step updates with the optimizer {name!r}, but the task's are: {named}")
    chosen = optimizer.named[name]
    its_own = {id(parameter) for group in chosen.param_groups for parameter in group["params"]}
    for parameter in parameters:
        if id(parameter) not in its_own:
            parameter.grad = None
    return chosen


def gather_when_called(parallel: Parallel) -> None:
    """For steps that call parts of the model: a part that is gathered ahead, and then not called, would be used as it
    was before the update."""
    for module in parallel.module.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch([])


def build_optimizers(config: Config, task: Task, parallel: Parallel) -> torch.optim.Optimizer:
    """The task's own, or the configuration's."""
    trained = [(name, p) for name, p in parallel.named_parameters() if p.requires_grad]
    own = task.optimizer(trained) if trained else None  # a stage of a pipeline may have nothing to train
    if own is None:
        return build_optimizer(config.optimizer, parallel.parameters())
    made = Optimizers(own) if isinstance(own, Mapping) else own
    for group in made.param_groups:  # what the schedule's rate is to be multiplied by
        group["initial_lr"] = group["lr"]
    return made


# --- after an evaluation ----------------------------------------------------------------------------------------------


def stops_early(config: Config, task: Task, evaluations: Sequence[Mapping[str, float]]) -> bool:
    """Whether training is to end after these evaluations: by train.patience, or as the task says."""
    patience, metric = config.train.patience, config.checkpoint.metric
    if patience is not None and len(evaluations) > patience:
        sign = 1 if config.checkpoint.mode == "max" else -1
        values = [sign * found[metric] if math.isfinite(found[metric]) else -math.inf for found in evaluations]
        if max(values[-patience:]) <= max(values[:-patience]):
            return True
    return task.stop_early(evaluations)


def call_on_evaluation(
    task: Task, parallel: Parallel, heartbeat: Heartbeat, *, folder: str, step: int, is_first_rank: bool
) -> EvaluationLog:
    """Calls the task's `on_evaluation`; what it has logged.

    Args:
        task: with an on_evaluation of its own.
        parallel: the model, which every rank calls equally often.
        heartbeat: is told of every call of the model, since it may take long.
        folder: of the run; what is logged goes below it.
        step: after which the evaluation is.
        is_first_rank: whether this rank writes files.
    """
    log = EvaluationLog(folder, step, is_first_rank)

    def moves(*_: Any) -> None:
        heartbeat.ticks += 1

    alive = parallel.inner.register_forward_pre_hook(moves)
    parallel.module.eval()
    try:
        parallel.forward(lambda model, _: task.on_evaluation(model, log), None)
    finally:
        alive.remove()
        parallel.module.train()
    return log


class EvaluationLog:
    """The `log` that on_evaluation is given; rank 0's files go into the run's folder and to MLflow."""

    def __init__(self, folder: str, step: int, first: bool) -> None:
        self.folder, self.first = f"evaluation/step-{step:08d}", first
        self._storage = Storage(folder).join(self.folder) if first else None
        self.numbers: dict[str, float] = {}
        self.written = False

    def __call__(self, name: str, value: Any) -> None:
        """value: text; a number; a figure of matplotlib; an image: (H, W), (H, W, 3 or 4) or (1 or 3, H, W), of bytes
        or of 0 to 1, or PIL's."""
        if isinstance(value, (int, float)):
            self.numbers[name] = float(value)
        elif self._storage is not None:
            suffix, content = ("txt", value.encode()) if isinstance(value, str) else ("png", _png(name, value))
            self._storage.make()
            self._storage.write_bytes(f"{name}.{suffix}", content)
            self.written = True


def _png(name: str, value: Any) -> bytes:
    out = io.BytesIO()
    if hasattr(value, "savefig"):
        value.savefig(out, format="png")
        return out.getvalue()
    from matplotlib.image import imsave

    if hasattr(value, "getbands"):  # PIL's
        value.save(out, format="png")
        return out.getvalue()
    pixels = torch.as_tensor(value).detach().cpu()
    if pixels.dim() == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.permute(1, 2, 0).squeeze(-1)
    if pixels.dim() not in (2, 3):
        raise UserError(f"on_evaluation logs {name!r} of shape {tuple(pixels.shape)}: an image has 2 or 3 dimensions")
    top = 1 if pixels.is_floating_point() else 255
    array = (pixels.float() if top == 1 else pixels).clamp(0, top).numpy()
    imsave(out, array, cmap="gray", vmin=0, vmax=top, format="png")
    return out.getvalue()
