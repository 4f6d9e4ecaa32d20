"""What trials say about batch size and learning rate: pure functions of what they reported.

Steps to a target against batch size follow  S(B) = S_min · (1 + B_crit / B)  (McCandlish et al. 2018, eq. 5.1 with
E = S·B): below the critical batch size B_crit twice the batch nearly halves the steps, far above it gains nothing. The
gradient noise scale (app/noise_scale.py) predicts B_crit; both are shown, since they can differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.sweep.ledger import Trial

BATCH, RATE, WORKERS, SEED = "train.global_batch_size", "optimizer.lr", "workers", "train.seed"


@dataclass(frozen=True)
class BestRate:
    """The best learning rate at one batch size."""

    batch: int
    rate: float
    value: float
    edge: bool
    """It is the smallest or the largest that was tried, so the best may lie beyond."""


@dataclass(frozen=True)
class ScalingRule:
    """Best learning rate against batch size: rate = at_one · batch ** exponent."""

    exponent: float
    at_one: float
    low: float
    high: float
    """95 % interval of the exponent; infinite with fewer than three batch sizes."""
    points: int

    @property
    def name(self) -> str:
        """The rule of thumb it agrees with; undecided where the interval is too wide to tell."""
        if not self.high - self.low <= 1:
            return "undecided"
        for name, exponent in (("square root", 0.5), ("linear", 1.0), ("constant", 0.0)):
            if abs(self.exponent - exponent) <= 0.15:
                return name
        return "measured exponent"

    def rate(self, batch: float) -> float:
        return float(self.at_one * batch**self.exponent)


@dataclass(frozen=True)
class CriticalBatch:
    """S(B) = least_steps · (1 + batch / B)."""

    batch: float
    low: float
    high: float
    least_steps: float

    def steps(self, batch: float) -> float:
        return self.least_steps * (1 + self.batch / batch)


@dataclass(frozen=True)
class StepTime:
    """Seconds per step = fixed + per_sample · (samples of one worker)."""

    fixed: float
    per_sample: float

    def seconds(self, batch: float, workers: int) -> float:
        return self.fixed + self.per_sample * batch / workers


def value_of(trial: Trial, metric: str, mode: str, samples: float = math.inf) -> float | None:
    """The best value it reported, up to so many samples."""
    found = [v for at, v in trial.curve(metric, "samples") if math.isfinite(v) and at <= samples]
    return (min(found) if mode == "min" else max(found)) if found else None


def steps_to(trial: Trial, metric: str, target: float, mode: str, over: str = "step") -> float | None:
    """Steps (or seconds) until the metric passed the target, between two reports by interpolation; None: never."""
    sign = 1.0 if mode == "min" else -1.0
    before: tuple[float, float] | None = None
    for at, value in trial.curve(metric, over):
        if math.isfinite(value) and sign * value <= sign * target:
            if before is None or value == before[1]:
                return at
            return before[0] + (at - before[0]) * (before[1] - target) / (before[1] - value)
        before = (at, value) if math.isfinite(value) else None
    return None


@dataclass
class _Tried:
    """Trials that differ in their seed at most: one point of the space, whose value is their mean."""

    trials: list[Trial]

    def value(self, metric: str, mode: str, samples: float = math.inf) -> float:
        found = [v for t in self.trials if (v := value_of(t, metric, mode, samples)) is not None]
        return sum(found) / len(found) if found else math.nan

    @property
    def samples(self) -> float:
        return min(float(trial.last["samples"]) for trial in self.trials)


def best_rates(trials: Iterable[Trial], metric: str, mode: str) -> list[BestRate]:
    """The best learning rate of every batch size that three or more were tried at: the vertex of the parabola through
    the best point and its neighbours, over the logarithm of the rate. Seeds are averaged over."""
    sign = 1.0 if mode == "min" else -1.0
    by_batch: dict[int, dict[float, dict[str, _Tried]]] = {}
    for trial in trials:
        if value_of(trial, metric, mode) is None or RATE not in trial.values or BATCH not in trial.values:
            continue
        alike = str(sorted((key, str(value)) for key, value in trial.values.items() if key != SEED))
        points = by_batch.setdefault(int(trial.values[BATCH]), {}).setdefault(float(trial.values[RATE]), {})
        points.setdefault(alike, _Tried([])).trials.append(trial)
    found = []
    for batch, rates in sorted(by_batch.items()):
        if len(rates) < 3:
            continue
        tried = sorted(rates)
        best = {r: min(points.values(), key=lambda p: sign * p.value(metric, mode)) for r, points in rates.items()}
        values = {r: sign * point.value(metric, mode) for r, point in best.items()}
        i = min(range(len(tried)), key=lambda i: values[tried[i]])
        edge, near = i in (0, len(tried) - 1), tried[max(0, i - 1) : i + 2]
        # One that was stopped early is compared with what the others had reached by then.
        shortest = min(best[r].samples for r in near)
        then = [best[r].value(metric, mode, shortest) for r in near]
        rate = tried[i] if edge else _vertex(near, [sign * value for value in then if math.isfinite(value)])
        found.append(BestRate(batch, rate, sign * values[tried[i]], edge))
    return found


def _vertex(rates: Sequence[float], values: Sequence[float]) -> float:
    x = [math.log(rate) for rate in rates]
    if len(values) < 3:
        return rates[1]
    a, b, _ = np.polyfit(x, values, 2)
    middle = -b / (2 * a) if a > 0 else x[1]
    return math.exp(min(max(middle, x[0]), x[2]))


def scaling_rule(rates: Sequence[BestRate]) -> ScalingRule | None:
    """The power law through the best learning rates; those at the edge of what was tried are left out where two
    others remain. None with fewer than two batch sizes."""
    inner = [r for r in rates if not r.edge]
    used = inner if len(inner) >= 2 else list(rates)
    if len(used) < 2:
        return None
    x = np.log([r.batch for r in used])
    y = np.log([r.rate for r in used])
    exponent, intercept = np.polyfit(x, y, 1)
    half = math.inf
    if len(used) > 2:
        from scipy import stats

        left = y - (exponent * x + intercept)
        error = math.sqrt(float(left @ left) / (len(used) - 2) / float(((x - x.mean()) ** 2).sum()))
        half = float(stats.t.ppf(0.975, len(used) - 2)) * error
    return ScalingRule(float(exponent), math.exp(intercept), exponent - half, exponent + half, len(used))


def fastest_by_batch(trials: Iterable[Trial], metric: str, target: float, mode: str) -> dict[int, tuple[float, Trial]]:
    """For every batch size the fewest steps in which a trial reached the target, and that trial."""
    found: dict[int, tuple[float, Trial]] = {}
    for trial in trials:
        steps = steps_to(trial, metric, target, mode)
        if steps is None or BATCH not in trial.values:
            continue
        batch = int(trial.values[BATCH])
        if batch not in found or steps < found[batch][0]:
            found[batch] = (steps, trial)
    return dict(sorted(found.items()))


def critical_batch(steps: dict[int, float]) -> CriticalBatch | None:
    """Fits S(B) in logarithms, so that every batch size counts alike. None with fewer than three batch sizes, or where
    steps do not fall as the batch grows."""
    if len(steps) < 3:
        return None
    from scipy import optimize, stats

    batches, needed = np.array(list(steps), dtype=float), np.array(list(steps.values()), dtype=float)

    def model(batch: Any, log_least: float, log_critical: float) -> Any:
        return log_least + np.log1p(np.exp(log_critical) / batch)

    start = (math.log(needed.min()), math.log(float(np.median(batches))))
    try:
        found, covariance = optimize.curve_fit(model, batches, np.log(needed), p0=start, maxfev=20_000)
    except (RuntimeError, ValueError):
        return None
    critical = math.exp(min(found[1], 700.0))
    if not batches.min() / 100 < critical < batches.max() * 100:
        return None
    spread = math.sqrt(covariance[1, 1]) if np.isfinite(covariance[1, 1]) else math.inf
    half = min(float(stats.t.ppf(0.975, max(1, len(steps) - 2))) * spread, 700.0)
    return CriticalBatch(critical, critical * math.exp(-half), critical * math.exp(half), math.exp(found[0]))


def step_time(trials: Iterable[Trial]) -> StepTime | None:
    """Seconds per step against a worker's samples, neither part negative; None where nothing was measured."""
    from scipy import optimize

    rows: list[tuple[float, float]] = []
    for trial in trials:
        last = trial.last
        if last and last["seconds"] > 0 and last["step"] > 0:
            rows.append((last["samples"] / last["step"] / (last.get("workers") or 1), last["seconds"] / last["step"]))
    if not rows:
        return None
    samples, seconds = np.array(rows).T
    matrix = np.stack([np.ones_like(samples), samples], axis=1) / seconds[:, None]  # relative errors count
    (fixed, per_sample), _ = optimize.nnls(matrix, np.ones_like(seconds))
    return StepTime(float(fixed), float(per_sample))


