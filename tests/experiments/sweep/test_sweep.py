"""Sweeps as users run them: killed and run again, with failing trials, schedulers and MLflow."""

import json
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from experiments.sweep.trials import load_trial
from tests.running import ROOT, end_tree, finish, start, trireme, wait_until

pytestmark = pytest.mark.slow

SLOW = """
experiment:
  task: "tests.tasks:Points"
  task_args: {step_seconds: 0.15}
  train: {steps: 60, global_batch_size: 16}
  checkpoint: {every_steps: 10, weights: false}
  tracking: {system_metrics_every: 0}
space: {optimizer.lr: [0.001, 0.01, 0.1, 0.3], train.global_batch_size: [16]}
reports: 6
concurrent: 2
confirm: 0
"""


def write(tmp_path: Path, text: str = SLOW) -> list[str]:
    """Writes a sweep's file, and returns the arguments that run it."""
    (tmp_path / "s.yaml").write_text(text)
    return ["sweep", str(tmp_path / "s.yaml"), f"run.storage={tmp_path}"]


def trials(tmp_path: Path) -> dict[int, dict[str, Any]]:
    """The records of all trials, with the number of starts and the driver's log of each."""
    trials_by_index = {}
    for file in sorted((tmp_path / "s").glob("*/trial.json")):
        record = load_trial(file.parent)
        assert record is not None
        run = file.with_name("run.json")
        log = file.parent / "logs" / "driver.log"
        starts = json.loads(run.read_text())["starts"] if run.exists() else 0
        trial = asdict(record) | {
            "starts": starts,
            "log": log.read_text() if log.exists() else "",
        }
        trials_by_index[trial["index"]] = trial
    return trials_by_index


def resumed(trial: dict[str, Any]) -> list[int]:
    """The steps after which a trial has continued."""
    return [int(step) for step in re.findall(r"continuing after step (\d+)", trial["log"])]


def runs(tmp_path: Path) -> dict[str, tuple[str, str | None]]:
    """The status and the parent's name of each MLflow run, by its name."""
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    logged_runs = client.search_runs([client.get_experiment_by_name("trireme").experiment_id])
    names = {run.info.run_id: run.info.run_name for run in logged_runs}
    assert len(set(names.values())) == len(names), "every run is there once"
    states = {}
    for run in logged_runs:
        parent = names.get(run.data.tags.get("mlflow.parentRunId"))
        states[run.info.run_name] = (run.info.status, parent)
    return states


