"""One step of a model in one process, watched: which traits (traits.py) it has.

Before any worker starts, one small step is run, with real data where that is quick and on the meta
device where it is not. On meta everything is seen except what depends on the values of tensors:
whether a change depends on the data, and whether two samples take different routes through the
model.

Comparing samples does not find a branch that nearly all samples take the same way. So whenever
Python asks for a value that depends on the batch (`if x.sum() > 0`), another run gives it another
answer, and the route of that run is compared, too. And a model that counts its calls in Python is
found by calling it again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.rehearsal.hooks import HookRecorder
from strategies.rehearsal.questions import Answers
from strategies.rehearsal.watch import Loss, PartCall, Route, Watch, nearly_equal, unique
from strategies.training_mode import begin
from strategies.traits import Observation, Trait

CALLS_AGAIN = 3
"""How often the model is called again, to see whether it counts its calls."""
STEP_SIZE = 0.05
"""How far parameters are moved between two calls, as an optimizer would."""


def observe(
    build: Callable[[], nn.Module],
    find_blocks: Callable[[nn.Module], list[str]],
    loss: Loss,
    batches: Sequence[Any],
    seed: Callable[[int], None] = lambda number: None,
    *,
    other_answers: int = 12,
) -> list[Observation]:
    """Runs a step's forward and backward, and says what was observed.

    All batches but the first are run forward only, to compare their routes through the model.

    Args:
        build: Returns the model, the same whenever it is called, where the batches are: on the CPU
            or on meta.
        find_blocks: Returns the names of its repeating blocks.
        loss: (model, batch) → the mean loss, 0-dimensional.
        batches: At least one, as `loss` takes them.
        seed: Seeds the generators that forward draws from, with the number of the batch; called
            before each forward.
        other_answers: The most runs in which one number of the batch is answered differently.
    """

    def watch_batch(number: int, answers: Answers, *, backward: bool = False) -> Watch:
        with HookRecorder() as hooks:
            module = begin(build())
        watch = Watch(module, find_blocks(module), hooks, answers)
        seed(number)
        watch.step(loss, batches[number], backward=backward)
        return watch

    watches = [
        watch_batch(number, Answers(), backward=number == 0) for number in range(len(batches))
    ]
    first = watches[0]
    routes = [watch.route for watch in watches]
    other_routes = []
    for answers in first.answers.with_other_answers(other_answers):
        # The code after the branch may fail with an answer that is not true.
        with contextlib.suppress(Exception):
            other_routes.append(watch_batch(0, answers).route)
    for answers in first.answers.with_extreme_draws():
        with contextlib.suppress(Exception):
            routes.append(watch_batch(0, answers).route)
    observations_of_calls = _call_again(first, loss, batches[0], seed=lambda: seed(0))
    return [
        *first.observations(),
        *_compare_changes(
            [watch.changed_parameters for watch in watches],
            same=Trait.CHANGES_PARAMETERS,
            by_data=Trait.CHANGES_PARAMETERS_BY_DATA,
        ),
        *_compare_changes(
            [watch.changed_buffers for watch in watches],
            same=Trait.CHANGES_BUFFERS,
            by_data=Trait.CHANGES_BUFFERS_BY_DATA,
        ),
        *_compare_routes([*routes, *other_routes]),
        *_compare_answers([first.route, *other_routes]),
        *observations_of_calls,
    ]


# --- the same model, called again -----------------------------------------------------------------


def _call_again(
    first: Watch, loss: Loss, batch: Any, *, seed: Callable[[], None]
) -> list[Observation]:
    """What the same model does differently with the same batch when it is called again.

    If its code raises, because it can be called only once, nothing is observed.
    """

    def watch_again() -> Watch:
        watch = Watch(first.module, sorted(first.blocks), HookRecorder(), Answers())
        seed()
        watch.step(loss, batch, backward=False)
        return watch

    routes = [first.route]
    part_calls = [first.part_calls]
    changed_each_time: list[str] = []
    with contextlib.suppress(Exception):
        for _ in range(CALLS_AGAIN):
            watch = watch_again()
            routes.append(watch.route)
            part_calls.append(watch.part_calls)
        if first.changed_parameters:
            _move_parameters(first.module)
            # What forward only keeps within bounds is there again after one call.
            watch_again()
            changed_each_time = watch_again().changed_beyond_rounding
    names_by_trait = [
        (Trait.VARIES_BY_CALL, _differences(routes)),
        (Trait.OUTPUT_VARIES_BY_CALL, unique(_parts_with_other_outputs(part_calls))),
        (Trait.CHANGES_PARAMETERS_EACH_TIME, unique(changed_each_time)),
    ]
    return [Observation(trait, names) for trait, names in names_by_trait if names]


def _parts_with_other_outputs(calls_by_run: list[list[PartCall]]) -> Iterator[str]:
    """The parts that had the same inputs in several runs, and other outputs."""
    for first, *others in zip(*calls_by_run, strict=False):
        for other in others:
            has_same_inputs = (other.name, other.inputs) == (first.name, first.inputs)
            if not has_same_inputs:
                continue
            if not nearly_equal(torch.tensor(other.outputs), torch.tensor(first.outputs)):
                yield first.name or "the model"


def _move_parameters(module: nn.Module) -> None:
    """Moves trained parameters a little, as the optimizer does between two steps."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad and not parameter.is_meta:
                step = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(step, alpha=STEP_SIZE)


