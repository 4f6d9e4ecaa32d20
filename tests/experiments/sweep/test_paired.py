"""Early stopping by losses over the same samples: what is stopped, and how often wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from experiments.sweep.paired import (
    MISTAKES,
    PIECES,
    Branch,
    Comparisons,
    better_branch,
    difference_at,
)

pytestmark = pytest.mark.pure

Floats = np.ndarray[Any, np.dtype[np.float64]]
RATES = tuple(1e-4 * 2**number for number in range(5))
REPORTS = 4
STEPS = REPORTS * PIECES


def run_sweep(curves: Sequence[Floats], rates: Sequence[float] = RATES) -> list[int]:
    """The last step of each trial, if trials run one after another.

    Args:
        curves: The training losses of each trial, by step.
        rates: Its learning rate.
    """
    comparisons = Comparisons(rates=sorted(rates), looks=REPORTS - 1)
    branches: list[Branch] = []
    for rate, curve in zip(rates, curves, strict=True):
        branch = Branch(rate=rate, last_step=STEPS)
        for report in range(REPORTS):
            for step in range(report * PIECES + 1, (report + 1) * PIECES + 1):
                branch.losses[step] = float(curve[step - 1])
            is_last = report == REPORTS - 1
            if not is_last and better_branch(branch, branches, comparisons) is not None:
                break
        branches.append(branch)
    return [branch.step for branch in branches]


def noise(random: np.random.Generator, correlation: float) -> Floats:
    """Noise of one branch that is correlated from step to step, with the deviation 1."""
    values = random.normal(size=STEPS)
    for step in range(1, STEPS):
        fresh = np.sqrt(1 - correlation**2) * values[step]
        values[step] = correlation * values[step - 1] + fresh
    return values


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_rates_that_do_not_differ_are_stopped_in_at_most_one_case_in_twenty(
    correlation: float,
) -> None:
    random = np.random.default_rng(7)
    sweeps = 1000
    mistaken = 0
    for _ in range(sweeps):
        samples = 10 * random.normal(size=STEPS)  # what the samples do is the same for all
        steps = run_sweep([samples + noise(random, correlation) for _ in RATES])
        mistaken += sum(step < STEPS for step in steps)
    assert mistaken / (sweeps * len(RATES)) <= MISTAKES


def test_a_rate_that_is_worse_is_stopped_though_samples_vary_more() -> None:
    random = np.random.default_rng(8)
    saved = 0.0
    sweeps = 100
    for _ in range(sweeps):
        samples = 10 * random.normal(size=STEPS)
        worse = (0.0, 0.0, 0.0, 3.0, 3.0)
        steps = run_sweep([samples + noise(random, 0.3) + each for each in worse])
        saved += sum(STEPS - step for step in steps[3:]) / (2 * STEPS)
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
    comparisons = Comparisons(rates=RATES, looks=REPORTS - 1)
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
    comparisons = Comparisons(rates=RATES, looks=1)
    better = Branch(rate=1e-4, last_step=STEPS, losses=dict.fromkeys(range(1, 63), 0.0))
    worse = Branch(rate=1.6e-3, last_step=STEPS, losses=dict.fromkeys(range(1, 65), 9.0))
    assert better_branch(worse, [better], comparisons) is None
    better.losses |= {63: 0.0, 64: 0.0}
    assert better_branch(worse, [better], comparisons) is better


def test_few_losses_and_losses_that_are_not_finite_stop_nothing() -> None:
    comparisons = Comparisons(rates=RATES, looks=1)
    for losses in ({}, {1: 9.0}, dict.fromkeys(range(1, 9), 9.0), {1: float("nan"), 2: 9.0}):
        worse = Branch(rate=1.6e-3, last_step=STEPS, losses=dict(losses))
        better = Branch(rate=1e-4, last_step=STEPS, losses=dict.fromkeys(losses, 0.0))
        assert better_branch(worse, [better], comparisons) is None


def test_a_difference_goes_on_along_a_line() -> None:
    steps = np.arange(10.0)
    assert difference_at(20.0, steps, 3.0 - 0.1 * steps) == pytest.approx(1.0)


def test_tune_stops_a_trial_and_learns_the_same_again_from_repeated_reports() -> None:
    from ray.tune.schedulers import TrialScheduler

    from experiments.sweep.paired_scheduler import PairedScheduler

    class NamedTrial:
        """What the scheduler asks of Tune's trial."""

        def __init__(self, name: str, config: dict[str, Any]) -> None:
            self.name = name
            self.config = config

        def __str__(self) -> str:
            return self.name

    def report(step: int, loss: float) -> dict[str, Any]:
        losses = [(each, loss) for each in range(step - PIECES + 1, step + 1)]
        return {"step": step, "steps": STEPS, "losses": losses}

    def decisions() -> list[list[str]]:
        comparisons = Comparisons(rates=RATES, looks=REPORTS - 1)
        scheduler = PairedScheduler(comparisons)
        answers = []
        rows = [(1e-4, 0, 1.0), (4e-4, 0, 2.0), (2e-4, 0, 3.0), (8e-4, 1, 9.0), (4e-4, 1, 1.0)]
        for number, (rate, seed, loss) in enumerate(rows):
            config = {"optimizer.lr": rate, "train.seed": seed}
            trial: Any = NamedTrial(f"t{number}", config)
            answers.append(
                [
                    scheduler.on_trial_result(None, trial, report(step, loss))
                    for step in range(PIECES, STEPS + 1, PIECES)
                ]
            )
        return answers

    first = decisions()
    goes_on = [TrialScheduler.CONTINUE] * REPORTS
    stopped = [TrialScheduler.STOP] * (REPORTS - 1) + [TrialScheduler.CONTINUE]
    # A neighbour is kept, another seed has other samples, and the last report ends a trial anyway.
    # The last trial is of a setting that was stopped with the first seed.
    assert first == [goes_on, stopped, goes_on, goes_on, stopped]
    assert decisions() == first
