"""The planner's measure of itself: that it calibrates on other configurations than it tests, and counts rightly."""

from __future__ import annotations

import numpy as np
import pytest

from app.config_io import with_values
from app.planner.check import BATCHES, Case, Predictor, cases, changed, fit, kendall, regret, summary
from app.planner.measure import Measured, measure
from app.planner.rates import rates


def test_no_configuration_is_both_calibrated_and_tested() -> None:
    calibrated, tested = cases()
    assert len(tested) >= 24 and {case.model for case in tested} == set(BATCHES)
    assert {case.workers for case in tested} == {1, 2, 4}
    assert not {case.name for case in calibrated} & {case.name for case in tested}


def test_kendall_and_regret_are_what_they_say() -> None:
    assert kendall(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == 1
    assert kendall(np.array([1.0, 2, 3]), np.array([10.0, 30, 20])) == pytest.approx(1 / 3)
    fast = Case("gpt", 2, 8, ["strategy=ddp"], predicted=2.0, predicted_bytes=1.0, measured=Measured(1.0, 1.0))
    slow = Case("gpt", 2, 8, ["strategy=fsdp"], predicted=1.0, predicted_bytes=1.1, measured=Measured(1.5, 1.0))
    assert regret([fast, slow]) == pytest.approx([0.5]), "the slow one is chosen"
    found = summary([fast, slow])
    assert found["step_error"] == pytest.approx((1.0 + 1 / 3) / 2) and found["memory_error"] == pytest.approx(0.05)
    assert found["regret"] == found["regret_most"] == pytest.approx(0.5) and found["choices"] == 1


def test_constants_are_found_again_from_what_they_predict() -> None:
    calibrated, tested = cases()
    every = [case for case in [*calibrated, *tested] if case.model in ("wide", "cnn") and case.workers < 4]
    predictor, start = Predictor(), rates("cpu")
    factors = dict.fromkeys(
        (
            "compute",
            "stream",
            "operation",
            "step",
            "within",
            "latency_within",
            "unit",
            "tensor_step",
            "crowd2",
            "crowd4",
        ),
        1.0,
    )
    truth = changed(start, factors | {"compute": 1.4, "step": 0.7, "crowd2": 1.15})
    for case in every:
        case.measured = Measured(predictor.plan(case, truth, 0.9 if case.model == "cnn" else 1.2)[0], 1.0)
    device, own = fit(every[::2], predictor, start)
    for case in every[1::2]:
        found = predictor.plan(case, device, own[case.model])[0]
        assert case.measured and case.measured.seconds
        assert found == pytest.approx(case.measured.seconds, rel=0.1), case.name


def test_a_configuration_that_fails_is_told_and_harms_nothing() -> None:
    bad = Case("cnn", 1, 64, ["strategy=single"]).config
    bad = with_values(bad, {"task_args": {"data": "digits", "model": "cnn", "model_args": {"widths": [64, -1]}}})
    good = Case("cnn", 1, 64, ["strategy=single"])
    from app.config_io import to_dict

    first, second = measure([to_dict(bad), to_dict(good.config)], 1, budget=0.05)
    assert first.seconds is None and first.failure
    assert second.seconds is not None and second.seconds > 0 and second.bytes > 1e7
