"""Early stopping by losses over the same samples: what is stopped, and how often wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from ray.tune.schedulers import TrialScheduler

from experiments.sweep.paired import (
    MISTAKES,
    PIECES,
    Branch,
    Comparisons,
    better_branch,
    difference_at,
)
from experiments.sweep.paired_scheduler import PairedScheduler
from experiments.sweep.trials import RATE, SEED

pytestmark = pytest.mark.pure

Floats = np.ndarray[Any, np.dtype[np.float64]]
RATES = tuple(1e-4 * 2**number for number in range(5))
REPORTS = 4
STEPS = REPORTS * PIECES


class NamedTrial:
    """What the scheduler asks of a trial of Tune's."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config

    def __str__(self) -> str:
        return self.name


def run_sweep(curves: Mapping[tuple[float, int], Floats]) -> dict[tuple[float, int], int]:
    """The last step of each trial, by the scheduler, if trials run one after another.

    Args:
        curves: The training losses of each trial by step, by its rate and seed.
    """
    rates = sorted({rate for rate, _ in curves})
    seeds = len({seed for _, seed in curves})
    scheduler = PairedScheduler(Comparisons(rates=rates, seeds=seeds, looks=REPORTS - 1))
    last_steps = {}
    for (rate, seed), curve in curves.items():
        trial: Any = NamedTrial(f"{rate}-{seed}", {RATE: rate, SEED: seed})
        for step in range(PIECES, STEPS + 1, PIECES):
            losses = [(each, float(curve[each - 1])) for each in range(step - PIECES + 1, step + 1)]
            result = {"step": step, "steps": STEPS, "losses": losses}
            last_steps[rate, seed] = step
            if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                break
    return last_steps


def noise(random: np.random.Generator, correlation: float) -> Floats:
    """Noise of one branch that is correlated from step to step, with the deviation 1."""
    values = random.normal(size=STEPS)
    for step in range(1, STEPS):
        fresh = np.sqrt(1 - correlation**2) * values[step]
        values[step] = correlation * values[step - 1] + fresh
    return values


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_settings_that_do_not_differ_are_stopped_in_at_most_one_case_in_twenty(
    correlation: float,
) -> None:
    """By the scheduler, with two seeds, of which one is enough to stop a setting."""
    random = np.random.default_rng(7)
    sweeps = 200
    mistaken = 0
    for _ in range(sweeps):
        curves: dict[tuple[float, int], Floats] = {}
        for seed in range(2):
            samples = 10 * random.normal(size=STEPS)  # what they do is the same for all rates
            curves |= {(rate, seed): samples + noise(random, correlation) for rate in RATES}
        last_steps = run_sweep(curves)
        mistaken += len({rate for (rate, _), step in last_steps.items() if step < STEPS})
    assert mistaken / (sweeps * len(RATES)) <= MISTAKES


def test_a_rate_that_is_worse_is_stopped_though_samples_vary_more() -> None:
    random = np.random.default_rng(8)
    sweeps = 100
    saved = 0.0
    for _ in range(sweeps):
        samples = 10 * random.normal(size=STEPS)
        worse = dict(zip(RATES, (0.0, 0.0, 0.0, 3.0, 3.0), strict=True))
        last_steps = run_sweep(
            {(rate, 0): samples + noise(random, 0.3) + worse[rate] for rate in RATES}
        )
        saved += sum(STEPS - last_steps[rate, 0] for rate in RATES[3:]) / (2 * STEPS)
    assert saved / sweeps > 0.5, "of the steps of the rates that are worse"


def shrinking(step: Floats) -> Floats:
    """A difference that is gone after half of the steps, and then has the other sign."""
    return 4.0 - 8.0 * step / STEPS


def steady(step: Floats) -> Floats:
    return np.full_like(step, 4.0)


@pytest.mark.parametrize(
    ("difference", "rates", "is_stopped"),
    [
        (steady, (1e-4, 4e-4), True),
        (shrinking, (1e-4, 4e-4), False),
        (steady, (1e-4, 2e-4), False),  # next to the better one
    ],
)
def test_a_difference_that_goes_away_and_a_neighbour_stop_nothing(
    difference: Callable[[Floats], Floats], rates: tuple[float, float], is_stopped: bool
) -> None:
    random = np.random.default_rng(9)
    step = np.arange(1, STEPS + 1, dtype=np.float64)
    comparisons = Comparisons(rates=RATES, seeds=1, looks=REPORTS - 1)
    curves = [noise(random, 0.0), noise(random, 0.0) + difference(step)]
    first, second = (
        Branch(
            rate=rate,
            last_step=STEPS,
            losses={number: float(curve[number - 1]) for number in range(1, PIECES + 1)},
        )
        for rate, curve in zip(rates, curves, strict=True)
    )
    assert (better_branch(second, [first], comparisons) is first) == is_stopped
    assert better_branch(first, [second], comparisons) is None


def test_a_branch_is_not_compared_with_one_that_is_not_as_far() -> None:
    comparisons = Comparisons(rates=RATES, seeds=1, looks=1)
    better = Branch(rate=1e-4, last_step=STEPS, losses=dict.fromkeys(range(1, 63), 0.0))
    worse = Branch(rate=1.6e-3, last_step=STEPS, losses=dict.fromkeys(range(1, 65), 9.0))
    assert better_branch(worse, [better], comparisons) is None
    better.losses |= {63: 0.0, 64: 0.0}
    assert better_branch(worse, [better], comparisons) is better


def test_few_losses_and_losses_that_are_not_finite_stop_nothing() -> None:
    comparisons = Comparisons(rates=RATES, seeds=1, looks=1)
    for losses in ({}, {1: 9.0}, dict.fromkeys(range(1, 9), 9.0), {1: float("nan"), 2: 9.0}):
        worse = Branch(rate=1.6e-3, last_step=STEPS, losses=dict(losses))
        better = Branch(rate=1e-4, last_step=STEPS, losses=dict.fromkeys(losses, 0.0))
        assert better_branch(worse, [better], comparisons) is None


def test_a_difference_goes_on_along_a_line() -> None:
    steps = np.arange(10.0)
    assert difference_at(20.0, steps, 3.0 - 0.1 * steps) == pytest.approx(1.0)


def test_a_neighbour_is_kept_and_a_setting_is_stopped_with_all_its_seeds() -> None:
    rows = [(1e-4, 0, 1.0), (4e-4, 0, 2.0), (2e-4, 0, 3.0), (8e-4, 1, 9.0), (4e-4, 1, 1.0)]
    curves = {(rate, seed): np.full(STEPS, loss) for rate, seed, loss in rows}
    last_steps = run_sweep(curves)
    assert last_steps == {
        (1e-4, 0): STEPS,
        (4e-4, 0): PIECES,
        (2e-4, 0): STEPS,  # next to the better one
        (8e-4, 1): STEPS,  # another seed has other samples
        (4e-4, 1): PIECES,  # stopped with the first seed
    }
    assert run_sweep(curves) == last_steps, "the same again from repeated reports"
