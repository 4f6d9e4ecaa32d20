"""What a layout costs, in bytes: the sizes that cost functions read, and what they return.

Parameters, gradients and optimizer state are exact to the byte, padding included; only Adafactor's
rows and columns are not counted. The planner (app/planner) estimates the activations that backward
keeps, and the time that communication takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from torch import nn

from strategies.mixtures import find_mixtures, shard_dim

Number = int | float
"""A count or a size; also a bool, which counts as 0 or 1."""

FLOAT32_BYTES = 4
ITEMSIZES = {"fp32": FLOAT32_BYTES, "bf16": 2}
"""Bytes of a number, by the name of its type."""

EIGHT_BIT_BLOCK = 256
"""The most numbers of a row that share a scale in the state of adamw8bit."""
SMALLEST_BLOCK = 32
"""The fewest; with fewer, the scales would take more than an eighth of what the numbers take."""

STATES = {
    **dict.fromkeys(("adamw", "adam", "adamax", "nadam", "radam", "adadelta", "rprop"), 2),
    **dict.fromkeys(("sgd", "adagrad", "rmsprop", "asgd"), 1),
    "adafactor": 0,
    "muon": 1,
    "adamw8bit": 2 * (1 / FLOAT32_BYTES + 1 / EIGHT_BIT_BLOCK),
}
"""Tensors of the parameter's size that an optimizer keeps (sgd: its momentum).

Adafactor keeps only a row and a column for each matrix, which count as 0 here. The state of
adamw8bit has a byte for each number and a scale for each block, where `eight_bit_block` allows it.
The names are those of app/training/optimizer.py.
"""
STEP_NUMBERS = {"sgd": 0, "muon": 0, "nadam": 2, "asgd": 3}
"""Single numbers that an optimizer keeps of each tensor; the others keep one, a count of steps."""
STEP_COPIES = {
    **dict.fromkeys(("adamax", "asgd", "nadam", "radam", "rmsprop"), 1),
    **dict.fromkeys(("adagrad", "adadelta"), 2),
}
"""Copies of the trained parameters that a step makes on a GPU, by optimizer; others make none.

