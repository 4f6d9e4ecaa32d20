"""The one law, measured: every strategy trains the same model, and continues any other strategy's checkpoint.

A `Trial` is a small training run in plain terms: a model, a loss, the global batch of every step. `train` runs it
under a layout, as the training loop does but with nothing around it, and returns the curve; `difference` compares two
curves. A checkpoint that one layout leaves (torch.distributed.checkpoint, as the application writes it) another can
continue. The rows that are tried are in rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from app.config import OptimizerConfig
from app.training.optimizer import build_optimizer
from strategies.parallel import Parallel
from strategies.parallelize import Blocks, ContextPlanFor, Layout, LayoutError, Options, TensorPlan, check, parallelize
from strategies.tree import tree_leaves, tree_map

Batch = Any


@dataclass(frozen=True)
class Trial:
    """What is trained.

    build: the model, the same every time. loss: (model, batch) → mean over the batch's items. batch: step, from 0 →
    that step's global batch, a pytree of tensors with samples along dimension 0. items: how many a batch has. heads:
    that tp must divide, if any.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batch: Callable[[int], Batch]
    items: Callable[[Batch], Any] = lambda batch: len(tree_leaves(batch)[0])
    steps: int = 20
    micro_batches: int = 1
    clip: float | None = None
    blocks: Blocks = None
    tensor_plan: TensorPlan = None
    context_plan: ContextPlanFor = None
    heads: int | None = None
    # A larger epsilon than Adam's usual: a gradient that is zero but for rounding (the bias of attention's keys) would
    # otherwise be scaled up to a step of full size in a random direction, on one device too.
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = field(
        default=lambda parameters: build_optimizer(OptimizerConfig(lr=1e-2, eps=1e-5, weight_decay=0.01), parameters)
    )


