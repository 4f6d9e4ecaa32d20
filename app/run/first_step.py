"""The task's first step, taken on this process before any worker starts, to see what a layout could not keep.

The model is built and runs forward and backward on a few samples: on the meta device, which costs a second for a model
of any size, and, where a step is small, on real numbers. What is looked for is in strategies/rehearsal; what only
an application knows is here: how samples are read, and whether the loss of a batch is the mean over its parts.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from app.config import Config
from app.data.loader import Batch, fetch, length, map_tensors
from app.data.randomness import seed_everything, seed_step
from app.run.items_remark import items_remark
from app.tasks.base import Task
from app.tasks.build import build_model
from app.tasks.items import count_items, weighs_items
from app.training.batch_gather import POINTER
from strategies import activation_checkpointing, registry
from strategies.blocks import find_blocks
from strategies.dims import Layout, LayoutError
from strategies.options import Options
from strategies.rehearsal.observe import observe
from strategies.traits import Observation, Trait, broken_by, require_kept

SAMPLES = 4
"""In the batch that is looked at; two halves of it must have two samples each, for BatchNorm."""
OPERATIONS = 2e9
"""Floating-point operations of a forward up to which the step is taken on real numbers: ten times as many in all, about
a second on one processor, and three more where the code asks for numbers."""
FEW_OPERATIONS = 2e8
"""Up to which gradients of parts are compared too, and more ways through the model: 23 times as many in all, and twelve
more where the code asks for numbers."""
PARAMETERS = 100_000_000
"""Up to which the step is taken on real numbers: 400 MB, and as much for gradients."""
OTHER_ANSWERS = 12
"""Runs in which a number that the code asks of a batch is answered otherwise."""
FEW_ANSWERS = 3
"""The same where a step is not small."""
WAYS = 9
"""How many batches are compared in the way that they take through the model."""
CALLS = 4
"""How often the loss of the same samples is taken, to see whether it stays."""
COARSE_TOLERANCE = 5e-2
"""The same where a parameter has 16 bits."""
REPEATED_TOLERANCE = 1e-5
"""The same of a loss that is taken again, in any type: it is computed in the same way."""
TOLERANCE = 1e-4
"""Relative difference of two losses, which are the same to rounding, from which on they are not."""
GRADIENT_TOLERANCE = 1e-3
"""The same of gradients, in which rounding adds up."""


@dataclass(frozen=True)
class FirstStep:
    """What was seen.

    Args:
        observations: what the model does that some layouts cannot keep.
        with_numbers: whether it was run on real numbers.
        items_remark: a sentence, where the loss is no mean over the items that parts of a batch are weighted by.
        coupling: where the samples of a batch depend on one another, what shows it: a clause.
        stateful: whether the loss of the same samples is another one when it is taken again.
        error_of_one: what the model says to a batch of one sample, where it takes larger ones.
        error_of_recomputing: what the model says in backward when it is recomputed as the configuration asks for.
    """

    observations: tuple[Observation, ...] = ()
    with_numbers: bool = False
    items_remark: str = ""
    coupling: str = ""
    stateful: bool = False
    error_of_one: str = ""
    error_of_recomputing: str = ""

    def is_kept_by(self, layout: Layout, options: Options) -> bool:
        """Whether the layout trains such a model as one device would."""
        records = registry.records(layout.name)
        return not broken_by(records, options, self.observations, data_workers=layout.dims.dp_cp)

    def require_kept(self, layout: Layout, options: Options, *, smallest: int, micro_batches: int = 1) -> None:
        """Raises LayoutError, one sentence, where the layout would train another model than one device.

        Args:
            layout: what is to be trained under.
            options: how it behaves.
            smallest: samples of the smallest micro-batch.
            micro_batches: of one worker's share of a step.
        """
        if smallest == 1 and self.error_of_one:
            raise LayoutError(
                f"a micro-batch has one sample here, which the model does not take ({self.error_of_one}): raise "
                "train.global_batch_size or train.micro_batch_size"
            )
        require_kept(
            layout,
            registry.records(layout.name),
            options,
            self.observations,
            alternatives=[registry.by_degrees("dp_replicate"), registry.by_degrees("dp_shard")],
            micro_batches=micro_batches,
        )
        mode = options.activation_checkpointing
        if mode != "none" and self.error_of_recomputing:
            raise LayoutError(
                f"the model cannot be recomputed as train.activation_checkpointing={mode} does "
                f"({self.error_of_recomputing}): write {'full' if mode == 'selective' else 'none'} instead"
            )

    def notes(self, layout: Layout, micro_batches: int, *, gathers: bool = False) -> Iterator[str]:
        """What to say of a model that a layout which splits a batch trains otherwise than one device.

        Args:
            layout: what is trained under.
            micro_batches: of one worker's share of a step.
            gathers: whether the task calls self.gather, so that its loss is that of the whole batch.
        """
        parts = layout.dims.dp * micro_batches
        if parts == 1:
            return
        if self.items_remark:
            yield self.items_remark
        elif self.coupling and not gathers:
            yield (
                f"{self.coupling}, so samples of a batch depend on one another, and this run, which splits each batch "
                f"into {parts}, does not train what one device with the whole batch would: {POINTER}"
            )
        if self.stateful and micro_batches > 1:
            yield (
                "the loss of the same samples is another one when it is taken again, so it depends on how often it is "
                f"called, which here is {micro_batches} times in a step"
            )
        for observation in self.observations:
            if observation.trait is Trait.BRANCHES_ON_DATA:
                yield (
                    f"{observation.sentence}: where that is decided for a whole batch, each of its {parts} parts "
                    "decides for itself, and this run differs from one device with the whole batch"
                )
            elif observation.trait is Trait.NORMALISES_OVER_BATCH and layout.dims.world_size == 1:
                yield (
                    f"{observation.sentence}: here over one micro-batch, so this run differs from one with "
                    "micro-batches of another size; GroupNorm does not depend on that"
                )
            elif observation.trait is Trait.CHANGES_BUFFERS_BY_DATA:
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
    untouched = copy.copy(task)
    task = copy.copy(task)  # what it counts in its attributes begins anew in a worker
    batches = _batches(task)
    operations = _operations(config, task, batches[0])
    if operations <= OPERATIONS:
        with contextlib.suppress(Exception):
            thorough = operations <= FEW_OPERATIONS
            stateful = thorough and _is_stateful(config, untouched, batches[0])
            return replace(_with_numbers(config, task, batches, thorough=thorough), stateful=stateful)
    with contextlib.suppress(Exception):  # code that looks at numbers has none on meta
        return FirstStep(_watched(config, task, batches[:1], torch.device("meta"), other_answers=OTHER_ANSWERS))
    return FirstStep()


def _build(config: Config, task: Task, device: torch.device) -> nn.Module:
    seed_everything(config.train.seed)
    with device:
        return build_model(task)


def _operations(config: Config, task: Task, batch: Batch) -> float:
    """Floating-point operations of a forward, in products and convolutions; infinite for a model that is too large for
    real numbers, or where they cannot be counted."""
    meta = torch.device("meta")
    try:
        model = _build(config, task, meta)
        if _numbers(model) > PARAMETERS:
            return math.inf
        with FlopCounterMode(display=False) as counter:  # with gradients, which a loss may take itself
            task.loss(model, map_tensors(lambda tensor: tensor.to(meta), batch))
        return float(counter.get_total_flops())
    except Exception:  # code that looks at numbers
        pass
    try:
        model = _build(config, task, torch.device("cpu"))
        if _numbers(model) > PARAMETERS // 20:
            return math.inf
        with FlopCounterMode(display=False) as counter:
            task.loss(model, _copied(batch))
        return float(counter.get_total_flops())
    except Exception:
        return math.inf


def _with_numbers(config: Config, task: Task, batches: list[Batch], *, thorough: bool) -> FirstStep:
    cpu = torch.device("cpu")
    chosen = batches if thorough else batches[:3]
    observations = _watched(config, task, chosen, cpu, other_answers=OTHER_ANSWERS if thorough else FEW_ANSWERS)
    remark: str | None = None
    couples = ""
    with contextlib.suppress(Exception):  # a loss that cannot be taken in evaluation
        steps = [_evaluated(task, _build(config, task, cpu), batch, backward=thorough) for batch in batches[:3]]
        couples = coupling(*steps) or repeating(steps[1], _evaluated_twice_over(config, task, batches[1], thorough))
        if couples:
            remark = items_remark(
                task,
                batches[0],
                lambda batch: task.loss(_build(config, task, cpu).eval(), _copied(batch)),
            )
    return FirstStep(
        observations,
        with_numbers=True,
        items_remark=remark or "",
        coupling=couples,
        error_of_one=_error_of_one(config, task, batches[0], cpu),
        error_of_recomputing=_error_of_recomputing(config, task, batches[0], cpu),
    )


def _evaluated_twice_over(config: Config, task: Task, batch: Batch, backward: bool) -> _Step:
    """The step of a batch that has each of these samples twice."""
    twice = map_tensors(lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor, batch)
    return _evaluated(task, _build(config, task, torch.device("cpu")), twice, backward=backward)


def _is_stateful(config: Config, task: Task, batch: Batch) -> bool:
    """Whether the same model's loss of the same samples is another one when it is taken again, as where the model or
    the task counts its calls. The task has not been asked for its loss yet."""
    with contextlib.suppress(Exception):  # a loss that cannot be taken in evaluation, or not twice
        model = _build(config, task, torch.device("cpu"))
        losses = []
        for _ in range(CALLS):
            seed_step(config.train.seed, 0, data_rank=0, device=torch.device("cpu"))
            losses.append(_evaluated(task, model, batch, backward=False).loss)
        return not all(_alike(losses[0], loss, REPEATED_TOLERANCE) for loss in losses)
    return False


def _error_of_one(config: Config, task: Task, batch: Batch, device: torch.device) -> str:
    """What the model says to one sample of a batch that it takes; "" where it takes it."""
    one = map_tensors(lambda tensor: tensor[:1].clone() if tensor.dim() else tensor, batch)
    try:
        task.loss(_build(config, task, device).train(), one)
    except Exception as error:
        return _first_line(error)
    return ""


def _error_of_recomputing(config: Config, task: Task, batch: Batch, device: torch.device) -> str:
    """What a step says in which the model is recomputed, where it takes one in which it is not; "" where both do."""
    mode = config.train.activation_checkpointing
    if mode == "none":
        return ""

    def take_step(*, recomputed: bool) -> None:
        model = _build(config, task, device).train()
        if recomputed:
            activation_checkpointing.apply(model, find_blocks(model, task.blocks(model)), mode)
        seed_step(config.train.seed, 0, data_rank=0, device=device)
        task.loss(model, _copied(batch)).backward()

    try:
        take_step(recomputed=False)
    except Exception:  # which the workers' logs will say
        return ""
    try:
        take_step(recomputed=True)
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _watched(
    config: Config, task: Task, batches: list[Batch], device: torch.device, *, other_answers: int
) -> tuple[Observation, ...]:
    observations = observe(
        lambda: _build(config, task, device),
        lambda module: find_blocks(module, task.blocks(module)),
        task.loss,
        [map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches],
        seed=lambda number: seed_step(config.train.seed, number, data_rank=0, device=torch.device("cpu")),
        other_answers=other_answers,
    )
    return tuple(observations)


def _batches(task: Task) -> list[Batch]:
    """A batch from all over the data, its two halves, and pairs of other samples; of a stream its first samples, and
    their halves again."""
    data: Any = task.train_data()
    samples = length(data)
    if samples is None:
        whole = fetch(data, [(position, position) for position in range(SAMPLES)])
        return [whole, *[_rows(whole, 0), _rows(whole, 1)] * ((WAYS - 1) // 2)]
    wanted = 2 * SAMPLES + 2 * WAYS
    picks = [(number * (samples - 1) // (wanted - 1), number) for number in range(wanted)]
    whole = _with_items(task, picks, fallback=picks[:: wanted // SAMPLES][:SAMPLES])
    others = [pick for pick in picks if pick not in whole]
    pairs = [others[2 * number : 2 * number + 2] for number in range(WAYS - 3)]
    halves = [whole[: SAMPLES // 2], whole[SAMPLES // 2 :]]
    return [fetch(data, chosen) for chosen in (whole, *halves, *pairs)]


def _with_items(task: Task, picks: list[tuple[int, int]], *, fallback: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of a task that counts its items, samples from all over the picks: the loss of samples without items says nothing.

    Those with the most items come first and one without any last, where there is one, so that the halves of the batch
    differ in their items: else a mean over rows, too, would be the mean of the halves' by their items.
    """
    if not weighs_items(task):
        return fallback
    data: Any = task.train_data()
    items = {pick: count_items(task, fetch(data, [pick])) for pick in picks}
    with_some = [pick for pick in picks if items[pick]]
    without = [pick for pick in picks if not items[pick]]
    step = max(1, len(with_some) // SAMPLES)
    chosen = with_some[::step][:SAMPLES]
    if len(chosen) < SAMPLES:
        return fallback
    chosen.sort(key=lambda pick: -items[pick])
    return [*chosen[:-1], without[0]] if without else chosen


def _rows(batch: Batch, half: int) -> Batch:
    return map_tensors(lambda tensor: tensor.chunk(2)[half] if tensor.dim() else tensor, batch)


def _copied(batch: Batch) -> Batch:
    """The batch for one call of the model, which may change it in place."""
    return map_tensors(torch.Tensor.clone, batch)


def _numbers(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- samples that depend on one another -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A batch's items, loss and gradient, in evaluation, where nothing is drawn and BatchNorm couples nothing; an empty
    gradient where it was not asked for."""

    items: float
    loss: Tensor
    gradient: Tensor
    tolerance: float = TOLERANCE
    gradient_tolerance: float = GRADIENT_TOLERANCE


def _evaluated(task: Task, model: nn.Module, batch: Batch, *, backward: bool) -> _Step:
    loss = task.loss(model.eval(), _copied(batch))
    if backward:
        loss.backward()
    gradients = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
    real = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    flat = torch.cat([loss.new_empty(0, dtype=torch.double), *(g.flatten().double() for g in real)])
    is_coarse = any(parameter.element_size() < 4 for parameter in model.parameters())
    return _Step(
        float(count_items(task, batch)),
        loss.detach().double(),
        flat,
        tolerance=COARSE_TOLERANCE if is_coarse else TOLERANCE,
        gradient_tolerance=COARSE_TOLERANCE if is_coarse else GRADIENT_TOLERANCE,
    )


def coupling(whole: _Step, *halves: _Step) -> str:
    """A clause that shows that samples depend on one another, if the loss or the gradient of a batch is not the mean
    of its halves', by their items; "" where it is, or where that cannot be said."""
    counted = [half for half in halves if half.items]
    total = sum(half.items for half in counted)
    if not counted:
        return ""
    loss = torch.stack([half.loss * (half.items / total) for half in counted]).sum()
    if not _alike(whole.loss, loss, whole.tolerance):
        return f"the loss of {SAMPLES} samples is {whole.loss:.6g}, and the mean of its halves' {loss:.6g}"
    if any(half.gradient.shape != whole.gradient.shape for half in counted):
        return ""
    gradient = torch.stack([half.gradient * (half.items / total) for half in counted]).sum(0)
    if not _alike(whole.gradient, gradient, whole.gradient_tolerance):
        return f"the gradient of {SAMPLES} samples is not the mean of its halves'"
    return ""


def repeating(once: _Step, twice: _Step) -> str:
    """A clause that shows that samples depend on one another, if each of them given twice makes another loss or
    gradient; "" where it does not. What couples equal samples alone, as the rows of a table that are looked up several
    times, is not seen in a few samples that are not."""
    if not _alike(once.loss, twice.loss, once.tolerance):
        return f"the loss of samples is {once.loss:.6g}, and {twice.loss:.6g} where each is in the batch twice"
    if once.gradient.shape == twice.gradient.shape and not _alike(
        once.gradient, twice.gradient, once.gradient_tolerance
    ):
        return "the gradient of samples is another one where each is in the batch twice"
    return ""


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two are the same but for rounding; what is not finite says nothing."""
    if not bool(torch.isfinite(one).all() and torch.isfinite(other).all()):
        return True
    return float((one - other).norm()) <= tolerance * max(float(one.norm()), float(other.norm()), tolerance)
