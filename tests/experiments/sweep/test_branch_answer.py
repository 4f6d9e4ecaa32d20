"""The answer of branches is right as often as it says, on losses whose truth is known."""

import bisect
import functools
import math
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from experiments.sweep.branches import (
    BranchBatch,
    Gain,
    Losses,
    answer_of,
    gains,
    losses_of,
    residual_variance,
    shown_difference,
)
from experiments.sweep.search import Search
from experiments.sweep.trials import Trial

pytestmark = pytest.mark.pure
Floats = npt.NDArray[np.float64]
BATCHES = [8, 16, 32, 64, 128, 256]
CURVATURES = np.geomspace(0.01, 1.0, 12)
"""Of a quadratic loss."""
SAMPLES = 8192
RATES = np.geomspace(1.0 / 256, 1.0, 9)
"""Among them are the best ones of all batches."""


def loss_of_quadratic(batch: int, rates: Floats, gradient_noise: float) -> Floats:
    """The expected loss of SGD on a quadratic after SAMPLES samples, for each rate, in closed form.

    In a direction of curvature h the mean square distance v of a step of rate r becomes
    (1 - r h)² v + r² · gradient_noise · h / batch.
    """
    shrink = (1 - rates[:, None] * CURVATURES) ** 2
    added = rates[:, None] ** 2 * gradient_noise * CURVATURES / batch
    steps = SAMPLES // batch
    remaining = shrink**steps
    square = remaining + added * (1 - remaining) / np.maximum(1 - shrink, 1e-12)
    return (0.5 * CURVATURES * square).sum(axis=1)


@functools.cache
def at_best_rate(batch: int, gradient_noise: float) -> float:
    return float(loss_of_quadratic(batch, np.geomspace(1e-2, 1.9, 120), gradient_noise).min())


def branches_of_quadratic(
    gradient_noise: float,
    noise: float,
    *,
    seeds: int,
    random: np.random.Generator,
    rates: Floats = RATES,
) -> Losses:
    """Losses of branches on a quadratic, with noise of a known size, and more that seeds share."""
    shared = random.normal(scale=5 * noise, size=seeds)
    losses = {}
    for batch in BATCHES:
        expected = loss_of_quadratic(batch, rates, gradient_noise)
        for rate, loss in zip(rates, expected, strict=True):
            drawn = loss + shared + random.normal(scale=noise, size=seeds)
            losses[batch, float(rate)] = list(drawn)
    return losses


def true_critical_batch(gradient_noise: float, noise: float) -> int:
    """The batch whose loss is above that of the smallest by the noise between two branches."""
    limit = at_best_rate(BATCHES[0], gradient_noise) + math.sqrt(2) * noise

    def is_worse(batch: int) -> bool:
        return at_best_rate(batch, gradient_noise) > limit

    candidates = range(BATCHES[0], BATCHES[-1] + 1)
    return candidates[bisect.bisect_left(candidates, True, key=is_worse) - 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "rates"),
    [
        pytest.param(3, RATES, id="3 seeds"),
        pytest.param(5, RATES, id="5 seeds"),
        pytest.param(3, RATES[:4], id="rates too low for large batches"),
        pytest.param(3, RATES[6:], id="rates too high for small batches"),
        pytest.param(3, RATES[3:5], id="two rates"),
    ],
)
def test_the_true_critical_batch_is_inside_the_interval_in_80_percent_of_cases(
    seeds: int, rates: Floats
) -> None:
    random = np.random.default_rng(seeds)
    inside = []
    for gradient_noise, size in product((0.3, 1.0, 3.0, 10.0, 30.0), (0.05, 0.1, 0.2, 0.4, 0.8)):
        spread = at_best_rate(256, gradient_noise) - at_best_rate(8, gradient_noise)
        noise = spread * size / math.sqrt(2)
        truth = true_critical_batch(gradient_noise, noise)
        losses = branches_of_quadratic(
            gradient_noise, noise, seeds=seeds, random=random, rates=rates
        )
        answer = answer_of(losses)
        assert answer is not None and answer.critical is not None
        assert answer.noise is not None
        inside.append(answer.critical.low - 1 <= truth <= answer.critical.high + 1)
    assert len(inside) >= 20
    assert sum(inside) >= 0.8 * len(inside)


