"""Whether a task's loss is the mean over what the parts of a batch are weighted by.

If a batch is divided, each part's loss is multiplied by its share of the items
(app/tasks/items.py). That gives the loss of the whole batch only if the loss is a mean over those
items. This is found by computing, not by reading code: the loss of a small batch is compared with
the losses of two parts of it, weighted once by rows, and once by what can be counted in the batch,
such as labels that are not masked, a mask's ones, and tokens that are not padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.data.loader import Batch, map_tensors, rows, tensors
from app.tasks.base import Task
from app.tasks.items import count_items, weighs_items

SAME = 1e-4
"""Relative difference up to which two losses are the same in float32."""
DIFFERENT = 1e-3
"""Relative difference from which on two losses differ."""
IGNORED = -100
"""A label that does not count, as in torch's cross entropy."""
CUTS = 3
"""At how many rows a batch is cut in two.

At a single one the losses might agree by chance, or one part might have nothing that counts.
"""
LEAST_SHIFT = 0.02
"""How much a part's weight must change with what is counted, so that the losses can tell."""


@dataclass(frozen=True)
class Count:
    """Something that can be counted in a batch.

    Args:
        expression: Python that counts it, of a batch called `batch`.
        by_row: How many each row has.
    """

    expression: str
    by_row: list[float]

    def cuts(self) -> list[int]:
        """Where to cut the batch in two so that weights by this count are not those by rows.

        Returns:
            Numbers of rows of the first part, at most `CUTS`; first those at which both parts have
            some of what is counted, and of these the ones at which the weights differ most.
        """
        total = sum(self.by_row)
        rows_in_all = len(self.by_row)
        if total <= 0:
            return []
        ranked: list[tuple[bool, float, int]] = []
        for cut in range(1, rows_in_all):
            weight = sum(self.by_row[:cut]) / total
            shift = abs(weight - cut / rows_in_all)
            if shift >= LEAST_SHIFT:
                has_empty_part = not 0 < weight < 1
                ranked.append((has_empty_part, -shift, cut))
        return [cut for _, _, cut in sorted(ranked)[:CUTS]]


def items_remark(task: Task, batch: Batch, loss: Callable[[Batch], Tensor | float]) -> str | None:
    """Tells if the parts of a divided batch would be weighted by what the loss is not a mean over.

    Layouts that divide no batch train the right loss in any case.

    Args:
        task: As training has it.
        batch: A few rows of its data, with real numbers.
        loss: The task's loss of a batch, with its model; the same whenever it is called, so without
            dropout.

    Returns:
        One sentence; None if the weights are right, and if nothing follows: too few rows, as
        many items in each of them, or a loss that is not a mean over anything in the batch.
    """
    number = rows(batch)
    if number < 2 or any(tensor.dim() and len(tensor) != number for tensor in tensors(batch)):
        return None
    task_weighs_items = weighs_items(task)
    if task_weighs_items:
        by_row = [count_items(task, _slice(batch, row, row + 1)) for row in range(number)]
        counts = [Count("items", by_row)]
    else:
        counts = list(_counts(batch, number))
    losses = _Losses(batch, loss)
    for count in counts:
        cuts = count.cuts()
        if not cuts:
            continue
        is_over_rows = all(
            losses.are_mean(cut, [cut, number - cut], tolerance=DIFFERENT) for cut in cuts
        )
        is_over_count = all(
            losses.are_mean(cut, [sum(count.by_row[:cut]), sum(count.by_row[cut:])], tolerance=SAME)
            for cut in cuts
        )
        if task_weighs_items and is_over_rows and not is_over_count:
            return (
                "the loss is a mean over samples, but the task's `items`, by which parts of a "
                "batch are weighted, counts something else: leave `items` out, or let the loss be "
                "the mean over what it counts"
            )
        if not task_weighs_items and is_over_count and not is_over_rows:
            return (
                f"the loss is a mean over {count.expression}, not over samples, so a batch that is "
                "divided over workers or micro-batches would be trained with another loss: give "
                f"the task a method `def items(self, batch): return {count.expression}`"
            )
    return None


