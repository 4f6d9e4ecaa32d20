"""A real run whose ranks report through an aggregator, as those of more than 64 do."""

import signal
import sys
from pathlib import Path

import pytest

from tests import running
from tests.app.launchers.test_resume import ACTORS, RAY, command, wait_for_step
from tests.running import LONG, Lines, curve, mlflow_run, start

PROGRAM = [sys.executable, "-m", "tests.aggregated"]
STEPS = 40
NOTICE_SECONDS = 2.0
"""Within so long a death is to be known."""
SLACK = 3.0
"""How many more seconds a busy machine may take."""


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [ACTORS, RAY])
def test_a_death_and_a_hang_are_noticed_through_the_aggregator(
    tmp_path: Path, ray_environment: dict[str, str], overrides: list[str]
) -> None:
    faults = ["fault.hang_seconds=1.5", "fault.max_restarts=9", f"train.steps={STEPS}"]
    process = start(command(tmp_path, *overrides, *faults), env=ray_environment, program=PROGRAM)
    lines = Lines(process)
    folder = tmp_path / "run"
    wait_for_step(folder, 5)
    killed = running.disturb(folder, 1, signal.SIGKILL)
    assert lines.when("starting again") - killed < NOTICE_SECONDS + SLACK
    assert "worker 1" in lines.text and "died after step" in lines.text
    wait_for_step(folder, 15)
    running.disturb(folder, 1, signal.SIGSTOP)
    assert lines.when("does not answer")
    assert process.wait(LONG) == 0, lines.text
    assert sorted(curve(tmp_path, "run")) == list(range(1, STEPS + 1))
    assert mlflow_run(tmp_path, "run").data.tags["trireme.restarts"] == "2"
