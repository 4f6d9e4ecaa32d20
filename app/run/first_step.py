"""Takes the task's first step in this process, to find what some layouts would train otherwise.

Before any worker starts, the model runs forward and backward on a few samples: on the meta device,
which costs a second for a model of any size, and, if a step is small, on real data.
strategies/rehearsal defines what is looked for. What only an application knows is here: how samples
are read, and whether the loss of a batch is the mean over its parts.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from app.config import Config
from app.data.loader import Batch, Picks, fetch, length, map_tensors, tensors
from app.data.randomness import seed_everything, seed_step
from app.run.items_remark import items_remark
from app.tasks.base import Task
from app.tasks.build import build_model
from app.tasks.items import count_items, weighs_items
from app.training import hooks
from app.training.batch_gather import POINTER
from strategies import activation_checkpointing, activation_offloading, registry
from strategies.blocks import find_blocks
from strategies.dims import Layout, LayoutError
from strategies.options import Options
from strategies.rehearsal.observe import observe
from strategies.torch_internals import OperationMode
from strategies.traits import Observation, Trait, broken_by, require_kept
from strategies.tree import clone_tensors

SAMPLES = 4
"""Samples in the batch that is looked at. Each half has two of them, which BatchNorm needs."""
MAX_OPERATIONS = 2e9
"""Floating-point operations of a forward up to which real numbers are used.

The step then takes ten times as many in all, about a second on one processor, and three times that
if the code asks for values of tensors.
"""
THOROUGH_OPERATIONS = 2e8
"""Floating-point operations of a forward up to which the step is examined thoroughly.

