"""Runs are compared over the same samples, and noise is not mistaken for a difference."""

import math
from pathlib import Path

import numpy as np
import pytest
import trireme

from app.errors import UserError
from app.results.compare import Curve, Floats, compare_curves, mean_interval
from tests.app.run.test_fork import train_base
from tests.running import invoke


def autocorrelated(random: np.random.Generator, count: int, correlation: float) -> Floats:
    """Gaussian numbers of mean 0 and variance 1, each correlated with the one before."""
    # Imported here because each process of `make test` imports this file.
    from scipy.signal import lfilter

    new = random.normal(size=count)
    new[1:] *= math.sqrt(1 - correlation**2)
    return lfilter([1.0], [1.0, -correlation], new)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "correlation"), [(16, 0.0), (50, 0.3), (100, 0.6), (400, 0.8)])
def test_without_a_difference_better_is_said_in_at_most_one_of_20(
    count: int, correlation: float
) -> None:
    random = np.random.default_rng(0)
    claims = {"better": 0, "worse": 0}
    for _ in range(1000):
        _, low, high = mean_interval(autocorrelated(random, count, correlation))
        claims["better"] += high < 0
        claims["worse"] += low > 0
    assert max(claims.values()) <= 50


def test_a_real_difference_is_seen_although_the_losses_vary_more_than_it() -> None:
    random = np.random.default_rng(1)
    difficulty = random.normal(size=100)  # of the samples, which both runs see
    samples = 32.0 * np.arange(1, 101)
    reference = Curve(
        name="a", samples=samples, values=3 + difficulty + 0.01 * random.normal(size=100)
    )
    better = Curve(
        name="b", samples=samples, values=2.98 + difficulty + 0.01 * random.normal(size=100)
    )
    difference = compare_curves(better, reference, share=0.5)
    assert difference.verdict == "better"
    assert difference.low < -0.02 < difference.high
    assert (difference.first_sample, difference.pieces) == (1616, 50)


def test_runs_of_different_batches_are_compared_over_the_same_samples() -> None:
    def loss(samples: Floats) -> Floats:
        return 3 - samples / 10_000

    small = 32.0 * np.arange(1, 401)
    large = 128.0 * np.arange(1, 101)
    means = np.array([loss(small[start : start + 4]).mean() for start in range(0, 400, 4)])
    run = Curve(name="large", samples=large, values=means)
    difference = compare_curves(
        run, Curve(name="small", samples=small, values=loss(small)), share=1.0
    )
    assert difference.mean == pytest.approx(0.0, abs=1e-9)
    assert difference.pieces == 99


def test_runs_without_common_samples_and_few_values_are_said_to_be_so() -> None:
    early = Curve(name="a", samples=np.arange(1.0, 9.0), values=np.ones(8))
    late = Curve(name="b", samples=np.arange(20.0, 29.0), values=np.ones(9))
    with pytest.raises(
        UserError, match="b has logged samples 20 to 28 and a 1 to 8, of which none"
    ):
        compare_curves(late, early, share=0.5)
    assert compare_curves(early, early, share=1.0).verdict == "undecided"


@pytest.mark.usefixtures("own_cache")
def test_forks_are_compared_by_command_and_in_python(tmp_path: Path) -> None:
    base = train_base(tmp_path, "train.steps=4")
    invoke("fork", base, "run.name=slow", "optimizer.lr=1e-6", "train.steps=40")
    run = trireme.load_run(base)
    fast = trireme.fork(
        run, run={"name": "fast"}, optimizer={"lr": 1e-2}, train={"steps": 40}, quiet=True
    )
    assert fast.name == "fast"
    slow = trireme.load_run(tmp_path / "slow")
    assert trireme.compare(slow, fast).loc["fast", "verdict"] == "better"
    answer = invoke("compare", tmp_path / "slow", tmp_path / "fast").stdout
    assert answer.startswith("fast is better than slow: -")
    assert "over samples" in answer
    assert "a comparison needs two runs" in invoke("compare", base, code=2).stderr
    assert "its metrics are" in invoke("compare", base, base, "--metric", "loss", code=2).stderr
