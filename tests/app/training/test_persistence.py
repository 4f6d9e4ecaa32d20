"""How often to save: the interval that loses the least time, and when a save is due."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.io import load_config, with_values
from app.launchers.failure_policy import mean_time_between_failures
from app.training import persistence
from app.training.persistence import checkpoint_interval

pytestmark = pytest.mark.pure


def test_the_interval_loses_the_least_time() -> None:
    def lost(seconds: float, stall: float, mean: float) -> float:
        """Share of the time lost to failures (a Poisson process) if a restart costs nothing."""
        return 1 - seconds / (mean * math.expm1((seconds + stall) / mean))

    for stall, mean in ((0.5, 60.0), (2.0, 3600.0), (30.0, 3600.0)):
        best = checkpoint_interval(stall, 0.0, mean)
        around = [lost(best * factor, stall, mean) for factor in (0.8, 0.9, 1.0, 1.1, 1.25)]
        assert min(around) == around[2], (stall, mean, around)
    assert checkpoint_interval(0.001, 5.0, 60.0) == 5.0, "no sooner than the one before is written"
    assert checkpoint_interval(100.0, 1.0, 10.0) == 10.0, "saving costs more than failing"
    assert mean_time_between_failures(0, 0.0, 1) == 30 * 86400
    assert mean_time_between_failures(0, 0.0, 30) == 86400
    assert mean_time_between_failures(9, 3600.0, 2592000) == pytest.approx(360.1)


def test_a_save_is_due_by_the_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    saving: Any = object.__new__(persistence.Persistence)
    config = load_config([], ["task=tests.tasks:Points", "checkpoint.auto=true"])
    saving.job = SimpleNamespace(config=config, mtbf_seconds=60.0)
    saving.checkpointer = SimpleNamespace(last_total_seconds=0.1, last_stall_seconds=0.0)
    saving.longest_stall = None
    saving.saved_at = 100.0
    monkeypatch.setattr(persistence.time, "monotonic", lambda: 107.0)
    assert not saving.is_overdue(), "nothing is measured yet: a minute"
    saving.longest_stall = 0.3
    assert 7 > saving.interval() == pytest.approx(checkpoint_interval(0.3, 0.1, 60.0))
    assert saving.is_overdue()
    # The time of a GPU's copy is known only after save() has returned.
    saving.checkpointer.last_stall_seconds = 0.4
    assert saving.interval() == pytest.approx(checkpoint_interval(0.4, 0.1, 60.0))
    saving.job.config = with_values(config, {"checkpoint.auto": False})
    assert saving.interval() == 300.0
