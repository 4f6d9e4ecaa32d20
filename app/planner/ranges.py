"""Between which shares of a planned speed runs lie: 80 of 100, by the errors of published runs (conformal).

The range is that of the errors of runs whose layout splits the model in the same way, each planned with constants that
were fitted to other sources' runs alone, so that it holds for a run of a source that nobody has seen. It is wider the
further a plan is from all of them: a model of another kind, a family of GPUs without fitted constants, a layout that
nobody has published, a model or a sequence beyond the smallest or largest (fitted.yaml's `ranges`; written by
`python -m experiments.benchmarks published --fit`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DEFAULT = (0.8, 1.25)
DENSE, MIXTURE, ADAPTERS = "dense", "mixture", "adapters"
OCTAVES = 2.0
"""Factors of two outside of what was seen that count as much as another kind of model."""


class Traits(NamedTuple):
    """What a plan's error depends on."""

    layout: str
    """How the model is split: data, tp, pp, tp+pp, …"""
    model: str
    """dense, mixture or adapters."""
    family: str
    """Of GPUs with fitted constants; "" for none."""
    billions: float
    """Parameters."""
    sequence: int | None
    """Tokens."""


@dataclass(frozen=True)
class Spread:
    """Least and most share of the planned speed, and which of the plan's traits no published run has."""

    low: float
    high: float
    unseen: tuple[str, ...] = ()


def spread_of(traits: Traits, ranges: Mapping[str, Any]) -> Spread:
    """The range of a plan. ranges: fitted.yaml's, or none."""
    if not ranges:
        return Spread(*DEFAULT)
    unseen, distance = distance_of(traits, ranges["seen"])
    low, high = base_of(traits, ranges["layouts"], distance)
    wider = 1 + ranges["wider"] * distance
    return Spread(low**wider, high**wider, unseen)


def base_of(traits: Traits, layouts: Mapping[str, Sequence[float]], distance: float) -> tuple[float, float]:
    """The range of runs that split the model in the same way; of a plan that is far from them no narrower than that of
    all, for how well its kind of layout is known says little of it."""
    low, high = layouts.get(traits.layout) or layouts["any"]
    if distance > 0:
        return min(low, layouts["any"][0]), max(high, layouts["any"][1])
    return low, high


def distance_of(traits: Traits, seen: Mapping[str, Any]) -> tuple[tuple[str, ...], float]:
    """The traits that no run has, in words, and how far the plan is from runs that were seen: 0 among them."""
    unseen = []
    if traits.model not in seen["models"]:
        unseen.append({MIXTURE: "a mixture of experts", ADAPTERS: "adapters"}.get(traits.model, traits.model))
    if traits.layout not in seen["layouts"]:
        unseen.append(f"layouts with {traits.layout}")
    if traits.family not in seen["families"]:
        unseen.append("this GPU")
    beyond = _octaves(traits.billions, seen["billions"]) + _octaves(traits.sequence, seen["sequence"])
    return tuple(unseen), len(unseen) + beyond / OCTAVES


def _octaves(value: float | None, ends: tuple[float, float]) -> float:
    """Factors of two by which a value is outside."""
    if not value:
        return 0.0
    return max(0.0, math.log2(ends[0] / value), math.log2(value / ends[1]))
