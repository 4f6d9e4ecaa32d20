"""What a batch's loss is the mean of: how the parts of a global batch are weighted.

A task that overrides `items` says that its loss is the mean over what it counts there (targets that are not masked,
say), and each part of a global batch then weighs as much as it counts. Any other task's loss is a mean over rows.

To learn how many items all workers have takes a small collective in each step. A count that is the same for every row
(the tokens of sequences of one length) gives the weights of a mean over rows, without it: `@same_for_every_row`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from app.data.loader import Batch, rows
from app.errors import UserError
from app.tasks.base import Task

Count = TypeVar("Count", bound=Callable[..., Any])
_MARK = "same_for_every_row"


class CountedBatch(NamedTuple):
    """A micro-batch and its number of items, which was counted before the batch went to a device."""

    batch: Batch
    items: float


def same_for_every_row(method: Count) -> Count:
    """Marks an `items` that counts as many for every row, so that a mean over items is one over rows.

    The mark is the method's: a subclass that overrides `items` is weighted by its own.
    """
    setattr(method, _MARK, True)
    return method


def weighs_items(task: Task) -> bool:
    """Whether parts of a global batch are weighted by the task's `items`, and not by their rows."""
    method = task.items
    function = getattr(method, "__func__", method)
    return function is not Task.items and not hasattr(function, _MARK)


def count_items(task: Task, batch: Batch) -> float:
    """How many items a batch has, as a number of the host.

    Raises:
        UserError: the task counts less than nothing, or nan.
    """
    if not weighs_items(task) and task.unit == "samples":
        return float(rows(batch))
    items = float(task.items(batch))
    if not 0 <= items < float("inf"):
        raise UserError(f"the task's items gives {items:g} for a batch, but it must be a number of at least 0")
    return items