Gradients of parts are then compared too, and more paths through the model: 23 times as many
operations in all, and twelve times that if the code asks for values of tensors.
"""
MAX_PARAMETERS = 100_000_000
"""Parameters up to which real numbers are used: 400 MB, and as much for gradients."""
OTHER_ANSWERS = 12
"""Runs in which a value of the batch that the code asks for is replaced by another."""
FEW_OTHER_ANSWERS = 3
"""The same if the step is not examined thoroughly."""
BATCHES = 9
"""Batches whose paths through the model are compared."""
REPEATED_LOSSES = 4
"""How often the loss of the same samples is computed, to see whether it stays the same."""
TOLERANCE = 1e-4
"""Relative difference from which on two losses differ by more than rounding."""
GRADIENT_TOLERANCE = 1e-3
"""The same for gradients, in which rounding adds up."""
COARSE_TOLERANCE = 5e-2
"""The same for losses and gradients if a parameter has 16 bits."""
RECOMPUTING_TOLERANCE = 1e-2
"""The same for the gradient of a parameter if activations are recomputed."""
REPEATED_TOLERANCE = 1e-5
"""The same for a loss that is computed again in the same way, whatever its type."""
CPU = torch.device("cpu")
META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """What the first step has shown.

    Args:
        observations: What the model does that some layouts cannot keep.
        with_numbers: Whether it ran on real data.
        items_remark: A sentence if the loss is not a mean over the items that parts of a batch are
            weighted by; "" otherwise.
        coupling: A clause that shows that samples of a batch depend on one another; "" if they do
            not.
        is_stateful: Whether the loss of the same samples changes when it is computed again.
        refused_sizes: How the model refuses batches of so many samples, by their number, if it
            takes larger ones.
        recomputing_error: How the model fails in backward if it is recomputed as the configuration
            says, but not without that; "" if it does not fail.
        offloading_error: The same if what blocks save is moved to host memory.
    """

    observations: tuple[Observation, ...] = ()
    with_numbers: bool = False
    items_remark: str = ""
    coupling: str = ""
    is_stateful: bool = False
    refused_sizes: Mapping[int, str] = field(default_factory=dict)
    recomputing_error: str = ""
    offloading_error: str = ""

    def is_kept_by(self, layout: Layout, options: Options) -> bool:
        """Whether a layout trains this model as one device would."""
        records = registry.records(layout.name)
        broken = broken_by(records, options, self.observations, data_workers=layout.dims.dp_cp)
        return not broken

    def require_kept(
        self, layout: Layout, options: Options, *, smallest: int, micro_batches: int = 1
    ) -> None:
        """Checks that a layout trains this model as one device would.

        Args:
            layout: How the work is split.
            options: How the strategies behave.
            smallest: Samples of the smallest micro-batch.
            micro_batches: Micro-batches of one worker's part of a step.

        Raises:
            LayoutError: It would train another model; one sentence.
        """
        if smallest in self.refused_sizes:
            samples = "one sample" if smallest == 1 else f"{smallest} samples"
            raise LayoutError(
                f"a micro-batch has {samples} here, which the model does not take "
                f"({self.refused_sizes[smallest]}): raise train.global_batch_size or "
                "train.micro_batch_size"
            )
        require_kept(
            layout,
            registry.records(layout.name),
            options,
            observations=self.observations,
            alternatives=[
                registry.by_degrees("dp_replicate"),
                registry.by_degrees("dp_shard"),
            ],
            micro_batches=micro_batches,
        )
        mode = options.activation_checkpointing
        if mode != "none" and self.recomputing_error:
            alternative = "full" if mode == "selective" else "none"
            raise LayoutError(
                f"the model cannot be recomputed as train.activation_checkpointing={mode} does "
                f"({self.recomputing_error}): write {alternative} instead"
            )
        if options.activation_offloading and self.offloading_error:
            raise LayoutError(
                "what the model saves for backward cannot be moved as train.activation_offloading "
                f"does ({self.offloading_error}): leave it out, or write "
                "train.activation_checkpointing=full instead"
            )

    def notes(self, layout: Layout, micro_batches: int, *, gathers: bool = False) -> Iterator[str]:
        """Sentences on what a layout that splits a batch trains otherwise than one device.

        Args:
            layout: How the work is split.
            micro_batches: Micro-batches of one worker's part of a step.
            gathers: Whether the task calls self.gather, so that its loss is that of the whole
                batch.
        """
        parts = layout.dims.dp * micro_batches
        if parts == 1:
            return
        if self.items_remark:
            yield self.items_remark
        elif self.coupling and not gathers:
            yield (
                f"{self.coupling}, so samples of a batch depend on one another, and this run, "
                f"which splits each batch into {parts}, does not train what one device with the "
                f"whole batch would: {POINTER}"
            )
        if self.is_stateful and micro_batches > 1:
            yield (
                "the loss of the same samples changes when it is computed again, so it depends on "
                f"how often it is called, which here is {micro_batches} times in a step"
            )
        for observation in self.observations:
            note = _note_on(observation, layout, parts=parts, micro_batches=micro_batches)
            if note:
                yield note


def _note_on(observation: Observation, layout: Layout, *, parts: int, micro_batches: int) -> str:
    """What an observation means for a batch in `parts` parts; "" if it means nothing."""
    match observation.trait:
        case Trait.BRANCHES_ON_DATA:
            return (
                f"{observation.sentence}: where that is decided for a whole batch, each of its "
                f"{parts} parts decides for itself, and this run differs from one device with the "
                "whole batch"
            )
        case Trait.NORMALISES_OVER_BATCH if layout.dims.world_size == 1:
            return (
                f"{observation.sentence}: here over one micro-batch, so this run differs from one "
                "with micro-batches of another size; GroupNorm does not depend on that"
            )
        case Trait.CHANGES_BUFFERS_BY_DATA:
            return (
                f"{observation.sentence}: each of the {parts} parts of a batch changes it by its "
                "own samples, and rank 0's is saved, so this run differs from one device with the "
                "whole batch"
            )
        case Trait.CHANGES_BUFFERS if micro_batches > 1:
            return (
                f"{observation.sentence} once in each of the {micro_batches} micro-batches of a "
                "step"
            )
        case _:
            return ""


def take_first_step(config: Config, task: Task) -> FirstStep:
    """Takes the first step, with each of the losses that a training_step of the task's own takes.

    What the task's own code raises is left to the workers, whose logs say where it was.

    Args:
        config: Its seed is used, as workers do.
        task: With its data; not changed.
    """
    count = len(hooks.losses_of_step(copy.copy(task)))
    return _merged([_take_step_of_loss(config, task, number) for number in range(count)])


def _with_loss(task: Task, number: int) -> Task:
    """A copy of the task whose loss is one of those of its step.

    What a task counts in its attributes begins anew in each copy, as in a worker.
    """
    copied = copy.copy(task)
    if hooks.overrides(task, "training_step"):
        vars(copied)["loss"] = hooks.losses_of_step(copy.copy(task))[number]
    return copied


def _merged(steps: list[FirstStep]) -> FirstStep:
    """What the first step shows, of what it shows with each of its losses."""
    names: dict[Trait, dict[str, None]] = {}
    refused_sizes: dict[int, str] = {}
    for step in steps:
        refused_sizes |= step.refused_sizes
        for observation in step.observations:
            names.setdefault(observation.trait, {}).update(dict.fromkeys(observation.names))

    def first_sentence(sentences: Iterator[str]) -> str:
        return next((sentence for sentence in sentences if sentence), "")

    return FirstStep(
        observations=tuple(Observation(trait, tuple(where)) for trait, where in names.items()),
        with_numbers=all(step.with_numbers for step in steps),
        items_remark=first_sentence(step.items_remark for step in steps),
        coupling=first_sentence(step.coupling for step in steps),
        is_stateful=any(step.is_stateful for step in steps),
        refused_sizes=refused_sizes,
        recomputing_error=first_sentence(step.recomputing_error for step in steps),
        offloading_error=first_sentence(step.offloading_error for step in steps),
    )


def _take_step_of_loss(config: Config, task: Task, number: int) -> FirstStep:
    """What the first step shows with one of its losses."""
    untouched_task = _with_loss(task, number)
    task = _with_loss(task, number)
    batches = _batches(task)
    operations = _count_operations(config, task, batches[0])
    if operations <= MAX_OPERATIONS:
        is_thorough = operations <= THOROUGH_OPERATIONS
        with contextlib.suppress(Exception):  # see above
            is_stateful = is_thorough and _is_stateful(config, untouched_task, batches[0])
            first_step = _step_with_numbers(config, task, batches, thorough=is_thorough)
            return replace(first_step, is_stateful=is_stateful)
    with contextlib.suppress(Exception):  # code that looks at numbers has none on meta
        observations = _observe(config, task, batches[:1], device=META, other_answers=OTHER_ANSWERS)
        return FirstStep(observations=observations)
    return FirstStep()


def _build(config: Config, task: Task, device: torch.device) -> nn.Module:
    seed_everything(config.train.seed)
    with device:
        return build_model(task)


def _count_operations(config: Config, task: Task, batch: Batch) -> float:
    """Floating-point operations of a forward, in products and convolutions.

    Returns:
        Infinity if the model is too large for real numbers, or operations cannot be counted.
    """
    with contextlib.suppress(Exception):  # code that looks at numbers has none on meta
        model = _build(config, task, META)
        if _count_parameters(model) > MAX_PARAMETERS:
            return math.inf
        meta_batch = map_tensors(lambda tensor: tensor.to(META), batch)
        return _operations_of_loss(task, model, meta_batch)
    with contextlib.suppress(Exception):  # the workers meet what the task's own code raises
        model = _build(config, task, CPU)
        if _count_parameters(model) > MAX_PARAMETERS // 20:
            return math.inf
        return _operations_of_loss(task, model, clone_tensors(batch))
    return math.inf


def _operations_of_loss(task: Task, model: nn.Module, batch: Batch) -> float:
    """Floating-point operations of a forward, and of gradients that the loss takes itself.

    torch's own FlopCounterMode hooks modules to tell their operations apart, which fails in
    reentrant checkpoints and in gradients of leaves. So only its formulas are used.
    """
    counter = _OperationCounter()
    with counter:
        task.loss(model, batch)
    return counter.operations


class _OperationCounter(OperationMode):  # type: ignore[misc]
    """Adds up the floating-point operations of products and convolutions."""

    operations = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **kwargs, out_val=output)
        return output


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _step_with_numbers(
    config: Config, task: Task, batches: list[Batch], *, thorough: bool
) -> FirstStep:
    """What the step shows on real numbers.

    Args:
        config: The configuration.
        task: What is trained.
        batches: See `_batches`.
        thorough: Compare gradients too, and all batches.
    """
    refused_sizes = _refused_sizes(config, task, batches[0])
    taken_batches = [batch for batch in batches if _samples_of(batch) not in refused_sizes]
    observations = _observe(
        config,
        task,
        taken_batches if thorough else taken_batches[:3],
        device=CPU,
        other_answers=OTHER_ANSWERS if thorough else FEW_OTHER_ANSWERS,
    )
    remark: str | None = None
    clause = ""
    with contextlib.suppress(Exception):  # a loss that cannot be computed in evaluation
        clause = _find_coupling(config, task, batches, with_gradients=thorough)
        if clause:
            remark = items_remark(
                task,
                batches[0],
                lambda batch: task.loss(_build(config, task, CPU).eval(), clone_tensors(batch)),
            )
    return FirstStep(
        observations=observations,
        with_numbers=True,
        items_remark=remark or "",
        coupling=clause,
        refused_sizes=refused_sizes,
        recomputing_error=_recomputing_error(config, task, batches[0]),
        offloading_error=_offloading_error(config, task, batches[0]),
    )


def _observe(
    config: Config,
    task: Task,
    batches: list[Batch],
    *,
    device: torch.device,
    other_answers: int,
) -> tuple[Observation, ...]:
    observations = observe(
        build=lambda: _build(config, task, device),
        find_blocks=lambda model: find_blocks(model, task.blocks(model)),
        loss=task.loss,
        batches=[map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches],
        seed=lambda number: seed_step(config.train.seed, number, data_rank=0, device=CPU),
        other_answers=other_answers,
    )
    return tuple(observations)


def _is_stateful(config: Config, task: Task, batch: Batch) -> bool:
    """Whether the loss of the same samples changes when the same model computes it again.

    It does, for example, if the model or the task counts its calls.

    Args:
        config: The configuration.
        task: Its loss has not been called yet.
        batch: The samples.
    """
    with contextlib.suppress(Exception):  # a loss that cannot be computed in evaluation, or twice
        model = _build(config, task, CPU)
        losses = []
        for _ in range(REPEATED_LOSSES):
            seed_step(config.train.seed, 0, data_rank=0, device=CPU)
            losses.append(_evaluate(task, model, batch, with_gradient=False).loss)
        return not all(_are_alike(losses[0], loss, REPEATED_TOLERANCE) for loss in losses)
    return False


def _samples_of(batch: Batch) -> int:
    """The samples of a batch, by the first of its tensors that has a dimension for them."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 0)


