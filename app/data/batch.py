"""A batch: tensors in tuples, lists and dicts, nested as the data set likes; conventionally (inputs, targets)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from app.errors import UserError
from strategies.tree import tree_leaves, tree_map

Batch = Any


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """The batch with each tensor replaced by `function` of it."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors(batch: Batch) -> list[Tensor]:
    """The batch's tensors in order."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def rows(batch: Batch) -> int:
    """Rows of the first tensor in a batch."""
    for tensor in tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    raise UserError("a batch holds no tensor; the task's data must give tensors, such as a tuple (inputs, targets)")
