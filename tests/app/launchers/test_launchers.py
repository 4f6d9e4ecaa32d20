"""The same experiment gives the same losses whatever launches it, and failures end as they should."""

import sys
from pathlib import Path

import pytest

from tests.running import POINTS, close, committed, curve, mlflow_run, same_bits, trireme, weights

PIPELINE = ["strategy=pipeline", "parallel.pp=2"]
SHORT = [*POINTS, "train.steps=20", "train.log_every=1", "optimizer.weight_decay=0.01"]


def arguments(storage: Path, name: str, *more: str) -> list[str]:
    return ["train", *SHORT, f"run.name={name}", f"run.storage={storage}", *more]


def test_two_workers_and_uneven_micro_batches_one_curve(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    """Ray Train and torchrun: test_resume.py. The actors' environment is that of a submitted job."""
    quiet = ["task=tests.tasks:Plain", "train.clip_norm=0.5"]  # no dropout: one worker and two draw nothing different
    one = trireme(*arguments(tmp_path, "one", "launcher=local", *quiet))
    uneven = ["train.micro_batch_size=5", "train.noise_scale_every=2"]
    env = ray_environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"PYTHONPATH": "."}}}'}
    two = trireme(*arguments(tmp_path, "two", "launcher=actors", "workers=2", *uneven, *quiet), env=env)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    for metric, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("eval/accuracy", 1e-6)):
        single = curve(tmp_path, "one", metric)
        assert single and close(curve(tmp_path, "two", metric), single, tolerance), metric
    measured = curve(tmp_path, "two", "train/noise_scale")
    assert measured and all(value > 0 for value in measured.values())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    more = ["task=tests.tasks:Infinite", "checkpoint.every_steps=2", "launcher=local"]
    ended = trireme(*arguments(tmp_path, "run", *more))
    assert ended.code == 1
    assert "not finite at step 6" in ended.err and "optimizer.lr" in ended.err
    assert committed(tmp_path / "run") == [2, 4], "the last good checkpoints are intact, and no bad one was made"
    assert mlflow_run(tmp_path, "run").info.status == "FAILED"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "more", "says", "logged"),
    [
        ("Raises", ["workers=2"], "a bug of the user's", "in loss"),
        ("Infinite", ["workers=2"], "not finite at step 6 on rank 1", ""),
        ("Raises", PIPELINE, "a bug of the user's", "in loss"),
    ],
)
def test_what_would_fail_again_is_named_and_not_tried_again_in_ray(
    tmp_path: Path, ray_environment: dict[str, str], task: str, more: list[str], says: str, logged: str
) -> None:
    ended = trireme(*arguments(tmp_path, "run", f"task=tests.tasks:{task}", *more), env=ray_environment)
    assert ended.code == 1
    assert says in ended.err and "starting again" not in ended.out
    assert mlflow_run(tmp_path, "run").info.status == "FAILED"
    if logged:
        logs = [log for log in (tmp_path / "run" / "logs").glob("rank-?.log") if logged in log.read_text()]
        assert any(str(log) in ended.err for log in logs), "the log that is named has the traceback"


def test_half_precision_learns_and_what_mlflow_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a model puts its code first there: an older `app`

    more = ["launcher=local", "train.precision=fp16", "tracking.log_model=true", "--json"]
    ended = trireme(*arguments(tmp_path, "run", *more))
    assert ended.code == 0, ended.err
    outcome = ended.json
    assert outcome["status"] == "finished" and outcome["mlflow"]["complete"]
    run = mlflow_run(tmp_path, "run")
    assert run.info.status == "FINISHED" and run.info.run_id == outcome["mlflow"]["run_id"]
    assert run.data.params["train.steps"] == "20" and run.data.params["train.global_batch_size"] == "16"
    assert {"train/loss", "train/grad_norm", "train/lr", "train/samples_per_second"} <= set(run.data.metrics)
    assert {"eval/loss", "eval/accuracy"} <= set(run.data.metrics)
    losses = curve(tmp_path, "run")
    assert losses[20] < losses[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (model,) = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    loaded = mlflow.pytorch.load_model(f"models:/{model.model_id}")
    assert same_bits(loaded.state_dict(), weights(tmp_path / "run"))