def noise_scale(trials: Iterable[Trial]) -> float | None:
    """The median of the gradient noise scales that trials measured last, in samples."""
    found = [t.last["metrics"]["train/noise_scale"] for t in trials if "train/noise_scale" in t.last.get("metrics", {})]
    finite = [value for value in found if math.isfinite(value) and value > 0]
    return float(np.median(finite)) if finite else None


def efficiency(noise: float, batch: float, reference: float) -> float:
    """How much a sample is worth in a batch of `batch`, relative to one of `reference`: Pollux (Qiao et al., OSDI
    2021), eq. 7."""
    return (noise + reference) / (noise + batch)


def fair_target(trials: Sequence[Trial], metric: str, mode: str) -> float | None:
    """A target that every batch size reaches that was trained to the end: the worst of the best values of each. With
    one such batch size, within 5 % of the best value there is. None without a single value."""
    better, worst = (min, max) if mode == "min" else (max, min)
    best: dict[int, float] = {}
    for trial in trials:
        value = value_of(trial, metric, mode)
        if value is None or trial.status not in ("finished", "reached"):
            continue
        batch = int(trial.values.get(BATCH, 0))
        best[batch] = better(best.get(batch, value), value)
    if len(best) > 1:
        return worst(best.values())
    return sum(best.values()) * (1.05 if (mode == "min") == (sum(best.values()) > 0) else 1 / 1.05) if best else None
