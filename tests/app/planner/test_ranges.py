"""A range covers the runs that it was made from, and widens for traits that none of them had."""

import pytest

from app.errors import UserError
from app.planner.assumptions import ASSUMPTIONS, apply_assumptions
from app.planner.device import constants
from app.planner.machine import MachineOptions, find_machine
from app.planner.ranges import ADAPTERS, DENSE, MIXTURE, Traits, fit_probability, spread_of

pytestmark = pytest.mark.pure
SEEN = {
    "models": [DENSE],
    "layouts": ["data", "tp"],
    "families": ["hopper"],
    "billions": [1.0, 70.0],
    "sequence": [2048, 8192],
}
RANGES = {
    "kinds": {"any": [0.8, 1.2], "tp": [0.9, 1.1]},
    "seen": SEEN,
    "attention": 1.0,
    "groups": {},
    "wider": 0.5,
}
KNOWN = Traits("data", DENSE, "hopper", 7.0, 4096)


def test_the_range_of_a_known_layout_is_its_own_and_else_that_of_all() -> None:
    overall = spread_of(KNOWN, RANGES)
    assert (overall.low, overall.high, overall.unmeasured) == (0.8, 1.2, ())
    tensor = spread_of(KNOWN._replace(layout="tp"), RANGES)
    assert (tensor.low, tensor.high) == (0.9, 1.1)
    unknown_gpu = spread_of(KNOWN._replace(layout="tp", family=""), RANGES)
    assert unknown_gpu.low < tensor.low**1.5, "the range of all layouts, and then wider"
    assert spread_of(KNOWN, {}).low == 0.8, "without published runs, a quarter"


def test_a_kind_of_model_of_which_runs_are_known_has_a_range_of_its_own() -> None:
    ranges = RANGES | {
        "kinds": {"any": [0.8, 1.2], "tp": [0.9, 1.1], MIXTURE: [0.5, 2.0]},
        "seen": SEEN | {"models": [DENSE, MIXTURE]},
        "groups": {f"model {MIXTURE}": 1.5, "layout tp": 3.0},
    }
    for layout in ("tp", "cp+pp"):
        spread = spread_of(KNOWN._replace(model=MIXTURE, layout=layout), ranges)
        assert spread.low < 0.5**1.49 and spread.high > 2.0**1.49
    assert spread_of(KNOWN._replace(model=MIXTURE, layout="tp"), ranges).unmeasured == ()
    assert spread_of(KNOWN._replace(model=ADAPTERS), ranges).unmeasured == ("adapters",)
    dense = spread_of(KNOWN._replace(layout="tp"), ranges)
    assert dense.low == pytest.approx(0.9**3), "dense models have nothing of a mixture's range"


