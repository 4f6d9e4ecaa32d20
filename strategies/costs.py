"""What a layout costs, in bytes: the sizes that every strategy's cost function reads, and what it answers.

Parameters, gradients and optimizer state are exact to the byte, padding included. Activations are what the model's own
forward saves, read off it by whoever makes the ModelSize (app/planner/read.py does). Communication is what one rank
sends in one optimizer step by ring algorithms: an all-reduce of n bytes over k ranks sends 2·n·(k-1)/k, an all-gather
or a reduce-scatter to or from n bytes n·(k-1)/k (Thakur et al. 2005, "Optimization of collective communication
operations in MPICH").
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

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
    """The dimension that tensor parallelism splits; None: whole on every tp rank."""

    @property
    def numel(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    def part(self, ways: int, dim: int = 0) -> ParameterSize:
        """The largest part when torch.chunk cuts `dim` in `ways`: that of the first rank."""
        shape = self.shape or (1,)
        return replace(self, shape=(*shape[:dim], -(-shape[dim] // ways), *shape[dim + 1 :]))


@dataclass(frozen=True)
class ModelSize:
    """A model as costs see it."""

    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int = 0
    activation_bytes: int = 0
    """What backward needs of one micro-batch, bytes, when nothing is recomputed."""
    boundary_bytes: int = 0
    """What flows from one block to the next in one micro-batch, bytes."""
    kept_bytes: int | None = None
    """Of `activation_bytes`, what `selective` checkpointing keeps. None: not known, taken to be half."""
    outside_bytes: int = 0
    """Of `activation_bytes`, what is saved outside of blocks (the loss, an embedding), which is never recomputed."""

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.parameters)

    @property
    def trainable(self) -> tuple[ParameterSize, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def units(self) -> dict[str, list[ParameterSize]]:
        groups: dict[str, list[ParameterSize]] = {}
        for p in self.parameters:
            groups.setdefault(p.unit, []).append(p)
        return groups


@dataclass(frozen=True)
class Cost:
    """Bytes on the rank that holds most, and bytes it sends per optimizer step, by collective."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int = 0
    transient: int = 0
    """Bytes held only for a while within a step: gathered parameters, communication buffers."""
    activations: int = 0
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def memory(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.transient + self.activations


def model_size(module: nn.Module, blocks: list[str] | None = None, split: dict[str, int] | None = None) -> ModelSize:
    """Reads the sizes off a module, which may be on meta. split: parameter name → dimension that tp splits."""
    split = split or {}

    def unit(name: str) -> str:
        return next((block for block in blocks or [] if name.startswith(block + ".")), "")

    return ModelSize(
        parameters=tuple(
            ParameterSize(name, tuple(p.shape), p.element_size(), unit(name), p.requires_grad, split.get(name))
            for name, p in module.named_parameters()
        ),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
    )


def all_reduce(size: int, ways: int) -> int:
    """Bytes one rank sends to all-reduce `size` bytes over `ways` ranks."""
    return 2 * size * (ways - 1) // ways


def gather(size: int, ways: int) -> int:
    """Bytes one rank sends to all-gather to, or reduce-scatter from, `size` bytes over `ways` ranks."""
    return size * (ways - 1) // ways


def replicated(size: ModelSize, optimizer: str = "adamw") -> Cost:
    """Everything whole, as on one device; AdamW also keeps a 4-byte step count per parameter."""
    trainable = size.trainable
    states = STATES[optimizer] * sum(p.bytes for p in trainable) + step_bytes(trainable, optimizer)
    return Cost(size.bytes, sum(p.bytes for p in trainable), states, size.buffer_bytes)


def step_bytes(parameters: tuple[ParameterSize, ...], optimizer: str) -> int:
    """Adam counts its steps in one float32 per parameter, on every rank."""
    return 4 * len(parameters) if optimizer in ("adam", "adamw") else 0