@dataclass
class Curve:
    """What a run leaves: per step the loss and the gradient norm (before clipping); at the end, rank 0's weights.

    notes: what the strategy reported about this model."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()


AMPLIFIED = 10.0
"""How much further than the loss a gradient norm and a weight may be off: they are not averages over a batch, and Adam
divides a gradient by its own size. Measured over all rows, 20 steps in float32: loss 3e-7, norm 7e-6, weights 1e-5."""


@dataclass(frozen=True)
class Difference:
    """Relative differences of one curve from another: the largest over steps of the loss and of the gradient norm, and
    over tensors, at the end, of the root mean square of a - b relative to that of a or of all weights (the larger)."""

    loss: float
    norm: float
    weights: float

    def within(self, limit: Difference | float) -> bool:
        """Whether no figure is larger than that of `limit`, or than `bounds` allows. False for nan."""
        bound = limit if isinstance(limit, Difference) else bounds(limit)
        return self.loss <= bound.loss and self.norm <= bound.norm and self.weights <= bound.weights


def bounds(tolerance: float) -> Difference:
    """What may differ where the loss may by `tolerance`."""
    return Difference(tolerance, AMPLIFIED * tolerance, AMPLIFIED * tolerance)


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
    """Runs the trial under the layout; collective over its ranks. Weights are whole, and on rank 0 only.

    steps: only these. load: the folder of the checkpoint to begin with; save: where to leave one at the end.
    """
    parallel = begin(trial, layout, options, device)
    optimizer = parallel.prepare_optimizer(trial.optimizer(parallel.parameters()))
    alone = not dist.is_initialized()
    if load:
        state = _state(parallel, optimizer)
        dcp.load(state, checkpoint_id=load, no_dist=alone)
        parallel.load_model_state(state["model"])
        parallel.load_optimizer_state(optimizer, state["optimizer"])
    losses, norms = run_steps(trial, parallel, optimizer, range(trial.steps) if steps is None else steps)
    if save:
        dcp.save(_state(parallel, optimizer), checkpoint_id=save, no_dist=alone)
    return Curve(losses, norms, parallel.full_model_state(), parallel.notes)


def _state(parallel: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}


def begin(trial: Trial, layout: Layout, options: Options, device: torch.device) -> Parallel:
    """The trial's model under the layout.

    Raises:
        LayoutError: heads that tp does not divide; fewer rows in a batch than there are micro-batches, whose mean
            would be of nothing.
    """
    check(layout, options, heads=trial.heads)
    rows, parts = len(tree_leaves(trial.batch(0))[0]), layout.dims.dp * trial.micro_batches
    if rows < parts:
        raise LayoutError(
            f"a batch of {rows} is not enough for {layout.dims.dp} data-parallel workers with {trial.micro_batches} "
            f"micro-batches each: write train.global_batch_size={parts} or more"
        )
    return parallelize(
        trial.build,
        layout,
        options,
        device=device,
        blocks=trial.blocks,
        tensor_plan=trial.tensor_plan,
        context_plan=trial.context_plan,
        example=(trial.loss, _micro_batches(trial.batch(0), 0, layout.dims.dp, trial.micro_batches)[0]),
    )


def run_steps(
    trial: Trial, parallel: Parallel, optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each of these steps."""
    losses, norms = [], []
    dims = parallel.layout.dims
    rank = dims.data_rank(dist.get_rank()) if dims.world_size > 1 else 0
    for step in steps:
        batch = trial.batch(step)
        micro_batches = _micro_batches(batch, rank, dims.dp, trial.micro_batches)
        weights = [float(trial.items(part) / trial.items(batch)) for part in micro_batches]
        parts = [tree_map(lambda t: t.to(parallel.device), part) for part in micro_batches]
        total = parallel.forward_backward(parts, weights, trial.loss)
        norms.append(parallel.grad_norm_(trial.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = parallel.total(total)
        if dims.pp > 1:  # the ranks without the loss have 0
            dist.all_reduce(loss)
            loss = loss * dims.pp / dims.world_size
        losses.append(loss)
    return [float(loss) for loss in losses], [float(norm) for norm in norms]


def difference(truth: Curve, curve: Curve) -> Difference:
    """How far `curve` is from `truth`; nan or another set of names counts as infinitely far."""
    if truth.weights.keys() != curve.weights.keys():
        return Difference(float("inf"), float("inf"), float("inf"))
    filled = {name: tensor for name, tensor in truth.weights.items() if tensor.numel()}
    usual = _rms([tensor for tensor in filled.values() if tensor.is_floating_point() or tensor.is_complex()])
    weights = max((_relative(tensor, curve.weights[name], usual) for name, tensor in filled.items()), default=0.0)
    return Difference(_largest(truth.losses, curve.losses), _largest(truth.norms, curve.norms), weights)


def _relative(a: torch.Tensor, b: torch.Tensor, usual: float) -> float:
    """rms(a - b) / rms(a), or over the `usual` size of the model's weights where that is more: not element by element
    nor tensor by tensor, where a bias that has just left zero would be compared with next to nothing."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    value = _rms([a.double() - b.double()]) / max(_rms([a]), usual, 1e-12)
    return value if value == value else float("inf")


def _rms(tensors: list[torch.Tensor]) -> float:
    """The root of the mean square over all elements."""
    count = sum(tensor.numel() for tensor in tensors)
    return (sum(float(tensor.abs().double().square().sum()) for tensor in tensors) / max(1, count)) ** 0.5


def _largest(a: list[float], b: list[float]) -> float:
    if len(a) != len(b):
        return float("inf")
    values = [abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b)]
    return max((value if value == value else float("inf") for value in values), default=0.0)


def _micro_batches(batch: Batch, rank: int, ways: int, count: int) -> list[Batch]:
    """This rank's contiguous share of the batch, in `count` parts."""
    share = tree_map(lambda tensor: tensor.tensor_split(ways)[rank], batch)
    return [tree_map(lambda tensor, i=i: tensor.tensor_split(count)[i], share) for i in range(count)]  # type: ignore[misc]
