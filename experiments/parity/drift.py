"""What one device differs from itself by in 16 bits, which is all that a layout may.

The same training with its rows in another order, or in more or fewer micro-batches, rounds at other places, as a layout
does, and the differences grow from step to step. The largest of these is what a row is allowed, or the rounding of one
number if that is more.

There are two ways to compute in 16 bits (strategies/precision.py), and they are not equally noisy: operation by
operation, which keeps the residual stream and the norms in float32, and by parameters, as the sharded rows do, which
computes everything in 16 bits. A row is compared with one device of its own way. Over 20 steps of bf16 on a small GPT,
weights at the end: by operations 2.2e-2, by parameters 1.5e-1, and 2.7e-2 from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from experiments.parity.curves import Batch, Curve, Difference, Trial, bounds, difference, map_tensors
from experiments.parity.rows import Row
from strategies.blocks import find_blocks, separable
from strategies.options import Options
from strategies.precision import DTYPES

_ROUNDED = ("reversed", "halved", "merged", *(f"rotated {rows}" for rows in range(1, 7)))
BY_PARAMETERS = "by parameters"
KINDS = (*_ROUNDED, "float32", BY_PARAMETERS, *(f"{BY_PARAMETERS} {kind}" for kind in _ROUNDED))
"""Runs of one device beside its plain one ("")."""


def truth_of(row: Row, precision: str) -> str:
    """The kind of run on one device that the row is compared with."""
    dims = row.layout.dims
    return BY_PARAMETERS if precision != "fp32" and dims.dp_shard > 1 and dims.pp == 1 else ""


def changed(kind: str, trial: Trial, options: Options) -> tuple[Trial, Options]:
    """The trial and the options of one device, as this kind runs them. By parameters without recomputation, which
    changes no number of one device, and would see the parameters in float32 again."""
    if kind.startswith(BY_PARAMETERS):
        trial = replace(trial, loss=_by_parameters(trial, DTYPES[options.precision], options.float_output))
        options = replace(options, precision="fp32", activation_checkpointing="none")
    way = kind.removeprefix(BY_PARAMETERS).split()
    batch = trial.batch
    match way:
        case ["float32"]:
            options = replace(options, precision="fp32")
        case ["halved"]:
            trial = replace(trial, micro_batches=2 * trial.micro_batches)
        case ["merged"]:
            trial = replace(trial, micro_batches=1)
        case ["reversed"]:
            trial = replace(trial, batch=lambda step: map_tensors(lambda t: t.flip(0), batch(step)))
        case ["rotated", rows]:
            trial = replace(trial, batch=lambda step: map_tensors(lambda t: t.roll(int(rows), 0), batch(step)))
    return trial, options


def limits(precision: str, curves: dict[str, Curve]) -> dict[str, Difference]:
    """Kind of truth → what a row may differ from it by. curves: those that could be had of "" and `KINDS`."""
    others = {"": (*_ROUNDED, "float32"), BY_PARAMETERS: tuple(f"{BY_PARAMETERS} {kind}" for kind in _ROUNDED)}
    return {
        truth: _largest(
            [bounds(torch.finfo(DTYPES[precision]).eps / 2)]
            + [difference(curves[truth], curves[kind]) for kind in kinds if kind in curves]
        )
        for truth, kinds in others.items()
    }


def _largest(found: list[Difference]) -> Difference:
    return Difference(max(one.loss for one in found), max(one.norm for one in found), max(one.weights for one in found))


def _by_parameters(trial: Trial, dtype: torch.dtype, float_output: bool) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """The loss of a model on one device that computes as a sharded one does: its parameters as `dtype`, and so the
    floating-point tensors that it and its units are called with."""

    def narrow(tree: Any) -> Any:
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    def loss(module: nn.Module, batch: Batch) -> torch.Tensor:
        blocks = find_blocks(module, trial.blocks(module) if callable(trial.blocks) else trial.blocks)
        units = [module, *map(module.get_submodule, separable(module, blocks))]
        hooks = [
            unit.register_forward_pre_hook(lambda _, args, named: (narrow(args), narrow(named)), with_kwargs=True)
            for unit in units
        ]
        if float_output:
            widen = lambda t: t.float() if t.dtype is dtype else t  # noqa: E731
            hooks.append(module.register_forward_hook(lambda _, args, output: map_tensors(widen, output)))
        try:
            cast = {f"module.{name}": narrow(parameter) for name, parameter in module.named_parameters()}
            return functional_call(_Loss(module, trial.loss), cast, (batch,))
        finally:
            for hook in hooks:
                hook.remove()

    return loss


class _Loss(nn.Module):
    """A loss as a module that holds the model, so that whatever the loss calls of the model has the cast parameters."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.loss(self.module, batch)
