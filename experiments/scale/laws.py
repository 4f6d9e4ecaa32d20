"""What more workers would bring: laws through measured points, and how far to trust them. Pure.

Every law says what a sample costs on n workers, in worker-seconds, relative to the smallest number
n₀ that was measured; throughput relative to n₀'s is n / n₀ / cost(n).

    logarithm   cost = 1 + a · log₂(n / n₀)                     rings and trees grow by a hop
    plan        cost = plan(n) · measured(n₁) / plan(n₁)        n₁: the largest number measured
    universal   cost = 1 + σ (m − 1) + κ m (m − 1), m = n / n₀  Gunther 1993

σ is contention, the share of the work that is not divided; κ is coherence, what every worker
exchanges with every other one.

Where the batch grows with the workers (weak scaling) the logarithm is used. Where it does not
(strong scaling) the matrix products of each worker shrink, which a plan knows and a law does not:
the plan's curve is used, and the universal law where there is no plan. `python -m
experiments.benchmarks laws` compares the laws with published series.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Speeds = Mapping[int, Sequence[float]]
"""By number of workers, the measured samples per second of each repeat."""
Curve = Mapping[int, float]
"""By number of workers, the planned samples per second."""
LAWS = ("logarithm", "plan", "universal")
SPREADS = {"logarithm": 0.015, "plan": 0.05, "universal": 0.06}
"""By law, the relative error that nine of ten published points stay within.

It is for each doubling beyond the largest number of workers to which the law was fitted (`python -m
experiments.benchmarks laws`). The plan's is 0.015 where the batch grows; where it does not, there
are only two published points, so that it is taken to be three times as much.
"""
MIN_COUNTS = 3
"""Different numbers of workers that an interval needs."""
MIN_REPEATS = 2
"""Repeats of each number of workers that an interval needs."""
QUANTILE = 1.645
"""Nine of ten values of a normal distribution are within this many standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of one series of points.

    Attributes:
        name: One of `LAWS`.
        base: The smallest number of workers measured.
        largest: The largest one.
        speed: Samples per second on the smallest.
        values: The law's constants by name.
        noise: The relative standard error of a point, from its repeats; None if a point was
            measured once.
        counts: How many numbers of workers were measured.
        costs: For the plan's curve, the cost by number of workers, scaled to what was measured.
    """

    name: str
    base: int
    largest: int
    speed: float
    values: dict[str, float]
    noise: float | None
    counts: int
    costs: dict[int, float] = field(default_factory=dict)

    def cost(self, workers: float) -> float:
        """Worker-seconds of a sample, relative to the smallest number of workers.

        Raises:
            KeyError: The plan's curve does not have that number of workers.
        """
        if self.name == "plan":
            return self.costs[int(workers)]
        if self.name == "logarithm":
            return 1 + self.values["a"] * math.log2(workers / self.base)
        m = workers / self.base
        return 1 + self.values["sigma"] * (m - 1) + self.values["kappa"] * m * (m - 1)

    def speedup(self, workers: float) -> float:
        """Throughput relative to that of the smallest number of workers."""
        return workers / self.base / self.cost(workers)

    def spread(self, workers: int) -> float | None:
        """The relative half-width of the interval in which nine of ten measurements lie.

        Returns:
            None if too little was measured.
        """
        if self.counts < MIN_COUNTS or self.noise is None:
            return None
        doublings = max(0.0, math.log2(workers / self.largest))
        return math.hypot(SPREADS[self.name] * doublings, QUANTILE * self.noise)

    def to_json(self) -> dict[str, Any]:
        """The law as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Law":
        """The law that `to_json` returned, after JSON has made texts of numbers that are keys."""
        costs = {int(workers): cost for workers, cost in data["costs"].items()}
        return cls(**{**data, "costs": costs})


def choose_law(speeds: Speeds, *, is_weak: bool, curve: Curve | None = None) -> Law | None:
    """The law of a series, of the kind that suits it.

    Args:
        speeds: What was measured.
        is_weak: Whether the batch grows with the workers.
        curve: What a plan says of these numbers of workers, and of those that are asked about.

    Returns:
        None with fewer than two numbers of workers.
    """
    if is_weak:
        return fit_law("logarithm", speeds)
    if curve:
        return fit_law("plan", speeds, curve)
    return fit_law("universal", speeds)


def fit_law(name: str, speeds: Speeds, curve: Curve | None = None) -> Law | None:
    """The law of one kind.

    Args:
        name: One of `LAWS`.
        speeds: What was measured.
        curve: What a plan says; needed for the law "plan".

    Returns:
        None with fewer than two numbers of workers, or if the plan does not have the smallest and
        the largest.
    """
    counts = sorted(speeds)
    if len(counts) < 2:
        return None
    base = counts[0]
    largest = counts[-1]
    medians = {n: statistics.median(speeds[n]) for n in counts}
    costs = {n: n / base * medians[base] / medians[n] for n in counts}
    larger_costs = {n: cost for n, cost in costs.items() if n > base}
    values: dict[str, float] = {}
    planned_costs: dict[int, float] = {}
    if name == "plan":
        if not curve or not {base, largest} <= curve.keys():
            return None
        unscaled = {n: n / base * curve[base] / speed for n, speed in curve.items()}
        scale = costs[largest] / unscaled[largest]
        planned_costs = {n: cost * scale for n, cost in unscaled.items()}
    elif name == "logarithm":
        doublings = {math.log2(n / base): cost for n, cost in larger_costs.items()}
        values = {"a": _slope(doublings)}
    else:
        values = _universal_constants({n / base: cost for n, cost in larger_costs.items()})
    return Law(
        name=name,
        base=base,
        largest=largest,
        speed=medians[base],
        values=values,
        noise=_noise(speeds),
        counts=len(counts),
        costs=planned_costs,
    )


def _slope(costs: Mapping[float, float]) -> float:
    """a of cost = 1 + a·x, by relative least squares.

    It is not negative, since more workers never make a sample cheaper.

    Args:
        costs: Costs by x.
    """
    product = sum(x * (cost - 1) / cost**2 for x, cost in costs.items())
    square = sum((x / cost) ** 2 for x, cost in costs.items())
    return max(0.0, product / square)


def _universal_constants(costs: Mapping[float, float]) -> dict[str, float]:
    """σ and κ of the universal law, by relative least squares; neither is negative.

    Args:
        costs: Costs by m, of which one value tells σ only.
    """
    import numpy as np
    from scipy import optimize

    m = np.array(list(costs), dtype=float)
    cost = np.array(list(costs.values()))
    columns = [m - 1]
    if len(m) > 1:
        columns.append(m * (m - 1))
    solution, _ = optimize.nnls((np.stack(columns) / cost).T, (cost - 1) / cost)
    return {
        "sigma": float(solution[0]),
        "kappa": float(solution[1]) if len(m) > 1 else 0.0,
    }


def _noise(speeds: Speeds) -> float | None:
    """The relative standard error of a point's median, pooled over all points.

    Returns:
        None if a point was measured once.
    """
    variances = []
    for repeats in speeds.values():
        if len(repeats) < MIN_REPEATS:
            return None
        deviation = statistics.stdev(repeats) / statistics.mean(repeats)
        variances.append(deviation**2 / len(repeats))
    return math.sqrt(statistics.mean(variances))