@pytest.mark.slow
@pytest.mark.parametrize(("batches", "rates", "seeds"), [(2, 1, 3), (4, 1, 5), (6, 3, 3)])
def test_without_a_difference_a_batch_is_called_worse_in_at_most_one_of_20(
    batches: int, rates: int, seeds: int
) -> None:
    random = np.random.default_rng(batches)
    claims = 0
    for _ in range(1000):
        shared = 3 * random.normal(size=seeds)
        losses = [shared + random.normal(size=(rates, seeds)) for _ in range(batches)]
        variance, freedom = residual_variance(losses)
        at_best = [array.mean(axis=1).min() for array in losses]
        shown = shown_difference(variance, freedom=freedom, seeds=seeds, batches=batches)
        claims += max(at_best) - min(at_best) > shown
    assert claims <= 50


def parabolas(noise: float, seeds: int, *, excess: float, case: int = 1) -> Losses:
    """Losses with a best rate of 0.001 · √batch, which rise by `excess` at each doubling."""
    random = np.random.default_rng(case)
    losses = {}
    for number, batch in enumerate((16, 32, 64, 128)):
        best = math.log(0.001 * batch**0.5)
        for rate in 0.001 * 2.0 ** np.arange(-1, 7):
            loss = 2 + 0.05 * (math.log(rate) - best) ** 2 + excess * number
            losses[batch, float(rate)] = list(loss + noise * random.normal(size=seeds))
    return losses


@pytest.mark.slow
def test_best_rates_and_their_exponent_are_inside_their_intervals_in_80_percent_of_cases() -> None:
    exponents = []
    rates = []
    for case in range(40):
        answer = answer_of(parabolas(0.004, 3, excess=0.0, case=case))
        assert answer is not None and answer.exponent is not None
        exponents.append(answer.exponent.low < 0.5 < answer.exponent.high)
        assert answer.exponent.high - answer.exponent.low < 0.4
        for each in answer.batches:
            assert each.rate is not None and not each.edge
            rates.append(each.rate.low < 0.001 * each.batch**0.5 < each.rate.high)
    assert sum(exponents) >= 0.8 * len(exponents)
    assert sum(rates) >= 0.8 * len(rates)
    assert answer.is_open, "the largest batch is as good as the smallest"


def test_what_is_not_decided_says_how_many_seeds_would_decide() -> None:
    one_seed = answer_of(parabolas(0.004, 1, excess=0.01))
    assert one_seed is not None
    assert (one_seed.noise, one_seed.critical, one_seed.more_seeds) == (None, None, 2)
    few = answer_of(parabolas(0.01, 2, excess=0.006))
    assert few is not None and few.more_seeds
    many = answer_of(parabolas(0.01, 60, excess=0.009))
    assert many is not None and many.is_decided
    clear = answer_of(parabolas(0.001, 3, excess=0.05))
    assert clear is not None and clear.is_decided and clear.critical is not None
    assert clear.critical.high < 32
    assert [each.verdict for each in clear.batches] == ["best", "worse", "worse", "worse"]
    assert [each.batch for each in clear.usable()] == [16]


def test_a_small_batch_without_a_rate_that_suits_it_does_not_hide_the_critical_one() -> None:
    """As digits@150 had it: the rates are far too high for a batch of 16."""
    losses = {
        (16, 0.001): [0.073, 0.120],
        (16, 0.002): [0.105, 0.129],
        (16, 0.004): [0.109, 0.154],
        (128, 0.0005): [0.0600, 0.0610],
        (128, 0.001): [0.0590, 0.0598],
        (128, 0.002): [0.0609, 0.0634],
        (512, 0.002): [0.0756, 0.0758],
        (512, 0.004): [0.0706, 0.0701],
        (512, 0.008): [0.0790, 0.0762],
    }
    answer = answer_of(losses)
    assert answer is not None and answer.critical is not None
    assert [each.verdict for each in answer.batches] == ["worse", "best", "worse"]
    assert 128 <= answer.critical.value < 256 and not answer.is_open
    assert [each.batch for each in answer.usable()] == [128]
    assert answer.edge_batches == [16]
    assert answer.critical.low == 16, "with lower rates it may be the best by far"
    assert not answer.is_decided
    inside = answer_of(losses | {(16, 0.0005): [0.080, 0.121]})
    assert inside is not None and inside.critical is not None
    assert inside.edge_batches == [] and inside.critical.low > 100


