"""What a task's own `optimizer()` returns, checked before anything is trained with it.

Without these checks, a wrong value would be an error in the middle of a run, at its first step or
checkpoint; and an optimizer over other parameters than the model's would silently train nothing.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from app.errors import UserError
from app.tasks.returned import described
from strategies.tree import tree_leaves

NamedParameters = Sequence[tuple[str, nn.Parameter]]
"""What `optimizer()` is called with."""


def needs_closure(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether a step of the optimizer computes the loss itself, several times, as LBFGS's does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def closure_mistake(optimizer: type[torch.optim.Optimizer]) -> str:
    """Why an optimizer that needs a closure cannot be used."""
    return (
        f"{optimizer.__name__} computes the loss itself in its step, but here the loss is computed "
        "before the step: write an optimizer whose step() needs no closure"
    )


def require_optimizer(
    returned: Any, parameters: NamedParameters
) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]:
    """Check what a task's `optimizer()` returns.

    Args:
        returned: What it returned, which is not None.
        parameters: What it was called with.

    Returns:
        The optimizer, or several by name.

    Raises:
        UserError: It is something else, needs a closure, or has parameters of its own.
    """
    optimizers = _optimizers_in(returned)
    for optimizer in optimizers:
        if needs_closure(type(optimizer)):
            raise UserError(f"the task's optimizer(): {closure_mistake(type(optimizer))}")
    given = {id(parameter) for _, parameter in parameters}
    others = sum(id(parameter) not in given for parameter in _parameters_of(optimizers))
    if others:
        raise UserError(
            f"the task's optimizer() has {others} parameter{'s' if others > 1 else ''} that it was "
            "not called with, which would not be trained: make it of those that it is called with, "
            "[p for _, p in parameters]; what a loss learns belongs in the model"
        )
    return returned  # type: ignore[no-any-return]


def left_out(returned: Any, parameters: NamedParameters) -> list[str]:
    """The names of the parameters that no optimizer has.

    Args:
        returned: What `require_optimizer` takes.
        parameters: What `optimizer()` was called with.
    """
    trained = {id(parameter) for parameter in _parameters_of(_optimizers_in(returned))}
    return [name for name, parameter in parameters if id(parameter) not in trained]


def _parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Parameter]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _optimizers_in(returned: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that a task returned.

    Raises:
        UserError: It returned something else.
    """
    if isinstance(returned, torch.optim.Optimizer):
        return [returned]
    if isinstance(returned, Mapping) and returned:
        optimizers = list(returned.values())
        if all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            return optimizers
    sentence = (
        f"the task's optimizer() returns {_shown(returned)}, but it must be a "
        "torch.optim.Optimizer, or, for a training_step that uses several, a dict of them by name"
    )
    leaves = tree_leaves(returned)
    has_schedule = any(isinstance(leaf, LRScheduler) for leaf in leaves)
    if has_schedule or (isinstance(returned, Mapping) and "lr_scheduler" in returned):
        sentence += "; the rate of each step is the task's schedule(step, steps), or schedule.name"
    raise UserError(sentence)


def _shown(returned: Any) -> str:
    """What it is, in words; of a dict, what its first wrong value is."""
    if not isinstance(returned, Mapping):
        return described(returned)
    for name, value in returned.items():
        if not isinstance(value, torch.optim.Optimizer):
            return f"a dict in which {name!r} is {described(value)}"
    return "an empty dict"
