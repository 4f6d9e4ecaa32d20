"""A batch: tensors in tuples, lists and dicts, nested as the data set likes; conventionally (inputs, targets)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from app.errors import UserError

Batch = Any


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """The batch with each tensor replaced by `function` of it; mappings become dicts, everything else stays."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [map_tensors(function, value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def tensors(batch: Batch) -> Iterator[Tensor]:
    """The batch's tensors in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(value)


def rows(batch: Batch) -> int:
    """Rows of the first tensor in a batch."""
    for tensor in tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    raise UserError("A batch holds no tensor; the task's data must give tensors, such as a tuple (inputs, targets).")
