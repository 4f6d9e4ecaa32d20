"""What a person sees when a run ends."""

import time
from unittest import mock

import pytest

from app.console import terminal
from app.console.terminal import Console
from app.run import lifecycle

pytestmark = pytest.mark.pure


def test_the_end_of_a_run_says_that_it_waits_for_mlflow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "FIRST_SILENCE", 0.0)
    driver = mock.Mock(console=Console(), start_clock=time.monotonic())
    driver.run.manifest.seconds = 0.0
    output = []

    def finish(*_: object, **__: object) -> mock.Mock:
        deadline = time.monotonic() + 10
        while not output and time.monotonic() < deadline:
            time.sleep(0.05)
            output.extend(capsys.readouterr().out.splitlines())
        return mock.Mock(complete=True, left_out="", trackers=[])

    driver.tracker.finish.side_effect = finish
    lifecycle._end(driver, "finished", "FINISHED", "finished after step 3")
    assert output == ["waiting for MLflow to have the last metrics and files (0:00)"]
    time.sleep(0.5)
    assert capsys.readouterr().out == ""
