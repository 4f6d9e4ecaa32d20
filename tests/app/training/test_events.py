"""Events from workers to the driver: how they travel, are stored, and are handled."""

import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from ray import cloudpickle

from app.console.terminal import Console
from app.run.driver import Driver
from app.training.events import (
    FROM_ANY_RANK,
    CheckpointSaved,
    DriverEvent,
    Event,
    FilesWritten,
    MetricsLogged,
    NodePreempted,
    PipelineTraced,
    ProfileTaken,
    StepParts,
    StepPartsMeasured,
    StepsDone,
    SystemSampled,
    TrainingDone,
    TrainingStarted,
    WarningIssued,
    WorkerDied,
    WorkerFailed,
    WorkerInfo,
    WorkerStarted,
)
from strategies.pipeline.simulate import BlockSeconds, Span
from tests.chain import config

pytestmark = pytest.mark.pure

STEPS_DONE = StepsDone(
    step=12,
    steps=50,
    loss=0.5,
    loss_step=10,
    rate=1204.5,
    unit="tokens",
    gpus=2,
    mfu=0.41,
    seconds_left=19.0,
    seconds_per_step=0.5,
    memory_bytes=310_000_000,
    global_batch_size=32,
    samples_seen=384,
)
RANK = {"rank": 0, "device": "cpu", "operators": []} | {
    f"{name}_seconds": 0.1
    for name in ("step", "computing", "communication", "exposed_communication", "idle")
}
FOR_DRIVER: list[DriverEvent] = [
    TrainingStarted(time=1.5, resumed_from=5, step=5, steps=50, device="cuda:0", parameters=7),
    STEPS_DONE,
    MetricsLogged(
        step=10, time=2.5, training_seconds=4.0, values={"train/loss": 0.5, "eval/loss": 0.75}
    ),
    SystemSampled(time=3.5, values={"system/node-0/cpu": 5.0}),
    CheckpointSaved(step=10, stall_seconds=0.25, previous_seconds=0.0, interval_seconds=60.0),
    FilesWritten(folder="evaluation/step-00000010"),
    ProfileTaken(step=9, folder="profile/steps-8-9", profile={"steps": [8, 9], "ranks": [RANK]}),
    PipelineTraced(
        step=7, spans=[Span(stage=0, kind="F", micro_batch=0, chunk=0, start=0.0, end=1.0)]
    ),
    StepPartsMeasured(
        step=21,
        parts=StepParts(computing=0.5, bubble=0.25),
        blocks=BlockSeconds(before=0.125, blocks=(0.25, 0.5), after=0.0),
    ),
    WarningIssued(message="the disk is nearly full"),
    TrainingDone(summary={"step": 50, "stopped": False}),
]
FOR_LAUNCHER: list[Event] = [
    WorkerStarted(
        info=WorkerInfo(
            rank=1, pid=42, ip="10.0.0.1", node="node", label="stage 1 of 2", oom_kills=3
        )
    ),
    WorkerDied(rank=1, details="the node died"),
    NodePreempted(node="node", reason="spot", message="the node 10.0.0.1 is about to go (spot)"),
]
FAILED = WorkerFailed(rank=1, error=ValueError("no such file"))


def test_every_kind_of_event_has_an_example() -> None:
    assert {type(event) for event in FOR_DRIVER} == set(get_args(DriverEvent))
    assert {type(event) for event in [*FOR_DRIVER, *FOR_LAUNCHER, FAILED]} == set(get_args(Event))
    assert set(FROM_ANY_RANK) < set(get_args(Event))


