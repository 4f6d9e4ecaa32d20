"""Runs in Ray as a user starts them: pipeline stages on actors, placement groups, waiting for room.

Runs of two workers with every launcher: test_resume.py. How runs end: tests/faults.
"""

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
from tests.running import (
    LONG,
    POINTS,
    Lines,
    committed,
    curve,
    invoke,
    mlflow_run,
    mlflow_text,
    start,
    trireme,
    wait_until,
    weights,
)

GPT = [
    "experiments/gpt.yaml",
    "task_args.d_model=32",
    "task_args.n_layers=4",
    "task_args.sequence_length=32",
    "task_args.eval_samples=16",
    "train.steps=12",
    "train.global_batch_size=16",
    "train.eval_every=6",
    "train.log_every=1",
    "tracking.log_model=false",
]
RATES = {
    "memory_bandwidth": 1e5,
    "stream": 1.0,
    "operation": 1e-9,
    "link_within": 1e13,
    "latency_within": 1e-9,
    "latency_across": 1e-9,
}
"""A machine whose memory alone takes time, as `trireme calibrate` would have measured it."""


def assert_profiled(storage: Path, name: str, first_step: int) -> None:
    """Checks the profile of three steps on ranks 0 and 1: its files, in MLflow, and as shown."""
    steps = f"steps-{first_step}-{first_step + 2}"
    for rank in (0, 1):
        trace = storage / name / "profile" / steps / f"rank-{rank}.trace.json.gz"
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        names = {str(event.get("name")) for event in events}
        steps_traced = {name for name in names if name.startswith("ProfilerStep")}
        assert len(steps_traced) == 3, "the step that warms up is not in the trace"
    ranks = json.loads(invoke("profile", storage / name, "--json").stdout)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["communication_seconds"] > 0, "gradients or activations are sent in every step"
        parts = [rank[f"{part}_seconds"] for part in ("computing", "exposed_communication", "idle")]
        assert sum(parts) == pytest.approx(rank["step_seconds"], rel=0.01)
        operators = [row for row in rank["operators"] if row["name"].startswith("aten::")]
        assert any(row["bytes"] > 0 for row in operators)
    run = mlflow_run(storage, name)
    assert run.data.metrics["profile/step_seconds"] == pytest.approx(ranks[0]["step_seconds"])
    (table,) = mlflow_text(storage, run.info.run_id, f"profile/{steps}")
    assert table in invoke("profile", storage / name).stdout