class _Losses:
    """Losses of a batch and of its parts, each computed once."""

    def __init__(self, batch: Batch, loss: Callable[[Batch], Tensor | float]) -> None:
        self.batch = batch
        self.loss = loss
        self.rows = rows(batch)
        self._computed: dict[tuple[int, int], float] = {}

    def of_rows(self, begin: int, end: int) -> float:
        if (begin, end) not in self._computed:
            with torch.no_grad():
                self._computed[begin, end] = float(self.loss(_slice(self.batch, begin, end)))
        return self._computed[begin, end]

    def are_mean(self, cut: int, weights: Sequence[float], *, tolerance: float) -> bool:
        """Whether the batch's loss is the weighted mean of its two parts' losses.

        Args:
            cut: The first row of the second part.
            weights: Of the two parts. A part without weight is not computed.
            tolerance: Relative difference up to which losses are the same.
        """
        parts = [(0, cut), (cut, self.rows)]
        weighted = 0.0
        for weight, (begin, end) in zip(weights, parts, strict=True):
            if weight > 0:
                weighted += weight * self.of_rows(begin, end)
        mean = weighted / sum(weights)
        whole = self.of_rows(0, self.rows)
        scale = max(abs(whole), abs(mean), 1e-6)
        return math.isfinite(mean) and abs(whole - mean) <= tolerance * scale


def _slice(batch: Batch, begin: int, end: int) -> Batch:
    return map_tensors(lambda tensor: tensor[begin:end] if tensor.dim() else tensor, batch)


# --- what can be counted in a batch ---------------------------------------------------------------


def _counts(batch: Batch, number: int) -> Iterator[Count]:
    """What a loss may be the mean over, the likelier first.

    These are labels that count, masks, and tokens that are not padding. Sequences are also counted
    without their first place, which a model that shifts its labels leaves out.
    """
    countable = [
        (path, tensor)
        for path, tensor in _paths(batch, "batch")
        if tensor.dim() and not tensor.is_complex()
    ]
    for path, tensor in countable:
        for expression, values in _with_and_without_first_place(path, tensor):
            if (tensor == IGNORED).any():
                by_row = _sum_by_row(values != IGNORED, number)
                yield Count(f"({expression} != {IGNORED}).sum()", by_row)
    for path, tensor in countable:
        if _is_mask(tensor):
            for expression, values in _with_and_without_first_place(path, tensor):
                yield Count(f"{expression}.sum()", _sum_by_row(values, number))
    for path, tensor in countable:
        if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() > 1:
            most_common_end = int(tensor.flatten(1)[:, -1].mode().values)
            for padding in {0, -1, most_common_end} - {IGNORED}:
                by_row = _sum_by_row(tensor != padding, number)
                yield Count(f"({path} != {padding}).sum()", by_row)


def _with_and_without_first_place(path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, and of sequences also all places but the first; each with its expression."""
    yield path, tensor
    if tensor.dim() > 1:
        yield f"{path}[:, 1:]", tensor[:, 1:]


def _is_mask(tensor: Tensor) -> bool:
    """Whether a tensor may hold weights: numbers that are not negative, whole ones only 0 and 1."""
    if not (tensor >= 0).all():
        return False
    if tensor.dtype == torch.bool or tensor.is_floating_point():
        return True
    return bool(tensor.max() <= 1)


def _sum_by_row(tensor: Tensor, number: int) -> list[float]:
    return tensor.reshape(number, -1).double().sum(1).tolist()


def _paths(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a batch and the Python expressions that reach them."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from _paths(value, f"{path}[{index}]")
    elif hasattr(tree, "items"):
        for key, value in tree.items():
            yield from _paths(value, f"{path}[{key!r}]")
