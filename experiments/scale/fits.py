"""Laws of scaling, fitted to repeated measurements: pure functions.

Amdahl 1967 (strong scaling, the same batch on n workers):      T(n) = T(1) · (s + (1 − s) / n)
Gustafson 1988 (weak scaling, the batch grows with n):          S(n) = n − s · (n − 1)
Universal scalability law (Gunther 1993), for throughput:       C(n) = n / (1 + σ (n − 1) + κ n (n − 1))

s: the serial fraction. σ: contention, what has to wait its turn. κ: coherence, what everybody must tell everybody; with
κ > 0 there is a number of workers past which more is slower.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Times = Mapping[int, Sequence[float]]
"""Workers → seconds per step, repeated."""


@dataclass(frozen=True)
class Law:
    """A fitted law. parameters: name → (value, low, high), 95 % by the bootstrap over repeats."""

    name: str
    parameters: dict[str, tuple[float, float, float]]
    note: str = ""

    def value(self, name: str) -> float:
        return self.parameters[name][0]

    def speedup(self, n: float) -> float:
        """Throughput of n workers relative to one."""
        return speedup(self.name, {name: value for name, (value, _, _) in self.parameters.items()}, n)


def speedup(law: str, p: Mapping[str, float], n: float) -> float:
    """What a law says of n workers."""
    if law == "amdahl":
        return 1 / (p["s"] + (1 - p["s"]) / n)
    if law == "gustafson":
        return n - p["s"] * (n - 1)
    return n / (1 + p["sigma"] * (n - 1) + p["kappa"] * n * (n - 1))


def throughput(times: Times, weak: bool) -> dict[int, float]:
    """Samples per second relative to the smallest number of workers there is, from median step times."""
    least = min(times)
    base = statistics.median(times[least])
    return {n: base / statistics.median(t) * (n / least if weak else 1.0) for n, t in sorted(times.items())}


def fit_laws(times: Times, weak: bool, draws: int = 1000) -> list[Law]:
    """Amdahl's or Gustafson's law, and the universal one. Needs one worker and at least one other number."""
    if 1 not in times or len(times) < 2:
        return []
    own = "gustafson" if weak else "amdahl"
    fits: list[tuple[str, Callable[[dict[int, float]], dict[str, float]], str]] = [(own, _ONE[own], "")]
    if len(times) >= 3:
        fits.append(("usl", _usl, ""))
    else:
        fits.append(("usl", _contention, "two numbers of workers tell σ only; κ is taken as 0"))
    laws = []
    for name, fit, note in fits:
        best = fit(throughput(times, weak))
        if best.get("s", 0.0) > 1:
            note = "above 1: several workers are slower than one"
        drawn = [fit(throughput(sample, weak)) for sample in _resampled(times, draws)]
        bounds = {key: _interval([d[key] for d in drawn]) for key in best}
        laws.append(Law(name, {key: (value, *bounds[key]) for key, value in best.items()}, note))
    return laws


def _resampled(times: Times, draws: int) -> list[dict[int, list[float]]]:
    source = random.Random(0)
    return [{n: [source.choice(list(t)) for _ in t] for n, t in times.items()} for _ in range(draws)]


def _interval(values: list[float]) -> tuple[float, float]:
    values = sorted(values)
    return values[int(0.025 * len(values))], values[min(len(values) - 1, int(0.975 * len(values)))]


def _amdahl(found: dict[int, float]) -> dict[str, float]:
    """Least squares in 1/S = 1/n + s (1 − 1/n), which is linear in s."""
    pairs = [(1 - 1 / n, 1 / value - 1 / n) for n, value in found.items() if n > 1]
    return {"s": max(0.0, sum(a * b for a, b in pairs) / sum(a * a for a, _ in pairs))}


def _gustafson(found: dict[int, float]) -> dict[str, float]:
    pairs = [(n - 1.0, n - value) for n, value in found.items() if n > 1]
    return {"s": max(0.0, sum(a * b for a, b in pairs) / sum(a * a for a, _ in pairs))}


_ONE = {"amdahl": _amdahl, "gustafson": _gustafson}


def _contention(found: dict[int, float]) -> dict[str, float]:
    pairs = [(n - 1.0, n / value - 1) for n, value in found.items() if n > 1]
    return {"sigma": max(0.0, sum(a * b for a, b in pairs) / sum(a * a for a, _ in pairs)), "kappa": 0.0}


def _usl(found: dict[int, float]) -> dict[str, float]:
    """n / C − 1 = σ (n − 1) + κ n (n − 1) is linear in both, neither of which is negative; relative errors count."""
    import numpy as np
    from scipy import optimize

    rows = [(n, value) for n, value in found.items() if n > 1]
    weight = [value / n for n, value in rows]
    matrix = np.array([[(n - 1) * w, n * (n - 1) * w] for (n, _), w in zip(rows, weight)])
    (sigma, kappa), _ = optimize.nnls(matrix, np.array([(n / value - 1) * w for (n, value), w in zip(rows, weight)]))
    return {"sigma": float(sigma), "kappa": float(kappa)}


def most_useful(law: Law) -> float | None:
    """The number of workers past which more is slower; None where the fit knows none."""
    sigma, kappa = law.parameters["sigma"][0], law.parameters["kappa"][0]
    return math.sqrt(max(0.0, 1 - sigma) / kappa) if kappa > 1e-12 else None


@dataclass(frozen=True)
class Forecast:
    """What `workers` would bring. seconds: per step. cost: worker-seconds per sample, relative to one worker.
    run_seconds: to see as many samples as the whole run does on one worker."""

    workers: int
    speedup: float
    efficiency: float
    seconds: float
    cost: float
    run_seconds: float


def forecast(
    law: Law, times: Times, weak: bool, steps: float = 1.0, factors: Sequence[int] = (1, 2, 4, 16)
) -> list[Forecast]:
    """The law at and beyond what was measured: `factors` times the largest number of workers.

    steps: of the whole run on one worker.
    """
    one, largest = statistics.median(times[1]), max(times)
    found = []
    for n in (largest * factor for factor in factors):
        gain = law.speedup(n)
        found.append(Forecast(n, gain, gain / n, one / gain * (n if weak else 1), n / gain, steps * one / gain))
    return found


PAYS = 1.5
"""Twice the workers are worth it, we say, if they do at least half as much again."""


def verdict(law: Law, times: Times, weak: bool) -> str:
    """Whether the next doubling pays, in a sentence."""
    largest = max(times)
    now, then = law.speedup(largest), law.speedup(2 * largest)
    gain = then / now
    does = f"{2 * largest} workers would do {gain:.2f} times the work of {largest}"
    does += f", at {2 / gain:.2f} times the price per sample"
    if gain <= 1:
        return f"The next doubling does not pay: {does}; more is slower."
    if gain < PAYS:
        return f"The next doubling does not pay: {does}."
    return f"The next doubling pays: {does}."
