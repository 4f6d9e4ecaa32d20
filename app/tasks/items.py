"""How the parts of a global batch are weighted, by the number of items that a loss is the mean of.

A task that overrides `items` says that its loss is the mean over what it counts there (such as
targets that are not masked), and each part of a global batch then has that weight. The loss of any
other task is a mean over rows.

Adding up the items of all workers takes a small collective in each step. A task whose count is the
same for every row (such as the tokens of sequences of one length) marks `items` with
`@same_for_every_row`: the weights are then those of a mean over rows, without the collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from app.data.loader import Batch, rows
from app.tasks.base import Task
from app.tasks.returned import require_number

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "same_for_every_row"


class CountedBatch(NamedTuple):
    """A micro-batch and its number of items, counted before the batch was moved to a device."""

    batch: Batch
    items: float


def same_for_every_row(method: Method) -> Method:
    """Mark an `items` that counts the same for every row.

    The mark is the method's: a subclass that overrides `items` is weighted by its own.
    """
    setattr(method, _MARK, True)
    return method


def weighs_items(task: Task) -> bool:
    """Whether parts of a global batch are weighted by the task's `items`, not by their rows."""
    method = task.items
    function = getattr(method, "__func__", method)
    is_overridden = function is not Task.items
    return is_overridden and not hasattr(function, _MARK)


def count_items(task: Task, batch: Batch) -> float:
    """How many items a batch on the host has.

    Raises:
        UserError: The task's count is no number, negative, infinite or NaN.
    """
    if not weighs_items(task) and task.unit == "samples":
        return float(rows(batch))
    return require_number(task.items(batch), "the task's items(batch) gives")