def _samples(batch: Batch, start: int, stop: int) -> Batch:
    """A copy of some of a batch's samples."""
    return map_tensors(lambda tensor: tensor[start:stop].clone() if tensor.dim() else tensor, batch)


def _refused_sizes(config: Config, task: Task, batch: Batch) -> dict[int, str]:
    """How the model refuses small parts of a batch that it takes, by their number of samples.

    A model that normalises over the samples does not take one, and one that divides its batch
    before does not take two. The larger sizes are not tried if the model takes the smaller ones.
    """
    refused: dict[int, str] = {}
    for size in range(1, SAMPLES):
        try:
            task.loss(_build(config, task, CPU), _samples(batch, 0, size))
        except Exception as error:
            refused[size] = _first_line(error)
        else:
            break
    return refused


def _recomputing_error(config: Config, task: Task, batch: Batch) -> str:
    """How a step fails, or gets other gradients, only because the model is recomputed.

    Returns:
        A clause; "" if recomputation changes nothing.
    """
    mode = config.train.activation_checkpointing
    if mode == "none":
        return ""

    def recompute(model: nn.Module, blocks: list[str]) -> None:
        activation_checkpointing.apply(model, blocks, mode)

    return _error_because_of(
        recompute,
        config=config,
        task=task,
        batch=batch,
        otherwise="gradients change, because a block overwrites a result that is kept",
    )


