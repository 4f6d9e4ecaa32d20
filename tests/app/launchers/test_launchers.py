"""What a run leaves in MLflow, and that failures end as they should. That the same experiment gives the same losses
whatever launches it: test_resume.py, test_pipeline_in_ray.py."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import group
from tests.app.launchers.conftest import STEPS
from tests.running import POINTS, Ended, committed, curve, mlflow_run, same_bits, seed, trireme, weights


def arguments(storage: Path, *more: str) -> list[str]:
    return ["train", *POINTS, "train.steps=20", "train.log_every=1", "run.name=run", f"run.storage={storage}", *more]


def test_half_precision_learns_and_what_mlflow_gets(one: tuple[Path, Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a model puts its code first there: an older `app`
    storage, ended = one
    assert ended.code == 0, ended.err
    outcome = ended.json
    assert outcome["status"] == "finished" and outcome["mlflow"]["complete"]
    run = mlflow_run(storage, "run")
    assert run.info.status == "FINISHED" and run.info.run_id == outcome["mlflow"]["run_id"]
    assert run.data.params["train.steps"] == str(STEPS) and run.data.params["train.global_batch_size"] == "16"
    assert {"train/loss", "train/grad_norm", "train/lr", "train/samples_per_second"} <= set(run.data.metrics)
    assert {"eval/loss", "eval/accuracy"} <= set(run.data.metrics)
    losses = curve(storage, "run")
    assert losses[STEPS] < losses[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{storage}/mlflow.db")
    (model,) = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    loaded = mlflow.pytorch.load_model(f"models:/{model.model_id}")
    assert same_bits(loaded.state_dict(), weights(storage / "run"))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    words = arguments(tmp_path, "task=tests.tasks:Infinite", "checkpoint.every_steps=2", "launcher=local")
    seed(words)
    ended = CliRunner().invoke(group, words)
    assert ended.exit_code == 1
    assert "not finite at step 6" in ended.stderr and "optimizer.lr" in ended.stderr
    assert committed(tmp_path / "run") == [2, 4], "the last good checkpoints are intact, and no bad one was made"
    assert mlflow_run(tmp_path, "run").info.status == "FAILED"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["task=tests.tasks:Infinite", "workers=2"], "not finite at step 6 on rank 1"),
        (["task=tests.tasks:Raises", "strategy=pipeline", "parallel.pp=2"], "a bug of the user's"),
    ],
)
def test_what_would_fail_again_is_named_and_not_tried_again_in_ray(
    tmp_path: Path, ray_environment: dict[str, str], more: list[str], says: str
) -> None:
    ended = trireme(*arguments(tmp_path, *more), env=ray_environment)
    assert ended.code == 1 and says in ended.err and "starting again" not in ended.out
    assert mlflow_run(tmp_path, "run").info.status == "FAILED"
    logs = [log for log in (tmp_path / "run" / "logs").glob("rank-?.log") if "in loss" in log.read_text()]
    assert "Infinite" in more[0] or any(str(log) in ended.err for log in logs), "what is named has the traceback"
