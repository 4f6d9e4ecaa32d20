"""What a person sees when a run ends."""

import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app.config.io import load_config
from app.console import terminal
from app.console.terminal import Console
from app.run import lifecycle
from app.run.driver import Driver
from app.storage.storage import Storage
from app.tracking.tracker import Delivery

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


def test_a_second_signal_ends_the_wait_for_mlflow_and_the_end_is_written_down(
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver = mock.Mock(console=Console(), start_clock=time.monotonic(), summary={"step": 3})
    driver.note = lambda text: print(f"note: {text}")
    driver.run.manifest.seconds = 0.0
    left = Delivery(run_id=None, url="", complete=False)
    driver.tracker.finish.side_effect = [KeyboardInterrupt, left]
    assert not lifecycle._end(driver, "finished", "FINISHED", "finished after step 3").complete
    driver.run.end.assert_called_once_with("finished", {"step": 3})
    assert "have not reached MLflow yet (the wait for it was stopped)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ({"progressed": False}, "stopping: training has not begun"),
        ({"progressed": True}, "stopping: saving a checkpoint first"),
        ({"progressed": True, "summary": {"step": 3}}, "stopping: delivering the last metrics and"),
        ({"progressed": False, "ending": True}, "stopping: delivering the last metrics and files"),
    ],
)
def test_a_signal_is_told_what_is_done_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: dict[str, Any], shown: str
) -> None:
    driver = Driver(
        mock.Mock(storage=Storage(tmp_path), attempt="1", spool=tmp_path),
        load_config([], ["task=tests.tasks:Points", "run.name=a"]),
        Console(),
        mock.Mock(),
        tracker=mock.Mock(),
    )
    for name, value in state.items():
        setattr(driver, name, value)
    with driver.signals():
        signal.raise_signal(signal.SIGTERM)
    assert driver.stopping
    assert capsys.readouterr().out.startswith(shown)


def test_a_run_whose_layout_was_planned_says_how_far_the_plan_was_off() -> None:
    on_cpu = {"plan/step_seconds": 0.8, "plan/step_seconds_measured": 0.72}
    assert lifecycle._plan_in_words(on_cpu) == ("a step took 0.72 s; 0.8 s were planned (-10%)")
    on_gpu = {
        **on_cpu,
        "plan/memory_bytes_measured": 60e9,
        "plan/memory_error": -0.5,
    }
    assert lifecycle._plan_in_words(on_gpu) == (
        "a step took 0.72 s; 0.8 s were planned (-10%); "
        "tensors took 60.0 GB; 30.0 GB were planned (+100%)"
    )