def _offloading_error(config: Config, task: Task, batch: Batch) -> str:
    """How a step fails, or gets other gradients, only because saved tensors are moved.

    Returns:
        A clause; "" if moving changes nothing.
    """
    if not config.train.activation_offloading:
        return ""

    def move(model: nn.Module, blocks: list[str]) -> None:
        activation_offloading.apply(model, blocks, CPU)

    return _error_because_of(
        move, config=config, task=task, batch=batch, otherwise="gradients change"
    )


def _error_because_of(
    change: Callable[[nn.Module, list[str]], None],
    *,
    config: Config,
    task: Task,
    batch: Batch,
    otherwise: str,
) -> str:
    """How a step fails only because the model was changed.

    Args:
        change: Changes a model, whose blocks it is given too.
        config: The configuration.
        task: Its loss is computed.
        batch: The samples.
        otherwise: A clause for a step that does not fail but has other gradients.

    Returns:
        A clause; "" if the change makes no difference.
    """

    def take_step(*, changed: bool) -> dict[str, Tensor]:
        model = _build(config, task, CPU)
        if changed:
            change(model, find_blocks(model, task.blocks(model)))
        seed_step(config.train.seed, 0, data_rank=0, device=CPU)
        task.loss(model, clone_tensors(batch)).backward()
        parameters = model.named_parameters()
        return {name: each.grad for name, each in parameters if each.grad is not None}

    try:
        gradients = take_step(changed=False)
    except Exception:  # the workers meet it too, and their logs say where
        return ""
    try:
        changed_gradients = take_step(changed=True)
    except Exception as error:
        return _first_line(error)
    for name, gradient in gradients.items():
        changed_gradient = changed_gradients.get(name, torch.zeros_like(gradient))
        difference = (changed_gradient - gradient).abs().norm()
        if difference > RECOMPUTING_TOLERANCE * gradient.abs().norm():
            return otherwise
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


