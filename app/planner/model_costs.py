"""What a model costs, part by part: what reading a task's own model finds (read.py), at any batch and tp degree."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from app.planner.trace import AFTER, BEFORE
from strategies.costs import ParameterSize


def basis(batch: float, tp: float) -> np.ndarray:
    """What the coefficients c0 … c5 are multiplied with."""
    split = float(tp > 1)
    return np.array([1.0, batch, 1.0 / tp, batch / tp, split, batch * split])


@dataclass
class PartCosts:
    """Coefficients c0 … c5 of one part's costs."""

    values: dict[str, np.ndarray]  # of each of trace.py's values
    products: dict[str, np.ndarray]  # phase → (P, 4, 6): of m, n, k and batch of unlike products
    times: dict[str, np.ndarray]  # phase → (P,) how often each is done

    def at(self, batch: float, tp: float) -> dict[str, float]:
        """Every value, none below 0."""
        row = basis(batch, tp)
        return defaultdict(float, {name: max(0.0, float(found @ row)) for name, found in self.values.items()})

    def products_at(self, phase: str, batch: float, tp: float) -> np.ndarray:
        """(P, 5): m, n, k, batch, times."""
        return np.column_stack([self.products[phase] @ basis(batch, tp), self.times[phase]])


@dataclass
class ModelCosts:
    """The model's parts under one way of having precision."""

    parts: dict[str, PartCosts]
    order: list[str]  # the part of each block
    parameters: dict[str, tuple[ParameterSize, ...]]  # by part: those of one such part

    @property
    def counts(self) -> dict[str, int]:
        """How many of each part the whole model has."""
        found = {BEFORE: 1, AFTER: 1} | Counter(self.order)
        return {name: found[name] for name in self.parts}