def test_a_large_batch_without_a_rate_that_suits_it_may_be_the_critical_one() -> None:
    """As digits@300 had it: 256 is as good as 128 at the rate that follows."""
    losses = {
        (128, 0.008): [0.0541, 0.0538],
        (128, 0.016): [0.0510, 0.0509],
        (128, 0.032): [0.0533, 0.0535],
        (256, 0.008): [0.0573, 0.0574],
        (256, 0.016): [0.0565, 0.0563],
        (256, 0.032): [0.0584, 0.0583],
    }
    inside = answer_of(losses)
    assert inside is not None and inside.critical is not None
    assert inside.critical.high < 200 and not inside.is_open
    at_edge = answer_of({cell: each for cell, each in losses.items() if cell != (256, 0.032)})
    assert at_edge is not None and at_edge.critical is not None
    assert [each.verdict for each in at_edge.batches] == ["best", "worse"]
    assert (at_edge.edge_batches, at_edge.critical.high) == ([256], 256)
    assert at_edge.is_open, "the critical batch may be larger still"


def test_a_rate_near_zero_where_nothing_varies_is_not_the_noise() -> None:
    """As digits@300 had it: the loss of most batches falls as their rates do."""
    random = np.random.default_rng(1)
    inside = {(256, rate): 0.053 + 0.002 * random.normal(size=3) for rate in (0.016, 0.032, 0.064)}
    inside[256, 0.032] -= 0.004
    flat = {
        (batch, rate): 0.053 + 0.1 * rate + 0.01 * rate * random.normal(size=3)
        for batch in (16, 32, 512)
        for rate in (3e-5, 6e-5, 1.2e-4)
    }
    answer = answer_of({cell: list(losses) for cell, losses in (flat | inside).items()})
    assert answer is not None and answer.noise is not None
    assert answer.edge_batches == [16, 32, 512]
    assert answer.noise > 0.001
    only_flat = answer_of({cell: list(losses) for cell, losses in flat.items()})
    assert only_flat is not None and only_flat.noise is not None
    assert only_flat.noise < 0.001, "nothing else shows any"


def test_losses_are_those_of_branches_that_saw_all_samples() -> None:
    def trial(batch: int, rate: float, seed: int, loss: float, status: str = "finished") -> Trial:
        values = {"train.global_batch_size": batch, "optimizer.lr": rate, "train.seed": seed}
        report = {"step": 1, "samples": 64, "metrics": {"eval/loss": loss}}
        return Trial(0, "t", values, status=status, reports=[report])  # type: ignore[list-item]

    trials = [trial(8, 0.1, seed, 1.0 + seed) for seed in (0, 1)]
    trials += [trial(8, 0.2, 0, 3.0), trial(8, 0.2, 1, 9.0, "diverged")]
    losses = losses_of(trials, Search(space={}), {})
    assert losses[8, 0.1] == [1.0, 2.0]
    assert losses[8, 0.2][0] == 3.0 and math.isnan(losses[8, 0.2][1])
    answer = answer_of(losses)
    assert answer is not None
    (only,) = answer.batches
    assert (only.best_rate, only.loss, only.edge) == (pytest.approx(0.1), 1.5, True)
    assert answer.critical is None and answer.more_seeds == 0
    assert losses_of([Trial(0, "t", {"optimizer.lr": 0.1})], Search(space={}), {}) == {}


def test_the_quickest_usable_batch_is_named_for_each_number_of_workers() -> None:
    def row(batch: int) -> BranchBatch:
        return BranchBatch(
            batch=batch,
            rate=None,
            edge=False,
            best_rate=batch / 1000,
            loss=1.0,
            excess=0.0,
            verdict="within noise",
        )

    # A step takes 1 s and a second for each 16 samples of a worker.
    seconds = {(b, w): 1 + b / 16 / w for b in (16, 32, 64) for w in (1, 4)}
    one, four = gains([row(16), row(32)], seconds, samples=3200, present_batch=16, price=2.0)
    assert one == Gain(
        workers=1,
        batch=32,
        rate=0.032,
        steps=100,
        hours=300 / 3600,
        dollars=pytest.approx(600 / 3600),
        times_faster=pytest.approx(400 / 300),
    )
    assert (four.batch, four.times_faster) == (32, pytest.approx(200 * 1.25 / (100 * 1.5)))
    assert gains([], seconds, samples=3200, present_batch=16, price=None) == []
