"""What a task's methods give where a number or a truth is expected: its value, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from app.errors import UserError

if TYPE_CHECKING:
    from app.tasks.base import Task


def described(value: Any) -> str:
    """What a value is, in words: "a list", "the class AdamW", "a tensor of shape (64,)"."""
    if value is None:
        return "nothing"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    name = "tensor" if isinstance(value, Tensor) else type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def require_number(value: Any, sentence: str) -> float:
    """A number of at least 0 that a task's method has returned.

    Args:
        value: A number of Python or NumPy, or a tensor of one number.
        sentence: The beginning of the message, which a description of the value continues, such as
            "the task's items(batch) gives".

    Raises:
        UserError: It is something else, negative, infinite or NaN.
    """
    number = as_number(value)
    if number is None or not 0 <= number < float("inf"):
        shown = described(value) if number is None else f"{number:g}"
        raise UserError(f"{sentence} {shown}, but it must be a number of at least 0")
    return number


def require_truth(value: Any, sentence: str) -> bool:
    """Yes or no, as a task's method has returned it.

    Args:
        value: True or False of Python, NumPy or torch; nothing counts as no, since that is what a
            method returns that ends without `return`.
        sentence: The beginning of the refusal, such as "the task's stop_early() returns".

    Raises:
        UserError: It is something else, such as a text, every one of which would count as yes.
    """
    if value is None:
        return False
    number = as_number(value)
    if number not in (0.0, 1.0):
        shown = described(value) if number is None else f"{number:g}"
        raise UserError(f"{sentence} {shown}, but it must be True or False")
    return bool(number)


def require_metrics(returned: Any) -> Mapping[str, Tensor]:
    """What a task's `metrics` returns, if that is tensors by name.

    Raises:
        UserError: It is something else.
    """
    if not isinstance(returned, Mapping):
        raise UserError(
            f"the task's metrics() returns {described(returned)}, but it must be a dict of scalar "
            "tensors by name, such as {'loss': loss}"
        )
    for name, value in returned.items():
        if isinstance(value, Tensor):
            continue
        sentence = f"the task's metrics() gives {name!r} as {described(value)}, but it must be "
        if as_number(value) is None:
            raise UserError(f"{sentence}a scalar tensor: a mean over the batch's items")
        raise UserError(f"{sentence}the tensor itself, without .item() or float()")
    return returned


def derived_metrics(task: Task, means: dict[str, float]) -> dict[str, float]:
    """What the task derives from the means over all the held-out data.

    Args:
        task: The task.
        means: The means by name.

    Raises:
        UserError: It returns something else than numbers by name.
    """
    returned: Any = task.derived(means)
    if not isinstance(returned, Mapping):
        raise UserError(
            f"the task's derived() returns {described(returned)}, but it must be a dict of numbers "
            "by name"
        )
    derived = {}
    for name, value in returned.items():
        number = as_number(value)
        if number is None:
            raise UserError(
                f"the task's derived() gives {name!r} as {described(value)}, but it must be a "
                "number"
            )
        derived[name] = number
    return derived


def as_number(value: Any) -> float | None:
    """The value of a number of Python or NumPy or of a tensor of one number; None for others."""
    if isinstance(value, (str, bytes)) or tuple(getattr(value, "shape", None) or ()):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
