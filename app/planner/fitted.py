"""From traces at two batches and up to three degrees of tensor parallelism to costs at all of them.

cost(b, t) = c0 + c1·b + (c2 + c3·b) / t + (c4 + c5·b)·[t > 1]

The last term is what only split layers do, such as gathering their input; it needs traces at two degrees above 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.planner.trace import AFTER, BEFORE, PartTrace, Trace

SCALARS = ("saved", "kept", "boundary", "forward_extra", "extra", "sent", "calls")
BY_PHASE = ("attention", "moved", "operations")
PHASES = ("forward", "backward")


@dataclass
class Part:
    """Coefficients (c0, …, c5) of one part's costs."""

    scalars: dict[str, np.ndarray]
    products: dict[str, tuple[np.ndarray, np.ndarray]]
    """phase → ((P, 4, 6) coefficients of m, n, k and batch of each unlike product, (P,) how many)."""

    def at(self, name: str, batch: Any, tp: Any) -> np.ndarray:
        return self.scalars[name] @ basis(batch, tp)


@dataclass
class Costs:
    """The model's parts under one way of having precision; `order` names the part of each block."""

    parts: dict[str, Part]
    order: list[str]


def basis(batch: Any, tp: Any) -> np.ndarray:
    batch, tp = np.broadcast_arrays(np.asarray(batch, float), np.asarray(tp, float))
    split = np.where(tp > 1, 1.0, 0.0)
    return np.stack([np.ones_like(batch), batch, 1 / tp, batch / tp, split, batch * split])


def fitted(traces: dict[tuple[int, int], Trace], tp: int) -> Costs:
    """Costs from traces by (batch, tp): of two batches with tp = 1 and, if `tp` is not 0, with that, maybe one more."""
    first = traces[min(traces)]
    names = [name for name in (BEFORE, *dict.fromkeys(first.order), AFTER) if name in first.parts]
    parts = {}
    for name in names:
        four = {key: trace.parts[name] for key, trace in traces.items() if name in trace.parts}
        parts[name] = _fit_part(four, tp)
    return Costs(parts, first.order)


def _fit_part(traces: dict[tuple[int, int], PartTrace], tp: int) -> Part:
    def fit(read: Callable[[PartTrace], float]) -> np.ndarray:
        return _coefficients({key: read(trace) for key, trace in traces.items()}, tp)

    scalars = {name: fit(lambda t, n=name: getattr(t, n)) for name in SCALARS}  # type: ignore[misc]
    if tp:  # rings send a share of (t - 1) / t: coefficients of the whole, which one of t = 1 "sends" 0 of
        for name, factor in (("sent", tp / (tp - 1)), ("calls", 1.0)):
            split = {(b, 1): factor * getattr(t, name) for (b, t_), t in traces.items() if t_ == tp}
            scalars[name] = _coefficients(split, 0)
    for name in BY_PHASE:
        for phase in PHASES:
            scalars[f"{name}_{phase}"] = fit(lambda t, n=name, p=phase: float(getattr(t, n)[p]))  # type: ignore[misc]
    return Part(scalars, {phase: _fit_products(traces, tp, phase) for phase in PHASES})


def _fit_products(traces: dict[tuple[int, int], PartTrace], tp: int, phase: str) -> tuple[np.ndarray, np.ndarray]:
    lists = {key: trace.products[phase] for key, trace in traces.items()}
    first = lists[min(lists, key=lambda key: (key[1], key[0]))]
    if any(len(other) != len(first) for other in lists.values()):  # as if all work were split evenly
        lists = {key: value for key, value in lists.items() if key[1] == 1 and len(value) == len(first)}
    counted: Counter[tuple[float, ...]] = Counter()
    for i in range(len(first)):
        columns = [_coefficients({k: float(v[i][j]) for k, v in lists.items()}, tp) for j in range(4)]
        counted[tuple(np.round(np.concatenate(columns), 6))] += 1
    shapes = np.array(list(counted), float).reshape(-1, 4, 6)
    return shapes, np.array(list(counted.values()), float)


def _coefficients(values: dict[tuple[int, int], float], tp: int) -> np.ndarray:
    """(c0, …, c5) from values at (batch, tp); those that were not traced do not divide by t."""
    degrees = sorted({ways for _, ways in values if ways > 1 and tp})
    whole, *lines = (_line({b: value for (b, ways), value in values.items() if ways == t}) for t in (1, *degrees))
    nothing = np.zeros(2)
    if not lines:
        return np.concatenate([whole, nothing, nothing])
    if len(lines) == 1:
        divided = (whole - lines[0]) * tp / (tp - 1)
        return np.concatenate([whole - divided, divided, nothing])
    t, u = degrees
    divided = (lines[0] - lines[1]) / (1 / t - 1 / u)
    return np.concatenate([whole - divided, divided, lines[0] - divided / t - (whole - divided)])


def _line(values: dict[int, float]) -> np.ndarray:
    """(at 0, slope) through the values at two batches, or from 0 through the one at one batch."""
    b1, b2 = min(values), max(values)
    slope = (values[b2] - values[b1]) / (b2 - b1) if b2 > b1 else values[b1] / b1
    return np.array([values[b1] - slope * b1, slope])
