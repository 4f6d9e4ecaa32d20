"""The one law, measured: every strategy trains the same model, and continues every checkpoint.

A `Trial` is a small training run in plain terms: a model, a loss, the global batch of every step.
`train` runs it under a layout, as the training loop does but with nothing around it, and returns
its curve; `difference` compares two curves. A checkpoint that one layout leaves
(torch.distributed.checkpoint, as the application writes it) another one can continue. The layouts
that are tried are in rows.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from app.config import OptimizerConfig
from app.data.loader import map_tensors, rows, tensors
from app.tasks.base import Task, Update
from app.training.batch_gather import Gathering
from app.training.hooks import Updates, choose_optimizer, disable_prefetch
from app.training.optimizer import build_optimizer
from strategies.parallel import Loss, Parallel
from strategies.parallelize import (
    Blocks,
    ContextPlanFor,
    Layout,
    LayoutError,
    Options,
    TensorPlan,
    check,
    parallelize,
)
from strategies.tree import tree_map

Batch = Any
"""A tree of tensors with samples along dimension 0, and of whatever else a data set gives."""
TINY = 1e-12
"""Keeps a relative difference from a division by zero."""


def _build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # The epsilon is larger than Adam's usual one. A gradient that is zero but for rounding (that of
    # the bias of attention's keys) would otherwise be scaled up to a step of full size in a random
    # direction, on one device too.
    config = OptimizerConfig(lr=1e-2, eps=1e-5, weight_decay=0.01)
    return build_optimizer(config, parameters)


@dataclass(frozen=True)
class Trial:
    """What is trained.

    Attributes:
        build: Makes the model, the same one every time.
        loss: (model, batch) → the mean over the batch's items.
        batch: Step, from 0 → the global batch of that step.
        items: Batch → how many items it has.
        steps: The number of steps.
        micro_batches: The number of micro-batches of each data-parallel worker.
        clip: The largest gradient norm; None for no limit.
        blocks: The names of the model's blocks, as `parallelize` takes them.
        tensor_plan: How layers are divided, as `parallelize` takes it.
        context_plan: How sequences are divided, as `parallelize` takes it.
        heads: The number that tp must divide; None if there is none.
        optimizer: Parameters → their optimizer.
        task: The task whose `gather` the losses call; None if they call none.
        training_step: The updates of a step, as `Task.training_step`; None for one with the loss.
        task_optimizer: The model under a layout → the task's own optimizer; None if it has none.
        require: (layout, options, samples of the smallest micro-batch, micro-batches of a worker) →
            raises a LayoutError if this cannot be trained so; None if nothing is required.
        notes: (layout, micro-batches of a worker) → what it is known to train otherwise than one
            device.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batch: Callable[[int], Batch]
    _: KW_ONLY
    items: Callable[[Batch], Any] = rows
    steps: int = 20
    micro_batches: int = 1
    clip: float | None = None
    blocks: Blocks = None
    tensor_plan: TensorPlan = None
    context_plan: ContextPlanFor = None
    heads: int | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _build_optimizer
    task: Task | None = None
    training_step: Callable[[Update], None] | None = None
    task_optimizer: Callable[[Parallel], torch.optim.Optimizer] | None = None
    require: Callable[[Layout, Options, int, int], None] | None = None
    notes: Callable[[Layout, int], Iterable[str]] = lambda layout, micro_batches: ()

    def build_optimizer(self, parallel: Parallel) -> torch.optim.Optimizer:
        """The optimizer of a model under a layout."""
        if self.task_optimizer is not None:
            return self.task_optimizer(parallel)
        return self.optimizer(parallel.parameters())


@dataclass
class Curve:
    """What a training has left.

    Attributes:
        losses: The loss of each step.
        norms: The gradient norm of each step, before clipping.
        weights: The weights at the end; on rank 0 only.
        notes: What is known of the model under the layout.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()


AMPLIFIED = 10.0
"""How much further than the loss a gradient norm and a weight may be off.

