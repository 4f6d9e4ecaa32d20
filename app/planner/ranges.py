"""What errors of earlier plans say of a plan: the range of its speed, and whether it fits.

80 of 100 runs have a speed within the range. Ranges are conformal: they are made of the errors of
runs whose layout splits the model in the same way (of a mixture of experts, or of adapters: runs of
that kind), each planned with constants that were fitted to other sources' runs only (CV+:
https://arxiv.org/abs/1905.02928), so that they hold for runs of a new source. Runs of one source
err alike, so that each source counts as much, however many runs it has
(https://arxiv.org/abs/2306.06342; what that leaves out: experiments/benchmarks/fit.py). If fewer
than 80 of 100 runs of a GPU, of a size of models, of a length of sequences or of a layout would be
inside, the ranges of that group are wider by the factor that brings them in (conformal within
groups: Vovk 2012, https://arxiv.org/abs/1209.2673). A range is wider the further a plan is from all
of these runs: a kind of model of which there are few, a family of GPUs without fitted constants, a
layout that nobody has published, a model or a sequence smaller than the smallest or larger than the
largest. It reaches further down the more of the computing is attention, whose kernels differ
between trainers by more than any others (`ranges` in fitted.yaml, written by `python -m
experiments.benchmarks published --fit`).

The probability of fitting is the share of measured peaks of memory that would have fitted with as
much room as the plan leaves: of Trireme's own trainings, or of published ones where another trainer
is described to the plan, whose peaks differ by more (`peaks` in constants.yaml).
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DEFAULT = (0.8, 1.25)
"""The range of devices to which nothing was fitted."""
DENSE, MIXTURE, ADAPTERS = "dense", "mixture", "adapters"
MODEL_NAMES = {MIXTURE: "a mixture of experts", ADAPTERS: "adapters"}
SIZE_LIMITS = (3.5, 10.0, 69.0)
"""Billions of parameters of the largest model of each group but the last."""
LENGTH_LIMITS = (2048, 8192, 16384)
"""Tokens of the longest sequence of each group but the last."""
OCTAVES = 2.0
"""Factors of two beyond the published sizes that count as much as another kind of model."""


class Traits(NamedTuple):
    """What the error of a plan depends on.

    Args:
        layout: How the model is split: data, tp, pp, tp+pp and so on.
        model: DENSE, MIXTURE or ADAPTERS.
        family: Of GPUs with fitted constants; "" for none.
        billions: Of parameters.
        sequence: Tokens of a sequence; None if there are none.
        attention: Share of the computing time that attention takes.
        gpu: Its name in the catalogue, with " limited" if it is a variant of that GPU.
    """

    layout: str
    model: str
    family: str
    billions: float
    sequence: int | None
    attention: float = 0.0
    gpu: str = ""

    @property
    def kind(self) -> str:
        """The runs whose errors its range is made of: its layout's, or its kind of model's."""
        return self.layout if self.model == DENSE else self.model

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of runs that it belongs to: by layout, GPU, size and length.

        Models that are not dense are a group of their own.
        """
        if self.model != DENSE:
            return (f"model {self.model}",)
        names = [f"layout {self.layout}", f"gpu {self.gpu}"]
        names.append(f"size {bisect.bisect_left(SIZE_LIMITS, self.billions)}")
        if self.sequence:
            names.append(f"length {bisect.bisect_left(LENGTH_LIMITS, self.sequence)}")
        return tuple(names)


@dataclass(frozen=True)
class Spread:
    """The range of a plan.

    Args:
        low: The least share of the planned speed.
        high: The most.
        unmeasured: The plan's traits that no published run has, in words.
    """

    low: float
    high: float
    unmeasured: tuple[str, ...] = ()


def spread_of(traits: Traits, ranges: Mapping[str, Any]) -> Spread:
    """The range of a plan.

    Args:
        traits: Of the plan.
        ranges: Those of fitted.yaml; empty if there are none for the device.
    """
    if not ranges:
        return Spread(*DEFAULT)
    unmeasured, distance = distance_of(traits, ranges["seen"])
    low, high = base_of(traits, ranges["kinds"], distance, attention=ranges["attention"])
    exponent = factor_of(traits, ranges["groups"]) * (1 + ranges["wider"] * distance)
    return Spread(low**exponent, high**exponent, unmeasured)


def factor_of(traits: Traits, groups: Mapping[str, float]) -> float:
    """How many times wider than its layout's the range of a plan is, as its groups need it.

    Args:
        traits: Of the plan.
        groups: The factors of the groups that need one.
    """
    return max([1.0, *(groups[name] for name in traits.groups if name in groups)])


def fit_probability(capacity: float, planned: float, peaks: Mapping[float, float]) -> float:
    """The probability that a layout fits.

    Between two quantiles it changes as the logarithm of the ratio does, and beyond the last one it
    goes on as between the last two.

    Args:
        capacity: Bytes that are there.
        planned: Bytes that the plan takes.
        peaks: Quantiles of the ratio of a measured peak to its plan, ascending, by their level.
    """
    if planned <= 0:
        return 1.0
    room = math.log(capacity / planned)
    levels = list(peaks)
    ratios = [math.log(ratio) for ratio in peaks.values()]
    after = bisect.bisect_left(ratios, room)
    after = min(max(after, 1), len(ratios) - 1)
    slope = (levels[after] - levels[after - 1]) / (ratios[after] - ratios[after - 1])
    probability = levels[after] + slope * (room - ratios[after])
    return min(max(probability, 0.0), 1.0)


def base_of(
    traits: Traits,
    kinds: Mapping[str, Sequence[float]],
    distance: float,
    *,
    attention: float = 0.0,
) -> tuple[float, float]:
    """The range of the runs that split the model in the same way, or have the same kind of model.

    If the plan is far from these runs, how well its layout is known says little, so the range is at
    least that of all runs.

    Args:
        traits: Of the plan.
        kinds: (low, high) by `Traits.kind`; `any` has that of all runs of dense models.
        distance: From `distance_of`.
        attention: How many times longer attention may take, less 1.
    """
    low, high = kinds.get(traits.kind) or kinds["any"]
    if distance > 0:
        low = min(low, kinds["any"][0])
        high = max(high, kinds["any"][1])
    return low / (1 + attention * traits.attention), high


def distance_of(traits: Traits, seen: Mapping[str, Any]) -> tuple[tuple[str, ...], float]:
    """How far a plan is from published runs.

    Args:
        traits: Of the plan.
        seen: The traits of the runs.

    Returns:
        (the traits that no run has, in words; the distance, 0 among the runs)
    """
    unmeasured = []
    if traits.model not in seen["models"]:
        unmeasured.append(MODEL_NAMES.get(traits.model, traits.model))
    if traits.layout not in seen["layouts"]:
        unmeasured.append(f"layouts with {traits.layout}")
    if traits.family not in seen["families"]:
        unmeasured.append("this GPU")
    octaves = _octaves(traits.billions, seen["billions"])
    octaves += _octaves(traits.sequence, seen["sequence"])
    return tuple(unmeasured), len(unmeasured) + octaves / OCTAVES


def _octaves(value: float | None, limits: tuple[float, float]) -> float:
    """Factors of two by which a value is outside of the limits."""
    if not value:
        return 0.0
    smallest, largest = limits
    return max(0.0, math.log2(smallest / value), math.log2(value / largest))
