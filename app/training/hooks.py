"""What a task may add to training. The loop calls it on all ranks alike, through this file.

in a step               training_step, log, optimizer, schedule
after an evaluation     on_evaluation, stop_early
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from app.config import CheckpointConfig, Config
from app.errors import UserError, nearest
from app.storage.storage import Storage
from app.tasks.base import Task
from app.tasks.build import build_model
from app.tasks.returned import as_number, described, require_number, require_truth
from app.training.job import Heartbeat, strategy_options
from app.training.optimizer import (
    Optimizers,
    build_optimizer,
    hidden_matrices,
    learning_rate,
    require_matches,
)
from app.training.task_optimizer import require_optimizer
from app.training.width_transfer import Widths
from strategies import registry
from strategies.blocks import find_blocks
from strategies.layout import Layout
from strategies.parallel import Loss
from strategies.parallelize import Options, Parallel
from strategies.state import build_on_meta
from strategies.training_mode import evaluating
from strategies.zero_weight import has_no_weight


def overrides(task: Task, name: str) -> bool:
    """Whether the task has a method of its own instead of the one of `Task`."""
    return getattr(type(task), name) is not getattr(Task, name)


def is_users_task(task: Task) -> bool:
    """Whether the task is a person's own, and not a built-in one."""
    return not type(task).__module__.startswith("app.")


def check(config: Config, task: Task, layout: Layout, logged: Sequence[str] = ()) -> Iterator[str]:
    """Check that the layout can do what the task and the configuration want.

    Args:
        config: The run's configuration.
        task: The task.
        layout: The layout that will train it.
        logged: The names that the task's loss logs.

    Yields:
        A sentence for the user about each thing that the layout leaves out.

    Raises:
        UserError: The layout cannot train this.
    """
    train = config.train
    dims = layout.dims
    is_engine = any(record.required_package for record in registry.records(layout.name))
    obstacle = step_obstacle(task, layout)
    if obstacle:
        raise UserError(f"the task has a training_step of its own, but {obstacle}: use ddp or fsdp")
    if train.ema_decay is not None and is_engine:
        raise UserError(
            f"train.ema_decay does not work with {layout.name}, which keeps the weights itself: "
            "use fsdp"
        )
    if train.grows_by_itself and train.eval_separate:
        raise UserError(
            "train.batch_schedule is auto, which moves checkpoints away from the steps that "
            "train.eval_separate evaluates: leave one of them out"
        )
    if train.batch_schedule and is_engine:
        raise UserError(
            f"train.batch_schedule does not work with {layout.name}, whose engine starts with one "
            "batch: use fsdp"
        )
    is_narrow = train.weight_dtype != "fp32" or config.optimizer.state_dtype != "fp32"
    if is_engine and is_narrow:
        key = "optimizer.state_dtype" if train.weight_dtype == "fp32" else "train.weight_dtype"
        raise UserError(
            f"{key}=bf16 does not work with {layout.name}, which gives optimizers flat parts in "
            "float32: use fsdp"
        )
    if is_narrow and overrides(task, "optimizer"):
        key = "optimizer.state_dtype" if train.weight_dtype == "fp32" else "train.weight_dtype"
        raise UserError(
            f"{key}=bf16 is for adamw, but the task has an optimizer of its own: leave one of the "
            "two out"
        )
    if is_engine and config.optimizer.name in ("muon", "adafactor", "adamw8bit"):
        indivisible = "rows" if config.optimizer.name == "adamw8bit" else "matrices"
        raise UserError(
            f"optimizer.name is {config.optimizer.name}, which needs whole {indivisible}, but "
            f"{layout.name} gives optimizers flat parts of them: use fsdp"
        )
    if dims.pp * dims.cp == 1:
        return
    if logged:
        names = ", ".join(f"train/{name}" for name in logged)
        yield f"{names}: not logged under pipeline or context parallelism"
    is_called = overrides(task, "on_evaluation") and not train.eval_separate
    if is_users_task(task) and is_called:
        yield "on_evaluation is not called under pipeline or context parallelism"


# --- a step ---------------------------------------------------------------------------------------


def step_obstacle(task: Task, layout: Layout) -> str:
    """Why a layout cannot take the steps of a task; "" if it can."""
    if not overrides(task, "training_step"):
        return ""
    if layout.dims.pp > 1:
        return "the stages of a pipeline take the steps"
    if any(record.required_package for record in registry.records(layout.name)):
        return f"{layout.name} takes the steps itself"
    return ""


