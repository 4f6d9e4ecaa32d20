"""Whole sweeps as a person runs them: killed and run again, warm workers, failing trials, MLflow."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.running import end_tree, finish, start, trireme, wait_until

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


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    file = tmp_path / "s" / "ledger.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def children(tmp_path: Path) -> dict[str, tuple[str, str | None]]:
    """Per MLflow run its status and its parent's name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("trireme").experiment_id])
    names = {run.info.run_id: run.info.run_name for run in runs}
    assert len(set(names.values())) == len(names), "no run twice"
    return {
        run.info.run_name: (run.info.status, names.get(run.data.tags.get("mlflow.parentRunId", ""))) for run in runs
    }


def test_killed_and_run_again(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    arguments = write(tmp_path)
    first = start(arguments, env=ray_environment)

    def half_way() -> bool:
        ended = {e["index"] for e in events(tmp_path, "end")}
        going = {e["index"]: e["report"]["step"] for e in events(tmp_path, "report") if e["index"] not in ended}
        return bool(ended) and any(20 <= step <= 30 for step in going.values())

    wait_until(half_way, 100)
    first.send_signal(signal.SIGKILL)
    at_kill = {e["index"]: e["report"]["step"] for e in events(tmp_path, "report")}
    finish(first)
    ended = {e["index"] for e in events(tmp_path, "end")}
    begun = {e["index"] for e in events(tmp_path, "trial")} - ended
    assert ended and begun, "some had ended, and some were under way"
    second = trireme(*arguments, "--json", env=ray_environment)
    assert second.code == 0, second.err
    assert second.json["trials"]["finished"] == 4
    starts = [e["index"] for e in events(tmp_path, "trial")]
    assert all(starts.count(index) == 1 for index in ended), "what had ended was not run again"
    continued = 0
    for index in begun:
        steps = [e["report"]["step"] for e in events(tmp_path, "report") if e["index"] == index]
        assert steps == [10, 20, 30, 40, 50, 60]
        name = next(e["name"] for e in events(tmp_path, "trial") if e["index"] == index)
        log = (tmp_path / "s" / name / "logs" / "driver.log").read_text()
        after = [int(step) for step in re.findall(r"continuing after step (\d+)", log)]
        if at_kill.get(index, 0) <= 30:  # seconds from its end, which is longer than Ray lets the orphans live
            assert after or index not in at_kill
        else:  # one may have taken its last step before the kill reached it
            assert after or "has finished already" in log
        assert all(step >= at_kill[index] for step in after), "from its last checkpoint, not from an earlier one"
        continued += bool(after)
    assert continued
    found = children(tmp_path)
    assert found.pop("s") == ("FINISHED", None)
    assert len(found) == 4 and set(found.values()) == {("FINISHED", "s")}
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        tags = dict(
            database.execute(
                "SELECT r.name, t.value FROM tags t JOIN runs r USING (run_uuid) WHERE t.key = 'trireme.best'"
            )
        )
        assert tags[second.json["best"]["trial"]] == "true"
        (command,) = database.execute("SELECT DISTINCT value FROM tags WHERE key = 'trireme.command'").fetchone()
        assert " sweep " in command, "a trial's command is the sweep's, not that of Ray's worker process"
        artifacts = {p.name for p in (tmp_path / "mlartifacts").rglob("*") if p.is_file()}
    assert {"report.html", "1-heat-map.svg", "answer.json", "next.yaml"} <= artifacts
    again = trireme(*arguments, "--json", env=ray_environment)
    assert again.code == 0 and again.json["best"] == second.json["best"]
    other = trireme(*arguments, "train.steps=70", env=ray_environment)
    assert other.code == 2 and "begun with another train.steps" in other.err


def test_warm_workers_bad_trials_and_a_stop(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    """Two workers per trial; of the trials one diverges, one raises, and a person stops the sweep in between."""
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
        wait_until(lambda: events(tmp_path, "end"), 200)
        first.send_signal(signal.SIGTERM)
        stopped = finish(first, 60)
    finally:
        end_tree(first.pid)
    assert stopped.code == 130 and "run the same command again" in stopped.err
    ended = trireme(*arguments, "--json", env=ray_environment)
    assert ended.code == 0, ended.err
    assert ended.json["trials"] == {"finished": 2, "reached": 0, "pruned": 0, "failed": 2}
    messages = {e["index"]: e["message"] for e in events(tmp_path, "end")}
    name = next(e["name"] for e in events(tmp_path, "trial") if e["index"] == 1)
    log = (tmp_path / "s" / name / "logs" / "driver.log").read_text()
    before = int((re.findall(r"continuing after step (\d+)", log) or [0])[-1])
    assert f"not finite at step {before + 6}" in messages[1] and "a bug of the user's" in messages[2]
    found = children(tmp_path)
    by_index = {name[:4]: status for name, (status, _) in found.items() if name.startswith("t0")}
    assert by_index == {"t000": "FINISHED", "t001": "FAILED", "t002": "FAILED", "t003": "FINISHED"}
    warm = [e["report"]["first_step"] for e in events(tmp_path, "report") if e["index"] == 3]
    assert warm[0] < 20