def test_a_killed_sweep_is_continued_by_the_same_command(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    arguments = write(tmp_path)
    first = start(arguments, env=ray_environment)

    def half_way() -> bool:
        running = [
            trial
            for trial in trials(tmp_path).values()
            if trial["status"] == "running" and trial["reports"]
        ]
        if len(running) == len(trials(tmp_path)):
            return False
        return any(20 <= trial["reports"][-1]["step"] <= 30 for trial in running)

    wait_until(half_way)
    first.send_signal(signal.SIGKILL)
    finish(first)
    unfinished = {
        index: trial for index, trial in trials(tmp_path).items() if trial["status"] != "finished"
    }
    assert unfinished
    assert unfinished.keys() != trials(tmp_path).keys(), "some trials had ended, some had not"
    second = trireme(*arguments, "--json", env=ray_environment).expect()
    assert second.json["trials"]["finished"] == 4
    for index, trial in trials(tmp_path).items():
        # No report is lost or repeated.
        assert [result["step"] for result in trial["reports"]] == [10, 20, 30, 40, 50, 60]
        assert trial["starts"] == 1 or index in unfinished, "finished trials are not run again"
    steps = {index: resumed(trials(tmp_path)[index]) for index in unfinished}
    assert any(steps.values())
    for index, trial in unfinished.items():
        last_step = trial["reports"][-1]["step"] if trial["reports"] else 0
        # Each trial continues from its last checkpoint.
        assert all(step >= last_step for step in steps[index])
    logged_runs = runs(tmp_path)
    assert logged_runs.pop("s") == ("FINISHED", None)
    assert len(logged_runs) == 4 and set(logged_runs.values()) == {("FINISHED", "s")}
    artifacts = {path.name for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()}
    assert {"report.html", "answer.json", "next.yaml"} <= artifacts
    repeated = trireme(*arguments, "--json", env=ray_environment)
    assert repeated.code == 0 and repeated.json["best"] == second.json["best"]
    changed = trireme(*arguments, "train.steps=70", env=ray_environment)
    assert changed.code == 2 and "begun with another train.steps" in changed.err


def test_a_sweep_that_is_killed_while_it_confirms_goes_on(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    arguments = [*write(tmp_path), "confirm=2", "confirm_seeds=1", "tracking.enabled=false"]
    first = start(arguments, env=ray_environment)
    wait_until(lambda: any(trial["confirms"] and trial["reports"] for trial in of(tmp_path)))
    first.send_signal(signal.SIGKILL)
    finish(first)
    searched = {trial["name"] for trial in of(tmp_path) if not trial["confirms"]}
    assert len(searched) == 4
    second = trireme(*arguments, "--json", env=ray_environment).expect()
    assert second.json["trials"]["finished"] == 6
    assert second.json["best"]["seeds"] == 1 and second.json["best"]["trial"] in searched
    starts = {trial["name"]: trial["starts"] for trial in of(tmp_path)}
    assert all(starts[name] == 1 for name in searched), "the search is not run again"
    more = trireme(*arguments, "confirm_seeds=2", "--json", env=ray_environment).expect()
    assert more.json["trials"]["finished"] == 8 and more.json["best"]["seeds"] == 2


def of(tmp_path: Path) -> list[dict[str, Any]]:
    """The records of all trials."""
    return list(trials(tmp_path).values())


def test_a_stopped_sweep_with_failing_trials_of_two_workers_goes_on(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    """One trial diverges, one raises, and the user stops the sweep in between."""
    text = """
experiment:
  task: "tests.tasks:Points"
  train: {steps: 40, global_batch_size: 16}
  tracking: {system_metrics_every: 0}
  checkpoint: {weights: false}
set: {workers: 2, strategy: ddp}
space:
  task: ["tests.tasks:Points", "tests.tasks:Infinite", "tests.tasks:Raises", "tests.tasks:Plain"]
reports: 4
concurrent: 1
confirm: 0
"""
    arguments = write(tmp_path, text)
    first = start(arguments, env=ray_environment)
    try:
        wait_until(lambda: any(trial["status"] != "running" for trial in trials(tmp_path).values()))
        first.send_signal(signal.SIGTERM)
        stopped = finish(first, 60)
    finally:
        end_tree(first.pid)
    assert stopped.code == 130 and "run the same command again" in stopped.err
    ended = trireme(*arguments, "--json", env=ray_environment)
    assert ended.code == 1 and "1 of 4 trials failed, the first t002" in ended.err
    assert ended.json["status"] == "incomplete"
    ends = {"finished": 2, "reached": 0, "pruned": 0, "diverged": 1, "failed": 1}
    assert ended.json["trials"] == ends
    trials_before = trials(tmp_path)
    resumed_after = max(resumed(trials_before[1]), default=0)
    assert f"not finite at step {resumed_after + 6}" in trials_before[1]["message"]
    assert "a bug of the user's" in trials_before[2]["message"]
    by_index = {
        name[:4]: status for name, (status, _) in runs(tmp_path).items() if name.startswith("t0")
    }
    assert by_index == {"t000": "FINISHED", "t001": "FAILED", "t002": "FAILED", "t003": "FINISHED"}
    assert trireme(*arguments, env=ray_environment).code == 1
    new_starts = [
        trials(tmp_path)[index]["starts"] - trial["starts"]
        for index, trial in trials_before.items()
    ]
    assert new_starts == [0, 0, 1, 0], "only the failed trial is tried again"


def test_relative_paths_are_relative_to_the_folder_of_the_command(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    """Also in the second trial of a process, for which Tune changes the folder."""
    csv_rows = "".join(f"{i % 7},{i % 5},{'xy'[i % 2]}\n" for i in range(60))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{csv_rows}")
    table = os.path.relpath(tmp_path / "t.csv", ROOT)
    text = f"""
experiment:
  task: tabular
  task_args: {{data: {table}, target: y}}
  train: {{steps: 4, global_batch_size: 8}}
set: {{tracking.enabled: false}}
space: {{optimizer.lr: [0.001, 0.01, 0.1]}}
concurrent: 1
confirm: 0
"""
    ended = trireme(*write(tmp_path, text), "--json", env=ray_environment)
    assert ended.code == 0 and ended.json["trials"]["finished"] == 3, ended.out


def test_a_scheduler_stops_trials_early_and_reaching_the_target_ends_them(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    overrides = [
        "space.optimizer.lr={loguniform: [1.0e-4, 0.3]}",
        "searcher=random",
        "trials=8",
        "concurrent=1",
        "scheduler={name: asha, grace_period: 10, reduction_factor: 2}",
        "task_args.step_seconds=0",
        "train.steps=40",
        "reports=10",
        "tracking.enabled=false",
        "target=0.3",
    ]
    ended = trireme(*write(tmp_path), *overrides, "--json", env=ray_environment).expect()
    counts = ended.json["trials"]
    assert sum(counts.values()) == 8
    assert counts["pruned"]
    assert counts["reached"]
    assert not counts["failed"]
    for trial in trials(tmp_path).values():
        values = [result["metrics"]["eval/loss"] for result in trial["reports"]]
        assert all(value > 0.3 for value in values[:-1])
        if trial["status"] == "reached":
            assert values[-1] <= 0.3
        if trial["status"] == "pruned":
            assert trial["message"].startswith("stopped early by asha after step")
            assert len(values) < 10
    assert ended.json["recommendation"]["values"]["workers"] == 1
