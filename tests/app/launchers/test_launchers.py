"""The same experiment gives the same losses under every launcher, and failures end as they should."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running import (
    POINTS,
    ROOT,
    committed,
    curve,
    environment,
    mlflow_run,
    same_bits,
    torchrun,
    trireme,
    wait_until,
    weights,
)

pytestmark = pytest.mark.alone

SHORT = [*POINTS, "train.steps=20", "train.log_every=1", "optimizer.weight_decay=0.01"]


def arguments(storage: Path, name: str, *more: str) -> list[str]:
    return ["train", *SHORT, f"run.name={name}", f"run.storage={storage}", *more]


def test_three_launchers_one_curve(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    quiet = "task=tests.tasks:Plain"  # no dropout, so that one worker and two draw nothing different
    one = trireme(*arguments(tmp_path, "one", "launcher=local", quiet))
    two = torchrun(*arguments(tmp_path, "two", quiet))
    in_ray = trireme(*arguments(tmp_path, "ray", "workers=2", quiet), env=ray_environment)
    assert (one.code, two.code, in_ray.code) == (0, 0, 0), one.err + two.err + in_ray.err
    assert same_bits(weights(tmp_path / "two"), weights(tmp_path / "ray"))
    single, ddp, ray = (curve(tmp_path, name) for name in ("one", "two", "ray"))
    assert len(single) == 20 and ddp == ray
    assert all(abs(single[step] - ddp[step]) <= 1e-5 * abs(single[step]) for step in single)
    assert curve(tmp_path, "ray", "eval/accuracy") == curve(tmp_path, "two", "eval/accuracy")


@pytest.mark.slow
def test_accumulation_and_a_smaller_last_micro_batch_change_nothing(tmp_path: Path) -> None:
    quiet = ["task=tests.tasks:Plain", "launcher=local", "train.clip_norm=0.5"]
    for name, size in (("whole", 16), ("uneven", 5)):
        ended = trireme(*arguments(tmp_path, name, *quiet, f"train.micro_batch_size={size}"))
        assert ended.code == 0, ended.err
    whole, uneven = curve(tmp_path, "whole"), curve(tmp_path, "uneven")
    assert all(abs(whole[step] - uneven[step]) <= 1e-5 * abs(whole[step]) for step in whole)
    norms = curve(tmp_path, "whole", "train/grad_norm"), curve(tmp_path, "uneven", "train/grad_norm")
    assert all(abs(norms[0][step] - norms[1][step]) <= 1e-4 * norms[0][step] for step in norms[0])


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_lower_precisions_learn(tmp_path: Path, precision: str) -> None:
    ended = trireme(*arguments(tmp_path, "run", "launcher=local", f"train.precision={precision}"))
    assert ended.code == 0, ended.err
    losses = curve(tmp_path, "run")
    assert losses[20] < losses[1]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    ended = torchrun(
        *arguments(tmp_path, "run", "task=tests.tasks:Infinite", "task_args.good_steps=5", "checkpoint.every_steps=2")
    )
    assert ended.code == 1
    assert "not finite at step 6 on rank 1" in ended.err and "optimizer.lr" in ended.err
    assert committed(tmp_path / "run") == [2, 4], "the last good checkpoints are intact, and no bad one was made"
    assert mlflow_run(tmp_path, "run").info.status == "FAILED"


def test_non_finite_in_ray_is_not_tried_again(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    ended = trireme(*arguments(tmp_path, "run", "task=tests.tasks:Infinite", "workers=2"), env=ray_environment)
    assert ended.code == 1
    assert "not finite at step 6 on rank 1" in ended.err
    assert "starting again" not in ended.out


def test_a_bug_of_the_users_is_named_and_not_tried_again(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    ended = trireme(*arguments(tmp_path, "run", "task=tests.tasks:Raises", "workers=2"), env=ray_environment)
    assert ended.code == 1
    assert "KeyError" in ended.err and "a bug of the user's" in ended.err
    assert "starting again" not in ended.out
    log = tmp_path / "run" / "logs" / "rank-0.log"
    assert str(log) in ended.err or "rank-1.log" in ended.err
    assert "in loss" in log.read_text(), "the log has the traceback"
    assert mlflow_run(tmp_path, "run").info.status == "FAILED"


def test_what_mlflow_gets(tmp_path: Path) -> None:
    import mlflow
    import torch

    ended = trireme(*arguments(tmp_path, "run", "launcher=local", "tracking.log_model=true", "--json"))
    assert ended.code == 0, ended.err
    outcome = ended.json
    assert outcome["status"] == "finished" and outcome["mlflow"]["complete"]
    run = mlflow_run(tmp_path, "run")
    assert run.info.status == "FINISHED" and run.info.run_id == outcome["mlflow"]["run_id"]
    assert run.data.params["train.steps"] == "20" and run.data.params["train.global_batch_size"] == "16"
    assert {"train/loss", "train/grad_norm", "train/lr", "train/samples_per_second"} <= set(run.data.metrics)
    assert {"eval/loss", "eval/accuracy"} <= set(run.data.metrics)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    (model,) = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    # Loaded in a process of its own: it must need nothing of ours, and it puts the model's copy of `app` on the path.
    load = (
        "import sys, torch, mlflow; mlflow.set_tracking_uri(sys.argv[1]); "
        "torch.save(mlflow.pytorch.load_model(sys.argv[2]).state_dict(), sys.argv[3])"
    )
    command = [sys.executable, "-c", load, f"sqlite:///{tmp_path}/mlflow.db", f"models:/{model.model_id}"]
    elsewhere = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    subprocess.run([*command, str(tmp_path / "loaded.pt")], cwd=tmp_path, env=elsewhere, check=True)
    assert same_bits(torch.load(tmp_path / "loaded.pt"), weights(tmp_path / "run"))
    assert mlflow.models.get_model_info(f"models:/{model.model_id}").signature is not None


def test_as_a_ray_job(tmp_path: Path) -> None:
    """`ray job submit --working-dir .` with nothing installed but what the cluster has."""
    from tests.running import ray_head_with_jobs

    with ray_head_with_jobs() as (address, dashboard):
        entry = [sys.executable, "-m", "app", *arguments(tmp_path, "job", "workers=2")]
        command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--working-dir", ".", "--", *entry]
        env = environment(RAY_ADDRESS=dashboard, RAY_AUTH_MODE="disabled")
        for _ in range(10):  # the head's job agent comes up some seconds after its dashboard
            submit = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
            if "No available agent" not in submit.stderr:
                break
            time.sleep(2)
        assert submit.returncode == 0, submit.stdout + submit.stderr
        assert address
    run = mlflow_run(tmp_path, "job")
    assert run.info.status == "FINISHED"
    assert json.dumps(run.data.tags).find("raysubmit_") > 0, "the MLflow run names its Ray job"
    wait_until(lambda: committed(tmp_path / "job"))
