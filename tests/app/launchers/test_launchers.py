"""Runs in Ray as a person starts them: stages on actors, what they wait for, what they leave there and find there. Runs
of two workers, whatever launches them: test_resume.py; how they end: tests/faults."""

import gzip
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import ray
import torch
from ray.util import placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup

from app.config.io import load_config
from app.launchers.room import groups_of_this_job, remove_groups_but
from app.tracking.tracker import Tracker
from tests.app.kit import logged, training_of
from tests.running import POINTS, committed, curve, invoke, mlflow_run, mlflow_text, trireme, wait_until, weights

GPT = ["experiments/gpt.yaml", "task_args.d_model=32", "task_args.n_layers=4", "task_args.sequence_length=32"]
GPT += ["task_args.eval_samples=16", "train.steps=12", "train.global_batch_size=16", "train.eval_every=6"]
GPT += ["train.log_every=1", "tracking.log_model=false"]


def assert_profiled(storage: Path, name: str, first: int) -> None:
    """Three steps of a run's ranks 0 and 1, from `first` on: in its folder, in MLflow and as they are shown."""
    steps = f"steps-{first}-{first + 2}"
    for rank in (0, 1):
        packed = storage / name / "profile" / steps / f"rank-{rank}.trace.json.gz"
        events = json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]
        taken = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
        assert len(taken) == 3, "those that were asked for, without the one to warm up"
    ranks = json.loads(invoke("profile", storage / name, "--json").stdout)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["communication_seconds"] > 0, "gradients or activations are sent in every step"
        parts = [rank[f"{part}_seconds"] for part in ("computing", "exposed_communication", "idle")]
        assert sum(parts) == pytest.approx(rank["step_seconds"], rel=0.01)
        assert any(row["name"].startswith("aten::") and row["bytes"] > 0 for row in rank["operators"])
    run = mlflow_run(storage, name)
    assert run.data.metrics["profile/step_seconds"] == pytest.approx(ranks[0]["step_seconds"])
    (table,) = mlflow_text(storage, run.info.run_id, f"profile/{steps}")
    assert table in invoke("profile", storage / name).stdout


def test_stages_train_as_one_device_and_what_they_leave(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    """The actors' environment is that of a submitted job."""
    more = ["strategy=pipeline", "parallel.pp=2", "parallel.profile_every=5", "parallel.trace_step=7"]
    more += ["profile.steps=[2,4]", "profile.ranks=[0,1]", "profile.memory=true", "fault.hang_seconds=100"]
    env = ray_environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"PYTHONPATH": "."}}}'}
    two = trireme("train", *GPT, *more, "run.name=two", f"run.storage={tmp_path}", env=env).expect()
    assert "8 micro-batches of 2 through 2 stages (1f1b)" in two.out, "what was decided is said"
    one, events = training_of(load_config(["experiments/gpt.yaml"], GPT[1:]), tmp_path / "one")
    one.run()
    for metric in ("train/loss", "train/grad_norm", "eval/loss", "eval/bits_per_byte"):
        alone = {event.step: event.values[metric] for event in logged(events, metric)}
        assert len(alone) in (2, 12) and curve(tmp_path, "two", metric) == pytest.approx(alone, rel=2e-5, abs=0), metric
    ours, theirs = weights(tmp_path / "two"), one.parallel.full_model_state()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5) for name in theirs)
    run = mlflow_run(tmp_path, "two")
    assert run.info.status == "FINISHED"
    assert run.data.tags["trireme.parameters"] == str(sum(tensor.numel() for tensor in theirs.values()))
    assert_profiled(tmp_path, "two", 2)
    metrics = run.data.metrics
    assert set(curve(tmp_path, "two", "pipeline/bubble")) == {5, 7, 10}, "of two profiles and a trace"
    assert 0 < metrics["pipeline/bubble_by_formula"] < metrics["pipeline/bubble"] < 1
    assert abs(metrics["pipeline/bubble_by_formula"] - 1 / 9) < 1e-6, "(p-1)/(m+p-1) with p=2, m=8"
    for stage in (0, 1):
        parts = ("compute", "wait", "handover", "reduce")
        spent = [metrics[f"pipeline/stage_{stage}/{part}_seconds"] for part in parts]
        assert all(seconds >= 0 for seconds in spent) and spent[0] > 0
    trace = json.loads((tmp_path / "two" / "pipeline" / "step-7.json").read_text())["traceEvents"]
    names = {event["name"] for event in trace if event["ph"] == "X" and event["cat"] == "compute"}
    assert names == {f"{kind}{micro}" for kind in "FB" for micro in range(8)}
    assert {event["pid"] for event in trace} == {0, 1}


