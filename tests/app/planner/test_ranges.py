"""Ranges hold what they were made of, and are wider for what nobody has seen."""

import pytest

from app.planner.ranges import ADAPTERS, DENSE, MIXTURE, Traits, spread_of

pytestmark = pytest.mark.pure
SEEN = {
    "models": [DENSE],
    "layouts": ["data", "tp"],
    "families": ["hopper"],
    "billions": [1.0, 70.0],
    "sequence": [2048, 8192],
}
RANGES = {"layouts": {"any": [0.8, 1.2], "tp": [0.9, 1.1]}, "seen": SEEN, "wider": 0.5}
KNOWN = Traits("data", DENSE, "hopper", 7.0, 4096)


def test_among_what_was_seen_a_range_is_that_of_the_kind_of_layout_or_of_all() -> None:
    known = spread_of(KNOWN, RANGES)
    assert (known.low, known.high, known.unmeasured) == (0.8, 1.2, ())
    split = spread_of(KNOWN._replace(layout="tp"), RANGES)
    assert (split.low, split.high) == (0.9, 1.1)
    far = spread_of(split_far := KNOWN._replace(layout="tp", family=""), RANGES)
    assert far.low < spread_of(split_far._replace(family="hopper"), RANGES).low ** 1.5, "as all, and then wider"
    assert spread_of(KNOWN, {}).low == 0.8, "without published runs, a quarter"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": MIXTURE}, "a mixture of experts"),
        ({"model": ADAPTERS}, "adapters"),
        ({"family": ""}, "this GPU"),
        ({"layout": "cp+pp"}, "layouts with cp+pp"),
        ({"billions": 280.0}, ""),
        ({"billions": 0.25}, ""),
        ({"sequence": 32768}, ""),
    ],
)
def test_each_trait_that_nobody_has_seen_makes_it_wider(change: dict[str, object], word: str) -> None:
    spread, known = spread_of(KNOWN._replace(**change), RANGES), spread_of(KNOWN, RANGES)
    assert spread.low == pytest.approx(known.low**1.5) and spread.high == pytest.approx(known.high**1.5)
    assert spread.unmeasured == ((word,) if word else ())
    further = spread_of(KNOWN._replace(**{"family": "", "model": MIXTURE, **change}), RANGES)
    assert further.low < spread.low or {"family", "model"} >= set(change)


def test_a_plan_without_a_sequence_is_not_further_away_for_it() -> None:
    assert spread_of(KNOWN._replace(sequence=None), RANGES) == spread_of(KNOWN, RANGES)