Those that have no fused kernel update all parameters of a group at once (`foreach` of torch.optim).
"""


def row_length(shape: tuple[int, ...]) -> int:
    """The numbers in a row of a parameter, which adamw8bit cuts into blocks; 0 without rows.

    A row of a convolution is what belongs to one output channel.
    """
    if len(shape) < 2:
        return 0
    return math.prod(shape[1:]) if len(shape) > 3 else shape[-1]


def eight_bit_block(shape: tuple[int, ...], most: int = EIGHT_BIT_BLOCK) -> int:
    """How many numbers of a row share a scale in the state of adamw8bit.

    Args:
        shape: Of the whole parameter, so that all layouts have the same blocks.
        most: The configured number; the largest that divides a row and this is taken.

    Returns:
        0: its state is kept in float32, as no such number is large enough.
    """
    length = row_length(shape)
    block = math.gcd(length, most) if length else 0
    return block if block >= min(SMALLEST_BLOCK, most) else 0


@dataclass(frozen=True)
class ParameterSize:
    """One parameter, as costs see it.

    Args:
        name: Its full name in the model.
        shape: Its shape, before anything is split.
        itemsize: Bytes of one number.
        unit: The unit of sharding (a block) that it belongs to; "": outside of the blocks.
        trainable: Whether it has a gradient.
        split_dim: The dimension that tensor parallelism splits; None: every tp rank has all of it.
        is_expert: Whether it has a row per expert of a mixture, which expert parallelism splits.
        is_uneven: Whether tensor parallelism has left some ranks fewer rows than others.
        narrows: Whether it is kept in the type of products, if that has 16 bits (frozen.py).
        block: The most numbers that share a scale in the state of adamw8bit.
    """

    name: str
    shape: tuple[int, ...]
    _: KW_ONLY
    itemsize: int = FLOAT32_BYTES
    unit: str = ""
    trainable: bool = True
    split_dim: int | None = None
    is_expert: bool = False
    is_uneven: bool = False
    narrows: bool = False
    block: int = EIGHT_BIT_BLOCK

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def eight_bit_state(self) -> int:
        """Bytes of the two moments that adamw8bit keeps."""
        block = eight_bit_block(self.shape, self.block)
        if not block:
            return 2 * FLOAT32_BYTES * self.numel
        return 2 * (self.numel + FLOAT32_BYTES * self.numel // block)

    def shard(self, ways: int, dim: int = 0) -> ParameterSize:
        """The largest of the shards that torch.chunk makes along `dim`: the first rank's."""
        rows = -(-self.shape[dim] // ways)
        return replace(self, shape=(*self.shape[:dim], rows, *self.shape[dim + 1 :]))


@dataclass(frozen=True)
class ModelSize:
    """A model, as costs see it."""

    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """What one rank holds of one unit of sharding, after tensor parallelism.

    A unit is a block, or everything outside of the blocks.
    """

    parameters: Number
    """Bytes, if dp_shard were 1."""
    gradients: Number
    """Bytes of the gradients of trained parameters, if dp_shard were 1."""
    tensors: Number
    """Number of trained parameters."""
    sharded_parameters: Number
    """Bytes of this rank's shards over dp_shard, padding included; rank 0's are never short."""
    sharded_gradients: Number
    """Bytes of their gradients."""
    gathered: Number
    """Numbers (not bytes) that an all-gather over dp_shard gives, padding included."""
    whole_gradients: Number = 0
    """Bytes of those of `sharded_gradients` that cannot be sharded: every worker has them."""
    is_root: bool = False
    """Whether it is what is outside of the blocks."""
    eight_bit_state: Number = 0
    """Bytes of the moments of adamw8bit, if dp_shard were 1."""
    sharded_eight_bit_state: Number = 0
    """Bytes of this rank's shards of them."""


@dataclass(frozen=True, kw_only=True)
class RankSize:
    """The sum over all units that one rank holds; UnitSize says what the fields are."""

    parameters: Number
    gradients: Number
    tensors: Number
    sharded_parameters: Number
    sharded_gradients: Number
    root: Number
    """`gathered` of what is outside of the blocks."""
    blocks: Number
    """`gathered` of all blocks."""
    largest_block: Number
    """`gathered` of the largest block."""
    two_largest_blocks: Number
    """`gathered` of the two largest blocks."""
    outside: float = 0.0
    """The share of gradients of what is outside of the blocks."""
    buffers: Number = 0
    """Bytes of buffers."""
    eight_bit_state: Number = 0
    sharded_eight_bit_state: Number = 0


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step does, as far as costs depend on it."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    compute_itemsize: int = FLOAT32_BYTES
    """Bytes of a number in matrix products."""
    reduce_itemsize: int = FLOAT32_BYTES
    """Bytes of a gradient's number while data-parallel workers average it."""
    reshard_after_forward: bool = True
    """Of a sharded strategy: whether gathered parameters are freed between forward and backward."""
    reduce_scatter_each_microbatch: bool = False
    """Of a sharded strategy: whether every micro-batch's gradients are reduced, instead of the
    sum of all at the end of the step."""
    optimizer: str = "adamw"
    gradient_itemsize: int = FLOAT32_BYTES
    """Bytes of a gradient's number."""
    state_itemsize: int = FLOAT32_BYTES
    """Bytes of a number of optimizer state."""

    @property
    def state_scale(self) -> float:
        """Bytes of a number of optimizer state over those of a gradient's."""
        return self.state_itemsize / self.gradient_itemsize


CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective that ranks run for the parameters of one unit.

    Args:
        name: What it does.
        over: The degree whose ranks take part, or "devices" for the devices of one process.
        bytes: Size of the whole tensor.
        times: How often it runs per optimizer step.
        phase: The phase of the step in which it runs.
    """

    name: CollectiveName
    over: Literal["dp_replicate", "dp_shard", "devices"]
    bytes: Number
    times: int
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes on the rank that holds most."""

    parameters: Number
    gradients: Number
    optimizer: Number
    buffers: Number = 0
    transient: Number = 0
    """Held only for a part of a step: gathered parameters, gradients that wait to be reduced.

    Autocast's 16-bit copies of parameters are not counted here, since a model's operations decide
    which there are, and when.
    """


def part_of(parameter: ParameterSize, tp: int, ep: int = 1) -> ParameterSize:
    """What one worker has of a parameter under tensor and expert parallelism."""
    part = parameter
    if parameter.split_dim is not None:
        part = parameter.shard(tp, parameter.split_dim)
    is_uneven = parameter.split_dim == 0 and parameter.shape[0] % tp != 0
    part = replace(part, is_uneven=is_uneven)
    return part.shard(ep) if part.is_expert else part


def model_size(
    module: nn.Module,
    blocks: list[str] | None = None,
    split: dict[str, int] | None = None,
    narrow: Collection[str] = (),
    block: int = EIGHT_BIT_BLOCK,
) -> ModelSize:
    """Reads the sizes of a module.

    Args:
        module: The model, which may be on the meta device.
        blocks: Names of its repeating blocks, each a unit of sharding.
        split: Parameter name → the dimension that tensor parallelism splits.
        narrow: Names of the parameters that are kept in the type of products.
        block: See ParameterSize.
    """
    split = split or {}
    expert_names = {name for mixture in find_mixtures(module) for name in mixture.parameter_names()}

    def unit_of(name: str) -> str:
        return next((block for block in blocks or [] if name.startswith(f"{block}.")), "")

    parameters = tuple(
        ParameterSize(
            name,
            tuple(parameter.shape),
            itemsize=parameter.element_size(),
            unit=unit_of(name),
            trainable=parameter.requires_grad,
            split_dim=split.get(name),
            is_expert=name in expert_names,
            narrows=name in narrow,
            block=block,
        )
        for name, parameter in module.named_parameters()
    )
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    return ModelSize(parameters, buffer_bytes)


def fsdp_dim(shape: tuple[int, ...], is_uneven: bool, ways: int) -> int | None:
    """The dimension along which a worker's part of a parameter is sharded.

    It is the first one. Where tensor parallelism has split the rows unevenly (a vocabulary of
    50,257), it is the second one, if all workers can have equally many columns: torch (2.11 to
    2.15) wrongly describes rows that are split unevenly twice, and cannot write a checkpoint of
    them.

    Args:
        shape: Of the worker's part.
        is_uneven: Whether tensor parallelism has left some ranks fewer rows than others.
        ways: Number of shards.

    Returns:
        None: it is not sharded, and every worker keeps it.
    """
    if shape and not is_uneven:
        return 0
    return 1 if len(shape) > 1 and shape[1] % ways == 0 else None


def unit_size(
    parameters: Sequence[ParameterSize],
    dp_shard: int,
    *,
    is_root: bool = False,
    expert_shards: int | None = None,
) -> UnitSize:
    """Adds up the parameters of one unit.

    Args:
        parameters: As `part_of` has left them.
        dp_shard: Number of shards.
        is_root: Whether the unit is what is outside of the blocks.
        expert_shards: Number of shards of experts, where expert parallelism splits them.
    """

    def sharding(parameter: ParameterSize) -> tuple[int | None, int]:
        """The dimension that is sharded, and the number of shards."""
        if parameter.is_expert and expert_shards is not None:
            return shard_dim(parameter.shape, expert_shards), expert_shards
        return fsdp_dim(parameter.shape, parameter.is_uneven, dp_shard), dp_shard

    sharded_parameters = 0
    sharded_gradients = 0
    sharded_eight_bit_state = 0
    whole_gradients = 0
    gathered = 0
    for parameter in parameters:
        dim, ways = sharding(parameter)
        shard = parameter if dim is None else parameter.shard(ways, dim)
        sharded_parameters += shard.bytes
        if dim is not None:
            # Bytes of quantized weights are not cast: two are as much as a number of 16 bits.
            gathered += shard.numel * ways // (2 if parameter.itemsize == 1 else 1)
        if parameter.trainable:
            sharded_gradients += shard.bytes
            sharded_eight_bit_state += shard.eight_bit_state
            whole_gradients += parameter.bytes if dim is None else 0

    trained = [parameter for parameter in parameters if parameter.trainable]
    return UnitSize(
        parameters=sum(parameter.bytes for parameter in parameters),
        gradients=sum(parameter.bytes for parameter in trained),
        tensors=len(trained),
        sharded_parameters=sharded_parameters,
        sharded_gradients=sharded_gradients,
        gathered=gathered,
        whole_gradients=whole_gradients,
        is_root=is_root,
        eight_bit_state=sum(parameter.eight_bit_state for parameter in trained),
        sharded_eight_bit_state=sharded_eight_bit_state,
    )


def rank_size(units: Sequence[UnitSize], buffers: int = 0) -> RankSize:
    """Adds up the units that a rank holds.

    Args:
        units: All of them; a block that occurs several times is listed as often.
        buffers: Bytes of the model's buffers.
    """
    blocks = sorted((unit.gathered for unit in units if not unit.is_root), reverse=True)
    gradients = sum(unit.gradients for unit in units)
    outside = sum(unit.gradients for unit in units if unit.is_root)
    return RankSize(
        parameters=sum(unit.parameters for unit in units),
        gradients=gradients,
        tensors=sum(unit.tensors for unit in units),
        sharded_parameters=sum(unit.sharded_parameters for unit in units),
        sharded_gradients=sum(unit.sharded_gradients for unit in units),
        root=sum(unit.gathered for unit in units if unit.is_root),
        blocks=sum(blocks),
        largest_block=max(blocks, default=0),
        two_largest_blocks=sum(blocks[:2]),
        outside=outside / gradients if gradients else 0.0,
        buffers=buffers,
        eight_bit_state=sum(unit.eight_bit_state for unit in units),
        sharded_eight_bit_state=sum(unit.sharded_eight_bit_state for unit in units),
    )


def optimizer_bytes(
    gradients: Number,
    tensors: Number,
    optimizer: str,
    outside: Number = 0,
    eight_bit_state: Number = 0,
    state_scale: float = 1.0,
) -> Number:
    """Bytes of optimizer state.

    An unknown optimizer is assumed to keep as much as Adam, which also counts steps, 4 bytes per
    tensor.

    Args:
        gradients: Bytes of the gradients.
        tensors: Number of trained parameters.
        optimizer: Its name in the configuration.
        outside: The share of the gradients that is of what is outside of the blocks, which Muon
            leaves to AdamW.
        eight_bit_state: The bytes of adamw8bit's moments.
        state_scale: See StepShape.
    """
    if optimizer == "muon":
        return gradients + int(gradients * outside)
    step_bytes = STEP_NUMBERS.get(optimizer, 1) * FLOAT32_BYTES * tensors
    if optimizer == "adamw8bit":
        return eight_bit_state + step_bytes
    return STATES.get(optimizer, 2) * int(gradients * state_scale) + step_bytes


def replicated(size: RankSize, step: StepShape) -> Cost:
    """The cost of having everything on every rank, as on one device."""
    return Cost(
        parameters=size.parameters,
        gradients=size.gradients,
        optimizer=optimizer_bytes(
            size.gradients,
            size.tensors,
            step.optimizer,
            outside=size.outside,
            eight_bit_state=size.eight_bit_state,
            state_scale=step.state_scale,
        ),
        buffers=size.buffers,
    )