They are not averages over a batch, and Adam divides a gradient by its own size. Measured over all
rows, 20 steps in float32: loss 3e-7, norm 7e-6, weights 1e-5.
"""


@dataclass(frozen=True)
class Difference:
    """The relative differences of one curve from another.

    Attributes:
        loss: The largest over steps.
        norm: The largest over steps, of the gradient norm.
        weights: The largest over tensors at the end: the root mean square of a - b relative to that
            of a or of all weights, the larger of the two.
    """

    loss: float
    norm: float
    weights: float

    def within(self, limit: Difference | float) -> bool:
        """Whether no figure is larger than that of a limit; False for nan.

        Args:
            limit: The limit, or a tolerance of the loss (see `bounds`).
        """
        bound = limit if isinstance(limit, Difference) else bounds(limit)
        return self.loss <= bound.loss and self.norm <= bound.norm and self.weights <= bound.weights


INFINITE = Difference(math.inf, math.inf, math.inf)


def bounds(tolerance: float) -> Difference:
    """What may differ if the loss may differ by a relative tolerance."""
    amplified = AMPLIFIED * tolerance
    return Difference(loss=tolerance, norm=amplified, weights=amplified)


# --- training -------------------------------------------------------------------------------------


def train(
    trial: Trial,
    layout: Layout,
    options: Options,
    device: torch.device,
    *,
    steps: range | None = None,
    load: str = "",
    save: str = "",
) -> Curve:
    """Runs a trial under a layout; a collective of its ranks.

    Args:
        trial: What is trained.
        layout: The layout.
        options: How it behaves.
        device: This rank's device.
        steps: Which steps are run; None for all.
        load: The folder of the checkpoint to begin with; "" for none.
        save: The folder in which a checkpoint is left at the end; "" for none.

    Returns:
        The curve, with whole weights on rank 0 and none on others.

    Raises:
        LayoutError: The layout cannot train this.
    """
    parallel = parallelize_trial(trial, layout, options, device)
    optimizer = parallel.prepare_optimizer(trial.build_optimizer(parallel))
    is_alone = not dist.is_initialized()
    if load:
        state = _state(parallel, optimizer)
        dcp.load(state, checkpoint_id=load, no_dist=is_alone)
        parallel.load_model_state(state["model"])
        parallel.load_optimizer_state(optimizer, state["optimizer"])
    if steps is None:
        steps = range(trial.steps)
    losses, norms = run_steps(trial, parallel, optimizer, steps)
    if save:
        dcp.save(_state(parallel, optimizer), checkpoint_id=save, no_dist=is_alone)
    weights = parallel.full_model_state()
    notes = (*trial.notes(layout, trial.micro_batches), *parallel.notes)
    return Curve(losses=losses, norms=norms, weights=weights, notes=notes)


def _state(parallel: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}


def parallelize_trial(
    trial: Trial,
    layout: Layout,
    options: Options,
    device: torch.device,
) -> Parallel:
    """The model of a trial under a layout; a collective of its ranks.

    Args:
        trial: What is trained.
        layout: The layout.
        options: How it behaves.
        device: This rank's device.

    Raises:
        LayoutError: The layout cannot train this: `Trial.require` says so, tp does not divide the
            heads, or a batch has fewer samples than there are micro-batches, so that the mean of
            one would be of nothing.
    """
    check(layout, options, heads=trial.heads)
    workers = layout.dims.dp
    samples = rows(trial.batch(0))
    least_samples = workers * trial.micro_batches
    if samples < least_samples:
        raise LayoutError(
            f"a batch of {samples} is not enough for {workers} data-parallel workers with "
            f"{trial.micro_batches} micro-batches each: write "
            f"train.global_batch_size={least_samples} or more"
        )
    if trial.require is not None:
        trial.require(layout, options, samples // least_samples, trial.micro_batches)
    first_batch = trial.batch(0)
    micro_batches = _micro_batches(
        first_batch, data_rank=0, workers=workers, count=trial.micro_batches
    )
    parallel = parallelize(
        trial.build,
        layout,
        options,
        device=device,
        blocks=trial.blocks,
        tensor_plan=trial.tensor_plan,
        context_plan=trial.context_plan,
        example=(trial.loss, micro_batches[0]),
    )
    if trial.training_step is not None:
        disable_prefetch(parallel)
    return parallel


def run_steps(
    trial: Trial,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
) -> tuple[list[float], list[float]]:
    """Trains; a collective of the layout's ranks.

    Args:
        trial: What is trained.
        parallel: Its model under a layout.
        optimizer: The optimizer, prepared by `parallel`.
        steps: The numbers of the steps.

    Returns:
        Loss and gradient norm of each step.
    """
    dims = parallel.layout.dims
    data_rank = dims.data_rank(dist.get_rank()) if dims.world_size > 1 else 0
    losses = []
    norms = []
    gathering = None
    if trial.task is not None:
        gathering = Gathering(trial.task, parallel, parallel.device)
    for step in steps:
        batch = trial.batch(step)
        micro_batches = _micro_batches(
            batch, data_rank=data_rank, workers=dims.dp, count=trial.micro_batches
        )
        items = trial.items(batch)
        weights = [float(trial.items(micro_batch) / items) for micro_batch in micro_batches]
        on_device = [_to_device(micro_batch, parallel.device) for micro_batch in micro_batches]
        update = partial(
            _update, trial, parallel, optimizer, gathering, batches=on_device, weights=weights
        )
        updates = Updates(update)
        if trial.training_step is None:
            updates(trial.loss)
        else:
            trial.training_step(updates)
        assert updates.loss is not None and updates.grad_norm is not None
        norms.append(updates.grad_norm)
        loss = parallel.total(updates.loss)
        if dims.pp > 1:
            # Only the ranks of the last stage have the loss; on the others it is 0.
            dist.all_reduce(loss)
            loss = loss * dims.pp / dims.world_size
        losses.append(loss)
    return [float(loss) for loss in losses], [float(norm) for norm in norms]


def _update(
    trial: Trial,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    gathering: Gathering | None,
    loss_function: Loss,
    optimizer_name: str,
    *,
    batches: Sequence[Batch],
    weights: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Updates the weights once, by the gradient of a loss, as the training loop does.

    Returns:
        This rank's part of the loss, and the norm of the gradient before clipping.
    """
    if gathering is None:
        loss = parallel.forward_backward(batches, weights, loss_function)
    else:
        loss = gathering.forward_backward(parallel, batches, weights, loss_function)
    chosen = choose_optimizer(optimizer, optimizer_name, parallel.parameters())
    norm = parallel.grad_norm_(trial.clip)
    chosen.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return map_tensors(lambda tensor: tensor.to(device), batch)