STEPS_TRIED = 10
"""Steps of a training_step that counts them, in which its losses are looked for."""


def losses_of_step(task: Task) -> list[Loss]:
    """The losses whose gradients the task's steps take, each once, in order.

    A training_step of the task's own is called with an `update` that changes no weights, and again
    if it has changed an attribute of the task, such as a count of steps: it may train the generator
    in every fifth step only. What it raises is left to the workers, whose logs say where it was.

    Args:
        task: A copy, which its training_step may change.
    """
    losses: dict[object, Loss] = {}

    def update(loss: Loss, optimizer: str = "") -> Tensor:
        function = getattr(loss, "__func__", loss)
        losses.setdefault(getattr(function, "__code__", function), loss)
        return torch.zeros(())

    if not overrides(task, "training_step"):
        return [task.loss]
    with contextlib.suppress(Exception):
        for _ in range(STEPS_TRIED):
            attributes = dict(vars(task))
            task.training_step(update)
            if all(attributes.get(name) is value for name, value in vars(task).items()):
                break
    return list(losses.values()) or [task.loss]


def options(config: Config, task: Task) -> Options:
    """The options of strategies, from the configuration and the task."""
    configured = strategy_options(config)
    # An update of a training_step may leave out weights that another update trains.
    may_leave_weights_out = overrides(task, "training_step")
    return replace(
        configured,
        float_output=task.float_output,
        find_unused_parameters=configured.find_unused_parameters or may_leave_weights_out,
    )


def disable_prefetch(parallel: Parallel) -> None:
    """Let FSDP gather each module only when it is called.

    A training_step may call parts of the model. If a part was gathered ahead and then not called,
    the next update would use the weights that it had before this one.
    """
    for module in parallel.module.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch([])


def build_optimizers(
    config: Config, task: Task, parallel: Parallel, *, widths: Widths
) -> torch.optim.Optimizer:
    """The task's own optimizer or optimizers, or else the configured one.

    Args:
        config: The run's.
        task: Its task.
        parallel: Its model.
        widths: For optimizer.width_transfer.

    Raises:
        UserError: The task's own `optimizer` returns something that cannot train the model.
    """
    trained = [(name, p) for name, p in parallel.named_parameters() if p.requires_grad]
    of_task = None
    if trained:  # a stage of a pipeline may have nothing to train
        of_task = task.optimizer(trained)
    if of_task is None:
        if parallel.layout.dims.pp == 1:  # a stage has only some of the names
            require_matches(config.optimizer, (name for name, _ in trained))
        hidden = None
        if config.optimizer.name == "muon":
            whole_model, _ = build_on_meta(lambda: build_model(task))
            blocks = find_blocks(whole_model, task.blocks(whole_model))
            hidden = hidden_matrices(whole_model, blocks)
        return build_optimizer(
            config.optimizer,
            parallel.parameters(),
            names={parameter: name for name, parameter in trained},
            hidden=hidden,
            widths=widths,
            weight_dtype=config.train.weight_dtype,
            seed=config.train.seed,
        )
    chosen = require_optimizer(of_task, trained)
    optimizer = Optimizers(chosen) if isinstance(chosen, Mapping) else chosen
    for group in optimizer.param_groups:  # the schedule multiplies this rate
        group["initial_lr"] = group["lr"]
    return optimizer


