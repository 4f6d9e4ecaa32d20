"""The best settings again with other seeds: which of them is best, and by how much.

The best of many trials is in part the luckiest one: its value is too good, and another setting may
be better. So the best settings are trained again, all with the same new seeds, and these values
alone judge them. A setting is a point of the search space without its seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.sweep import analysis
from experiments.sweep.branches import residual_variance, shown_difference
from experiments.sweep.spec import SOONEST, Sweep
from experiments.sweep.trials import FAILURES, SEED, Trial, setting_of, trial_name

INTERVAL = 0.8
"""What share of the intervals contains the true mean."""
POOLED = 5
"""Settings whose noise is pooled: the best ones, since far worse ones vary more."""
MOST_SEEDS = 64
"""More seeds than this are not proposed."""


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """A setting that several seeds have judged.

    Attributes:
        trial: The trial of the search that had it, the best one if there were several.
        values: The values of its keys, without the seed.
        by_seed: For each seed what it gave: the metric, or seconds to the target where the soonest
            is wanted.
        mean: The mean over the seeds; infinitely bad if one of them gave nothing.
        low: The lower end of the mean's 80 % interval; None with one seed or without a mean.
        high: Its upper end.
        verdict: "best", "worse" (by more than chance would make of settings that do not differ,
            with one mistake in 20), or "alike".
    """

    trial: str
    values: dict[str, object]
    by_seed: dict[int, float]
    mean: float
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What several seeds say about the best settings.

    Attributes:
        settings: The best one first.
        seeds: How many seeds have judged each.
        more_seeds: How many more would tell the best from the second; 0 if they are told apart,
            None if more than `MOST_SEEDS` would be needed, or the noise is not known.
    """

    settings: list[Confirmed]
    seeds: int
    more_seeds: int | None

    @property
    def best(self) -> Confirmed:
        return self.settings[0]


def plan_confirmation(sweep: Sweep, trials: Iterable[Trial]) -> list[Trial]:
    """The trials that train the best settings of a search again.

    Args:
        sweep: Says how many settings, and with how many seeds.
        trials: All trials of the sweep; those of the search have ended.

    Returns:
        Trials that have not run yet. Those that an earlier start has planned are not among them.
    """
    all_trials = list(trials)
    cost = _cost(sweep)
    candidates = [
        trial
        for trial in all_trials
        if not trial.confirms
        and trial.status in ("finished", "reached")
        and math.isfinite(cost(trial))
    ]
    candidates.sort(key=lambda trial: (cost(trial), trial.index))
    best_of_setting: dict[str, Trial] = {}
    for trial in candidates:
        best_of_setting.setdefault(setting_of(trial.values), trial)
    planned_values = [trial.values for trial in all_trials if trial.confirms]
    index = max((trial.index for trial in all_trials), default=-1)
    planned = []
    first_seed = sweep.experiment.train.seed + 1
    for best in list(best_of_setting.values())[: sweep.settings_to_confirm]:
        for seed in range(first_seed, first_seed + sweep.confirm_seeds):
            values = best.values | {SEED: seed}
            if values in planned_values:
                continue
            index += 1
            name = f"{trial_name(index, values)}-seed{seed}"
            planned.append(Trial(index, name, values, confirms=best.name))
    return planned


def confirmation_of(sweep: Sweep, trials: Iterable[Trial]) -> Confirmation | None:
    """What several seeds say: those that have confirmed, or those of the search space.

    Args:
        sweep: The sweep.
        trials: Its trials.

    Returns:
        None if no setting has more than the seed that chose it.
    """
    all_trials = list(trials)
    by_name = {trial.name: trial for trial in all_trials}
    cost = _cost(sweep)
    has_own_seeds = SEED in sweep.space
    costs: dict[str, dict[int, float]] = {}
    names: dict[str, str] = {}
    for trial in all_trials:
        judges = not trial.confirms if has_own_seeds else bool(trial.confirms)
        if not judges or not trial.ended or trial.status == "pruned":
            continue
        setting = setting_of(trial.values)
        seed = int(trial.values[SEED])
        costs.setdefault(setting, {})[seed] = cost(trial)
        searched = by_name.get(trial.confirms, trial)
        current = by_name.get(names.get(setting, ""))
        if current is None or cost(searched) < cost(current):
            names[setting] = searched.name
    seeds = _common_seeds(costs.values())
    if not seeds or (has_own_seeds and len(seeds) < 2):
        return None
    rows = {
        setting: [by_seed[seed] for seed in seeds]
        for setting, by_seed in costs.items()
        if set(seeds) <= by_seed.keys()
    }
    order = sorted(
        rows, key=lambda setting: (np.mean(rows[setting]), by_name[names[setting]].index)
    )
    table = np.array([rows[setting] for setting in order])
    if not math.isfinite(float(table[0].mean())):
        return None
    trials_in_order = [by_name[names[setting]] for setting in order]
    return _judged(sweep, trials_in_order, seeds=seeds, table=table)