def _micro_batches(batch: Batch, *, data_rank: int, workers: int, count: int) -> list[Batch]:
    """The micro-batches of one data-parallel worker.

    Args:
        batch: The global batch, of which each worker has a contiguous share.
        data_rank: The worker's number.
        workers: The number of data-parallel workers.
        count: The number of its micro-batches.
    """
    share = _part(batch, index=data_rank, parts=workers)
    return [_part(share, index=index, parts=count) for index in range(count)]


def _part(batch: Batch, *, index: int, parts: int) -> Batch:
    return take_samples(batch, torch.arange(rows(batch)).tensor_split(parts)[index])


def take_samples(batch: Batch, numbers: Tensor) -> Batch:
    """Some samples of a batch.

    Args:
        batch: The batch. A list without tensors that has an entry for each sample, as
            `default_collate` makes it of texts, is divided too; what belongs to no sample, such as
            a number, is in every part.
        numbers: The samples' numbers, 1-dimensional.
    """
    samples = rows(batch)

    def of_each_sample(values: Any) -> bool:
        return isinstance(values, (list, tuple)) and len(values) == samples and not tensors(values)

    def taken(values: Any) -> Any:
        if isinstance(values, Tensor):
            return values[numbers] if values.dim() else values
        if of_each_sample(values):
            return [values[number] for number in numbers.tolist()]
        return values

    return tree_map(taken, batch, is_leaf=of_each_sample)


# --- comparing ------------------------------------------------------------------------------------


def difference(reference: Curve, curve: Curve) -> Difference:
    """How far a curve is from a reference.

    nan, and weights of other names, count as infinitely far.
    """
    if reference.weights.keys() != curve.weights.keys():
        return INFINITE
    tensors = {name: tensor for name, tensor in reference.weights.items() if tensor.numel()}
    numbers = [
        tensor for tensor in tensors.values() if tensor.is_floating_point() or tensor.is_complex()
    ]
    size_of_model = _root_mean_square(numbers)
    weights = 0.0
    for name, tensor in tensors.items():
        distance = _relative_distance(tensor, curve.weights[name], least_size=size_of_model)
        weights = max(weights, distance)
    return Difference(
        loss=_largest_relative(reference.losses, curve.losses),
        norm=_largest_relative(reference.norms, curve.norms),
        weights=weights,
    )


def _relative_distance(
    reference: torch.Tensor,
    tensor: torch.Tensor,
    *,
    least_size: float,
) -> float:
    """rms(reference - tensor) / rms(reference), or over `least_size` where that is more.

    It is not measured element by element, nor relative to the tensor alone: a bias that has just
    left zero would be compared with next to nothing.

    Args:
        reference: The reference; not empty.
        tensor: The tensor that is compared with it.
        least_size: The root mean square of the whole model's weights.
    """
    if reference.is_complex():
        reference = torch.view_as_real(reference)
        tensor = torch.view_as_real(tensor)
    if not reference.is_floating_point():
        return 0.0 if torch.equal(reference, tensor) else math.inf
    distance = _root_mean_square([reference.double() - tensor.double()])
    size = max(_root_mean_square([reference]), least_size, TINY)
    return _infinite_if_nan(distance / size)


def _root_mean_square(tensors: Iterable[torch.Tensor]) -> float:
    """The root of the mean square over all elements of all tensors."""
    squares = 0.0
    count = 0
    for tensor in tensors:
        squares += float(tensor.abs().double().square().sum())
        count += tensor.numel()
    return (squares / max(1, count)) ** 0.5


def _largest_relative(reference: Sequence[float], values: Sequence[float]) -> float:
    """The largest relative difference of two series; infinite if their lengths differ."""
    if len(reference) != len(values):
        return math.inf
    largest = 0.0
    for expected, value in zip(reference, values):
        relative = abs(expected - value) / max(abs(expected), TINY)
        largest = max(largest, _infinite_if_nan(relative))
    return largest


def _infinite_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value
