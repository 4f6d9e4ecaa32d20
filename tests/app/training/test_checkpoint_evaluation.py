"""Evaluation of a checkpoint by one process: the numbers of an evaluation in training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoint import Commit, commits
from app.checkpoint.evaluations import PLAN, Evaluation, Evaluations, Plan, write
from app.config import Config
from app.config.io import load_config, with_values
from app.errors import UserError
from app.storage.lease import write_lease
from app.storage.storage import Storage
from app.training.checkpoint_evaluation import CheckpointEvaluation, DamagedCheckpoint
from app.training.hooks import check
from app.training.job import Job
from app.training.loop import Training
from app.training.persistence import Persistence
from strategies.layout import choose
from tests.app.kit import logged, training_of
from tests.pool import run_distributed
from tests.running import flip
from tests.tasks import Gan, Points

OVERRIDES = [
    "train.steps=4",
    "train.global_batch_size=32",
    "train.eval_every=2",
    "train.ema_decay=0.9",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "run.name=evaluated",
]
CPU = torch.device("cpu")
Metrics = dict[int, dict[str, float]]


class Noisy(Points):
    """Its metrics draw random numbers, and count other items than samples."""

    def metrics(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        metrics = super().metrics(model, batch)
        return metrics | {"noise": torch.randn(()), "mean": model(batch[0]).mean()}

    def items(self, batch: Any) -> int | torch.Tensor:
        return (batch[1] > 0).sum()


def config(task: str, *overrides: str) -> Config:
    return load_config([], [f"task={task}", *OVERRIDES, *overrides])


def train(rank: int, world: int, strategy: str, folder: str, task: str, *overrides: str) -> Metrics:
    """Trains, and returns what the evaluations in training have given, by step."""
    write_lease(Storage(folder), "attempt", 0)
    training, events = training_of(
        config(task, *overrides), folder, rank, world, strategy, persistence_class=Persistence
    )
    training.run()
    training.close()
    metrics: Metrics = {}
    for event in logged(events):
        values = {
            name.removeprefix("eval/"): value
            for name, value in event.values.items()
            if name.startswith("eval/")
        }
        if values:
            metrics[event.step] = values
    return metrics


def job_of(folder: Path, run_config: Config) -> Job:
    return Job(
        config=run_config,
        layout=choose("single", 1),
        folder=str(folder),
        attempt="a",
        run_uid="u",
        steps=4,
        cwd="/",
    )


def planned(folder: Path, plan: Plan) -> list[Commit]:
    """The checkpoints of a run, the oldest first, as if each waited for its evaluation."""
    newest_first = commits(str(folder / "checkpoints"))
    return [
        replace(commit, meta={**commit.meta, PLAN: plan.to_meta()})
        for commit in reversed(newest_first)
    ]


def evaluated(folder: Path, run_config: Config, plan: Plan) -> Metrics:
    """What an evaluation of each checkpoint of a run gives, by step."""
    evaluation = CheckpointEvaluation(job_of(folder, run_config), CPU)
    return {
        commit.step: evaluation.evaluate(commit, []).metrics for commit in planned(folder, plan)
    }


@pytest.mark.pure
@pytest.mark.parametrize(
    "task", ["tests.tasks:Gan", pytest.param(f"{__name__}:Noisy", marks=pytest.mark.slow)]
)
def test_one_worker_and_its_checkpoints_give_the_same_bits(tmp_path: Path, task: str) -> None:
    in_training = train(0, 1, "single", str(tmp_path), task)
    assert in_training.keys() == {2, 4}
    assert "ema_loss" in in_training[4]
    run_config = config(task)
    assert evaluated(tmp_path, run_config, Plan(batch_size=32, shares=1)) == in_training


@pytest.mark.alone
@pytest.mark.parametrize("task", ["tests.tasks:Gan", f"{__name__}:Noisy"])
def test_two_replicas_and_their_checkpoints_give_the_same_bits(tmp_path: Path, task: str) -> None:
    overrides = ["train.eval_batch_size=7"]
    in_training = run_distributed(train, 2, 2, "ddp", str(tmp_path), task, *overrides)[0]
    run_config = config(task, *overrides)
    assert evaluated(tmp_path, run_config, Plan(batch_size=7, shares=2)) == in_training


@pytest.mark.alone
@pytest.mark.parametrize(
    ("world", "strategy", "overrides", "shares"),
    [
        (2, "fsdp", [], 2),
        (2, "pipeline", ["parallel.pp=2", "train.micro_batch_size=8"], 1),
        pytest.param(4, "fsdp+tensor", ["parallel.tp=2"], 2, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_of_every_layout_are_evaluated_whole(
    tmp_path: Path, world: int, strategy: str, overrides: list[str], shares: int
) -> None:
    task = "tests.chain:Chain"
    arguments = (world, world, strategy, str(tmp_path), task, *overrides)
    in_training = run_distributed(train, *arguments)[0]
    run_config = config(task, f"strategy={strategy}", *overrides)
    separate = evaluated(tmp_path, run_config, Plan(batch_size=8, shares=shares))
    assert separate.keys() == in_training.keys() == {2, 4}
    for step, metrics in in_training.items():
        assert "ema_accuracy" in metrics
        assert separate[step] == pytest.approx(metrics, rel=2e-5)


@pytest.mark.pure
def test_training_writes_plans_and_evaluates_nothing(tmp_path: Path) -> None:
    """At the steps of train.eval_every and at the last one; other checkpoints have none."""
    separate = ["train.eval_separate=true", "checkpoint.every_steps=1", "train.steps=5"]
    metrics = train(0, 1, "single", str(tmp_path), "tests.tasks:Points", *separate)
    assert not metrics
    plans = {
        commit.step: commit.meta.get(PLAN) for commit in commits(str(tmp_path / "checkpoints"))
    }
    plan = {"batch_size": 32, "shares": 1}
    assert plans == {1: None, 2: plan, 3: None, 4: plan, 5: plan}
    assert all(commit.metric is None for commit in commits(str(tmp_path / "checkpoints")))


@pytest.mark.pure
@pytest.mark.parametrize("ended", [True, False])
def test_a_stop_is_an_early_end_if_the_results_say_so(tmp_path: Path, ended: bool) -> None:
    run_config = config("tests.tasks:Points", "train.eval_separate=true", "train.steps=9")
    write_lease(Storage(tmp_path), "attempt", 0)
    training, _ = training_of(run_config, tmp_path, persistence_class=Persistence)
    training.channel.stopping = True  # type: ignore[attr-defined]
    result = Evaluation(step=1, time=1.0, metrics={"loss": 1.0}, stops=ended)
    write(str(tmp_path / "checkpoints"), Evaluations((result,), ended))
    summary = training.run()
    training.close()
    assert summary["step"] == 1 and summary["stopped"] != ended
    (commit,) = commits(str(tmp_path / "checkpoints"))
    assert commit.meta["ended"] == ended and (PLAN in commit.meta) == ended
    assert (tmp_path / "model" / "weights.pt").exists() == ended
    again: Training = training_of(run_config, tmp_path, persistence_class=Persistence)[0]
    assert again.progress.ended == ended
    again.close()


@pytest.mark.pure
def test_a_task_hears_of_every_evaluation_and_is_asked_whether_to_stop(tmp_path: Path) -> None:
    train(0, 1, "single", str(tmp_path), "tests.tasks:Gan")
    run_config = config("tests.tasks:Gan", "task_args.ends_at=2")
    evaluation = CheckpointEvaluation(job_of(tmp_path, run_config), CPU)
    first, second = planned(tmp_path, Plan(batch_size=32, shares=1))
    without = [replace(each, meta={**each.meta, "evaluations": []}) for each in (first, second)]
    result = evaluation.evaluate(without[0], [])
    assert not result.stops and result.folders == ("evaluation/step-00000002",)
    assert "ink" in result.metrics, "what on_evaluation logs"
    assert evaluation.evaluate(without[1], [result.metrics]).stops
    pipeline = choose("pipeline", 2, pp=2)
    class_of_a_person = type("Own", (Gan,), {"training_step": Points.training_step})
    for separate, notes in ((False, 1), (True, 0)):
        own_config = with_values(run_config, {"train.eval_separate": separate})
        sentences = list(check(own_config, class_of_a_person(), pipeline))
        assert len(sentences) == notes, sentences


@pytest.mark.pure
def test_a_damaged_checkpoint_and_a_missing_metric_are_told(tmp_path: Path) -> None:
    train(0, 1, "single", str(tmp_path), "tests.tasks:Points")
    run_config = config("tests.tasks:Points", "checkpoint.metric=accurracy")
    evaluation = CheckpointEvaluation(job_of(tmp_path, run_config), CPU)
    commit, _ = planned(tmp_path, Plan(batch_size=32, shares=1))
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        evaluation.evaluate(commit, [])
    flip(Path(commit.path, "__0_0.distcp"))
    with pytest.raises(DamagedCheckpoint, match="SHA-256 differs"):
        evaluation.evaluate(commit, [])
