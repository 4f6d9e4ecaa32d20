"""A pipeline in Ray, as a person starts it, trains the same model; its stages killed and stopped: test_faults.py."""

import json
from pathlib import Path

import torch
from click.testing import CliRunner

from app.cli import group
from tests.app.test_profiler import assert_profiled
from tests.running import close, curve, mlflow_run, trireme, weights

GPT = ["experiments/gpt.yaml", "task_args.d_model=32", "task_args.n_layers=4", "task_args.sequence_length=32"]
GPT += ["task_args.eval_samples=16", "train.steps=12", "train.global_batch_size=16", "train.eval_every=6"]
GPT += ["train.log_every=1", "tracking.log_model=false"]


def test_the_same_training_as_on_one_device_and_what_it_leaves(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    """The actors' environment is that of a submitted job."""
    more = ["strategy=pipeline", "parallel.pp=2", "parallel.profile_every=5", "parallel.trace_step=7"]
    more += ["profile.steps=[2,4]", "profile.ranks=[0,1]", "profile.memory=true", "fault.hang_seconds=100"]
    env = ray_environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"PYTHONPATH": "."}}}'}
    run = ["train", *GPT, f"run.storage={tmp_path}"]
    one = trireme(*run, "strategy=single", "launcher=local", "run.name=one", env=ray_environment)
    two = trireme(*run, *more, "run.name=two", env=env)
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
    events = json.loads((storage / "two" / "pipeline" / "step-7.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X" and event["cat"] == "compute"}
    assert names == {f"{kind}{micro}" for kind in "FB" for micro in range(8)}
    assert {event["pid"] for event in events} == {0, 1}