def _cost(sweep: Sweep) -> Callable[[Trial], float]:
    """What is compared of a trial: lower is better, infinite is none."""

    def value_cost(trial: Trial) -> float:
        value = analysis.best_value(trial, sweep)
        if value is None or trial.status in FAILURES:
            return math.inf
        return sweep.sign * value

    def seconds_to_target(trial: Trial) -> float:
        assert sweep.target is not None
        seconds = analysis.reached_at(trial, sweep, sweep.target, "seconds")
        return math.inf if seconds is None else seconds

    return seconds_to_target if sweep.next == SOONEST else value_cost


def _common_seeds(by_seed: Iterable[Mapping[int, float]]) -> list[int]:
    """The seeds that most settings have: those of the setting with the most of them."""
    most: set[int] = set()
    for costs in by_seed:
        if len(costs) > len(most):
            most = set(costs)
    return sorted(most)


def _judged(
    sweep: Sweep,
    trials: Sequence[Trial],
    *,
    seeds: Sequence[int],
    table: np.ndarray,
) -> Confirmation:
    """Means, intervals and verdicts.

    Args:
        sweep: The sweep.
        trials: A trial of each setting, the best setting first.
        seeds: The seeds.
        table: Costs, (settings, seeds).
    """
    sign = 1 if sweep.next == SOONEST else sweep.sign
    count = len(seeds)
    sound = table[np.isfinite(table).all(axis=1)]
    nearest = sound[:POOLED]
    variance, freedom = residual_variance([row[None] for row in nearest])
    smallest_shown = shown_difference(variance, freedom=freedom, seeds=count, batches=len(sound))
    half_width = _half_width(nearest)
    settings = []
    for number, (trial, row) in enumerate(zip(trials, table, strict=True)):
        excess = float(row.mean() - table[0].mean())
        verdict = "worse" if excess > smallest_shown or math.isinf(excess) else "alike"
        mean = sign * float(row.mean())
        has_interval = half_width is not None and math.isfinite(mean)
        settings.append(
            Confirmed(
                trial=trial.name,
                values={key: value for key, value in trial.values.items() if key != SEED},
                by_seed={seed: sign * float(cost) for seed, cost in zip(seeds, row, strict=True)},
                mean=mean,
                low=mean - half_width if has_interval and half_width is not None else None,
                high=mean + half_width if has_interval and half_width is not None else None,
                verdict=verdict if number else "best",
            )
        )
    more_seeds: int | None = 0
    if len(sound) > 1 and settings[1].verdict == "alike":
        gap = float(sound[1].mean() - sound[0].mean())
        more_seeds = _more_seeds(gap, variance, settings=len(sound), seeds=count)
    return Confirmation(settings=settings, seeds=count, more_seeds=more_seeds)


def _half_width(table: np.ndarray) -> float | None:
    """Half the width of a mean's interval, by the variance within settings, which they share."""
    settings, seeds = table.shape
    freedom = settings * (seeds - 1)
    if not freedom:
        return None
    from scipy import stats

    variance = float(table.var(axis=1, ddof=1).mean())
    quantile = float(stats.t.ppf(0.5 + INTERVAL / 2, freedom))
    return quantile * math.sqrt(variance / seeds)


def _more_seeds(gap: float, variance: float, *, settings: int, seeds: int) -> int | None:
    """How many more seeds would show this gap, if it and the noise stayed what they are."""
    if not variance or seeds < 2:
        return None
    for count in range(seeds + 1, MOST_SEEDS + 1):
        freedom = (min(settings, POOLED) - 1) * (count - 1)
        shown = shown_difference(variance, freedom=freedom, seeds=count, batches=settings)
        if gap > shown:
            return count - seeds
    return None
