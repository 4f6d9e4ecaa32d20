"""The universal scalability law, fitted to repeated measurements, and what follows from it: pure functions.

Throughput of n workers relative to one (Gunther 1993):     C(n) = n / (1 + σ (n − 1) + κ n (n − 1))

σ: contention, the share of the work that is not divided; with κ = 0 the law is Amdahl's and σ his serial fraction.
κ: coherence, what every worker exchanges with every other; with κ > 0 there is a number of workers past which more is
slower. Where the batch grows with n (weak scaling), C counts samples per second all the same.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

Speeds = Mapping[int, Sequence[float]]
"""Workers → samples per second, repeated."""
Law = dict[str, tuple[float, float, float]]
""""sigma" and "kappa": value, and its 95 % interval by the bootstrap over repeats."""
PAYS = 1.5
"""Twice the workers are worth it, we say, if they do at least half as much again."""


def fit(speeds: Speeds, draws: int = 1000) -> Law | None:
    """None without a point of one worker and one of another number."""
    if 1 not in speeds or len(speeds) < 2:
        return None
    source = random.Random(0)
    samples = [{n: [source.choice(list(s)) for _ in s] for n, s in speeds.items()} for _ in range(draws)]
    drawn = [sorted(column) for column in zip(*map(_fit, samples))]
    low, high = int(0.025 * draws), int(0.975 * draws)
    sigma, kappa = ((value, found[low], found[high]) for value, found in zip(_fit(speeds), drawn))
    return {"sigma": sigma, "kappa": kappa}


def _fit(speeds: Speeds) -> tuple[float, float]:
    """σ and κ: n / C − 1 = σ (n − 1) + κ n (n − 1) is linear in both, neither of which is negative; relative errors
    count. Two numbers of workers tell σ only."""
    import numpy as np
    from scipy import optimize

    one = statistics.median(speeds[1])
    n = np.array([count for count in speeds if count > 1], dtype=float)
    gain = np.array([statistics.median(speeds[count]) / one for count in speeds if count > 1])
    columns = [n - 1, n * (n - 1)] if len(n) > 1 else [n - 1]
    solution, _ = optimize.nnls((np.stack(columns) * gain / n).T, (n / gain - 1) * gain / n)
    return float(solution[0]), float(solution[1]) if len(n) > 1 else 0.0


def speedup(law: Law, n: float) -> float:
    """Throughput of n workers relative to one."""
    return n / (1 + law["sigma"][0] * (n - 1) + law["kappa"][0] * n * (n - 1))


def verdict(law: Law, largest: int) -> str:
    """Whether twice the largest number of workers that was measured pays, in a sentence."""
    gain = speedup(law, 2 * largest) / speedup(law, largest)
    does = f"{2 * largest} workers would do {gain:.2f} times the work of {largest}"
    does += f", at {2 / gain:.2f} times the cost per sample{'; more is slower' if gain <= 1 else ''}"
    return f"The next doubling {'pays' if gain >= PAYS else 'does not pay'}: {does}."


def recommend(speeds: Mapping[str, Speeds]) -> str:
    """Which strategy to use on how many workers: the fastest strategy at each number, and of the numbers the largest up
    to which every doubling does at least `PAYS` times the work.

    speeds: by strategy.
    """
    counts = sorted({n for found in speeds.values() for n in found})
    best = {n: max((statistics.median(s[n]), name) for name, s in speeds.items() if n in s) for n in counts}
    least = chosen = counts[0]
    for n in counts[1:]:
        if best[n][0] / best[chosen][0] >= PAYS ** math.log2(n / chosen):
            chosen = n
    speed, strategy = best[chosen]
    gain = speed / best[least][0]
    more = f", {gain:.2f} times the throughput of {least}, at {gain / chosen * least:.0%} efficiency"
    what = f"{strategy} on {chosen} workers" if chosen > 1 else "1 worker"
    return f"Use {what}: {speed:,.0f} samples/s{more if chosen > least else ''}."
