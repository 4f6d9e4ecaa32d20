"""A thousand simulated ranks lose a node, or a rack, or one of them stands still.

The supervisor names what has happened, in time, and the run continues with what is left.
"""

import pytest

from experiments.benchmarks import scale_failures
from experiments.benchmarks.scale_failures import RACK_NODES, SCENES, Scene, play

pytestmark = pytest.mark.pure

RANKS = 1024
BOUNDS = {"a node": 2.0, "a rack": 5.0, "a hang": 10.0}
"""Seconds within which a decision must have been taken, beside the load of other tests."""
SLACK = 5.0
"""How many more seconds a busy machine may take."""


@pytest.fixture(autouse=True)
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_failures, "STEP_SECONDS", 0.1)
    monkeypatch.setattr(scale_failures, "BEAT_SECONDS", 0.25)


@pytest.mark.parametrize(
    "scene",
    [pytest.param(scene, marks=[pytest.mark.slow] * (scene.name != "a node")) for scene in SCENES],
    ids=lambda scene: scene.name,
)
def test_the_supervisor_decides_in_time(scene: Scene) -> None:
    outcome = play(scene, RANKS, train_seconds=1.0, overrides=["fault.hang_seconds=3"])
    assert outcome.seconds < BOUNDS[scene.name] + SLACK
    lost = 0 if scene.hangs else min(scene.nodes, RACK_NODES) * 8
    assert outcome.workers == RANKS - lost
    assert f"worker {RANKS // 2}, process" in outcome.decision
    if scene.hangs:
        assert "without progress; starting again from the last checkpoint" in outcome.decision
    else:
        assert "with its node; there is room for" in outcome.decision
    assert outcome.driver_share < 0.5
