"""Whole sweeps as a person runs them: killed and run again, failing trials, schedulers and searchers, MLflow."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

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
"""


def write(tmp_path: Path, text: str = SLOW) -> list[str]:
    (tmp_path / "s.yaml").write_text(text)
    return ["sweep", str(tmp_path / "s.yaml"), f"run.storage={tmp_path}"]


def trials(tmp_path: Path) -> dict[int, dict[str, Any]]:
    """What is kept of each, how often its run was started, and what its driver said."""
    found = {}
    for file in sorted((tmp_path / "s").glob("*/trial.json")):
        run, log = file.with_name("run.json"), file.parent / "logs" / "driver.log"
        starts = json.loads(run.read_text())["starts"] if run.exists() else 0
        trial = json.loads(file.read_text()) | {"starts": starts, "log": log.read_text() if log.exists() else ""}
        found[trial["index"]] = trial
    return found


def resumed(trial: dict[str, Any]) -> list[int]:
    """The steps after which it was continued."""
    return [int(step) for step in re.findall(r"continuing after step (\d+)", trial["log"])]


def runs(tmp_path: Path) -> dict[str, tuple[str, str | None]]:
    """Per MLflow run its status and its parent's name."""
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("trireme").experiment_id])
    names = {run.info.run_id: run.info.run_name for run in found}
    assert len(set(names.values())) == len(names), "no run twice"
    return {
        names[run.info.run_id]: (run.info.status, names.get(run.data.tags.get("mlflow.parentRunId"))) for run in found
    }


def test_killed_and_run_again(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    arguments = write(tmp_path)
    first = start(arguments, env=ray_environment)

    def half_way() -> bool:
        going = [t for t in trials(tmp_path).values() if t["status"] == "running" and t["reports"]]
        return len(going) < len(trials(tmp_path)) and any(20 <= t["reports"][-1]["step"] <= 30 for t in going)

    wait_until(half_way)
    first.send_signal(signal.SIGKILL)
    finish(first)
    begun = {index: t for index, t in trials(tmp_path).items() if t["status"] != "finished"}
    assert begun and begun.keys() != trials(tmp_path).keys(), "some had ended, and some were under way"
    second = trireme(*arguments, "--json", env=ray_environment).expect()
    assert second.json["trials"]["finished"] == 4
    for index, trial in trials(tmp_path).items():
        assert [r["step"] for r in trial["reports"]] == [10, 20, 30, 40, 50, 60], "nothing lost or told twice"
        assert trial["starts"] == 1 or index in begun, "what had ended was not run again"
    steps = {index: resumed(trials(tmp_path)[index]) for index in begun}
    assert any(steps.values())
    last = {index: t["reports"][-1]["step"] if t["reports"] else 0 for index, t in begun.items()}
    assert all(step >= last[index] for index in begun for step in steps[index]), "from its last checkpoint"
    found = runs(tmp_path)
    assert found.pop("s") == ("FINISHED", None)
    assert len(found) == 4 and set(found.values()) == {("FINISHED", "s")}
    artifacts = {p.name for p in (tmp_path / "mlartifacts").rglob("*") if p.is_file()}
    assert {"report.html", "answer.json", "next.yaml"} <= artifacts
    again = trireme(*arguments, "--json", env=ray_environment)
    assert again.code == 0 and again.json["best"] == second.json["best"]
    other = trireme(*arguments, "train.steps=70", env=ray_environment)
    assert other.code == 2 and "begun with another train.steps" in other.err


def test_two_workers_bad_trials_and_a_stop(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    """Of the trials one diverges, one raises, and a person stops the sweep in between."""
    text = """
experiment:
  task: "tests.tasks:Points"
  train: {steps: 40, global_batch_size: 16}
  tracking: {system_metrics_every: 0}
  checkpoint: {weights: false}
set: {workers: 2, strategy: ddp}
space: {task: ["tests.tasks:Points", "tests.tasks:Infinite", "tests.tasks:Raises", "tests.tasks:Plain"]}
reports: 4
concurrent: 1
"""
    arguments = write(tmp_path, text)
    first = start(arguments, env=ray_environment)
    try:
        wait_until(lambda: any(t["status"] != "running" for t in trials(tmp_path).values()))
        first.send_signal(signal.SIGTERM)
        stopped = finish(first, 60)
    finally:
        end_tree(first.pid)
    assert stopped.code == 130 and "run the same command again" in stopped.err
    ended = trireme(*arguments, "--json", env=ray_environment)
    assert ended.code == 1 and "1 of 4 trials failed, the first t002" in ended.err
    assert ended.json["status"] == "incomplete"
    assert ended.json["trials"] == {"finished": 2, "reached": 0, "pruned": 0, "diverged": 1, "failed": 1}
    found = trials(tmp_path)
    before = max(resumed(found[1]), default=0)
    assert f"not finite at step {before + 6}" in found[1]["message"] and "a bug of the user's" in found[2]["message"]
    by_index = {name[:4]: status for name, (status, _) in runs(tmp_path).items() if name.startswith("t0")}
    assert by_index == {"t000": "FINISHED", "t001": "FAILED", "t002": "FAILED", "t003": "FINISHED"}
    assert trireme(*arguments, env=ray_environment).code == 1
    more = [trials(tmp_path)[index]["starts"] - trial["starts"] for index, trial in found.items()]
    assert more == [0, 0, 1, 0], "what failed is tried again, and nothing else"


def test_relative_paths_mean_the_folder_of_the_command(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    """Also in the second trial of a process, which Tune gives a folder of its own."""
    rows = "".join(f"{i % 7},{i % 5},{'xy'[i % 2]}\n" for i in range(60))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{rows}")
    table = os.path.relpath(tmp_path / "t.csv", ROOT)
    text = f"""
experiment: {{task: tabular, task_args: {{data: {table}, target: y}}, train: {{steps: 4, global_batch_size: 8}}}}
set: {{tracking.enabled: false}}
space: {{optimizer.lr: [0.001, 0.01, 0.1]}}
concurrent: 1
"""
    ended = trireme(*write(tmp_path, text), "--json", env=ray_environment)
    assert ended.code == 0 and ended.json["trials"]["finished"] == 3, ended.out


def test_schedulers_stop_trials_and_the_target_ends_them(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    more = ["space.optimizer.lr={loguniform: [1.0e-4, 0.3]}", "searcher=random", "trials=8", "concurrent=1"]
    more += ["scheduler={name: asha, grace_period: 10, reduction_factor: 2}", "task_args.step_seconds=0"]
    more += ["train.steps=40", "reports=10", "tracking.enabled=false", "target=0.3"]
    ended = trireme(*write(tmp_path), *more, "--json", env=ray_environment).expect()
    counts = ended.json["trials"]
    assert sum(counts.values()) == 8 and counts["pruned"] and counts["reached"] and not counts["failed"]
    for trial in trials(tmp_path).values():
        values = [r["metrics"]["eval/loss"] for r in trial["reports"]]
        assert all(value > 0.3 for value in values[:-1])
        if trial["status"] == "reached":
            assert values[-1] <= 0.3
        if trial["status"] == "pruned":
            assert trial["message"].startswith("stopped early by asha after step") and len(values) < 10
    assert ended.json["recommendation"]["values"]["workers"] == 1
