"""What recomputation costs the host, beside what the planner takes it to cost."""

import pytest

from app.planner.device import constants
from experiments.benchmarks import recomputation

pytestmark = pytest.mark.pure


def test_the_planners_figures_are_to_each_other_as_those_of_this_host() -> None:
    operations = recomputation.count_operations("gpt", in_bf16=False)
    times = recomputation.measure("gpt", in_bf16=False, steps=15)
    measured = recomputation.added(times, operations)
    planned = constants()["checkpointing"]
    assert measured.keys() == planned.keys()
    call = times["none"].forward / operations
    forward = measured["selective"].forward / measured["full"].forward
    again = (measured["selective"].backward - call) / (measured["full"].backward - call)
    assert forward == pytest.approx(planned["selective"][0] / planned["full"][0], rel=0.5)
    assert again == pytest.approx(planned["selective"][1] / planned["full"][1], rel=0.5)
