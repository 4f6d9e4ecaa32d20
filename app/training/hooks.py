"""What a task may add to training, called from one place, on all ranks alike:

training_step, log, optimizer, schedule     in a step          (Update, build_optimizers, Average)
on_evaluation, stop_early                   after each one     (EvaluationLog, stops_early)
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from app.checkpoint.ranks import Ranks
from app.config import Config
from app.errors import UserError
from app.storage.storage import Storage
from app.tasks.base import Task
from app.training.events import FilesWritten, WarningIssued
from app.training.job import strategy_options
from app.training.optimizer import build_optimizer, learning_rate
from strategies import registry
from strategies.grad_sync import local
from strategies.layout import Layout
from strategies.parallelize import Options, Parallel
from strategies.zero_weight import has_no_weight

if TYPE_CHECKING:
    from app.training.loop import Training


def overrides(task: Task, name: str) -> bool:
    return getattr(type(task), name) is not getattr(Task, name)


def check(config: Config, task: Task, layout: Layout, logged: Sequence[str] = ()) -> Iterator[str]:
    """Remarks for the user on what the layout leaves out, such as what the loss logs. Raises UserError for what it
    cannot do."""
    dims, engine = layout.dims, any(record.requires for record in registry.records(layout.name))
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


def set_learning_rate(training: Training) -> dict[str, float]:
    """Gives the optimizer this step's; returns what it has, see `learning_rates`."""
    config, at, steps = training.config, training.steps_done, training.job.steps
    rate = learning_rate(config.optimizer, config.schedule, at, steps, config.train.global_batch_size)
    if (factor := training.task.schedule(at, steps)) is not None:
        rate = config.optimizer.lr * factor
    for group in training.optimizer.param_groups:  # initial_lr: of an optimizer of the task's own
        group["lr"] = rate * group["initial_lr"] / (config.optimizer.lr or 1.0) if "initial_lr" in group else rate
    return learning_rates(training.optimizer)


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


class Update:
    """What a task's training_step is given: each call is one update of the weights from the whole global batch."""

    def __init__(self, training: Training, micro_batches: list[Any], weights: list[Any], logged: bool) -> None:
        self.training, self.micro_batches, self.weights, self.logged = training, micro_batches, weights, logged
        self.loss: Any = 0.0  # of all updates, this worker's part
        self.norm: Tensor | None = None  # of the first update's gradient
        dims = training.dims
        training.task.recorded = {} if logged and dims.pp * dims.cp == 1 else None

    def __call__(self, loss: Callable[[Any, Any], Tensor], optimizer: str = "") -> Tensor:
        """loss: (model, batch) → its mean over the batch's items, 0-d. optimizer: the name of one of several, which
        changes its own parameters alone. Returns this worker's part of the mean over the global batch, detached."""
        training, parallel, scale = self.training, self.training.parallel, self.training.scale
        step, clip = training.steps_done + 1, training.config.train.clip_norm
        measured = training.noise is not None and training.noise.due(step)
        passes: Any = training.noise if measured else parallel
        factor = scale.scale if scale.enabled else 1.0
        found = training.gathering.forward_backward(passes, self.micro_batches, self.weights, loss, factor)
        chosen: torch.optim.Optimizer = training.optimizer
        if optimizer:
            chosen = training.optimizer.named[optimizer]  # type: ignore[attr-defined]
            own = {id(p) for group in chosen.param_groups for p in group["params"]}
            for parameter in parallel.parameters():
                parameter.grad = parameter.grad if id(parameter) in own else None
        scale.unscale_(parallel.parameters())
        norm = parallel.grad_norm_(clip) if self.logged or clip is not None or scale.enabled else None
        if scale.accepts(norm, step):
            chosen.step()
        training.optimizer.zero_grad(set_to_none=True)
        self.loss = found if isinstance(self.loss, float) else self.loss + found
        self.norm = norm if self.norm is None else self.norm
        return found

    def losses(self) -> dict[str, Tensor]:
        """This worker's part of what the task has logged, by name."""
        recorded, self.training.task.recorded = self.training.task.recorded or {}, None
        if any(len(values) != len(self.weights) for values in recorded.values()):
            if self.training.noise is not None:  # which cuts micro-batches in two
                return {}
            name = next(name for name, values in recorded.items() if len(values) != len(self.weights))
            raise UserError(f"the task logs {name!r} not once in each micro-batch: log it once whenever loss is called")
        return {name: self._weighted(values) for name, values in recorded.items()}

    def _weighted(self, values: list[Tensor]) -> Tensor:
        """The values' sum, each times its micro-batch's weight; one of weight 0 may be nan, and has no part in it."""
        total = torch.zeros_like(values[0])
        for value, weight in zip(values, self.weights, strict=True):
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


