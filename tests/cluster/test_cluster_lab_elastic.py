"""A run whose hosts go and come back, in the lab: 4 → 3 → 2 → 4 workers, one run in MLflow, the curve of one worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from experiments.benchmarks.chaos.elastic import LAUNCHERS, STEPS, cluster, draw, ride
from tests.lab import Lab, unavailable

WHY_NOT = unavailable()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is a lab"), pytest.mark.slow]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with cluster() as lab:
        yield lab


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_four_three_two_four_workers_on_hosts_that_go_and_come_back(lab: Lab, launcher: str) -> None:
    found = ride(lab, launcher, lab.shared / launcher)
    assert found.said == [3, 2, 4], "each once, in the one MLflow run"
    changes = [b for a, b in zip([0, *found.workers], found.workers, strict=False) if a != b]
    assert changes == [4, 3, 2, 4], "by what each step was computed on"
    assert found.status == "FINISHED"
    assert found.problems == [], "each position of the data's order once, with the sample it has there"
    assert len(found.loss) == STEPS and found.difference < 1e-5, "one curve, that of one worker nobody disturbed"
    assert [event.what for event in found.events] == ["network cut", "power lost", "both back"]
    assert all(event.seconds < 60 for event in found.events), found.events
    draw(found, lab.folder / "elastic.png")
    assert 10_000 < (lab.folder / "elastic.png").stat().st_size < 200_000
