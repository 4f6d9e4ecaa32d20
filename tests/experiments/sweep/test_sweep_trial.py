"""One trial in this very process: what it reports, and how it is stopped."""

import json
import os
import queue
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app.tracking.settings import Settings
from experiments.sweep.spec import read_sweep
from experiments.sweep.trial import REACHED, STOP_FILE, Setting, TrialRun
from experiments.sweep.trials import Trial
from tests.running import committed

TEXT = """
experiment: {task: "tests.tasks:Points", train: {steps: 40, global_batch_size: 16}, launcher: local}
set: {tracking.system_metrics_every: 0}
space: {optimizer.lr: [0.01, 0.02]}
reports: 4
"""


def setting(tmp_path: Path, *overrides: str) -> Setting:
    (tmp_path / "s.yaml").write_text(TEXT)
    sweep = read_sweep(str(tmp_path / "s.yaml"), list(overrides))
    settings = Settings(f"sqlite:///{tmp_path}/mlflow.db", "trireme", None)
    return Setting(sweep, tmp_path, settings, False, os.getcwd(), ("trireme", "sweep"))


def trial(found: Setting, index: int, known: Trial | None = None, **values: Any) -> TrialRun:
    return TrialRun(found, f"t{index:03d}", {"optimizer.lr": 0.01, **values}, known)


def results(trial: TrialRun, until: int = 10**9) -> list[dict[str, Any]]:
    found = [trial.next()]
    while not found[-1].get("done") and found[-1]["step"] < until:
        found.append(trial.next())
    return found


def test_a_trial_reports_every_evaluation_and_ends(tmp_path: Path) -> None:
    found = results(trial(setting(tmp_path), 0))
    assert [result["step"] for result in found] == [10, 20, 30, 40, 40] and found[-1]["status"] == "finished"
    reports = [result["report"] for result in found]
    assert all({"eval/loss", "eval/accuracy", "train/loss"} <= set(report["metrics"]) for report in reports)
    assert [report["seconds"] for report in reports] == sorted(report["seconds"] for report in reports)
    assert reports[0]["samples"] == 160
    spool = tmp_path / "t000" / "tracking"
    assert (spool / "start.json").exists() and not (spool / "writer.log").exists(), "the sweep's own writer delivers it"
    again = results(trial(setting(tmp_path), 0))
    assert [(r["step"], r.get("status")) for r in again] == [(40, None), (40, "finished")], "it is not trained again"
    told = results(trial(setting(tmp_path), 0, Trial(0, "t000", {}, "finished", reports=reports[:4])))
    assert [(r["step"], r["eval/loss"]) for r in told] == [(r["step"], r["eval/loss"]) for r in found]


def test_a_stopped_trial_says_why_and_continues(tmp_path: Path) -> None:
    found = setting(tmp_path, "task_args.step_seconds=0.02", "train.steps=50", "reports=10")
    first = trial(found, 0)
    heard = results(first, until=20)[-1]
    first.stop(REACHED)
    assert first.judged == heard["report"] and first.last["step"] >= 20, (
        "judged by what Tune has, not by what came after"
    )
    events = (tmp_path / "t000" / "tracking" / "events.jsonl").read_text().splitlines()
    end = [json.loads(line) for line in events if line][-1]
    assert end["type"] == "finish" and end["status"] == "FINISHED" and end["message"].startswith(REACHED)
    stopped = committed(tmp_path / "t000")[-1]
    assert 20 <= stopped < 50
    (tmp_path / STOP_FILE).touch()
    assert results(trial(found, 0))[-1]["status"] == "stopped", "none begins while the sweep is being stopped"
    (tmp_path / STOP_FILE).unlink()
    assert results(trial(found, 0))[-1]["status"] == "finished"
    assert f"continuing after step {stopped}" in (tmp_path / "t000" / "logs" / "driver.log").read_text()


def test_a_process_whose_device_has_failed_is_given_no_other_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune keeps a trial's process for the next one (`reuse_actors`); one that has ended it replaces."""
    ended = queue.Queue[int]()
    monkeypatch.setattr(os, "_exit", ended.put)
    for said, codes in (("CUDA error: device-side assert triggered", [1]), ("CUDA out of memory.", [])):
        monkeypatch.setattr(TrialRun, "_train", mock.Mock(side_effect=RuntimeError(said)))
        assert results(trial(setting(tmp_path), 0))[-1]["status"] == "failed"
        assert [ended.get() for _ in codes] == codes and ended.empty()


def test_a_trial_that_fails_is_a_result(tmp_path: Path) -> None:
    last = results(trial(setting(tmp_path), 0, task="tests.tasks:Raises"))[-1]
    assert last["status"] == "failed" and "a bug of the user's" in last["message"] and last["eval/loss"] == 1e30
    assert "in loss" in (tmp_path / "t000" / "logs" / "driver.log").read_text(), "the log has the traceback"
    last = results(trial(setting(tmp_path, "metric=eval/los", "task_args.step_seconds=0.02"), 1))[-1]
    assert last["status"] == "wrong metric" and "eval/loss" in last["message"]
    assert "training" not in [thread.name for thread in threading.enumerate()], "the next trial trains by itself"
