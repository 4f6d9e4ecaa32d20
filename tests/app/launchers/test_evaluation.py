"""The driver's part of evaluation beside training: what waits, late results, failures, restarts.

The worker is a fake, and the checkpoints are of a small state.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from app.checkpoint import Checkpointer, Commit
from app.checkpoint.evaluations import FILE, PLAN, Plan, read
from app.config.io import load_config
from app.errors import Interrupted, RunFailed, UserError
from app.launchers import evaluation
from app.launchers.evaluation import SeparateEvaluation
from app.launchers.ray_launch import evaluation_resources, resources_to_ask_for
from app.launchers.workers import WorkerLost
from app.training.checkpoint_evaluation import DamagedCheckpoint, Evaluated
from app.training.events import FilesWritten, MetricsLogged, WarningIssued
from app.training.job import Job
from cluster.connect import Cluster
from cluster.shape import NodeState
from strategies.layout import choose
from tests.app.checkpoint.kit import state_of, steps
from tests.running import wait_until

pytestmark = pytest.mark.pure

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: 0.5}
Before = Sequence[Mapping[str, float]]


class FakeWorker:
    """Evaluates as `LOSSES` says.

    Attributes:
        evaluated: The steps so far.
        before: The losses that each of them was told.
        troubles: What evaluations raise, one after another.
    """

    def __init__(self, *troubles: Exception) -> None:
        self.evaluated: list[int] = []
        self.before: list[list[float]] = []
        self.troubles: Iterator[Exception] = iter(troubles)

    def start(self, job: Job) -> None: ...

    def evaluate(self, commit: Commit, before: Before) -> Evaluated:
        trouble = next(self.troubles, None)
        if trouble is not None:
            raise trouble
        self.evaluated.append(commit.step)
        self.before.append([metrics["loss"] for metrics in before])
        return Evaluated(metrics={"loss": LOSSES[commit.step]}, folders=("evaluation/x",))

    def missing(self) -> str:
        return ", whose worker (CPU 1) has not started yet"

    def close(self) -> None: ...


class Scene:
    """A run whose checkpoints are evaluated, and the driver that is told of it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config = load_config(
            [], ["task=tests.tasks:Points", "train.steps=50", "checkpoint.keep_last=1", *overrides]
        )
        self.job = Job(
            config=self.config,
            layout=choose("single", 1),
            folder=str(folder),
            attempt="a",
            run_uid="u",
            steps=50,
            cwd="/",
        )
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "logs" / "evaluation.log").touch()
        self.messages: list[str] = []
        self.handled: list[Any] = []
        self.summary: dict[str, Any] = {"metrics": {"train/loss": 9.0}}
        self.driver: Any = SimpleNamespace(
            handle=self.handled.append,
            check=mock.Mock(),
            note=mock.Mock(),
            stop_requested=mock.Mock(return_value=False),
            summary=self.summary,
            add_to_summary=lambda **values: self.summary.update(values),
            console=mock.Mock(say=self.messages.append),
        )

    def save(self, *saved_steps: int, evaluations: Sequence[Mapping[str, float]] = ()) -> None:
        """Commits checkpoints that wait for their evaluation, as training does."""
        checkpoint = self.config.checkpoint
        checkpointer = Checkpointer(
            self.job.checkpoints, keep_last=checkpoint.keep_last, keeps_waiting=True
        )
        for step in saved_steps:
            plan = Plan(batch_size=4, shares=1).to_meta()
            meta = {"step": step, PLAN: plan, "evaluations": list(evaluations)}
            checkpointer.save(state_of(step), meta=meta)
        checkpointer.close()

    def start(self, worker: FakeWorker) -> SeparateEvaluation:
        """Begins to evaluate."""
        separate = SeparateEvaluation(worker)
        separate.start(self.job)
        return separate

    def logged(self) -> dict[int, float]:
        """The losses that the driver was told, by step; none twice."""
        events = [event for event in self.handled if isinstance(event, MetricsLogged)]
        logged = {event.step: event.values["eval/loss"] for event in events}
        assert len(logged) == len(events)
        return logged

    def notes(self) -> list[str]:
        """The remarks that the driver was told."""
        return [event.message for event in self.handled if isinstance(event, WarningIssued)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(evaluation, "LONGEST_PAUSE", 0.01)


def test_late_results_are_told_in_order_and_decide_what_is_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.save(10, 20, 30, 40, 50)
    assert steps(scene.job.checkpoints) == [50, 40, 30, 20, 10], "all wait"
    worker = FakeWorker()
    separate = scene.start(worker)
    separate.finish(scene.driver)
    assert worker.evaluated == [10, 20, 30, 40, 50]
    assert worker.before[3] == [3.0, 1.0, 2.0], "each is told those before"
    assert scene.logged() == LOSSES
    assert scene.summary["metrics"] == {"train/loss": 9.0, "eval/loss": 0.5}
    assert steps(scene.job.checkpoints) == [50]
    files = [event for event in scene.handled if isinstance(event, FilesWritten)]
    assert len(files) == 5


def test_a_second_start_evaluates_what_is_left_and_tells_everything(tmp_path: Path) -> None:
    """The tracker drops what it has, and a driver that was killed may not have told it."""
    scene = Scene(tmp_path)
    scene.save(10, 20)
    first = FakeWorker()
    separate = scene.start(first)
    wait_until(lambda: len(read(scene.job.checkpoints).results) == 2)
    separate.close()  # killed: what it has found out is told to nobody
    scene.save(30)
    second = FakeWorker()
    again = scene.start(second)
    again.finish(scene.driver)
    assert (first.evaluated, second.evaluated) == ([10, 20], [30])
    assert second.before == [[3.0, 1.0]]
    assert scene.logged() == {step: LOSSES[step] for step in (10, 20, 30)}
    assert steps(scene.job.checkpoints) == [30, 20], "the newest and the best"


@pytest.mark.parametrize(("patience", "ended"), [(1, True), (2, True), (3, False)])
def test_patience_counts_late_results_in_the_order_of_steps(
    tmp_path: Path, patience: int, ended: bool
) -> None:
    """It is used up at an evaluation, even if a later one, already waiting, is better again."""
    scene = Scene(tmp_path, f"train.patience={patience}", "train.eval_every=10")
    scene.save(10, 20, 30, 40, 50)
    separate = scene.start(FakeWorker())
    separate.finish(scene.driver)
    assert separate.wants_stop == separate.ended == ended
    assert read(scene.job.checkpoints).ended == ended, "the first rank reads it there"
    second_start = scene.start(FakeWorker())
    assert second_start.ended == ended
    second_start.close()
    more_patient = Scene(tmp_path, "train.patience=4", "train.eval_every=10")
    third_start = more_patient.start(FakeWorker())
    assert not third_start.ended and not read(scene.job.checkpoints).ended
    third_start.close()


def test_evaluations_in_training_and_those_of_a_forks_origin_count_first(tmp_path: Path) -> None:
    origin = Scene(tmp_path / "origin")
    origin.save(10, 20)
    origin.start(FakeWorker()).finish(origin.driver)
    scene = Scene(tmp_path / "fork", "train.patience=2", "train.eval_every=10")
    scene.job = dataclasses.replace(scene.job, fork=f"{origin.job.checkpoints}/step-00000010-a")
    worker = FakeWorker()
    scene.save(20, evaluations=[{"loss": 0.1}])
    separate = scene.start(worker)
    wait_until(lambda: worker.evaluated == [20])
    scene.save(30, evaluations=[{"loss": 0.1}])
    separate.finish(scene.driver)
    assert worker.before == [[3.0, 0.1], [3.0, 0.1, 1.0]]
    assert separate.ended, "no better than 0.1 in two evaluations"
    assert scene.logged() == {20: 1.0, 30: 2.0}, "what the other run has logged stays with it"


def from_a_persons_code() -> Exception:
    """An exception whose innermost line is in this file."""
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        return error


def test_a_worker_that_dies_is_replaced_and_evaluates_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.save(10, 20)
    worker = FakeWorker(WorkerLost(), WorkerLost())
    separate = scene.start(worker)
    separate.finish(scene.driver)
    assert worker.evaluated == [10, 20]
    first_note, second_note = scene.notes()
    assert first_note == second_note
    assert first_note.startswith("the worker of the evaluation of the checkpoint of step 10 died ")
    assert first_note.endswith("; evaluating it again")


@pytest.mark.parametrize(
    ("trouble", "tries", "pattern"),
    [
        (from_a_persons_code, 2, r"step 10 failed: ZeroDivisionError: .* twice;.*\n  File .*\n .*"),
        (WorkerLost, 3, r"the worker of .* step 10 died \(see /.*/logs/evaluation.log\), 3 times;"),
        (lambda: RunFailed("the disk"), 3, r"failed: RunFailed: the disk .* 3 times; the same"),
        (lambda: UserError("no such metric"), 1, "no such metric"),
    ],
)
def test_an_evaluation_that_always_fails_ends_the_run_after_saving(
    tmp_path: Path, trouble: Callable[[], Exception], tries: int, pattern: str
) -> None:
    scene = Scene(tmp_path, "fault.max_restarts=2")
    scene.save(10, 20)
    separate = scene.start(FakeWorker(*[trouble() for _ in range(9)]))
    wait_until(lambda: separate.wants_stop)
    assert not separate.ended
    with pytest.raises((RunFailed, UserError), match=pattern):
        separate.finish(scene.driver)
    assert len(scene.notes()) == tries - 1, "each failure but the last is told at once"
    assert steps(scene.job.checkpoints) == [20, 10], "both wait for the next start"
    assert not (tmp_path / "checkpoints" / FILE).exists()


def test_a_damaged_checkpoint_is_told_and_left_out(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.save(10, 20)
    worker = FakeWorker(DamagedCheckpoint("__0_0.distcp is missing"))
    separate = scene.start(worker)
    separate.finish(scene.driver)
    assert worker.evaluated == [20]
    (note,) = scene.notes()
    assert note == "the checkpoint of step 10 is not evaluated: __0_0.distcp is missing"


class Slow(FakeWorker):
    """Evaluates nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = False

    def evaluate(self, commit: Commit, before: Before) -> Evaluated:
        wait_until(lambda: self.may)
        return super().evaluate(commit, before)


def test_the_end_of_a_run_says_what_it_waits_for_and_can_be_interrupted(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.save(10, 20, 30)
    worker = Slow()
    separate = scene.start(worker)
    scene.driver.stop_requested = lambda: bool(scene.messages)
    sentence = "the evaluation of 3 checkpoints (steps 10, 20, 30)"
    with pytest.raises(Interrupted) as stopped:
        separate.finish(scene.driver)
    assert str(stopped.value) == f"stopped before {sentence}"
    assert scene.messages == [f"training is done; waiting for {sentence}"]
    shown = [call.args[0] for call in scene.driver.console.waits_for.call_args_list]
    assert shown[0] == f"{sentence}, whose worker (CPU 1) has not started yet"
    separate.leave(scene.driver)
    scene.driver.note.assert_called_once_with(f"{sentence} is left for the next start")
    scene.handled += separate.drain()
    assert scene.notes() == [
        "evaluation is slower than training: 3 checkpoints wait for it, and are kept meanwhile; "
        "raise train.eval_every, or give its worker more in train.eval_resources"
    ]
    separate.close()
    worker.may = True
    wait_until(lambda: not separate._thread.is_alive())
    assert not read(scene.job.checkpoints).results, "a start that has ended writes nothing more"


def test_results_wait_for_a_storage_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    scene.save(10)
    write = evaluation.write
    away = [OSError(5, "Input/output error"), OSError(5, "Input/output error")]

    def write_later(*arguments: Any) -> None:
        if away:
            raise away.pop()
        write(*arguments)

    monkeypatch.setattr(evaluation, "write", write_later)
    worker = FakeWorker()
    separate = scene.start(worker)
    separate.finish(scene.driver)
    assert worker.evaluated == [10] and scene.logged() == {10: 3.0}
    (note,) = scene.notes()
    assert "evaluation waits for the storage" in note and "Input/output error" in note


def test_a_start_that_was_superseded_writes_no_result(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.save(10)
    scene.job = dataclasses.replace(scene.job, leased=True)
    lease = {"attempt": "b", "host": "h", "pid": 1, "process_started": 1.0}
    (tmp_path / "lease.json").write_text(json.dumps(lease))
    separate = scene.start(FakeWorker())
    wait_until(lambda: not separate._thread.is_alive())
    assert separate.failure is None and not read(scene.job.checkpoints).results


# --- its resources --------------------------------------------------------------------------------


def cluster(*nodes: dict[str, float]) -> Cluster:
    """A cluster of nodes with these resources, all free."""
    states = tuple(
        NodeState(id=str(number), address="a", kind="", total=total, available=total)
        for number, total in enumerate(nodes)
    )
    return Cluster(states, shape=mock.Mock(path=""))


@pytest.mark.parametrize(
    ("node", "workers", "written", "expected"),
    [
        ({"CPU": 4.0}, 2, {}, {"CPU": 1.0}),
        ({"CPU": 2.0}, 2, {}, {}),  # it shares the workers' processors
        ({"CPU": 2.0}, 2, {"CPU": 0.0}, {"CPU": 0.0}),
        ({"CPU": 9.0, "GPU": 2.0}, 1, {"GPU": 1.0}, {"GPU": 1.0}),
    ],
)
def test_an_evaluation_gets_what_is_written_or_one_processor_if_there_is_one(
    node: dict[str, float],
    workers: int,
    written: dict[str, float],
    expected: dict[str, float],
) -> None:
    words = [f"train.eval_resources.{name}={amount}" for name, amount in written.items()]
    config = load_config([], ["train.eval_separate=true", *words])
    asked = evaluation_resources(config, cluster(node), workers=workers, per_worker={"CPU": 1.0})
    assert asked == expected


def test_resources_that_are_not_there_are_refused_and_auto_leaves_a_gpu() -> None:
    words = ["train.eval_separate=true", "train.eval_resources.GPU=1"]
    config = load_config([], words)
    with pytest.raises(UserError, match=r"asks for GPU 1 beside 2 workers of GPU 1 each"):
        evaluation_resources(
            config, cluster({"CPU": 9.0, "GPU": 2.0}), workers=2, per_worker={"GPU": 1.0}
        )
    eight = cluster({"CPU": 9.0, "GPU": 8.0})
    assert resources_to_ask_for(config, eight) == (7, {"GPU": 1.0})
    assert resources_to_ask_for(load_config([], []), eight) == (8, {"GPU": 1.0})