def test_what_an_ended_attempt_waits_for_is_not_left_behind_and_workers_have_the_environment(connected: None) -> None:
    """A group that nobody removes takes the places when they come, and the next attempt waits for ever."""
    others = [placement_group([{"CPU": 0.5}]), placement_group([{"CPU": 0.5}], name="a user's")]
    kept = groups_of_this_job()
    assert kept == {other.id.hex() for other in others}
    waiting, placed = placement_group([{"CPU": 1000.0}]), placement_group([{"CPU": 0.5}])
    unlike = placement_group([{"CPU": 1000.0, "their_own": 1.0}])
    named = placement_group([{"CPU": 1000.0}], name="another of theirs")
    assert placed.wait(30) and not waiting.wait(0.1)
    remove_groups_but(kept, {"CPU": 1.0, "GPU": 0.0})

    def states(*groups: PlacementGroup) -> set[str]:
        return {placement_group_table(each)["state"] for each in groups}

    wait_until(lambda: states(waiting, placed) == {"REMOVED"})
    assert states(named, unlike) == {"PENDING"} and all(other.wait(30) for other in others)
    for each in (*others, named, unlike):
        ray.util.remove_placement_group(each)
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_ALLOC_CONF")
    asked = ray.remote(lambda: [os.environ.get(name) for name in names])
    assert ray.get(asked.remote()) == ["2", "expandable_segments:True"]


@pytest.mark.slow
def test_a_run_says_who_holds_what_it_waits_for_and_gets_no_worker_on_an_excluded_node(
    tmp_path: Path, ray_environment: dict[str, str], connected: None
) -> None:
    assert placement_group([{"CPU": 3}]).wait(30), "until this process disconnects"
    run = ["train", *POINTS, "train.steps=4", f"run.storage={tmp_path}", "workers=2", "cluster.wait_seconds=4"]
    ended = trireme(*run, "run.name=ends", env=ray_environment).expect(2)
    assert "there is room for 1 of 2 workers after 4 s: bundle 2 of 2 (CPU 1) cannot be placed" in ended.err
    assert "3 of 4 CPU are held by job " in ended.err
    smaller = trireme(*run, "run.name=shrinks", "cluster.when_pending=shrink", env=ray_environment).expect()
    assert "continuing with 1 of 2 workers" in smaller.out
    (only,) = (node["NodeID"] for node in ray.nodes())
    ended = trireme(*run, "run.name=out", f"cluster.exclude_nodes=[{only}]", env=ray_environment)
    assert ended.code == 2 and "no node has it, the most is CPU 0" in ended.err, ended.out + ended.err


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    words = ["train", *POINTS, "task=tests.tasks:Infinite", "train.steps=20", "checkpoint.every_steps=2"]
    words += ["launcher=local", "run.name=run", f"run.storage={tmp_path}", "tracking.enabled=false"]
    with mock.patch.object(Tracker, "finish", autospec=True, side_effect=Tracker.finish) as finish:
        ended = invoke(*words, code=1)
    assert "not finite at step 6" in ended.stderr and "optimizer.lr" in ended.stderr
    assert committed(tmp_path / "run") == [2, 4], "the last good checkpoints are intact, and no bad one was made"
    assert finish.call_args.args[1] == "FAILED", "which MLflow is told"
