"""One trial in this very process: what it reports, how it is stopped, and how it takes over another's weights."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from app.run.cost import Rate
from app.tracking.settings import Settings
from app.tracking.spool import last_start
from experiments.sweep.spec import read_sweep
from experiments.sweep.trial import REPORT, Session, Setting, TrialProcess, Workers
from experiments.sweep.trial_driver import REACHED, checkpoint_at
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
    settings = Settings(f"sqlite:///{tmp_path}/mlflow.db", "trireme")
    return Setting(sweep, str(tmp_path), settings, "uid", False, os.getcwd())


def session(found: Setting, index: int, **values: Any) -> Session:
    return Session(found, index, f"t{index:03d}", {"optimizer.lr": 0.01, **values}, Workers())


class Asked(TrialProcess):
    """As Tune asks it, without Ray."""

    def __init__(self, session: Session) -> None:
        self.session = session


def hear(trial: Session, until: int = 10**9) -> list[dict[str, Any]]:
    said = []
    while not said or not (said[-1]["ended"] or said[-1]["step"] >= until):
        said.append(json.loads(trial.next()[REPORT]))
    return said


def test_a_trial_reports_every_evaluation_and_ends(tmp_path: Path) -> None:
    said = hear(session(setting(tmp_path), 0))
    assert [report["step"] for report in said] == [10, 20, 30, 40, 40]
    assert said[-1]["ended"] and said[-1]["status"] == "finished"
    assert all({"eval/loss", "eval/accuracy", "train/loss"} <= set(report["metrics"]) for report in said)
    seconds = [report["seconds"] for report in said[:-1]]
    assert seconds == sorted(seconds) and said[0]["samples"] == 160 and said[0]["first_step"] > 0
    spool = tmp_path / "t000" / "tracking"
    assert last_start(spool) and not (spool / "writer.log").exists(), "its metrics wait for the sweep's own process"
    again = hear(session(setting(tmp_path), 0))
    assert [(r["step"], r["status"]) for r in again] == [(40, "finished")], "what has finished is not trained again"


def test_what_a_trial_costs_is_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("app.run.cost.Prices.rate", lambda *_: Rate(3600.0, "a file"))
    said = hear(session(setting(tmp_path, "task_args.step_seconds=0.02"), 0))
    assert said[-1]["status"] == "finished"
    lines = (tmp_path / "t000" / "tracking" / "events.jsonl").read_text().splitlines()
    spooled = [json.loads(line) for line in lines if line]
    costs = [event["values"] for event in spooled if "cost/dollars" in event.get("values", {})]
    spent = json.loads((tmp_path / "t000" / "cost.json").read_text())["total"]
    assert costs[-1]["cost/dollars"] == spent > 0.5, "the last figure is the whole of it"
    assert costs[-1]["cost/dollars_per_million_samples"] == pytest.approx(spent / (40 * 16) * 1e6)


def test_a_stopped_trial_says_why_and_continues(tmp_path: Path) -> None:
    found = setting(tmp_path, "task_args.step_seconds=0.02", "train.steps=100", "reports=10")
    trial = session(found, 0)
    hear(trial, until=20)
    trial.halt(REACHED)
    finish = json.loads((tmp_path / "t000" / "tracking" / "events.jsonl").read_text().splitlines()[-1])
    assert finish["type"] == "finish" and finish["status"] == "FINISHED" and finish["message"].startswith(REACHED)
    stopped = committed(tmp_path / "t000")[-1]
    assert 20 <= stopped < 100
    second = session(found, 0)
    assert hear(second)[-1]["status"] == "finished"
    assert f"continuing after step {stopped}" in (tmp_path / "t000" / "logs" / "driver.log").read_text()


def test_a_failing_trial_is_a_report(tmp_path: Path) -> None:
    said = hear(session(setting(tmp_path), 0, task="tests.tasks:Raises"))
    assert said[-1]["status"] == "failed" and "a bug of the user's" in said[-1]["message"]
    log = (tmp_path / "t000" / "logs" / "driver.log").read_text()
    assert "in loss" in log, "the log has the traceback"


def test_a_copied_trial_goes_on_from_the_others_weights(tmp_path: Path) -> None:
    """What population-based training does with a good and a bad trial."""
    found = setting(tmp_path, "scheduler=pbt", "searcher=random", "trials=2")
    donor = session(found, 0)
    known = hear(donor, until=20)[-1]
    Asked(donor).save_checkpoint(str(tmp_path))
    pointer = json.loads((tmp_path / "pointer.json").read_text())
    assert (pointer["run"], pointer["step"]) == ("t000", 20)
    taker = session(found, 1, **{"optimizer.lr": 0.0})  # with which its own training changes nothing
    assert hear(taker)[-1]["status"] == "finished", "before Tune has seen that it is a bad one"
    taken = session(found, 1, **{"optimizer.lr": 0.0})
    Asked(taken).load_checkpoint(str(tmp_path))
    said = hear(taken)
    assert [report["step"] for report in said][-3:] == [30, 40, 40] and said[-1]["status"] == "finished"
    assert said[-1]["metrics"]["eval/loss"] == known["metrics"]["eval/loss"], "what Tune knew, not what came after it"
    assert "continuing after step 20" in (tmp_path / "t001" / "logs" / "driver.log").read_text()
    hear(donor, until=30)
    time.sleep(0.3)
    assert donor.reports.empty(), "it waits at each report until Tune asks for the next"
    hear(donor)
    assert checkpoint_at(donor.config, 20)["folder"] == pointer["folder"]
