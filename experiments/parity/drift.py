"""What one device differs from itself by in 16 bits, which is all that a layout may.

In 16 bits the same training with its rows in another order, or in more or fewer micro-batches, rounds elsewhere, as a
layout does, and the differences grow from step to step. The largest of these is what a row is allowed, or the rounding
of one number if that is more.

There are two ways to have 16 bits (precision.py), and they are not equally noisy: operation by operation, which keeps
the residual stream and the norms in float32, and by parameters, as the sharded rows do, which computes everything in
16 bits. So there is one device of either kind, and a row is held against that of its own.

Measured over 20 steps of bf16 on the small GPT of PARITY.md, weights at the end: by operations 2.2e-2, by parameters
1.5e-1, and 2.7e-2 from one to the other.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from experiments.parity.curves import Curve, Difference, Trial, bounds, difference
from strategies.blocks import find_blocks, separable
from strategies.precision import DTYPES, with_narrow_parameters

if TYPE_CHECKING:
    from experiments.parity.rows import Row
    from strategies.options import Options

OTHERWISE = ("reversed", "halved", "merged", *(f"rotated {rows}" for rows in range(1, 7)))
NARROW = "narrow"
KINDS = (*OTHERWISE, "float32", NARROW, *(f"{NARROW} {kind}" for kind in OTHERWISE))
"""Runs of one device beside its plain one: rounding otherwise; in float32; all that by parameters."""


def truth_of(row: Row, precision: str) -> str:
    """The kind of run on one device that the row is held against."""
    dims = row.layout.dims
    return NARROW if precision != "fp32" and dims.dp_shard > 1 and dims.pp == 1 else "train"


def changed(kind: str, trial: Trial, options: Options) -> tuple[Trial, Options]:
    """The trial and the options of one device, as this kind runs them. Recomputation is left out: it changes no number
    of one device, and would see the parameters in float32 again."""
    words = kind.split()
    if NARROW in words:
        dtype = DTYPES[options.precision]
        loss = with_narrow_parameters(trial.loss, dtype, lambda module: _units(trial, module), options.float_output)
        trial = dataclasses.replace(trial, loss=loss)
        options = dataclasses.replace(options, precision="fp32", activation_checkpointing="none")
    if "float32" in words:
        options = dataclasses.replace(options, precision="fp32")
    if "reversed" in words or "rotated" in words:
        in_order, shift = trial.batch, int(words[-1]) if "rotated" in words else None
        trial = dataclasses.replace(trial, batch=lambda step: tree_map(lambda t: _moved(t, shift), in_order(step)))
    count = {"halved": 2 * trial.micro_batches, "merged": 1}.get(words[-1], trial.micro_batches)
    return dataclasses.replace(trial, micro_batches=count), options


def limits(precision: str, curves: dict[str, Curve]) -> dict[str, Difference]:
    """Kind of truth → what a row may differ from it by. curves: those that could be had of "train" and `KINDS`."""
    least = bounds(torch.finfo(DTYPES[precision]).eps / 2)
    return {
        "train": _largest(least, curves, "train", (*OTHERWISE, "float32")),
        NARROW: _largest(least, curves, NARROW, tuple(f"{NARROW} {kind}" for kind in OTHERWISE)),
    }


def _largest(least: Difference, curves: dict[str, Curve], of: str, kinds: tuple[str, ...]) -> Difference:
    found = [difference(curves[of], curves[kind]) for kind in kinds if kind in curves]
    return Difference(
        max(least.loss, *(one.loss for one in found)),
        max(least.norm, *(one.norm for one in found)),
        max(least.weights, *(one.weights for one in found)),
    )


def _moved(leaf: Any, shift: int | None) -> Any:
    """A batch's tensor with its rows shifted round, or the other way round."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.flip(0) if shift is None else leaf.roll(shift, 0)


def _units(trial: Trial, module: nn.Module) -> list[str]:
    return separable(module, find_blocks(module, trial.blocks(module) if callable(trial.blocks) else trial.blocks))
