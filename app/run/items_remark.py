"""Whether a task's loss is the mean over what its parts are weighted by: found by computing it, not by reading code.

Of a batch that is divided, each part's loss is multiplied by its part of the items (app/tasks/items.py). That gives the
loss of the whole batch only if the loss is a mean over those items. So the loss of a small batch is compared with the
losses of two parts of it, once weighted by rows, and once by what can be counted in the batch: labels that are not
masked, a mask's ones, tokens that are not padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.data.loader import Batch, map_tensors, rows, tensors
from app.tasks.base import Task
from app.tasks.items import count_items, weighs_items

SAME = 1e-4
"""Relative difference of losses up to which they are the same in float32."""
DIFFERENT = 1e-3
"""And from which they are not."""
IGNORED = -100
"""A label that does not count, as in torch's cross entropy."""
CUTS = 3
"""At which a batch is cut in two: one might agree by chance, or have nothing that counts on one side."""
LEAST_SHIFT = 0.02
"""By how much a part's weight must depend on what is counted for the losses to tell."""


@dataclass(frozen=True)
class Count:
    """Something that can be counted in a batch.

    Args:
        expression: Python that counts it, of a batch called `batch`.
        by_row: how many each row has.
    """

    expression: str
    by_row: list[float]

    def cuts(self) -> list[int]:
        """Where to cut the batch in two so that the parts' weights by this count are not those by rows.

        Rows of the first part, at most `CUTS`; best where both parts have some and the weights differ most.
        """
        total, number = sum(self.by_row), len(self.by_row)
        if total <= 0:
            return []
        firsts = {at: sum(self.by_row[:at]) / total for at in range(1, number)}
        telling = [at for at in firsts if abs(firsts[at] - at / number) >= LEAST_SHIFT]
        telling.sort(key=lambda at: (not 0 < firsts[at] < 1, -abs(firsts[at] - at / number)))
        return telling[:CUTS]


def items_remark(task: Task, batch: Batch, loss: Callable[[Batch], Tensor | float]) -> str | None:
    """One sentence if the parts of a divided batch would be weighted by something else than what the loss is a mean of.

    None where they are right, and where nothing can be told: too few rows, as many items in all of them, or a loss that
    is no mean over anything that the batch shows. Layouts that divide no batch train the right loss in any case.

    Args:
        task: as training has it.
        batch: a few rows of its data, with real numbers.
        loss: the task's loss of a batch, with its model, the same whenever it is called: without dropout.
    """
    number = rows(batch)
    if number < 2 or any(tensor.dim() and len(tensor) != number for tensor in tensors(batch)):
        return None
    if weighs_items(task):
        by_row = [count_items(task, _slice(batch, at, at + 1)) for at in range(number)]
        counts = [Count("items", by_row)]
    else:
        counts = list(_counts(batch, number))
    losses = _Losses(batch, loss)
    for count in counts:
        cuts = count.cuts()
        if not cuts:
            continue
        is_over_rows = all(losses.are_mean(at, [at, number - at], DIFFERENT) for at in cuts)
        is_over_count = all(losses.are_mean(at, [sum(count.by_row[:at]), sum(count.by_row[at:])], SAME) for at in cuts)
        if weighs_items(task) and is_over_rows and not is_over_count:
            return (
                "the loss is a mean over samples, but the task's `items`, by which parts of a batch are weighted, "
                "counts something else: leave `items` out, or let the loss be the mean over what it counts"
            )
        if not weighs_items(task) and is_over_count and not is_over_rows:
            return (
                f"the loss is a mean over {count.expression}, not over samples, so a batch that is divided over "
                "workers or micro-batches would be trained with another loss: give the task a method "
                f"`def items(self, batch): return {count.expression}`"
            )
    return None


class _Losses:
    """Losses of a batch and of its parts, each computed once."""

    def __init__(self, batch: Batch, loss: Callable[[Batch], Tensor | float]) -> None:
        self.batch, self.loss, self.number = batch, loss, rows(batch)
        self._known: dict[tuple[int, int], float] = {}

    def of(self, begin: int, end: int) -> float:
        if (begin, end) not in self._known:
            with torch.no_grad():
                self._known[begin, end] = float(self.loss(_slice(self.batch, begin, end)))
        return self._known[begin, end]

    def are_mean(self, at: int, weights: list[float], tolerance: float) -> bool:
        """Whether the whole batch's loss is the weighted mean of the parts' before and from row `at`."""
        parts = [(0, at), (at, self.number)]
        weighted = [w * self.of(*part) for w, part in zip(weights, parts, strict=True) if w > 0]
        whole, mean = self.of(0, self.number), sum(weighted) / sum(weights)
        return math.isfinite(mean) and abs(whole - mean) <= tolerance * max(abs(whole), abs(mean), 1e-6)


def _slice(batch: Batch, begin: int, end: int) -> Batch:
    return map_tensors(lambda tensor: tensor[begin:end] if tensor.dim() else tensor, batch)


def _counts(batch: Batch, number: int) -> Iterator[Count]:
    """What a loss may be the mean of: labels that count, masks, tokens that are no padding; the likelier first.

    Of sequences each is also counted without the first place, which a model that shifts its labels leaves out.
    """
    named = [(path, t) for path, t in _paths(batch, "batch") if t.dim() and not t.is_complex()]
    places = [("", slice(None)), ("[:, 1:]", slice(1, None))]
    for path, tensor in named:
        for suffix, place in places[: 1 if tensor.dim() == 1 else 2]:
            if (tensor == IGNORED).any():
                seen = (tensor if tensor.dim() == 1 else tensor[:, place]) != IGNORED
                yield Count(f"({path}{suffix} != {IGNORED}).sum()", _by_row(seen, number))
    for path, tensor in named:
        for suffix, place in places[: 1 if tensor.dim() == 1 else 2]:
            if (tensor >= 0).all() and (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.max() <= 1):
                weights = tensor if tensor.dim() == 1 else tensor[:, place]
                yield Count(f"{path}{suffix}.sum()", _by_row(weights, number))
    for path, tensor in named:
        if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() > 1:
            for padding in {0, -1, int(tensor.flatten(1)[:, -1].mode().values)} - {IGNORED}:
                yield Count(f"({path} != {padding}).sum()", _by_row(tensor != padding, number))


def _by_row(tensor: Tensor, number: int) -> list[float]:
    return tensor.reshape(number, -1).double().sum(1).tolist()


def _paths(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a batch and how Python reaches them."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from _paths(value, f"{path}[{index}]")
    elif hasattr(tree, "items"):
        for key, value in tree.items():
            yield from _paths(value, f"{path}[{key!r}]")
