"""What the built-in tasks have in common: data in two parts, classification, and checks of arguments, each of which
answers a wrong value with one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.errors import UserError, nearest
from app.models.prediction import Preprocessor
from app.tasks.base import Batch, Task


class InParts(Task):
    """A task whose `__init__` has read its data into `_train` and `_eval` and knows how to build its model."""

    _train: Any
    _eval: Any
    _build: Callable[[], nn.Module]
    _input: Preprocessor | None = None

    def build_model(self) -> nn.Module:
        return self._build()

    def preprocessor(self) -> Preprocessor | None:
        return self._input

    def train_data(self) -> Dataset[Any]:
        return self._train

    def eval_data(self) -> Dataset[Any] | None:
        return self._eval


class Classification(InParts):
    """Batches are (inputs, int64 class); the model gives logits (batch, classes)."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs).float(), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = model(inputs).float()
        right = (logits.argmax(dim=-1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": right}


# --- arguments ----------------------------------------------------------------------------------------------------


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """`value`, if it is one of the known ones."""
    known = list(known)
    if value not in known:
        raise UserError(f"task_args.{name} is {value!r}{nearest(value, known)}; it can be {', '.join(known)}")
    return value


def whole(name: str, value: Any, at_least: int = 1) -> int:
    """`value`, if it is a whole number of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(f"task_args.{name} is {value!r}; it must be a whole number of at least {at_least}")
    return value


def require_known(where: str, owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises UserError for an argument that its owner does not take. where: the configuration key they stand under."""
    for name in given:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
            raise UserError(f"{where}.{name}: {owner} has no such argument{nearest(name, known)}; {takes}")


def checked_model(build: Callable[..., nn.Module], sizes: dict[str, Any], model_args: Any) -> Callable[[], nn.Module]:
    """A function that builds the model from its sizes and the user's `model_args`, tried once on meta."""
    if model_args is not None and not isinstance(model_args, Mapping):
        raise UserError(f"task_args.model_args is {model_args!r}; it must be a mapping of argument to value")
    given = dict(model_args or {})
    known = [name for name in inspect.signature(build).parameters if name not in sizes]
    require_known("task_args.model_args", "the model", given, known)
    make = partial(build, **sizes, **given)
    try:
        with torch.device("meta"):
            make()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"the arguments {given} do not make a model: {text}") from error
    return make
