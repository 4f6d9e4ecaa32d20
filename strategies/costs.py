"""What a layout costs, in bytes: the sizes that every strategy's cost functions read, and what they answer.

Parameters, gradients and optimizer state are exact to the byte, padding included. What backward keeps of forward, and
the time that communication takes, are the planner's (app/planner).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from strategies.mixtures import find_mixtures, shard_dim

Number = Any  # an int or a float, or a bool as 0 or 1

STATES = {"adamw": 2, "adam": 2, "sgd": 1}
"""Tensors of the parameter's size that an optimizer keeps (sgd: its momentum)."""


@dataclass(frozen=True)
class ParameterSize:
    """One parameter: its name, shape, bytes per number, the unit (block) it is sharded with, and its tp split."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    unit: str = ""
    trainable: bool = True
    split_dim: int | None = None
    """The dimension that tensor parallelism splits; None: replicated on every tp rank."""
    is_expert: bool = False
    """Whether it has a row per expert of a mixture, which expert parallelism splits."""
    is_uneven: bool = False
    """Whether tensor parallelism has left some of its ranks fewer rows than others."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    def shard(self, ways: int, dim: int = 0) -> ParameterSize:
        """The largest of the shards that torch.chunk makes along `dim`: that of the first rank."""
        return replace(self, shape=(*self.shape[:dim], -(-self.shape[dim] // ways), *self.shape[dim + 1 :]))


@dataclass(frozen=True)
class ModelSize:
    """A model as costs see it."""

    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int = 0


@dataclass(frozen=True)
class UnitSize:
    """What one rank holds of one unit of sharding (a block, or what is outside of blocks), after tensor parallelism."""

    parameters: Number
    """Bytes, if dp_shard were 1."""
    gradients: Number
    """Bytes of those that are trained."""
    tensors: Number
    """How many are trained."""
    sharded_parameters: Number
    """Bytes of this rank's shard over dp_shard, padding included; rank 0's shards are never short."""
    sharded_gradients: Number
    gathered: Number
    """Numbers (not bytes) that an all-gather over dp_shard gives, padding included."""
    whole_gradients: Number = 0
    """Bytes of those of `sharded_gradients` that cannot be sharded: every worker has them."""
    is_root: Number = False
    """Whether it is what is outside of blocks."""


@dataclass(frozen=True)
class RankSize:
    """All units that one rank holds, added up."""

    parameters: Number
    gradients: Number
    tensors: Number
    sharded_parameters: Number
    sharded_gradients: Number
    root: Number
    """`gathered` of what is outside of blocks."""
    blocks: Number
    """`gathered` of all blocks."""
    largest_block: Number
    two_largest_blocks: Number
    buffers: Number = 0


@dataclass(frozen=True)
class StepShape:
    """What a step does, as far as costs depend on it."""

    dp_replicate: Number = 1
    dp_shard: Number = 1
    tp: Number = 1
    pp: Number = 1
    micro_batches: Number = 1
    compute_itemsize: Number = 4
    """Bytes of a number in matrix products."""
    reduce_itemsize: Number = 4
    """Bytes of a gradient's number while data-parallel workers average it."""
    reshard_after_forward: Number = True
    """Of a sharded strategy: whether gathered parameters are freed between forward and backward."""
    reduce_scatter_each_microbatch: Number = False
    """Of a sharded strategy: whether every micro-batch's gradients are reduced, or those of all together at the end."""
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Collective:
    """Something that ranks do together for one unit. over: the degree whose ranks take part, or "devices" of one
    process. bytes: of the whole tensor. times: per optimizer step. phase: forward or backward."""

    name: str
    over: str
    bytes: Number
    times: Number
    phase: str


@dataclass(frozen=True)
class Cost:
    """Bytes on the rank that holds most."""

    parameters: Number
    gradients: Number
    optimizer: Number
    buffers: Number = 0
    transient: Number = 0
    """Bytes held only for a while within a step: gathered parameters, gradients that wait to be reduced."""


def part_of(p: ParameterSize, tp: int, ep: int = 1) -> ParameterSize:
    """What one worker has of a parameter under tensor and expert parallelism."""
    part = p if p.split_dim is None else p.shard(tp, p.split_dim)
    part = replace(part, is_uneven=p.split_dim == 0 and p.shape[0] % tp != 0)
    return part.shard(ep) if part.is_expert else part


def model_size(module: nn.Module, blocks: list[str] | None = None, split: dict[str, int] | None = None) -> ModelSize:
    """Reads the sizes off a module, which may be on meta. split: parameter name → dimension that tp splits."""
    split = split or {}
    experts = {name for found in find_mixtures(module) for name in found.parameter_names()}

    def unit(name: str) -> str:
        return next((block for block in blocks or [] if name.startswith(block + ".")), "")

    return ModelSize(
        parameters=tuple(
            ParameterSize(
                name, tuple(p.shape), p.element_size(), unit(name), p.requires_grad, split.get(name), name in experts
            )
            for name, p in module.named_parameters()
        ),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
    )


def fsdp_dim(shape: tuple[int, ...], is_uneven: bool, ways: int) -> int | None:
    """Along which dimension a worker's part of a parameter is sharded; None: not at all, every worker keeps it.

    Along rows; where tensor parallelism has split those unevenly (a vocabulary of 50,257), along columns if all workers
    can have equally many, for torch (2.11 to 2.15) describes rows that are split unevenly twice wrongly, and no
    checkpoint of them can be written."""
    if shape and not is_uneven:
        return 0
    return 1 if len(shape) > 1 and shape[1] % ways == 0 else None


def unit_size(
    parameters: tuple[ParameterSize, ...], dp_shard: int, is_root: bool = False, of_experts: int | None = None
) -> UnitSize:
    """Of parameters as part_of has left them. of_experts: shards of experts, where expert parallelism splits them."""

    def shard(p: ParameterSize) -> tuple[ParameterSize, int]:
        if p.is_expert and of_experts is not None:
            return p.shard(of_experts, shard_dim(p.shape, of_experts)), of_experts
        dim = fsdp_dim(p.shape, p.is_uneven, dp_shard)
        return (p, 0) if dim is None else (p.shard(dp_shard, dim), dp_shard)

    trained = [p for p in parameters if p.trainable]
    return UnitSize(
        sum(p.bytes for p in parameters),
        sum(p.bytes for p in trained),
        len(trained),
        sum(shard(p)[0].bytes for p in parameters),
        sum(shard(p)[0].bytes for p in trained),
        sum(part.numel * ways for part, ways in map(shard, parameters)),
        sum(p.bytes for p in trained if not shard(p)[1]),
        is_root,
    )


def rank_size(units: list[UnitSize], buffers: int = 0) -> RankSize:
    """The units added up."""
    blocks = sorted((unit.gathered for unit in units if not unit.is_root), reverse=True)
    return RankSize(
        sum(unit.parameters for unit in units),
        sum(unit.gradients for unit in units),
        sum(unit.tensors for unit in units),
        sum(unit.sharded_parameters for unit in units),
        sum(unit.sharded_gradients for unit in units),
        sum(unit.gathered for unit in units if unit.is_root),
        sum(blocks),
        max(blocks, default=0),
        sum(blocks[:2]),
        buffers,
    )


def optimizer_bytes(gradients: Number, tensors: Number, optimizer: str) -> Number:
    """Bytes of optimizer state for bytes of gradients; Adam also counts steps, 4 bytes per tensor. An optimizer that
    is not known is taken to keep as much as Adam."""
    return STATES.get(optimizer, 2) * gradients + (0 if optimizer == "sgd" else 4 * tensors)


def autocast_bytes(numbers: Number, step: StepShape) -> Number:
    """Under autocast each weight's 16-bit copy is kept until its backward."""
    return numbers * step.compute_itemsize * (step.compute_itemsize < 4)


def replicated(size: RankSize, step: StepShape) -> Cost:
    """Everything on every rank, as on one device."""
    state = optimizer_bytes(size.gradients, size.tensors, step.optimizer)
    cast = autocast_bytes(size.parameters // 4, step)
    return Cost(size.parameters, size.gradients, state, size.buffers, transient=cast)
