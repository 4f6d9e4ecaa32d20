"""What more workers would bring: laws through a series of measured points, and how far to trust them. Pure functions.

Every law says what a sample costs on n workers, in worker-seconds, relative to the smallest number n₀ that was
measured; throughput relative to n₀'s is n / n₀ / cost(n).

    logarithm      cost = 1 + a · log₂(n / n₀)                        rings and trees grow by a hop or a level
    plan           cost = plan(n) · measured(n₁) / plan(n₁)           n₁: the largest number that was measured
    universal      cost = 1 + σ (m − 1) + κ m (m − 1), m = n / n₀     Gunther 1993

σ: contention, the share of the work that is not divided; κ: coherence, what every worker exchanges with every other.

Where the batch grows with the workers (weak scaling) the logarithm is taken. Where it does not (strong scaling) each
worker's products shrink, which a plan knows and a law does not: the plan's curve is taken, and the universal law where
there is no plan. `python -m experiments.benchmarks laws` holds them beside published series.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Speeds = Mapping[int, Sequence[float]]
"""Workers → samples per second, repeated."""
Curve = Mapping[int, float]
"""Workers → samples per second, as planned."""
LAWS = ("logarithm", "plan", "universal")
SPREADS = {"logarithm": 0.015, "plan": 0.05, "universal": 0.06}
"""By law, the relative error that nine in ten published points stay within for each doubling beyond the largest number
of workers that the law was fitted to (`python -m experiments.benchmarks laws`). The plan's is 0.015 where the batch
grows; where it does not there are two published points only, so that it is taken to be three times as much."""
LEAST_COUNTS, LEAST_REPEATS = 3, 2
"""Numbers of workers, and repeats of each, from which on there is an interval."""


@dataclass(frozen=True)
class Law:
    """One series' law.

    Args:
        name: One of LAWS.
        base: The smallest number of workers measured.
        largest: The largest one.
        speed: Samples per second of the smallest.
        values: The law's own constants.
        noise: Relative standard error of a point, from its repeats; None with one repeat.
        counts: How many numbers of workers were measured.
        costs: Of the plan's curve, the cost by number of workers, scaled to what was measured.
    """

    name: str
    base: int
    largest: int
    speed: float
    values: dict[str, float]
    noise: float | None
    counts: int
    costs: dict[int, float] = field(default_factory=dict)

    def cost(self, n: int) -> float:
        """Worker-seconds of a sample relative to the smallest number's.

        Raises:
            KeyError: the plan's curve has no such number.
        """
        if self.name == "plan":
            return self.costs[n]
        if self.name == "logarithm":
            return 1 + self.values["a"] * math.log2(n / self.base)
        m = n / self.base
        return 1 + self.values["sigma"] * (m - 1) + self.values["kappa"] * m * (m - 1)

    def speedup(self, n: int) -> float:
        """Throughput relative to the smallest number's."""
        return n / self.base / self.cost(n)

    def spread(self, n: int) -> float | None:
        """Relative half-width of the interval in which nine of ten lie; None where too little was measured."""
        if self.counts < LEAST_COUNTS or self.noise is None:
            return None
        ahead = max(0.0, math.log2(n / self.largest))
        return math.hypot(SPREADS[self.name] * ahead, 1.645 * self.noise)

    def data(self) -> dict[str, Any]:
        """Itself as JSON can hold it."""
        return asdict(self)

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> "Law":
        return cls(**{**data, "costs": {int(n): cost for n, cost in data["costs"].items()}})


def fit(speeds: Speeds, *, is_weak: bool, curve: Curve | None = None) -> Law | None:
    """The law of a series; None for less than two numbers of workers.

    Args:
        speeds: What was measured.
        is_weak: Whether the batch grows with the workers.
        curve: What a plan says of these numbers of workers and of those that are asked about.
    """
    name = "logarithm" if is_weak else "plan" if curve else "universal"
    return fitted(name, speeds, curve)


def fitted(name: str, speeds: Speeds, curve: Curve | None = None) -> Law | None:
    """The law of that name; None for less than two numbers of workers, or a plan without them."""
    counts = sorted(speeds)
    if len(counts) < 2 or (name == "plan" and not (curve and {counts[0], counts[-1]} <= set(curve))):
        return None
    base, largest = counts[0], counts[-1]
    medians = {n: statistics.median(speeds[n]) for n in counts}
    costs = {n: n / base * medians[base] / medians[n] for n in counts}
    planned: dict[int, float] = {}
    values: dict[str, float] = {}
    if name == "plan" and curve:
        planned = {n: n / base * curve[base] / speed for n, speed in curve.items()}
        scale = costs[largest] / planned[largest]
        planned = {n: cost * scale for n, cost in planned.items()}
    elif name == "logarithm":
        values = {"a": _slope({math.log2(n / base): cost for n, cost in costs.items() if n > base})}
    else:
        values = _universal({n / base: cost for n, cost in costs.items() if n > base})
    return Law(name, base, largest, medians[base], values, _noise(speeds), len(counts), planned)


def _slope(costs: Mapping[float, float]) -> float:
    """a of cost = 1 + a·x, by relative least squares; not negative, as more workers never cost less a sample."""
    above = sum(x * (cost - 1) / cost**2 for x, cost in costs.items())
    return max(0.0, above / sum((x / cost) ** 2 for x, cost in costs.items()))


def _universal(costs: Mapping[float, float]) -> dict[str, float]:
    """σ and κ, neither negative, by relative least squares; two numbers of workers tell σ only."""
    import numpy as np
    from scipy import optimize

    m = np.array(list(costs), dtype=float)
    cost = np.array(list(costs.values()))
    columns = [m - 1, m * (m - 1)] if len(m) > 1 else [m - 1]
    solution, _ = optimize.nnls((np.stack(columns) / cost).T, (cost - 1) / cost)
    return {"sigma": float(solution[0]), "kappa": float(solution[1]) if len(m) > 1 else 0.0}


def _noise(speeds: Speeds) -> float | None:
    """Relative standard error of a point's median, pooled over points that were repeated; None if none was."""
    errors = [
        statistics.stdev(repeats) / statistics.mean(repeats) / math.sqrt(len(repeats))
        for repeats in speeds.values()
        if len(repeats) >= LEAST_REPEATS
    ]
    return math.sqrt(statistics.mean(error**2 for error in errors)) if errors else None
