"""What built-in tasks share: data in two parts, classification, and checks of arguments.

Each check raises a UserError of one sentence if a value is wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.config.arguments import no_such_argument
from app.errors import UserError, nearest
from app.models.prediction import Preprocessor
from app.tasks.base import Task

T = TypeVar("T")
InputsAndTargets = tuple[Tensor, Tensor]
"""A batch: the model's inputs, and what its outputs should be."""


class SplitDataTask(Task):
    """A task whose data is split into a part to train on and a held-out part.

    The `__init__` of a subclass reads the data and sets these attributes.

    Attributes:
        _train: The data to train on.
        _eval: The held-out data; None if there is none.
        _build: Makes a new model.
        _input: The preprocessor of the model; None if the model is given tensors.
    """

    _train: Any
    _eval: Any
    _build: Callable[[], nn.Module]
    _input: Preprocessor | None = None

    def build_model(self) -> nn.Module:
        """A new model."""
        return self._build()

    def preprocessor(self) -> Preprocessor | None:
        """What makes the model's arguments of rows, images or texts."""
        return self._input

    def train_data(self) -> Dataset[Any]:
        """The data to train on."""
        return self._train

    def eval_data(self) -> Dataset[Any] | None:
        """The held-out data, or None if there is none."""
        return self._eval


class Classification(SplitDataTask):
    """A task whose model gives logits (batch, classes).

    A batch is (inputs, classes), the classes as int64 (batch,).
    """

    def loss(self, model: nn.Module, batch: InputsAndTargets) -> Tensor:
        """The mean cross entropy."""
        inputs, labels = batch
        return F.cross_entropy(model(inputs).float(), labels)

    def metrics(self, model: nn.Module, batch: InputsAndTargets) -> dict[str, Tensor]:
        """The mean cross entropy, and the accuracy."""
        inputs, labels = batch
        logits = model(inputs).float()
        is_right = logits.argmax(dim=-1) == labels
        return {"loss": F.cross_entropy(logits, labels), "accuracy": is_right.float().mean()}


# --- arguments ---


def one_of(name: str, value: T, choices: Iterable[T]) -> T:
    """Check that an argument is one of some values.

    Args:
        name: The argument's name, for messages.
        value: Its value.
        choices: The values that it may have.

    Returns:
        The value.

    Raises:
        UserError: It has another value.
    """
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        hint = nearest(str(value), choices)
        raise UserError(f"task_args.{name} is {value!r}{hint}; it can be {listed}")
    return value


def whole_number(name: str, value: Any, at_least: int = 1) -> int:
    """Check that an argument is a whole number.

    Args:
        name: The argument's name, for messages.
        value: Its value.
        at_least: The smallest value that it may have.

    Returns:
        The value.

    Raises:
        UserError: It is not a whole number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(
            f"task_args.{name} is {value!r}; it must be a whole number of at least {at_least}"
        )
    return value


def require_known(names: Iterable[str], known: Sequence[str], *, key: str, owner: str) -> None:
    """Check that something takes all arguments with which it is called.

    Args:
        names: The names of the arguments.
        known: The names of the arguments that it takes.
        key: The configuration key that the arguments are below, for messages.
        owner: What is called, for messages.

    Raises:
        UserError: It does not take one of the arguments.
    """
    for name in names:
        if name not in known:
            raise UserError(no_such_argument(name, known, key=key, owner=owner))


def checked_model(
    model_class: Callable[..., nn.Module],
    sizes: Mapping[str, Any],
    model_args: Mapping[str, Any] | None,
) -> Callable[[], nn.Module]:
    """A function that builds a model, after one was built on the meta device to check that it can.

    Args:
        model_class: The class of the model.
        sizes: Arguments that the task decides.
        model_args: Arguments that the user wrote.

    Raises:
        UserError: The class does not take one of the user's arguments, or cannot be built.
    """
    if model_args is not None and not isinstance(model_args, Mapping):
        raise UserError(
            f"task_args.model_args is {model_args!r}; it must be a mapping of argument to value"
        )
    user_args = dict(model_args or {})
    known = [name for name in inspect.signature(model_class).parameters if name not in sizes]
    require_known(user_args, known, key="task_args.model_args", owner="the model")
    build = partial(model_class, **sizes, **user_args)
    try:
        with torch.device("meta"):
            build()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        message = str(error).strip() or type(error).__name__
        first_line = message.splitlines()[0].rstrip(".")
        raise UserError(f"the arguments {user_args} do not make a model: {first_line}") from error
    return build