def choose_optimizer(
    optimizer: torch.optim.Optimizer, name: str, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer that an update steps with.

    If it is one of a task's several optimizers, gradients of parameters of the others are dropped.

    Args:
        optimizer: The run's.
        name: The one that the task's training_step wants; "" means all.
        parameters: Of the whole model.

    Raises:
        UserError: There is none of that name.
    """
    if not name:
        return optimizer
    names = list(optimizer.named) if isinstance(optimizer, Optimizers) else []
    if not isinstance(optimizer, Optimizers) or name not in names:
        raise UserError(
            f"training_step updates with the optimizer {name!r}, but the task's are: "
            f"{', '.join(names) or 'none by name'}"
        )
    chosen = optimizer.named[name]
    trained = {id(parameter) for group in chosen.param_groups for parameter in group["params"]}
    for parameter in parameters:
        if id(parameter) not in trained:
            parameter.grad = None
    return chosen


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Where the configured schedule of the learning rate is.

    Attributes:
        step: Steps from its beginning; not the run's own if the batch changes.
        steps: Steps of the whole curve.
        batch_size: The global batch size of the step that is taken.
    """

    step: float
    steps: int
    batch_size: int


def curve_point(config: Config, *, step: int, steps: int, samples: int) -> CurvePoint:
    """Where the schedule is in a step of a run whose batch is configured.

    Args:
        config: Has the schedule and the batches.
        step: Steps taken so far.
        steps: Steps of the whole run.
        samples: Samples seen so far, which decide the batch.
    """
    schedule = config.schedule
    batches = config.train.batches
    batch_size = batches.batch_at(samples)
    if schedule.batch_size is not None:
        samples_at_end = batches.samples_after(steps - step, start=samples)
        return CurvePoint(
            step=samples / schedule.batch_size,
            steps=schedule.steps or max(1, round(samples_at_end / schedule.batch_size)),
            batch_size=batch_size,
        )
    steps_of_curve = schedule.steps or steps
    step_on_curve = batches.step_on_curve(
        step, samples=samples, first=schedule.warmup_steps, steps=steps_of_curve
    )
    return CurvePoint(step=step_on_curve, steps=steps_of_curve, batch_size=batch_size)


class Beginning(NamedTuple):
    """Where a fork continues another run.

    Args:
        samples: Samples that had been seen.
        rate: The learning rate of the last step before.
    """

    samples: int
    rate: float


def joined_rate(rate: float, beginning: Beginning, *, samples: int, join_samples: int) -> float:
    """The learning rate on the way from a fork's checkpoint to the fork's own schedule.

    Args:
        rate: What the schedule says.
        beginning: Where the fork began.
        samples: Samples seen so far.
        join_samples: Over how many samples it goes there, by the same factor with each.
    """
    if min(rate, beginning.rate) <= 0:  # no factor leads there
        return rate
    done = min(1.0, (samples - beginning.samples) / join_samples)
    return beginning.rate ** (1 - done) * rate**done


def base_rate(optimizer: torch.optim.Optimizer, config: Config) -> float:
    """The rate that `set_learning_rate` has set, before factors of single groups."""
    group = optimizer.param_groups[0]
    if "initial_lr" in group:
        return float(group["lr"] / group["initial_lr"] * (config.optimizer.lr or 1.0))
    return float(group["lr"])


def set_learning_rate(
    optimizer: torch.optim.Optimizer,
    config: Config,
    task: Task,
    *,
    step: int,
    steps: int,
    point: CurvePoint,
    samples: int = 0,
    beginning: Beginning | None = None,
) -> dict[str, float]:
    """Set the learning rate of a step.

    Args:
        optimizer: The run's.
        config: Has the schedule.
        task: May have a schedule of its own, which takes precedence.
        step: Steps taken so far.
        steps: Steps of the whole run.
        point: Where the configured schedule is.
        samples: Samples seen so far.
        beginning: Where a fork began; None if the run is no fork.

    Returns:
        The rates by name: "lr" is that of the first parameter group, "lr_NAME" that of one of
        several optimizers, "lr_group_1" and so on those of groups that differ from the first.
    """
    peak = config.optimizer.lr
    factor = schedule_factor(task, step, steps)
    if factor is None:
        rate = learning_rate(
            config.optimizer,
            config.schedule,
            point.step,
            steps=point.steps,
            batch_size=point.batch_size,
        )
    else:
        rate = peak * factor
    join_samples = config.schedule.join_samples
    if beginning is not None and join_samples:
        rate = joined_rate(rate, beginning, samples=samples, join_samples=join_samples)
    for group in optimizer.param_groups:
        if "initial_lr" in group:  # an optimizer of the task's own
            group["lr"] = rate * group["initial_lr"] / (peak or 1.0)
        else:
            group["lr"] = rate
    return _learning_rates(optimizer)


def schedule_factor(task: Task, step: int, steps: int) -> float | None:
    """The factor of a step's learning rate by the task's own schedule; None: it has none.

    Args:
        task: The task.
        step: Steps taken so far.
        steps: Steps of the whole run.

    Raises:
        UserError: The task returns something else than a number of at least 0.
    """
    factor = task.schedule(step, steps)
    if factor is None:
        return None
    return require_number(factor, f"the task's schedule({step}, {steps}) returns")


def _learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    first_rate = float(optimizer.param_groups[0]["lr"])
    rates = {"lr": first_rate}
    if isinstance(optimizer, Optimizers):
        for name, each in optimizer.named.items():
            rates[f"lr_{name}"] = float(each.param_groups[0]["lr"])
        return rates
    for number, group in enumerate(optimizer.param_groups):
        rate = float(group["lr"])
        if rate != first_rate:
            rates[f"lr_group_{number}"] = rate
    return rates


class Updates:
    """The `update` that a task's training_step calls; each call updates the weights once.

    Args:
        update: The loop's update: (loss function, name of an optimizer or "") → this worker's part
            of the mean loss over the global batch, and the norm of the gradient if it is known.
    """

    def __init__(self, update: Callable[[Loss, str], tuple[Tensor, Tensor | None]]) -> None:
        self._update = update
        self.loss: Tensor | None = None
        """The sum over all updates, this worker's part; None before the first."""
        self.grad_norm: Tensor | None = None
        """The norm of the first update's gradient."""

    def __call__(self, loss: Loss, optimizer: str = "") -> Tensor:
        """Update the weights by the gradient over the whole global batch.

        Args:
            loss: (model, batch) → its mean over the batch's items, 0-dimensional.
            optimizer: The name of one of several, which changes only its own parameters.

        Returns:
            This worker's part of the mean over the global batch, detached.
        """
        value, grad_norm = self._update(loss, optimizer)
        self.loss = value if self.loss is None else self.loss + value
        if self.grad_norm is None:
            self.grad_norm = grad_norm
        return value


def logged_losses(
    task: Task, weights: Sequence[float | Tensor], *, may_be_halved: bool
) -> dict[str, Tensor]:
    """This worker's part of what the task's loss has logged in a step, which is then forgotten.

    Args:
        task: Its `recorded` has the values of each call.
        weights: Of the step's micro-batches.
        may_be_halved: Whether a micro-batch may have been cut in two, as the measurement of the
            noise scale does.

    Returns:
        By name, the mean over the global batch; {} if micro-batches were cut in two.

    Raises:
        UserError: The loss did not log a name once in each micro-batch.
    """
    recorded = task.recorded or {}
    task.recorded = None
    uneven = [name for name, values in recorded.items() if len(values) != len(weights)]
    if uneven and may_be_halved:
        return {}
    if uneven:
        raise UserError(
            f"the task does not log {uneven[0]!r} exactly once in each micro-batch: "
            "log it once whenever loss is called"
        )
    return {name: _weighted_sum(values, weights) for name, values in recorded.items()}


def _weighted_sum(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        if not has_no_weight(weight):  # such a value may be nan
            total = total + value * weight
    return total


# --- after an evaluation --------------------------------------------------------------------------


def stops_early(config: Config, task: Task, evaluations: Sequence[Mapping[str, float]]) -> bool:
    """Whether training is to end: train.patience is used up, or the task says so.

    Args:
        config: Has the patience, and which metric it watches.
        task: May have a stop_early of its own.
        evaluations: The metrics of every evaluation, the newest last.

    Raises:
        UserError: See `task_stops_early`.
    """
    return _is_out_of_patience(config, evaluations) or task_stops_early(task, evaluations)


def task_stops_early(task: Task, evaluations: Sequence[Mapping[str, float]]) -> bool:
    """Whether the task says that training is to end.

    Args:
        task: May have a stop_early of its own.
        evaluations: The metrics of every evaluation, the newest last.

    Raises:
        UserError: It says neither yes nor no.
    """
    return require_truth(task.stop_early(evaluations), "the task's stop_early() returns")


def watches_metric(config: Config) -> bool:
    """Whether something is decided by the metric that checkpoint.metric names."""
    return config.checkpoint.keep_best or config.train.patience is not None


def require_metric(config: Config, metrics: Mapping[str, float]) -> None:
    """Check that an evaluation has the metric that somebody has written as checkpoint.metric.

    What can be known before training is refused then (app/run/rehearse.py).

    Raises:
        UserError: It does not have it.
    """
    wanted = config.checkpoint.metric
    is_written = wanted != CheckpointConfig.metric or config.train.patience is not None
    if watches_metric(config) and is_written and metrics and wanted not in metrics:
        raise UserError(
            f"checkpoint.metric is {wanted!r}, which the evaluation does not give"
            f"{nearest(wanted, metrics)}: write one of {', '.join(metrics)}"
        )


def ran_out_of_patience(config: Config, evaluations: Sequence[Mapping[str, float]]) -> bool:
    """Whether train.patience was used up at any of these evaluations, as of late ones.

    Args:
        config: Has the patience, and which metric it watches.
        evaluations: The metrics of every evaluation, the newest last.
    """
    return any(
        _is_out_of_patience(config, evaluations[: number + 1]) for number in range(len(evaluations))
    )


def _is_out_of_patience(config: Config, evaluations: Sequence[Mapping[str, float]]) -> bool:
    patience = config.train.patience
    if patience is None or len(evaluations) <= patience:
        return False
    sign = 1 if config.checkpoint.mode == "max" else -1
    scores = []
    for metrics in evaluations:
        value = metrics.get(config.checkpoint.metric, math.nan)
        scores.append(sign * value if math.isfinite(value) else -math.inf)
    return max(scores[-patience:]) <= max(scores[:-patience])


def call_on_evaluation(
    task: Task,
    parallel: Parallel,
    heartbeat: Heartbeat,
    *,
    folder: str,
    step: int,
    is_first_rank: bool,
) -> EvaluationLog:
    """Call the task's `on_evaluation`.

    Args:
        task: Has an on_evaluation of its own.
        parallel: The model, which every rank calls equally often.
        heartbeat: Ticks with every call of the model, since an on_evaluation may take long.
        folder: The run's folder, for the files that the task logs.
        step: The step just taken.
        is_first_rank: Whether this rank writes files.

    Returns:
        What the task has logged.
    """
    log = EvaluationLog(folder, step, is_first_rank)

    def tick(*_: object) -> None:
        heartbeat.ticks += 1

    hook = parallel.inner.register_forward_pre_hook(tick)
    try:
        with evaluating(parallel.module):
            parallel.forward(lambda model, _: task.on_evaluation(model, log), None)
    finally:
        hook.remove()
    return log


class EvaluationLog:
    """The `log` that on_evaluation calls. Rank 0's files go into the run's folder and to MLflow.

    Args:
        folder: The run's folder.
        step: The step just taken.
        is_first_rank: Whether this rank writes files.
    """

    def __init__(self, folder: str, step: int, is_first_rank: bool) -> None:
        self.folder = f"evaluation/step-{step:08d}"
        """Where the files are, relative to the run's folder."""
        self.numbers: dict[str, float] = {}
        self.has_files = False
        self._storage = Storage(folder).join(self.folder) if is_first_rank else None

    def __call__(self, name: str, value: Any) -> None:
        """Log a value.

        Args:
            name: The name of the metric, or of the file without its suffix.
            value: A number, a text, a figure of matplotlib or an image. An image is PIL's, or has
                the shape (H, W), (H, W, 3 or 4) or (1 or 3, H, W), with bytes or with floats from
                0 to 1.

        Raises:
            UserError: It is something else.
        """
        number = as_number(value)
        if number is not None:
            self.numbers[name] = number
            return
        if self._storage is None:
            return
        self._storage.make()
        if isinstance(value, str):
            self._storage.write_bytes(f"{name}.txt", value.encode())
        else:
            self._storage.write_bytes(f"{name}.png", _png(name, value))
        self.has_files = True


def _png(name: str, value: Any) -> bytes:
    """The PNG of a figure or an image.

    Raises:
        UserError: It is neither.
    """
    file = io.BytesIO()
    if isinstance(value, Tensor):
        value = value.detach().cpu()
    try:
        if hasattr(value, "savefig"):  # a figure of matplotlib
            value.savefig(file, format="png")
        elif hasattr(value, "getbands"):  # an image of PIL
            value.save(file, format="png")
        else:
            _write_pixels(file, torch.as_tensor(value))
    except (RuntimeError, TypeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"on_evaluation logs {name!r} with {described(value)} ({reason}), but it must be a "
            "number, a text, a figure of matplotlib or an image of shape (H, W), (H, W, 3 or 4) "
            "or (1 or 3, H, W)"
        ) from error
    return file.getvalue()


def _write_pixels(file: io.BytesIO, pixels: Tensor) -> None:
    from matplotlib.image import imsave

    if pixels.dim() == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.permute(1, 2, 0).squeeze(-1)
    if pixels.dim() not in (2, 3):
        raise ValueError("an image has 2 or 3 dimensions")
    if pixels.is_floating_point():
        white = 1
        pixels = pixels.float().clamp(0, 1)
    else:
        white = 255
        pixels = pixels.int().clamp(0, 255).byte()
    imsave(file, pixels.numpy(), cmap="gray", vmin=0, vmax=white, format="png")