# --- comparing batches ----------------------------------------------------------------------------


def _compare_changes(
    changes_by_batch: list[dict[str, Tensor]], *, same: Trait, by_data: Trait
) -> list[Observation]:
    """Tells apart changes that every batch makes alike from those that depend on the batch.

    Args:
        changes_by_batch: For each batch, the tensors that forward has changed, with their new
            values.
        same: The trait of a change that is the same for every batch.
        by_data: The trait of a change that is not, or of which that is unknown.
    """

    def depends_on_data(name: str) -> bool:
        values = [changes.get(name) for changes in changes_by_batch]
        first = values[0]
        if len(values) == 1 or first is None or first.is_meta:
            return True
        return any(value is None or not torch.equal(value, first) for value in values)

    names = unique(name for changes in changes_by_batch for name in changes)
    dependent = tuple(name for name in names if depends_on_data(name))
    independent = tuple(name for name in names if name not in dependent)
    names_by_trait = [(by_data, dependent), (same, independent)]
    return [Observation(trait, names) for trait, names in names_by_trait if names]


def _compare_routes(routes: list[Route]) -> list[Observation]:
    """Blocks and parameters that are not used alike on all routes.

    Blocks may be called more often on one route, or in another order.
    """
    observations: list[Observation] = []
    if not routes:
        return observations
    if any(route.calls != routes[0].calls for route in routes):
        counts = [Counter(route.calls) for route in routes]
        names = sorted({name for count in counts for name in count})
        uneven = [name for name in names if len({count[name] for count in counts}) > 1]
        observations.append(Observation(Trait.CALLS_VARY, tuple(uneven or names)))
    used = [route.parameters for route in routes]
    used_sometimes = set[str]().union(*used) - used[0].intersection(*used)
    if used_sometimes:
        observations.append(Observation(Trait.PARAMETERS_VARY, tuple(sorted(used_sometimes))))
    return observations


def _compare_answers(routes: list[Route]) -> list[Observation]:
    """Whether a number of the batch decides which route is taken."""
    names = _differences(routes)
    return [Observation(Trait.BRANCHES_ON_DATA, names)] if names else []


def _differences(routes: list[Route]) -> tuple[str, ...]:
    """The blocks or parameters that are not used alike; () if the routes are the same."""
    observations = _compare_routes(routes)
    return observations[0].names if observations else ()