@pytest.mark.parametrize(
    "event", [*FOR_DRIVER, *FOR_LAUNCHER], ids=lambda event: type(event).__name__
)
@pytest.mark.parametrize("library", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_an_event_travels_as_it_is(event: Event, library: Any) -> None:
    assert library.loads(library.dumps(event)) == event


def test_a_failure_travels_with_its_exception() -> None:
    received = cloudpickle.loads(cloudpickle.dumps(FAILED))
    assert received.rank == 1
    assert isinstance(received.error, ValueError)
    assert str(received.error) == "no such file"


@pytest.mark.parametrize(
    "event", [*FOR_DRIVER, *FOR_LAUNCHER, FAILED], ids=lambda event: type(event).__name__
)
def test_an_event_is_frozen_and_takes_no_unknown_field(event: Any) -> None:
    name = fields(event)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(event, name, None)
    with pytest.raises(TypeError):
        replace(event, lsos=1.0)


# --- what is kept in files ------------------------------------------------------------------------

PROGRESS = (
    '{"type": "progress", "step": 12, "steps": 50, "loss": 0.5, "loss_step": 10, "rate": 1204.5, '
    '"unit": "tokens", "gpus": 2, "mfu": 0.41, "seconds_left": 19.0, "seconds_per_step": 0.5, '
    '"memory_bytes": 310000000, "global_batch_size": 32, "samples_seen": 384}'
)
METRICS = (
    '{"type": "metrics", "step": 3, "time": 1.5, "training_seconds": 2.5, '
    '"values": {"train/loss": 0.5}}'
)


def test_progress_files_keep_their_format_and_are_read_back() -> None:
    assert json.dumps(STEPS_DONE.to_record()) == PROGRESS
    added_by_driver = {"attempt": "a", "time": 5.0, "evaluated": {"loss": 0.7}}
    assert StepsDone.from_record(json.loads(PROGRESS) | added_by_driver) == STEPS_DONE


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (("loss",), {"loss": None}),
        (("loss_step",), {"loss_step": 12}),
        (("gpus", "mfu"), {"gpus": 0, "mfu": None}),
        (("seconds_per_step",), {"seconds_per_step": 0.0}),
        (("global_batch_size", "samples_seen"), {"global_batch_size": 0, "samples_seen": 0}),
    ],
)
def test_progress_files_of_older_versions_are_read(
    missing: tuple[str, ...], expected: dict[str, Any]
) -> None:
    record = {name: value for name, value in json.loads(PROGRESS).items() if name not in missing}
    assert StepsDone.from_record(record) == replace(STEPS_DONE, **expected)


def test_metrics_in_checkpoints_keep_their_format_and_are_read_back() -> None:
    event = MetricsLogged(step=3, time=1.5, training_seconds=2.5, values={"train/loss": 0.5})
    assert event.to_json() == METRICS and MetricsLogged.from_json(METRICS) == event
    older = METRICS.replace('"training_seconds": 2.5, ', "")
    assert MetricsLogged.from_json(older) == replace(event, training_seconds=0.0)


# --- the driver -----------------------------------------------------------------------------------


class NotAnEvent:
    """Something that no worker sends."""


def test_the_driver_handles_every_event_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = mock.Mock(url=str(tmp_path), is_local=True)
    run = mock.Mock(
        local_folder=tmp_path, folder="runs/a", storage=storage, **{"lease.successor": None}
    )
    tracker = mock.Mock()
    driver = Driver(run, config("task=tests.tasks:Points"), Console(), mock.Mock(), tracker=tracker)
    driver.progress = mock.Mock()
    for event in FOR_DRIVER:
        driver.handle(event)
    assert tracker.tags.call_args_list[0] == mock.call(
        {"trireme.device": "cuda:0", "trireme.parameters": "7"}
    )
    logged = [call.args for call in tracker.metrics.call_args_list]
    assert (10, {"train/loss": 0.5, "eval/loss": 0.75}, 2.5) in logged
    assert (10, {"checkpoint/stall_seconds": 0.25, "checkpoint/interval_seconds": 60.0}) in logged
    assert [values["profile/idle_seconds"] for step, values in logged[-1:] if step == 9] == [0.1]
    tracker.system_metrics.assert_called_once_with({"system/node-0/cpu": 5.0}, 3.5)
    tracker.artifact.assert_any_call(tmp_path / "evaluation/step-00000010", "evaluation")
    assert (tmp_path / "pipeline/step-7.json").exists()
    assert [call.args[0] for call in driver.progress.note.call_args_list] == [
        json.loads(PROGRESS),
        {"evaluated": {"loss": 0.75}},
    ]
    assert driver.summary == {"step": 50, "stopped": False} and driver.step == 12
    output = capsys.readouterr().out
    assert "continuing after step 5 of 50" in output and "note: the disk is nearly full" in output
    assert "step 12/50  loss 0.5000 (step 10)" in output
    with pytest.raises(AssertionError, match="NotAnEvent"):
        driver.handle(NotAnEvent())  # type: ignore[arg-type]