@pytest.mark.parametrize(
    ("change", "unmeasured"),
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
def test_each_trait_that_no_measured_run_has_widens_the_range(
    change: dict[str, object], unmeasured: str
) -> None:
    spread = spread_of(KNOWN._replace(**change), RANGES)
    narrow = spread_of(KNOWN, RANGES)
    assert spread.low == pytest.approx(narrow.low**1.5)
    assert spread.high == pytest.approx(narrow.high**1.5)
    assert spread.unmeasured == ((unmeasured,) if unmeasured else ())
    wider = spread_of(KNOWN._replace(**{"family": "", "model": MIXTURE, **change}), RANGES)
    assert wider.low < spread.low or {"family", "model"} >= set(change)


def test_a_missing_sequence_length_does_not_widen_the_range() -> None:
    assert spread_of(KNOWN._replace(sequence=None), RANGES) == spread_of(KNOWN, RANGES)


def test_a_range_reaches_further_down_the_more_of_the_computing_is_attention() -> None:
    """Attention at half of the speed makes a step that is half attention 1.5 times as long."""
    spread = spread_of(KNOWN._replace(attention=0.5), RANGES)
    assert (spread.low, spread.high) == (pytest.approx(0.8 / 1.5), 1.2)


def test_the_range_is_as_wide_as_the_group_needs_that_needs_most() -> None:
    ranges = RANGES | {"groups": {"gpu a100-40gb": 1.5, "size 1": 2.0, "length 3": 9.0}}
    narrow = spread_of(KNOWN._replace(gpu="h100-80gb", billions=70.0), ranges)
    assert (narrow.low, narrow.high) == (0.8, 1.2)
    by_gpu = spread_of(KNOWN._replace(gpu="a100-40gb", billions=70.0), ranges)
    assert (by_gpu.low, by_gpu.high) == (pytest.approx(0.8**1.5), pytest.approx(1.2**1.5))
    by_size = spread_of(KNOWN._replace(gpu="a100-40gb", billions=7.0), ranges)
    assert (by_size.low, by_size.high) == (pytest.approx(0.8**2), pytest.approx(1.2**2))
    far = spread_of(KNOWN._replace(gpu="a100-40gb", billions=280.0), ranges)
    assert far.low == pytest.approx(0.8 ** (1.5 * 1.5)), "and wider still outside of all runs"


def test_the_probability_of_fitting_is_the_share_of_peaks_that_would_have_fitted() -> None:
    peaks = {0.1: 0.8, 0.5: 1.0, 0.9: 1.25}

    def probability(share: float) -> float:
        """Of a layout that is planned to take this share of what is there."""
        return fit_probability(100.0, 100 * share, peaks)

    for level, ratio in peaks.items():
        assert probability(1 / ratio) == pytest.approx(level)
    assert 0.5 < probability(1 / 1.1) < 0.9
    assert probability(0.5) == 1.0 and probability(2.0) == 0.0
    assert fit_probability(100.0, 0.0, peaks) == 1.0
    shares = [0.5 + i / 50 for i in range(50)]
    chances = [probability(share) for share in shares]
    assert chances == sorted(chances, reverse=True)


def test_the_peaks_that_plans_use_are_quantiles() -> None:
    for name in ("peaks", "peaks_of_others"):
        peaks = constants()[name]
        assert list(peaks) == sorted(peaks) and min(peaks) > 0 and max(peaks) < 1
        assert list(peaks.values()) == sorted(set(peaks.values()))


@pytest.mark.parametrize("name", [name for name, row in ASSUMPTIONS.items() if row.at_most_one])
def test_an_assumed_share_is_at_most_one(name: str) -> None:
    device = find_machine(MachineOptions(gpus=8, gpu="h100-80gb"), "8").device
    assert getattr(apply_assumptions(device, (f"{name}=1",)), name) == 1
    with pytest.raises(UserError, match=f"{name}=2: {name} is at most 1 .* from 0 to 1"):
        apply_assumptions(device, (f"{name}=2",))


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "half", ""])
def test_an_assumption_that_is_no_number_is_refused(value: str) -> None:
    device = find_machine(MachineOptions(gpus=8, gpu="h100-80gb"), "8").device
    for name in ASSUMPTIONS:
        with pytest.raises(UserError, match=f"^--assume {name}={value}: {name} .*: write "):
            apply_assumptions(device, (f"{name}={value}",))


def test_what_times_are_divided_by_cannot_be_assumed_to_be_nothing() -> None:
    device = find_machine(MachineOptions(gpus=8, gpu="h100-80gb"), "8").device
    above_zero = {name for name, assumption in ASSUMPTIONS.items() if assumption.above_zero}
    for name in above_zero:
        with pytest.raises(UserError, match=f"{name} .* is a number above 0: write {name}=NUMBER"):
            apply_assumptions(device, (f"{name}=0",))
    for name in {*ASSUMPTIONS} - above_zero:
        assert getattr(apply_assumptions(device, (f"{name}=0",)), name) == 0


def test_another_trainers_layout_needs_more_room_than_one_of_trireme() -> None:
    device = find_machine(MachineOptions(gpus=8, gpu="h100-80gb"), "8").device
    assert not apply_assumptions(device, ("across=0.5",)).of_another_trainer
    assert apply_assumptions(device, ("loss_memory=16",)).of_another_trainer
    peaks = constants()["peaks"]
    peaks_of_others = constants()["peaks_of_others"]
    for share in (0.85, 0.88, 0.9, 0.92, 0.95):
        of_trireme = fit_probability(1.0, share, peaks)
        of_another = fit_probability(1.0, share, peaks_of_others)
        assert of_trireme > of_another + 0.04 and of_another > 0.6
    assert fit_probability(1.0, 0.85, peaks) > 0.99
