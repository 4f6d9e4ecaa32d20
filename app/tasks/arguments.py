"""Checks of task arguments: each answers a wrong value with one sentence."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from app.errors import UserError


def nearest(word: str, known: Iterable[Any]) -> str:
    """ " (did you mean 'x'?)" with the nearest known word, or "" if none is near."""
    close = difflib.get_close_matches(str(word), [str(each) for each in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """`value`, if it is one of the known ones."""
    known = list(known)
    if value not in known:
        raise UserError(f"task_args.{name} is {value!r}{nearest(value, known)}; it can be {', '.join(known)}.")
    return value


def whole(name: str, value: Any, at_least: int = 1) -> int:
    """`value`, if it is a whole number of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(f"task_args.{name} is {value!r}; it must be a whole number of at least {at_least}.")
    return value


def fraction(name: str, value: Any) -> float:
    """`value`, if it is at least 0 and less than 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UserError(f"task_args.{name} is {value!r}; it must be a number from 0 to less than 1.")
    return float(value)


def held_out(total: int, eval_fraction: float | None, eval_samples: int | None, default_fraction: float) -> int:
    """How many of `total` samples to hold out, at least one being left to train on.

    `eval_samples` counts before `eval_fraction`; with neither, `default_fraction` is taken.
    """
    if eval_samples is not None:
        count = whole("eval_samples", eval_samples, at_least=0)
        if count >= total:
            raise UserError(
                f"task_args.eval_samples is {count}, but there are only {total} samples; leave some to train."
            )
        return count
    chosen = default_fraction if eval_fraction is None else fraction("eval_fraction", eval_fraction)
    return min(round(total * chosen), total - 1)


def checked_model(build: Callable[..., nn.Module], sizes: dict[str, Any], model_args: Any) -> Callable[[], nn.Module]:
    """A function that builds the model from its sizes and the user's `model_args`, tried once on meta.

    Raises UserError for arguments that the model does not have, or that it cannot be built with.
    """
    if model_args is not None and not isinstance(model_args, Mapping):
        raise UserError(f"task_args.model_args is {model_args!r}; it must be a mapping of argument to value.")
    given = dict(model_args or {})
    known = [name for name in inspect.signature(build).parameters if name not in sizes]
    for name in given:
        if name not in known:
            raise UserError(
                f"task_args.model_args.{name}: the model has no such argument{nearest(name, known)}; "
                f"it takes {', '.join(known)}."
            )
    make = partial(build, **sizes, **given)
    try:
        with torch.device("meta"):
            make()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"task_args.model_args {given} do not make a model: {text}.") from error
    return make
