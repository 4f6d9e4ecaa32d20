"""A task with a step, optimizers and pictures of its own, and an average of weights: its workers killed, run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.storage import Storage
from app.trained import trained
from tests.running import (
    committed,
    curve,
    end_tree,
    finish,
    mlflow_run,
    mlflow_text,
    same_bits,
    start,
    torchrun_program,
    wait_until,
    weights,
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_to_the_last_bit_after_a_kill_and_an_early_end(tmp_path: Path, strategy: str) -> None:
    given = ["train", "task=tests.tasks:Gan", "train.steps=200", "train.eval_every=10", "train.ema_decay=0.9"]
    given += ["task_args={ends_at: 8, step_seconds: 0.05}", "checkpoint.every_steps=10", "train.log_every=1"]
    given += [f"strategy={strategy}", f"run.storage={tmp_path}", "tracking.log_model=false"]
    truth = finish(start([*given, "run.name=truth"], program=torchrun_program()))
    assert truth.code == 0 and "training ends early, after step 80" in truth.out, truth.out + truth.err
    process = start([*given, "run.name=run"], program=torchrun_program())
    wait_until(lambda: committed(tmp_path / "run"))
    end_tree(process.pid)
    process.wait()
    again = finish(start([*given, "run.name=run"], program=torchrun_program()))
    assert again.code == 0 and "continuing after step" in again.out, again.out + again.err
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "truth"))
    for metric in ("train/loss", "train/real", "eval/loss", "eval/ema_loss", "eval/ink"):
        assert curve(tmp_path, "run", metric) == curve(tmp_path, "truth", metric)
    found = mlflow_run(tmp_path, "run")
    assert found.info.status == "FINISHED"
    assert mlflow_text(tmp_path, found.info.run_id, "evaluation/step-00000080") == ["sixteen digits"]
    assert committed(tmp_path / "run")[-1] == 80
    assert same_bits(dict(trained(Storage(str(tmp_path / "run"))).model.state_dict()), weights(tmp_path / "run"))
    third = finish(start([*given, "run.name=run", "--json"], program=torchrun_program()))
    assert json.loads(third.out.strip().splitlines()[-1])["status"] == "already_finished"
