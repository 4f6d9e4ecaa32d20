"""What a model costs, part by part: what reading a task's own model finds (read.py), at any batch and tp degree."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, fields
from typing import Any

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


FIELDS = fields(PartCosts)


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

    def data(self) -> dict[str, Any]:
        """Itself as what JSON can hold, from which `of_data` makes it again."""
        arrays = {
            name: {field.name: {key: a.tolist() for key, a in getattr(part, field.name).items()} for field in FIELDS}
            for name, part in self.parts.items()
        }
        sizes = {name: [asdict(size) for size in own] for name, own in self.parameters.items()}
        return {"parts": arrays, "order": self.order, "parameters": sizes}

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> ModelCosts:
        parts = {
            name: PartCosts(**{field: {k: np.array(v, float) for k, v in own.items()} for field, own in part.items()})
            for name, part in data["parts"].items()
        }
        for part in parts.values():  # where there are none, a list does not tell how wide they are
            part.products = {phase: array.reshape(-1, 4, 6) for phase, array in part.products.items()}
        sizes = {
            name: tuple(ParameterSize(**{**size, "shape": tuple(size["shape"])}) for size in own)
            for name, own in data["parameters"].items()
        }
        return cls(parts, data["order"], sizes)