def test_stages_train_as_one_device_and_leave_metrics_and_traces(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    """The actors have the environment of a submitted job."""
    overrides = [
        "strategy=pipeline",
        "parallel.pp=2",
        "parallel.profile_every=5",
        "parallel.trace_step=7",
        "profile.steps=[2,4]",
        "profile.ranks=[0,1]",
        "profile.memory=true",
        "fault.hang_seconds=100",
    ]
    job_config = '{"runtime_env": {"env_vars": {"PYTHONPATH": "."}}}'
    env = ray_environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": job_config}
    overrides += ["run.name=two", f"run.storage={tmp_path}"]
    staged = trireme("train", *GPT, *overrides, env=env).expect()
    assert "8 micro-batches of 2 through 2 stages (1f1b)" in staged.out
    single, events = training_of(load_config(["experiments/gpt.yaml"], GPT[1:]), tmp_path / "one")
    single.run()
    for metric in ("train/loss", "train/grad_norm", "eval/loss", "eval/bits_per_byte"):
        expected = {event.step: event.values[metric] for event in logged(events, metric)}
        assert len(expected) in (2, 12)
        assert curve(tmp_path, "two", metric) == pytest.approx(expected, rel=2e-5, abs=0), metric
    stage_weights = weights(tmp_path / "two")
    single_weights = single.parallel.full_model_state()
    assert stage_weights.keys() == single_weights.keys()
    for name, weight in single_weights.items():
        assert torch.allclose(stage_weights[name], weight, rtol=1e-4, atol=1e-5), name
    run = mlflow_run(tmp_path, "two")
    assert run.info.status == "FINISHED"
    parameters = sum(tensor.numel() for tensor in single_weights.values())
    assert run.data.tags["trireme.parameters"] == str(parameters)
    assert_profiled(tmp_path, "two", 2)
    metrics = run.data.metrics
    measured_steps = set(curve(tmp_path, "two", "pipeline/bubble"))
    assert measured_steps == {5, 7, 10}, "two profiles and a trace"
    assert 0 < metrics["pipeline/bubble_by_formula"] < metrics["pipeline/bubble"] < 1
    assert abs(metrics["pipeline/bubble_by_formula"] - 1 / 9) < 1e-6, "(p-1)/(m+p-1) with p=2, m=8"
    for stage in (0, 1):
        parts = ("compute", "wait", "handover", "reduce")
        seconds_spent = [metrics[f"pipeline/stage_{stage}/{part}_seconds"] for part in parts]
        assert all(seconds >= 0 for seconds in seconds_spent) and seconds_spent[0] > 0
    trace = json.loads((tmp_path / "two" / "pipeline" / "step-7.json").read_text())["traceEvents"]
    names = {event["name"] for event in trace if event["ph"] == "X" and event["cat"] == "compute"}
    assert names == {f"{kind}{micro_batch}" for kind in "FB" for micro_batch in range(8)}
    assert {event["pid"] for event in trace} == {0, 1}


def test_placement_groups_of_an_ended_attempt_are_removed(connected: None) -> None:
    """Otherwise a pending group takes the room once it is free, and the next attempt waits."""
    user_groups = [
        placement_group([{"CPU": 0.5}]),
        placement_group([{"CPU": 0.5}], name="a user's"),
    ]
    groups_before = groups_of_this_job()
    assert groups_before == {group.id.hex() for group in user_groups}
    waiting = placement_group([{"CPU": 1000.0}])
    placed = placement_group([{"CPU": 0.5}])
    other_bundle = placement_group([{"CPU": 1000.0, "their_own": 1.0}])
    other_name = placement_group([{"CPU": 1000.0}], name="another of theirs")
    assert placed.wait(30) and not waiting.wait(0.1)
    remove_groups_but(groups_before, {"CPU": 1.0, "GPU": 0.0})

    def states(*groups: PlacementGroup) -> set[str]:
        return {placement_group_table(group)["state"] for group in groups}

    wait_until(lambda: states(waiting, placed) == {"REMOVED"})
    assert states(other_name, other_bundle) == {"PENDING"}
    assert all(group.wait(30) for group in user_groups)
    for group in (*user_groups, other_name, other_bundle):
        ray.util.remove_placement_group(group)


def test_workers_have_the_environment_of_the_run(connected: None) -> None:
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_ALLOC_CONF")
    read_environment = ray.remote(lambda: [os.environ.get(name) for name in names])
    assert ray.get(read_environment.remote()) == ["2", "expandable_segments:True"]


@pytest.mark.slow
def test_a_waiting_run_names_who_holds_its_room_and_leaves_excluded_nodes_out(
    tmp_path: Path, ray_environment: dict[str, str], connected: None
) -> None:
    assert placement_group([{"CPU": 3}]).wait(30), "held until this process disconnects"
    arguments = [
        "train",
        *POINTS,
        "train.steps=4",
        f"run.storage={tmp_path}",
        "workers=2",
        "cluster.wait_seconds=4",
    ]
    ended = trireme(*arguments, "run.name=ends", env=ray_environment).expect(2)
    message = "there is room for 1 of 2 workers after 4 s: bundle 2 of 2 (CPU 1) cannot be placed"
    assert message in ended.err
    assert "3 of 4 CPU are held by job " in ended.err
    shrinking = ("run.name=shrinks", "cluster.when_pending=shrink")
    shrunk = trireme(*arguments, *shrinking, env=ray_environment).expect()
    assert "continuing with 1 of 2 workers" in shrunk.out
    (node_id,) = (node["NodeID"] for node in ray.nodes())
    ended = trireme(
        *arguments, "run.name=out", f"cluster.exclude_nodes=[{node_id}]", env=ray_environment
    )
    assert ended.code == 2
    assert "no node has it, the most is CPU 0" in ended.err, ended.out + ended.err
    stages = ["strategy=pipeline", "parallel.stage_resources=[{CPU: 1}, {CPU: 1}]"]
    ended = trireme(
        "train",
        *GPT,
        *stages,
        f"run.storage={tmp_path}",
        "run.name=stages",
        "workers=2",
        "cluster.wait_seconds=4",
        env=ray_environment,
    ).expect(2)
    assert "the workers have no places after 4 s (cluster.wait_seconds): bundle 1 of 1" in ended.err
    assert "3 of 4 CPU are held by job " in ended.err


@pytest.mark.slow
def test_a_run_goes_on_without_more_workers_whose_places_others_hold(
    tmp_path: Path, ray_environment: dict[str, str], connected: None
) -> None:
    """Its batch has grown, and cluster.max_workers is more than the cluster has."""
    taken_places = placement_group([{"CPU": 2}])
    assert taken_places.wait(30)
    others = {group for group in placement_group_table() if group != taken_places.id.hex()}

    def states() -> list[str]:
        table = placement_group_table()
        return sorted(
            entry["state"]
            for group, entry in table.items()
            if group not in {taken_places.id.hex(), *others} and entry["state"] != "REMOVED"
        )

    is_slow = tmp_path / "slow"
    is_slow.touch()
    # Where memory is slow and links are not, every further worker pays.
    rates = tmp_path / "trireme" / "planner" / "rates-cpu.json"
    rates.parent.mkdir(parents=True)
    rates.write_text(json.dumps(RATES))
    run = start(
        [
            "train",
            *POINTS,
            f"task_args={{step_seconds: 0.5, slow_while: {is_slow}}}",
            "train.batch_schedule=[[0,8],[80,256]]",
            "train.steps=2000",
            "train.log_every=1",
            "tracking.enabled=false",
            "checkpoint.every_seconds=null",
            "workers=2",
            "strategy=ddp",
            "cluster.max_workers=8",
            "cluster.wait_seconds=8",
            f"run.storage={tmp_path}",
            "run.name=run",
        ],
        env={**ray_environment, "XDG_CACHE_HOME": str(tmp_path)},
    )
    lines = Lines(run)
    lines.when("asking for 6 more")
    wait_until(lambda: "PENDING" in states())
    lines.when("the 6 workers that were asked for did not come within 8 s: continuing with 2")
    wait_until(lambda: "PENDING" not in states())
    assert run.poll() is None, "training goes on"
    is_slow.unlink()
    assert run.wait(LONG) == 0, lines.text
    assert lines.text.count("did not come within") == 1, lines.text
    assert committed(tmp_path / "run")[-1] == 2000
    wait_until(lambda: not states())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    arguments = [
        "train",
        *POINTS,
        "task=tests.tasks:Infinite",
        "train.steps=20",
        "checkpoint.every_steps=2",
        "launcher=local",
        "run.name=run",
        f"run.storage={tmp_path}",
        "tracking.enabled=false",
    ]
    with mock.patch.object(Tracker, "finish", autospec=True, side_effect=Tracker.finish) as finish:
        ended = invoke(*arguments, code=1)
    assert "not finite at step 6" in ended.stderr and "optimizer.lr" in ended.stderr
    steps = committed(tmp_path / "run")
    assert steps == [2, 4], "the good checkpoints are intact, and no bad one is written"
    assert finish.call_args.args[1] == "FAILED", "the status of the MLflow run"
