"""What trials say about batch size and learning rate: pure functions of their reports.

Steps to a target against batch size follow  S(B) = S_min · (1 + B_crit / B)  (McCandlish et al.
2018, eq. 5.1 with E = S·B, https://arxiv.org/abs/1812.06162): below the critical batch size B_crit
twice the batch nearly halves the steps, far above it gains nothing. The gradient noise scale
(app/training/noise_scale.py) predicts B_crit; both are shown, since they can differ.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.sweep.search import Search
from experiments.sweep.trials import BATCH, FAILURES, RATE, Trial, setting_of

MIN_RATES = 3
"""Learning rates that a batch size needs for its best one to be estimated."""
RULES = {"square root": 0.5, "linear": 1.0, "constant": 0.0}
"""The exponents of rules of thumb."""
CONFIDENCE = 0.975
"""The quantile at the upper end of a 95 % interval."""
MAX_LOG = 700.0
"""exp of more is infinite."""


@dataclass(frozen=True, kw_only=True)
class BestRate:
    """The best learning rate at one batch size.

    Attributes:
        batch: The batch size.
        rate: The learning rate.
        value: The value of the metric there.
        edge: Whether it is the smallest or the largest that was tried, so that the best one may lie
            beyond.
    """

    batch: int
    rate: float
    value: float
    edge: bool


@dataclass(frozen=True, kw_only=True)
class ScalingRule:
    """The best learning rate against the batch size: rate = at_one · batch ** exponent.

    Attributes:
        exponent: See above.
        at_one: See above.
        low: The lower end of the exponent's 95 % interval; infinite with fewer than three batch
            sizes.
        high: Its upper end.
    """

    exponent: float
    at_one: float
    low: float
    high: float

    @property
    def name(self) -> str:
        """The rule of thumb that it agrees with.

        "undecided" if the interval is too wide to tell, "measured exponent" if there is none.
        """
        is_decided = self.high - self.low <= 1
        if not is_decided:
            return "undecided"
        for name, exponent in RULES.items():
            if abs(self.exponent - exponent) <= 0.15:
                return name
        return "measured exponent"

    def rate(self, batch: float) -> float:
        """The learning rate for a batch size."""
        return float(self.at_one * batch**self.exponent)


@dataclass(frozen=True, kw_only=True)
class CriticalBatch:
    """Steps to a target against the batch size: S(B) = least_steps · (1 + batch / B).

    Attributes:
        batch: The critical batch size.
        low: The lower end of its 95 % interval.
        high: Its upper end.
        least_steps: The steps of an infinite batch.
    """

    batch: float
    low: float
    high: float
    least_steps: float

    @property
    def interval(self) -> str:
        """The interval for a person."""
        is_narrow = self.high < 1e4 * self.low
        if not is_narrow:
            return "too few points for an interval"
        return f"95 %: {self.low:.0f} to {self.high:.0f}"

    def steps(self, batch: float) -> float:
        """The steps to the target for a batch size."""
        return self.least_steps * (1 + self.batch / batch)


@dataclass(frozen=True)
class StepTime:
    """Seconds per step = fixed + per_sample · (samples of one worker)."""

    fixed: float
    per_sample: float

    def seconds(self, batch: float, workers: int) -> float:
        """Seconds per step for a global batch size."""
        return self.fixed + self.per_sample * batch / workers


def best_value(trial: Trial, search: Search, max_samples: float = math.inf) -> float | None:
    """The best finite value that a trial has reported.

    Args:
        trial: The trial.
        search: Says what is compared.
        max_samples: Reports after more samples do not count.

    Returns:
        None if it has reported none.
    """
    values = []
    for samples, value in trial.curve(search.metric, "samples"):
        if math.isfinite(value) and samples <= max_samples:
            values.append(value)
    return min(values, key=lambda value: search.sign * value, default=None)


def best_report(trial: Trial, search: Search) -> tuple[int, float] | None:
    """The step and the value of the best evaluation; None if there is none with a finite value."""
    evaluations = []
    for step, value in trial.curve(search.metric):
        if math.isfinite(value):
            evaluations.append((int(step), value))
    return min(evaluations, key=lambda pair: search.sign * pair[1], default=None)


def last_value(trial: Trial, search: Search) -> float | None:
    """The value of the last evaluation, finite or not; None if there was none."""
    curve = trial.curve(search.metric)
    return curve[-1][1] if curve else None


def rank_trials(trials: Iterable[Trial], search: Search) -> list[tuple[float, Trial]]:
    """Trials with their best values, the best one first, without those that failed or have none."""
    ranked = []
    for trial in trials:
        value = best_value(trial, search)
        if trial.status not in FAILURES and value is not None:
            ranked.append((value, trial))
    return sorted(ranked, key=lambda pair: search.sign * pair[0])


def reached_at(
    trial: Trial,
    search: Search,
    target: float,
    over: str = "step",
) -> float | None:
    """When the metric of a trial passed a target, interpolated between two reports.

    Args:
        trial: The trial.
        search: Says what is compared.
        target: The value to reach.
        over: The unit of the answer: "step" or "seconds".

    Returns:
        None if it never did.
    """
    before: tuple[float, float] | None = None
    for position, value in trial.curve(search.metric, over):
        if not math.isfinite(value):
            before = None
            continue
        if search.sign * value <= search.sign * target:
            if before is None or value == before[1]:
                return position
            position_before, value_before = before
            share = (value_before - target) / (value_before - value)
            return position_before + (position - position_before) * share
        before = position, value
    return None


def best_rates(trials: Iterable[Trial], search: Search) -> list[BestRate]:
    """The best learning rate of every batch size at which at least `MIN_RATES` were tried.

    It is the vertex of the parabola through the best point and its neighbours, over the logarithm
    of the rate. Trials that differ only in their seed are averaged over.
    """
    best = []
    for batch, groups_by_rate in sorted(_groups_by_batch_and_rate(trials, search).items()):
        if len(groups_by_rate) < MIN_RATES:
            continue
        best_groups = {}
        for rate, groups in groups_by_rate.items():
            best_groups[rate] = min(
                groups, key=lambda group: search.sign * _mean_value(group, search)
            )
        best.append(_best_rate(batch, best_groups, search))
    return best


def _groups_by_batch_and_rate(
    trials: Iterable[Trial],
    search: Search,
) -> dict[int, dict[float, list[list[Trial]]]]:
    """Trials that have a value, in groups that differ only in their seed."""
    groups: dict[tuple[int, float, str], list[Trial]] = {}
    for trial in trials:
        if not {RATE, BATCH} <= trial.values.keys() or best_value(trial, search) is None:
            continue
        batch = int(trial.values[BATCH])
        rate = float(trial.values[RATE])
        groups.setdefault((batch, rate, setting_of(trial.values)), []).append(trial)
    by_batch: dict[int, dict[float, list[list[Trial]]]] = {}
    for (batch, rate, _), group in groups.items():
        by_batch.setdefault(batch, {}).setdefault(rate, []).append(group)
    return by_batch


def _mean_value(group: Sequence[Trial], search: Search, max_samples: float = math.inf) -> float:
    """The mean best value of trials that differ only in their seed; nan if none has a value."""
    values = []
    for trial in group:
        value = best_value(trial, search, max_samples)
        if value is not None:
            values.append(value)
    return sum(values) / len(values) if values else math.nan


def _best_rate(batch: int, groups: Mapping[float, Sequence[Trial]], search: Search) -> BestRate:
    """The best learning rate at a batch size.

    Args:
        batch: The batch size.
        groups: For each learning rate, trials that differ only in their seed.
        search: Says what is compared.
    """
    rates = sorted(groups)
    values = [_mean_value(groups[rate], search) for rate in rates]
    best = min(range(len(rates)), key=lambda i: search.sign * values[i])
    edge = best in (0, len(rates) - 1)
    rate = rates[best]
    if not edge:
        neighbours = rates[best - 1 : best + 2]
        # A trial that was stopped early is compared with what the others had reached by then.
        shortest = min(trial.last["samples"] for rate in neighbours for trial in groups[rate])
        costs = [search.sign * _mean_value(groups[rate], search, shortest) for rate in neighbours]
        if all(map(math.isfinite, costs)):
            rate = _vertex(neighbours, costs)
    return BestRate(batch=batch, rate=rate, value=values[best], edge=edge)


def _vertex(rates: Sequence[float], costs: Sequence[float]) -> float:
    """The rate at the minimum of the parabola through three points, within their range."""
    logs = [math.log(rate) for rate in rates]
    curvature, slope, _ = np.polyfit(logs, costs, 2)
    minimum = -slope / (2 * curvature) if curvature > 0 else logs[1]
    return math.exp(min(max(minimum, logs[0]), logs[2]))


def scaling_rule(rates: Sequence[BestRate]) -> ScalingRule | None:
    """The power law through the best learning rates.

    Those at the edge of what was tried are left out if two others remain: they are no evidence of a
    rule.

    Returns:
        None with fewer than two batch sizes.
    """
    inner = [rate for rate in rates if not rate.edge]
    used = inner if len(inner) >= 2 else rates
    if len(used) < 2:
        return None
    log_batches = np.log([rate.batch for rate in used])
    log_rates = np.log([rate.rate for rate in used])
    exponent, intercept = np.polyfit(log_batches, log_rates, 1)
    half_width = math.inf
    if len(inner) > 2:
        from scipy import stats

        residuals = log_rates - (exponent * log_batches + intercept)
        degrees_of_freedom = len(used) - 2
        variance = float(residuals @ residuals) / degrees_of_freedom
        spread = float(((log_batches - log_batches.mean()) ** 2).sum())
        quantile = float(stats.t.ppf(CONFIDENCE, degrees_of_freedom))
        half_width = quantile * math.sqrt(variance / spread)
    return ScalingRule(
        exponent=float(exponent),
        at_one=math.exp(intercept),
        low=float(exponent - half_width),
        high=float(exponent + half_width),
    )


def fewest_steps(trials: Iterable[Trial], search: Search, target: float) -> dict[int, float]:
    """For every batch size the fewest steps in which a trial has reached the target."""
    fewest: dict[int, float] = {}
    for trial in trials:
        steps = reached_at(trial, search, target)
        if steps is not None and BATCH in trial.values:
            batch = int(trial.values[BATCH])
            fewest[batch] = min(steps, fewest.get(batch, math.inf))
    return dict(sorted(fewest.items()))


def critical_batch(steps: Mapping[int, float]) -> CriticalBatch | None:
    """Fits S(B) in logarithms, so that every batch size counts alike.

    Args:
        steps: Steps to the target by batch size.

    Returns:
        None with fewer than three batch sizes, or if steps do not fall as the batch grows.
    """
    if len(steps) < 3:
        return None
    from scipy import optimize, stats

    batches = np.array(list(steps), dtype=float)
    log_steps = np.log(np.array(list(steps.values()), dtype=float))

    def model(batch: Any, log_least: float, log_critical: float) -> Any:
        return log_least + np.log1p(np.exp(log_critical) / batch)

    start = (float(log_steps.min()), math.log(float(np.median(batches))))
    try:
        with warnings.catch_warnings():
            # Where steps halve as the batch doubles there is none; it is not a person's mistake.
            warnings.simplefilter("ignore", optimize.OptimizeWarning)
            fit, covariance = optimize.curve_fit(model, batches, log_steps, p0=start, maxfev=20_000)
    except (RuntimeError, ValueError):
        return None
    log_least, log_critical = fit
    critical = math.exp(min(log_critical, MAX_LOG))
    if not batches.min() / 100 < critical < batches.max() * 100:
        return None
    variance = covariance[1, 1]
    error = math.sqrt(variance) if np.isfinite(variance) else math.inf
    quantile = float(stats.t.ppf(CONFIDENCE, max(1, len(steps) - 2)))
    half_width = min(quantile * error, MAX_LOG)
    return CriticalBatch(
        batch=critical,
        low=critical * math.exp(-half_width),
        high=critical * math.exp(half_width),
        least_steps=math.exp(log_least),
    )


def noise_scale(trials: Iterable[Trial]) -> float | None:
    """The median of the gradient noise scales, in samples, that trials have measured last.

    What their batch could not bound from above does not count: see `least_noise_scale`.
    """
    scales = []
    for trial in trials:
        metrics = trial.last.get("metrics", {})
        scale = metrics.get("train/noise_scale", math.nan)
        is_bounded = "train/noise_scale_high" in metrics
        if is_bounded and math.isfinite(scale) and scale > 0:
            scales.append(scale)
    return float(np.median(scales)) if scales else None


def least_noise_scale(trials: Iterable[Trial]) -> float | None:
    """The largest of what noise scales are at least, of trials whose batch could not bound them.

    Returns:
        None if a trial has measured its noise scale, or none has tried.
    """
    bounds = []
    for trial in trials:
        metrics = trial.last.get("metrics", {})
        if "train/noise_scale_high" in metrics:
            return None
        if metrics.get("train/noise_scale_low", 0.0) > 0:
            bounds.append(metrics["train/noise_scale_low"])
    return max(bounds, default=None)


def step_speeds(trials: Iterable[Trial]) -> list[tuple[float, float]]:
    """For each trial the samples of one worker in a step, and the seconds of a step."""
    speeds = []
    for trial in trials:
        last = trial.last
        if last.get("seconds", 0) > 0:
            samples = last["samples"] / last["step"] / last["workers"]
            speeds.append((samples, last["seconds"] / last["step"]))
    return speeds


def step_time(trials: Iterable[Trial]) -> StepTime | None:
    """The law of the time of a step, fitted to relative errors; neither part is negative.

    Returns:
        None if nothing was measured.
    """
    from scipy import optimize

    speeds = step_speeds(trials)
    if not speeds:
        return None
    samples, seconds = np.array(speeds).T
    # Both sides are divided by the measured seconds, so that errors are relative.
    matrix = np.stack([np.ones_like(samples), samples], axis=1) / seconds[:, None]
    (fixed, per_sample), _ = optimize.nnls(matrix, np.ones_like(seconds))
    return StepTime(float(fixed), float(per_sample))


def fair_target(trials: Iterable[Trial], search: Search) -> float | None:
    """A target that every batch size reached of which a trial was trained to the end.

    It is the worst of the best values of the batch sizes; with one batch size, a value 5 % worse
    than the best.

    Returns:
        None if there is no value.
    """
    best_by_batch: dict[int, float] = {}
    for value, trial in rank_trials(trials, search):
        if trial.status in ("finished", "reached"):
            best_by_batch.setdefault(int(trial.values.get(BATCH, 0)), value)
    if not best_by_batch:
        return None
    worst = max(best_by_batch.values(), key=lambda value: search.sign * value)
    if len(best_by_batch) > 1:
        return worst
    return worst + 0.05 * search.sign * abs(worst)