# --- batches --------------------------------------------------------------------------------------


def _batches(task: Task) -> list[Batch]:
    """A batch of samples from all over the data, its two halves, and pairs of other samples.

    A stream gives its first samples, and their halves several times.
    """
    data: Any = task.train_data()
    samples = length(data)
    if samples is None:
        batch = fetch(data, [(position, position) for position in range(SAMPLES)])
        halves = [_half(batch, 0), _half(batch, 1)]
        return [batch, *halves * ((BATCHES - 1) // 2)]
    count = 2 * SAMPLES + 2 * BATCHES
    picks = [(number * (samples - 1) // (count - 1), number) for number in range(count)]
    evenly_spaced = picks[:: count // SAMPLES][:SAMPLES]
    batch_picks = _picks_with_items(task, picks, fallback=evenly_spaced)
    other_picks = [pick for pick in picks if pick not in batch_picks]
    pairs = [other_picks[2 * number : 2 * number + 2] for number in range(BATCHES - 3)]
    first_half = batch_picks[: SAMPLES // 2]
    second_half = batch_picks[SAMPLES // 2 :]
    return [fetch(data, chosen) for chosen in (batch_picks, first_half, second_half, *pairs)]


def _picks_with_items(task: Task, picks: Picks, *, fallback: Picks) -> Picks:
    """Samples for the batch: of a task that counts its items, samples that have some.

    The loss of samples without items says nothing. Samples with the most items come first, and one
    without any comes last if there is one, so that the halves of the batch differ in their items.
    Otherwise a mean over rows would also be the mean of the halves' by their items.

    Args:
        task: With its data.
        picks: The samples to choose from.
        fallback: The choice if the task counts no items, or too few samples have some.
    """
    if not weighs_items(task):
        return fallback
    data: Any = task.train_data()
    items = {pick: count_items(task, fetch(data, [pick])) for pick in picks}
    with_items = [pick for pick in picks if items[pick]]
    without_items = [pick for pick in picks if not items[pick]]
    step = max(1, len(with_items) // SAMPLES)
    chosen = with_items[::step][:SAMPLES]
    if len(chosen) < SAMPLES:
        return fallback
    chosen.sort(key=lambda pick: -items[pick])
    if without_items:
        chosen[-1] = without_items[0]
    return chosen


def _half(batch: Batch, number: int) -> Batch:
    return map_tensors(lambda tensor: tensor.chunk(2)[number] if tensor.dim() else tensor, batch)


def _doubled(batch: Batch) -> Batch:
    """A batch that has each sample of this one twice."""
    return map_tensors(
        lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor, batch
    )


# --- samples that depend on one another -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """A batch's loss and gradient in evaluation, where nothing is random and BatchNorm is fixed.

    Args:
        items: What the batch is weighted by.
        loss: 0-dimensional, in double precision.
        gradient: Of all parameters, flat, in double precision; empty if it was not computed.
        tolerance: Relative difference from which on two losses differ.
        gradient_tolerance: Relative difference from which on two gradients differ.
    """

    items: float
    loss: Tensor
    gradient: Tensor
    tolerance: float = TOLERANCE
    gradient_tolerance: float = GRADIENT_TOLERANCE


def _evaluate(task: Task, model: nn.Module, batch: Batch, *, with_gradient: bool) -> _Evaluation:
    loss = task.loss(model.eval(), clone_tensors(batch))
    if with_gradient:
        loss.backward()
    flat_gradients = [loss.new_empty(0, dtype=torch.double)]
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        flat_gradients.append(gradient.flatten().double())
    has_16_bits = any(parameter.element_size() < 4 for parameter in model.parameters())
    return _Evaluation(
        items=float(count_items(task, batch)),
        loss=loss.detach().double(),
        gradient=torch.cat(flat_gradients),
        tolerance=COARSE_TOLERANCE if has_16_bits else TOLERANCE,
        gradient_tolerance=COARSE_TOLERANCE if has_16_bits else GRADIENT_TOLERANCE,
    )


def _find_coupling(
    config: Config, task: Task, batches: list[Batch], *, with_gradients: bool
) -> str:
    """A clause that shows that samples of a batch depend on one another; "" if they do not."""

    def evaluate(batch: Batch) -> _Evaluation:
        model = _build(config, task, CPU)
        return _evaluate(task, model, batch, with_gradient=with_gradients)

    whole, first_half, second_half = [evaluate(batch) for batch in batches[:3]]
    clause = _differs_from_parts(whole, first_half, second_half, parts="halves")
    clause = clause or _differs_when_doubled(first_half, evaluate(_doubled(batches[1])))
    if clause:
        return clause
    # Two halves may agree by chance: in both the same token may have the largest output.
    with contextlib.suppress(Exception):  # a loss that cannot be computed of one sample
        samples = [evaluate(_samples(batches[0], number, number + 1)) for number in range(SAMPLES)]
        return _differs_from_parts(whole, *samples, parts="samples")
    return ""


def _differs_from_parts(whole: _Evaluation, *evaluations: _Evaluation, parts: str) -> str:
    """Compares the loss and the gradient of a batch with the mean of its parts', by their items.

    Args:
        whole: Of the batch.
        evaluations: Of its parts.
        parts: What they are, for the clause.

    Returns:
        A clause that says what differs; "" if nothing does, or if that is not known.
    """
    with_items = [part for part in evaluations if part.items]
    total = sum(part.items for part in with_items)
    if not with_items:
        return ""
    weighted_losses = [part.loss * (part.items / total) for part in with_items]
    mean_loss = torch.stack(weighted_losses).sum()
    if not _are_alike(whole.loss, mean_loss, whole.tolerance):
        return (
            f"the loss of {SAMPLES} samples is {whole.loss:.6g}, and the mean of its {parts}' "
            f"{mean_loss:.6g}"
        )
    if any(part.gradient.shape != whole.gradient.shape for part in with_items):
        return ""
    weighted_gradients = [part.gradient * (part.items / total) for part in with_items]
    mean_gradient = torch.stack(weighted_gradients).sum(0)
    if not _are_alike(whole.gradient, mean_gradient, whole.gradient_tolerance):
        return f"the gradient of {SAMPLES} samples is not the mean of its {parts}'"
    return ""


def _differs_when_doubled(once: _Evaluation, twice: _Evaluation) -> str:
    """Compares the loss and the gradient of a batch with those of the batch with doubled samples.

    This shows what couples only equal samples, such as rows of a table that are looked up several
    times: few samples have such rows otherwise.

    Returns:
        A clause that says what differs; "" if nothing does.
    """
    if not _are_alike(once.loss, twice.loss, once.tolerance):
        return (
            f"the loss of samples is {once.loss:.6g}, and {twice.loss:.6g} where each is in the "
            "batch twice"
        )
    if once.gradient.shape != twice.gradient.shape:
        return ""
    if not _are_alike(once.gradient, twice.gradient, once.gradient_tolerance):
        return "the gradient of samples is another one where each is in the batch twice"
    return ""


def _are_alike(left: Tensor, right: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by rounding only, or hold values that are not finite."""
    if not bool(torch.isfinite(left).all() and torch.isfinite(right).all()):
        return True
    scale = max(float(left.norm()), float(right.norm()), tolerance)
    return float((left - right).norm()) <= tolerance * scale
