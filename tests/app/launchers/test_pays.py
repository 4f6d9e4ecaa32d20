"""Whether more workers pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.launchers.pays import PAYS, workers_that_pay

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("seconds", "steps_left", "moving_seconds", "expected"),
    [
        ({2: 1.0, 4: 0.5, 8: 0.25}, 1000, 0.0, 8),
        ({2: 1.0, 4: 0.5, 8: 0.4}, 1000, 0.0, 4),  # the second doubling does 1.25 times the work
        ({2: 1.0, 4: 0.7, 8: 0.5}, 1000, 0.0, 2),  # all of it must pay, not its last part
        ({2: 1.0, 3: 0.75}, 1000, 0.0, 3),  # half as many more, of which less is asked
        ({2: 1.0, 4: 0.5}, 1000, 100.0, 4),
        ({2: 1.0, 4: 0.5}, 1000, 200.0, 2),  # the restart takes what they save
        ({2: 1.0, 4: 0.5}, 0, 10.0, 2),
        ({2: 1.0, 4: 1.5, 8: 0.2}, 1000, 0.0, 8),
        ({4: 0.5}, 1000, 0.0, 2),  # of the present number nothing is known
        ({1: 0.1, 2: 1.0}, 1000, 0.0, 2),  # fewer are not looked at
    ],
)
def test_twice_the_workers_pay_if_they_do_half_as_much_again(
    seconds: dict[int, float], steps_left: int, moving_seconds: float, expected: int
) -> None:
    workers = workers_that_pay(
        seconds, present=2, steps_left=steps_left, moving_seconds=moving_seconds
    )
    assert workers == expected


@given(
    st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), st.floats(0.001, 10.0), min_size=1),
    st.integers(1, 10_000),
    st.floats(0.0, 100.0),
)
def test_what_pays_ends_sooner_and_costs_little_more(
    seconds: dict[int, float], steps_left: int, moving_seconds: float
) -> None:
    present = min(seconds)
    workers = workers_that_pay(
        seconds, present=present, steps_left=steps_left, moving_seconds=moving_seconds
    )
    before = steps_left * seconds[present]
    after = steps_left * seconds[workers] + moving_seconds
    doublings = (workers // present).bit_length() - 1
    if workers != present:
        assert after < before
        assert workers * after <= present * before * (2 / PAYS) ** doublings * (1 + 1e-9)
