"""What recomputation costs the host, beside what the planner takes it to cost."""

import pytest

from app.planner.device import constants
from experiments.benchmarks import recomputation

pytestmark = pytest.mark.pure


def test_the_planners_figures_are_those_of_the_host_within_a_factor_of_two() -> None:
    times = recomputation.measure("gpt", in_bf16=True, steps=15)
    measured = recomputation.ratios(times)
    planned = constants()["checkpointing"]
    assert measured.keys() == planned.keys()
    for mode, (forward, again) in planned.items():
        assert forward / 2 < measured[mode].forward < 2 * forward
        assert again / 2 < measured[mode].backward < 2 * again
