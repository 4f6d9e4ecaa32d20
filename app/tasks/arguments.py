"""Checks of task arguments: each answers a wrong value with one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from app.errors import UserError, nearest


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


def checked_model(build: Callable[..., nn.Module], sizes: dict[str, Any], model_args: Any) -> Callable[[], nn.Module]:
    """A function that builds the model from its sizes and the user's `model_args`, tried once on meta."""
    if model_args is not None and not isinstance(model_args, Mapping):
        raise UserError(f"task_args.model_args is {model_args!r}; it must be a mapping of argument to value")
    given = dict(model_args or {})
    known = [name for name in inspect.signature(build).parameters if name not in sizes]
    for name in given:
        if name not in known:
            raise UserError(
                f"task_args.model_args.{name}: the model has no such argument{nearest(name, known)}; "
                f"it takes {', '.join(known)}"
            )
    make = partial(build, **sizes, **given)
    try:
        with torch.device("meta"):
            make()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"the arguments {given} do not make a model: {text}") from error
    return make