def gather_when_called(parallel: Parallel) -> None:
    """For steps that call parts of the model: a part that is gathered ahead, and then not called, would be used as it
    was before the update."""
    for module in parallel.module.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch([])


def build_optimizers(config: Config, task: Task, parallel: Parallel) -> torch.optim.Optimizer:
    """The task's own, or the configuration's."""
    own = task.optimizer([(name, p) for name, p in parallel.named_parameters() if p.requires_grad])
    if own is None:
        return build_optimizer(config.optimizer, parallel.parameters())
    made = Optimizers(own) if isinstance(own, Mapping) else own
    for group in made.param_groups:  # what the schedule's rate is to be multiplied by
        group["initial_lr"] = group["lr"]
    return made


class Average:
    """An exponential moving average of the weights, each worker's of its own part; in the first steps of fewer:
    decay min(d, (1 + t) / (10 + t))."""

    def __init__(self, parallel: Parallel, decay: float) -> None:
        self.parallel, self.decay = parallel, decay
        self.values = {n: p.detach().clone() for n, p in parallel.named_parameters() if p.requires_grad}
        self._pairs = [(local(self.values[n]), p) for n, p in parallel.named_parameters() if n in self.values]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = [a for a, _ in self._pairs], [local(p.detach()) for _, p in self._pairs]
        get_ema_multi_avg_fn(decay)(averages, weights, step)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts the model has the average for weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in self._pairs:
            weight = local(parameter.detach())
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        for module in self.parallel.module.modules():
            if isinstance(module, FSDPModule):  # what was gathered, or is on its way, is the other's
                module.unshard()
                module.reshard()


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


def evaluate(training: Training, figures: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The figures of the weights, of their average (ema_…), and what the task logs; notes whether training ends."""
    values, average, progress = figures(), training.average, training.progress
    with average.in_place() if average else contextlib.nullcontext():
        if average is not None:
            values |= {f"ema_{name}": value for name, value in figures().items()}
        if overrides(training.task, "on_evaluation") and training.dims.pp * training.dims.cp == 1:
            values |= on_evaluation(training)
    progress.evaluations.append(values)
    progress.ended = any(Ranks().all(stops_early(training.config, training.task, progress.evaluations)))
    if progress.ended and training.place.rank == 0:
        sentence = f"training ends early, after step {training.steps_done:,}"
        training.channel.emit(WarningIssued(message=sentence))
    return values


def on_evaluation(training: Training) -> dict[str, float]:
    """Calls the task's; the numbers that it logs."""
    task, parallel, heartbeat = training.task, training.parallel, training.heartbeat
    log = EvaluationLog(training.job.folder, training.steps_done, training.place.rank == 0)

    def moves(*_: Any) -> None:
        heartbeat.ticks += 1

    alive = parallel.inner.register_forward_pre_hook(moves)
    parallel.module.eval()
    try:
        parallel.forward(lambda model, _: task.on_evaluation(model, log), None)
    finally:
        alive.remove()
        parallel.module.train()
    if log.written:
        training.channel.emit(FilesWritten(folder=log.folder))
    return log.numbers


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
