"""What a model costs, part by part, for any micro-batch and tensor-parallel degree (read.py)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.planner.trace import AFTER, BEFORE
from strategies.costs import ParameterSize

Floats = npt.NDArray[np.float64]


def basis(batch: float, tp: float) -> Floats:
    """The factors of the coefficients c0 … c5, (6,).

    Args:
        batch: Samples of the micro-batch.
        tp: The degree of tensor parallelism.
    """
    is_split = float(tp > 1)
    return np.array([1.0, batch, 1.0 / tp, batch / tp, is_split, batch * is_split])


@dataclass
class PartCosts:
    """The coefficients c0 … c5 of one part's costs.

    Args:
        values: (6,) for each value of a trace (trace.py).
        products: (P, 4, 6) for each phase: m, n, k and batch of its distinct products.
        repeats: (P,) for each phase: how often each product is computed.
    """

    values: dict[str, Floats]
    products: dict[str, Floats]
    repeats: dict[str, Floats]

    def at(self, batch: float, tp: float) -> dict[str, float]:
        """Every value for a micro-batch and a degree; none is below 0, unknown names are 0."""
        factors = basis(batch, tp)
        values: dict[str, float] = defaultdict(float)
        for name, coefficients in self.values.items():
            values[name] = max(0.0, float(coefficients @ factors))
        return values

    def products_at(self, phase: str, batch: float, tp: float) -> Floats:
        """(P, 5): m, n, k, batch and repeats of the products of a phase."""
        return np.column_stack([self.products[phase] @ basis(batch, tp), self.repeats[phase]])


@dataclass
class ModelCosts:
    """The parts of a model under one variant of its computation.

    Args:
        parts: By name, in the order of forward.
        order: The part of each block.
        parameters: By name, the parameters of one such part.
    """

    parts: dict[str, PartCosts]
    order: list[str]
    parameters: dict[str, tuple[ParameterSize, ...]]

    @property
    def counts(self) -> dict[str, int]:
        """How many of each part the whole model has."""
        counts = Counter(self.order)
        counts[BEFORE] = 1
        counts[AFTER] = 1
        return {name: counts[name] for name in self.parts}
