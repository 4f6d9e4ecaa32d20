"""Which of several layouts comes first, by its speed and by whether it fits."""

from dataclasses import replace

import pytest

from app.planner.output import between
from app.planner.plan import ranked
from app.planner.read import Reader
from tests.app.planner.conftest import gpus, plan_of


def test_a_simpler_layout_within_the_range_of_the_fastest_comes_first(
    small: Reader,
) -> None:
    plan = plan_of(
        small, gpus(8), "train.precision=bf16", fixed_keys=("train.activation_checkpointing",)
    )
    row = plan.rows[0]
    assert row.verdict == "fits" and row.speed_range[0] < 1 < row.speed_range[1]
    low, high = plan.layout(row)["tokens_per_second_range"]
    assert low < plan.layout(row)["tokens_per_second"] < high
    for share, verdict in ((1.2, "fits"), (1.05, "close"), (0.95, "close"), (0.8, "does not fit")):
        assert replace(row, capacity=share * row.memory_bytes).verdict == verdict
    beyond_host = replace(row, host_memory_bytes=1.1, host_bytes=1.0)
    assert not beyond_host.fits and beyond_host.verdict == "does not fit"
    assert between(6.1e3, 7e3) == "6.1–7.0 k" and between(95, 120) == "95–120"
    # A range that is wide does not begin at 0.0 k.
    assert between(48, 9.7e3) == "48–9.7 k" and between(0.2, 30) == "<1–30"
    assert between(1.2e3, 3e6) == "1.2 k–3.0 M"
    simple = min((row for row in plan.rows if row.fits), key=lambda row: row.candidate.complexity)
    complex_ = next(
        row
        for row in plan.rows
        if row.fits and row.candidate.complexity > simple.candidate.complexity
    )
    slow = replace(simple, seconds={"compute": 1.0})
    barely_faster = replace(complex_, seconds={"compute": 0.98}, speed_range=(0.9, 1.1))
    assert ranked([slow, barely_faster])[0] is slow
    much_faster = replace(complex_, seconds={"compute": 0.6}, speed_range=(0.9, 1.1))
    assert ranked([slow, much_faster])[0] is not slow
    uncertain = replace(complex_, seconds={"compute": 0.9}, speed_range=(0.5, 2.0))
    assert ranked([slow, uncertain])[0] is not slow, "wide ranges alone do not make layouts equal"


@pytest.mark.parametrize(
    ("share", "gain", "first"),
    [
        (0.5, 0.9, "fast"),
        (0.85, 0.9, "fast"),
        (0.97, 0.9, "safe"),
        (0.97, 0.5, "fast"),
        (0.99, 0.9, "safe"),
        (1.2, 0.1, "safe"),
    ],
)
def test_speed_is_weighed_by_the_probability_that_a_layout_fits(
    small: Reader, share: float, gain: float, first: str
) -> None:
    """The fast layout takes `gain` of the safe one's time and `share` of the GPU's memory."""
    fixed_keys = ("train.activation_checkpointing",)
    row = plan_of(small, gpus(2), "train.precision=bf16", fixed_keys=fixed_keys).rows[0]
    safe = replace(row, seconds={"compute": 1.0}, memory={"parameters": 0.3 * row.capacity})
    fast = replace(row, seconds={"compute": gain}, memory={"parameters": share * row.capacity})
    assert safe.fit_probability > 0.999 and 0 <= fast.fit_probability <= 1
    assert (fast.fit_probability > 0.5) == (share < 1)
    assert ranked([fast, safe])[0] is (safe if first == "safe" else fast)
    assert replace(safe, host_memory_bytes=1.2, host_bytes=1.0).fit_probability == 0
