"""A pipeline in Ray, as a person starts it: trains the same model, and survives the death and the hanging of stages."""

import json
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from app.cli import group
from tests.app.test_profiler import assert_profiled
from tests.running import (
    LONG,
    Lines,
    close,
    committed,
    curve,
    disturb,
    mlflow_run,
    mlflow_text,
    same_bits,
    start,
    trireme,
    wait_until,
    weights,
)

GPT = ["experiments/gpt.yaml", "task_args.d_model=32", "task_args.n_layers=4", "task_args.sequence_length=32"]
GPT += ["task_args.eval_samples=16", "train.steps=12", "train.global_batch_size=16", "train.eval_every=6"]
GPT += ["train.log_every=1", "tracking.log_model=false"]
CHAIN = ["task=tests.chain:Chain", "strategy=pipeline", "parallel.pp=2", "train.global_batch_size=16"]
CHAIN += ["train.micro_batch_size=4", "train.steps=60", "train.log_every=1", "checkpoint.every_steps=5"]
CHAIN += ["tracking.log_model=false", "fault.hang_seconds=1.5"]


def test_the_same_training_as_on_one_device_and_what_it_leaves(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    more = ["strategy=pipeline", "parallel.pp=2", "parallel.profile_every=5", "parallel.trace_step=7"]
    more += ["profile.steps=[2,4]", "profile.ranks=[0,1]", "profile.memory=true"]
    one = trireme("train", *GPT, "strategy=single", "launcher=local", "run.name=one", f"run.storage={tmp_path}")
    two = trireme("train", *GPT, *more, "run.name=two", f"run.storage={tmp_path}", env=ray_environment)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert "8 micro-batches of 2 through 2 stages (1f1b)" in two.out, "what was decided is said"
    for metric in ("train/loss", "train/grad_norm", "eval/loss", "eval/bits_per_byte"):
        assert close(curve(tmp_path, "two", metric), curve(tmp_path, "one", metric), 2e-5), metric
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5) for name in theirs)
    run = mlflow_run(tmp_path, "two")
    assert run.info.status == "FINISHED"
    assert run.data.tags["trireme.parameters"] == str(sum(tensor.numel() for tensor in theirs.values()))
    check_profile(tmp_path, run.data.metrics)
    assert_profiled(tmp_path, "two", 2)
    assert CliRunner().invoke(group, ["profile", str(tmp_path / "one")]).exit_code == 2, "it has none"


def check_profile(storage: Path, metrics: dict[str, float]) -> None:
    """Of the steps 5 and 10, and the trace of step 7."""
    assert set(curve(storage, "two", "pipeline/bubble")) == {5, 7, 10}
    assert 0 < metrics["pipeline/bubble_by_formula"] < metrics["pipeline/bubble"] < 1
    assert abs(metrics["pipeline/bubble_by_formula"] - 1 / 9) < 1e-6, "(p-1)/(m+p-1) with p=2, m=8"
    for stage in (0, 1):
        parts = ("compute", "wait", "handover", "reduce")
        spent = [metrics[f"pipeline/stage_{stage}/{part}_seconds"] for part in parts]
        assert all(seconds >= 0 for seconds in spent) and spent[0] > 0
    folder = storage / "two" / "pipeline"
    events = json.loads((folder / "step-7.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X" and event["cat"] == "compute"}
    assert names == {f"{kind}{micro}" for kind in "FB" for micro in range(8)}
    assert {event["pid"] for event in events} == {0, 1}


@pytest.mark.slow
def test_stages_are_killed_and_stopped_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    plain = ["train", *CHAIN, f"run.storage={tmp_path}"]
    calm = trireme(*plain, "run.name=calm", env=ray_environment)
    assert calm.code == 0, calm.err
    slow = ["task_args.step_seconds=0.02", f"task_args.hang={tmp_path / 'sleep'}"]
    process = start([*plain, "run.name=hurt", *slow], env=ray_environment)
    lines = Lines(process)
    folder = tmp_path / "hurt"
    wait_until(lambda: max(committed(folder), default=0) >= 15)
    killed = disturb(folder, 1, signal.SIGKILL)
    assert lines.when("died") >= killed, "noticed by the supervisor, not by a time-out"
    wait_until(lambda: max(committed(folder), default=0) >= 35)
    stopped = disturb(folder, 0, signal.SIGSTOP)
    assert lines.when("does not answer") - stopped >= 1.5
    wait_until(lambda: max(committed(folder), default=0) >= 45)
    (tmp_path / "sleep").touch()
    assert lines.when("without progress"), "a block that sleeps for ever, and answers"
    process.wait(LONG)
    assert process.returncode == 0, lines.text
    assert same_bits(weights(folder), weights(tmp_path / "calm"))
    assert curve(tmp_path, "hurt") == curve(tmp_path, "calm"), "one unbroken curve in one MLflow run"
    recoveries = curve(tmp_path, "hurt", "fault/recovery_seconds")
    assert len(recoveries) == 3, recoveries
    run = mlflow_run(tmp_path, "hurt")
    assert run.info.status == "FINISHED" and run.data.tags["trireme.restarts"] == "3"
    assert "stage 1 of 2" in run.data.tags["trireme.last_failure"], "it says who"
    stacks, asleep_at = mlflow_text(tmp_path, run.info.run_id, "hangs")
    assert "time.sleep(3600)" in asleep_at
    assert "worker 0 (stage 0 of 2)" in stacks and "does not answer" in stacks
    assert "runtime.py" in stacks or "loop.py" in stacks, "where the other one stood"
