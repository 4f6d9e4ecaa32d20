"""The task's first step, taken on this process before any worker starts, to see what a layout could not keep.

The model is built and runs forward and backward on a few samples: on the meta device, which costs a second for a model
of any size, and, where a step is small, on real numbers. What is looked for is in strategies/rehearsal.py; what only
an application knows is here: how samples are read, and whether the loss of a batch is the mean over its parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from app.config import Config
from app.data.loader import Batch, fetch, length, map_tensors
from app.data.stream import is_stream
from app.randomness import seed_everything, seed_step
from app.tasks.base import Task
from strategies import registry
from strategies.blocks import find_blocks
from strategies.dims import Layout, Options
from strategies.rehearsal import observe
from strategies.traits import Observation, Trait, broken_by, require_kept

SAMPLES = 4
"""In the batch that is looked at; two halves of it must have two samples each, for BatchNorm."""
OPERATIONS = 5e9
"""Floating-point operations of a forward up to which the step is taken on real numbers: about two seconds on one
processor for all that is run."""
PARAMETERS = 100_000_000
"""Up to which the step is taken on real numbers: 400 MB, and as much for gradients."""
WAYS = 6
"""How many batches are compared in the way that they take through the model."""
TOLERANCE = 1e-3
"""Relative difference of two losses, which are the same to rounding, from which on they are not."""


@dataclass(frozen=True)
class FirstStep:
    """What was seen.

    Args:
        observations: what the model does that some layouts cannot keep.
        with_numbers: whether it was run on real numbers.
        losses: of a batch, and the mean of its halves' by their items, where they were compared.
    """

    observations: tuple[Observation, ...] = ()
    with_numbers: bool = False
    losses: tuple[float, float] | None = None

    @property
    def couples_samples(self) -> bool:
        """Whether the loss of a batch is not the mean of its halves': samples depend on one another."""
        if self.losses is None:
            return False
        whole, parts = self.losses
        return abs(whole - parts) > TOLERANCE * max(abs(whole), abs(parts), TOLERANCE)

    def is_kept_by(self, layout: Layout, options: Options) -> bool:
        """Whether the layout trains such a model as one device would."""
        records = registry.records(layout.name)
        return not broken_by(records, options, self.observations, data_workers=layout.dims.dp_cp)

    def require_kept(self, layout: Layout, options: Options) -> None:
        """Raises LayoutError, one sentence, where the layout would train another model than one device."""
        require_kept(
            layout,
            registry.records(layout.name),
            options,
            self.observations,
            alternatives=[registry.by_degrees("dp_replicate"), registry.by_degrees("dp_shard")],
        )

    def notes(self, layout: Layout, micro_batches: int) -> Iterator[str]:
        """What to say of a model that a layout which splits a batch trains otherwise than one device.

        Args:
            layout: what is trained under.
            micro_batches: of one worker's share of a step.
        """
        parts = layout.dims.dp * micro_batches
        if parts == 1:
            return
        if self.couples_samples and self.losses is not None:
            whole, halves = self.losses
            yield (
                f"the loss of {SAMPLES} samples is {whole:.4g}, and the mean of its halves {halves:.4g}, so samples of "
                f"a batch depend on one another, and this run, which splits each batch into {parts}, does not train "
                "what one device with the whole batch would"
            )
        for observation in self.observations:
            by_data = observation.trait is Trait.CHANGES_BUFFERS_BY_DATA
            if by_data:
                yield (
                    f"{observation.sentence}: each of the {parts} parts of a batch changes it by its own samples, and "
                    "rank 0's is saved, so this run differs from one device with the whole batch"
                )
            elif observation.trait is Trait.CHANGES_BUFFERS and micro_batches > 1:
                yield f"{observation.sentence} once in each of the {micro_batches} micro-batches of a step"


def take_first_step(config: Config, task: Task) -> FirstStep:
    """Takes it. What the task's own code raises is left to the workers, whose logs say where it was.

    Args:
        config: its seed is used, as workers do.
        task: with its data.
    """
    batches = _batches(task)
    small = _is_small(config, task, batches[0])
    if small:
        with contextlib.suppress(Exception):
            return _with_numbers(config, task, batches)
    with contextlib.suppress(Exception):  # code that looks at numbers has none on meta
        return FirstStep(_watched(config, task, batches[:1], torch.device("meta")))
    return FirstStep()


def _build(config: Config, task: Task, device: torch.device) -> nn.Module:
    seed_everything(config.train.seed)
    with device:
        return task.build_model()


def _is_small(config: Config, task: Task, batch: Batch) -> bool:
    """Whether the step is quick enough on real numbers."""
    meta = torch.device("meta")
    try:
        model = _build(config, task, meta)
        if _numbers(model) > PARAMETERS:
            return False
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            task.loss(model, map_tensors(lambda tensor: tensor.to(meta), batch))
    except Exception:  # code that looks at numbers: how many operations it takes is not known
        try:
            return _numbers(_build(config, task, torch.device("cpu"))) <= PARAMETERS // 20
        except Exception:
            return False
    return counter.get_total_flops() <= OPERATIONS


def _with_numbers(config: Config, task: Task, batches: list[Batch]) -> FirstStep:
    cpu = torch.device("cpu")
    observations = _watched(config, task, batches, cpu)
    losses = None
    with contextlib.suppress(Exception):  # a loss that cannot be taken in evaluation
        losses = _compare_halves(task, lambda: _build(config, task, cpu).eval(), batches[:3])
    return FirstStep(observations, with_numbers=True, losses=losses)


def _watched(config: Config, task: Task, batches: list[Batch], device: torch.device) -> tuple[Observation, ...]:
    observations = observe(
        lambda: _build(config, task, device),
        lambda module: find_blocks(module, task.blocks(module)),
        task.loss,
        [map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches],
        seed=lambda number: seed_step(config.train.seed, number, 0, torch.device("cpu")),
    )
    return tuple(observations)


def _batches(task: Task) -> list[Batch]:
    """A batch from all over the data, its two halves, and these again; of a stream its first samples."""
    data: Any = task.train_data()
    samples = length(data) or SAMPLES
    picks = [(index * (samples - 1) // max(1, SAMPLES - 1), position) for position, index in enumerate(range(SAMPLES))]
    whole = fetch(data, picks)
    if is_stream(data):
        halves = [_rows(whole, 0), _rows(whole, 1)]
    else:
        halves = [fetch(data, picks[: SAMPLES // 2]), fetch(data, picks[SAMPLES // 2 :])]
    return [whole, *halves * ((WAYS - 1) // 2)]


def _rows(batch: Batch, half: int) -> Batch:
    return map_tensors(lambda tensor: tensor.chunk(2)[half] if tensor.dim() else tensor, batch)


def _numbers(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _compare_halves(task: Task, build: Callable[[], nn.Module], batches: list[Batch]) -> tuple[float, float] | None:
    """(the loss of the first batch, the mean of the others', which are its halves, by their items); None where they
    are not finite. Each is of a new model, since forward may change it."""
    items = [float(task.items(batch)) for batch in batches]
    losses = [float(task.loss(build(), batch).detach()) for batch in batches]
    counted = [(loss, count) for loss, count in zip(losses[1:], items[1:]) if count]
    total = sum(count for _, count in counted)
    mean = sum(loss * count for loss, count in counted) / total if total else float("nan")
    values = torch.tensor([losses[0], mean])
    return (losses[0], mean) if bool(values.isfinite().all()) else None
