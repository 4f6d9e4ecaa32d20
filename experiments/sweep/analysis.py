"""What trials say about batch size and learning rate: pure functions of what they reported.

Steps to a target against batch size follow  S(B) = S_min · (1 + B_crit / B)  (McCandlish et al. 2018, eq. 5.1 with
E = S·B): below the critical batch size B_crit twice the batch nearly halves the steps, far above it gains nothing. The
gradient noise scale (app/training/noise_scale.py) predicts B_crit; both are shown, since they can differ.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.sweep.search import Search
from experiments.sweep.trials import BATCH, FAILURES, RATE, SEED, Trial


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

    @property
    def name(self) -> str:
        """The rule of thumb it agrees with; undecided where the interval is too wide to tell."""
        if not self.high - self.low <= 1:
            return "undecided"
        rules = {"square root": 0.5, "linear": 1.0, "constant": 0.0}
        return next((name for name, power in rules.items() if abs(self.exponent - power) <= 0.15), "measured exponent")

    def rate(self, batch: float) -> float:
        return float(self.at_one * batch**self.exponent)


@dataclass(frozen=True)
class CriticalBatch:
    """S(B) = least_steps · (1 + batch / B)."""

    batch: float
    low: float
    high: float
    """95 % interval."""
    least_steps: float

    @property
    def interval(self) -> str:
        known = self.high < 1e4 * self.low
        return f"95 %: {self.low:.0f} to {self.high:.0f}" if known else "too few points for an interval"

    def steps(self, batch: float) -> float:
        return self.least_steps * (1 + self.batch / batch)


@dataclass(frozen=True)
class StepTime:
    """Seconds per step = fixed + per_sample · (samples of one worker)."""

    fixed: float
    per_sample: float

    def seconds(self, batch: float, workers: int) -> float:
        return self.fixed + self.per_sample * batch / workers


Way = dict[str, Any]
"""A trial that reached the target: "trial", "values", and until then "seconds"."""


@dataclass
class Answer:
    """Everything that was worked out; `answer.json` holds it."""

    best: dict[str, Any]
    """"trial", "values", "value" (the best of its evaluations), "step" (of that one), "evaluations", "last" value."""
    target: float | None
    rates: list[BestRate]
    rule: ScalingRule | None
    steps: dict[int, float]  # to the target, by batch size
    critical: CriticalBatch | None
    noise: float | None  # gradient noise scale, samples
    time: StepTime | None
    spent: dict[str, float]  # "worker_seconds" of training, "dollars"
    soonest: Way | None
    by_workers: list[dict[str, Any]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        """The numbers among it, for MLflow."""
        found = {
            "answer/lr_exponent": self.rule.exponent if self.rule else None,
            "answer/critical_batch": self.critical.batch if self.critical else None,
            "answer/noise_scale": self.noise,
            "answer/seconds_to_target": self.soonest["seconds"] if self.soonest else None,
            "cost/worker_hours": self.spent["worker_seconds"] / 3600,
            "cost/dollars": self.spent.get("dollars"),
        }
        return {name: value for name, value in found.items() if value is not None}


def best_value(trial: Trial, search: Search, samples: float = math.inf) -> float | None:
    """The best value it reported, up to a number of samples; None: no finite one."""
    found = [v for at, v in trial.curve(search.metric, "samples") if math.isfinite(v) and at <= samples]
    return min(found, key=lambda value: search.sign * value) if found else None


def best_report(trial: Trial, search: Search) -> tuple[int, float] | None:
    """(step, value) of the evaluation whose value is the best; None: no finite one."""
    found = [(step, value) for step, value in trial.curve(search.metric) if math.isfinite(value)]
    return min(found, key=lambda pair: search.sign * pair[1]) if found else None  # type: ignore[return-value]


def last_value(trial: Trial, search: Search) -> float | None:
    """The value of the last evaluation, finite or not; None: there was none."""
    curve = trial.curve(search.metric)
    return curve[-1][1] if curve else None


def ranked(trials: Iterable[Trial], search: Search) -> list[tuple[float, Trial]]:
    """Trials that have a value and did not fail, with their values, the best first."""
    found = [(best_value(trial, search), trial) for trial in trials if trial.status not in FAILURES]
    return sorted(((v, t) for v, t in found if v is not None), key=lambda pair: search.sign * pair[0])


def steps_to(trial: Trial, search: Search, target: float, over: str = "step") -> float | None:
    """Steps (or seconds) until the metric passed the target, between two reports by interpolation; None: never."""
    before: tuple[float, float] | None = None
    for at, value in trial.curve(search.metric, over):
        if math.isfinite(value) and search.sign * value <= search.sign * target:
            if before is None or value == before[1]:
                return at
            return before[0] + (at - before[0]) * (before[1] - target) / (before[1] - value)
        before = (at, value) if math.isfinite(value) else None
    return None


def best_rates(trials: Iterable[Trial], search: Search) -> list[BestRate]:
    """The best learning rate of every batch size that three or more were tried at: the vertex of the parabola through
    the best point and its neighbours, over the logarithm of the rate. Seeds are averaged over."""
    by_batch: dict[int, dict[float, dict[str, list[Trial]]]] = {}
    for trial in trials:
        if best_value(trial, search) is not None and {RATE, BATCH} <= trial.values.keys():
            alike = str(sorted((key, str(value)) for key, value in trial.values.items() if key != SEED))
            points = by_batch.setdefault(int(trial.values[BATCH]), {}).setdefault(float(trial.values[RATE]), {})
            points.setdefault(alike, []).append(trial)
    found = []
    for batch, rates in sorted(by_batch.items()):
        if len(rates) >= 3:
            best = {
                r: min(points.values(), key=lambda p: search.sign * _mean(p, search)) for r, points in rates.items()
            }
            found.append(_best_rate(batch, best, search))
    return found


def _mean(alike: Sequence[Trial], search: Search, samples: float = math.inf) -> float:
    """Of trials that differ in their seed at most; nan: none has a value."""
    found = [v for trial in alike if (v := best_value(trial, search, samples)) is not None]
    return sum(found) / len(found) if found else math.nan


def _best_rate(batch: int, tried: dict[float, list[Trial]], search: Search) -> BestRate:
    rates = sorted(tried)
    i = min(range(len(rates)), key=lambda i: search.sign * _mean(tried[rates[i]], search))
    edge, near = i in (0, len(rates) - 1), rates[max(0, i - 1) : i + 2]
    # One that was stopped early is compared with what the others had reached by then.
    shortest = min(trial.last["samples"] for rate in near for trial in tried[rate])
    then = [search.sign * _mean(tried[rate], search, shortest) for rate in near]
    best = rates[i] if edge or not all(map(math.isfinite, then)) else _vertex(near, then)
    return BestRate(batch, best, _mean(tried[rates[i]], search), edge)


def _vertex(rates: Sequence[float], values: Sequence[float]) -> float:
    """Of the parabola through three points, within their range."""
    x = [math.log(rate) for rate in rates]
    a, b, _ = np.polyfit(x, values, 2)
    return math.exp(min(max(-b / (2 * a) if a > 0 else x[1], x[0]), x[2]))


def scaling_rule(rates: Sequence[BestRate]) -> ScalingRule | None:
    """The power law through the best learning rates; those at the edge of what was tried are left out where two
    others remain. None with fewer than two batch sizes."""
    inner = [r for r in rates if not r.edge]
    used = inner if len(inner) >= 2 else list(rates)
    if len(used) < 2:
        return None
    x, y = np.log([r.batch for r in used]), np.log([r.rate for r in used])
    exponent, intercept = np.polyfit(x, y, 1)
    half = math.inf
    if len(inner) > 2:  # a best rate at the edge is no evidence of a rule
        from scipy import stats

        left = y - (exponent * x + intercept)
        error = math.sqrt(float(left @ left) / (len(used) - 2) / float(((x - x.mean()) ** 2).sum()))
        half = float(stats.t.ppf(0.975, len(used) - 2)) * error
    return ScalingRule(float(exponent), math.exp(intercept), float(exponent - half), float(exponent + half))


def fewest_steps(trials: Iterable[Trial], search: Search, target: float) -> dict[int, float]:
    """For every batch size the fewest steps in which a trial reached the target."""
    found: dict[int, float] = {}
    for trial in trials:
        steps, batch = steps_to(trial, search, target), trial.values.get(BATCH)
        if steps is not None and batch is not None:
            found[int(batch)] = min(steps, found.get(int(batch), math.inf))
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


def noise_scale(trials: Iterable[Trial]) -> float | None:
    """The median of the gradient noise scales that trials measured last, in samples."""
    found = [trial.last.get("metrics", {}).get("train/noise_scale", math.nan) for trial in trials]
    finite = [value for value in found if math.isfinite(value) and value > 0]
    return float(np.median(finite)) if finite else None


def speeds(trials: Iterable[Trial]) -> list[tuple[float, float]]:
    """Samples of one worker, and seconds, of a step of each trial."""
    lasts = [trial.last for trial in trials if trial.last.get("seconds", 0) > 0]
    return [(r["samples"] / r["step"] / r["workers"], r["seconds"] / r["step"]) for r in lasts]


def step_time(trials: Iterable[Trial]) -> StepTime | None:
    """Neither part is negative; relative errors count. None where nothing was measured."""
    from scipy import optimize

    if not (found := speeds(trials)):
        return None
    samples, seconds = np.array(found).T
    matrix = np.stack([np.ones_like(samples), samples], axis=1) / seconds[:, None]
    (fixed, per_sample), _ = optimize.nnls(matrix, np.ones_like(seconds))
    return StepTime(float(fixed), float(per_sample))


def fair_target(trials: Iterable[Trial], search: Search) -> float | None:
    """A target that every batch size reaches that was trained to the end: the worst of the best values of each. With
    one such batch size, within 5 % of the best value there is. None without a single value."""
    best: dict[int, float] = {}
    for value, trial in ranked(trials, search):
        if trial.status in ("finished", "reached"):
            best.setdefault(int(trial.values.get(BATCH, 0)), value)
    if not best:
        return None
    worst = max(best.values(), key=lambda value: search.sign * value)
    return worst if len(best) > 1 else worst + 0.05 * search.sign * abs(worst)
