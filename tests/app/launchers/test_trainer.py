"""Ray Train's TorchTrainer without what is done elsewhere: another release of Ray must not undo it silently."""

from __future__ import annotations

import os
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from app.launchers.trainer import ELSEWHERE, Group, Trainer, Unasked, _logging_left_alone


def trainer() -> Trainer:
    return Trainer(
        print,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="x", storage_path="/tmp"),
        grows=False,
    )


def test_what_is_replaced_is_what_ray_train_has() -> None:
    for mine, theirs in ((Trainer, TorchTrainer), (Group, WorkerGroup), (Unasked, FixedScalingPolicy)):
        own = {name for name in vars(mine) if not name.startswith("__") and name not in ("end", "made")}
        own -= {name for name in own if name.startswith("_abc_")}
        assert own, mine
        assert not [name for name in own if not hasattr(theirs, name)], mine
    assert TrainController.worker_group_cls is WorkerGroup


def test_no_callback_is_left_that_starts_a_process_for_nothing() -> None:
    theirs = super(Trainer, trainer())._create_default_callbacks()
    assert any(isinstance(callback, ELSEWHERE) for callback in theirs)
    assert not any(isinstance(callback, ELSEWHERE) for callback in trainer()._create_default_callbacks())


def test_a_runtime_environment_is_named_only_for_what_the_user_has_set(monkeypatch: Any) -> None:
    monkeypatch.delenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", raising=False)
    assert Group._get_worker_runtime_env({}) == {}
    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", "7")
    assert Group._get_worker_runtime_env({})["env_vars"] == {"RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "7"}


def test_the_variable_that_keeps_logging_as_it_is_goes_again(monkeypatch: Any) -> None:
    name = "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING"
    monkeypatch.delenv(name, raising=False)
    with _logging_left_alone():
        assert os.environ[name] == "0"
    assert name not in os.environ


def test_ending_gives_back_every_place_also_after_one_that_is_gone() -> None:
    given_back: list[str] = []

    class Places:
        def __init__(self, name: str) -> None:
            self.name = name

        def shutdown(self) -> None:
            given_back.append(self.name)
            if self.name == "gone":
                raise RuntimeError("gone")

    made = trainer()
    made.made += [Places("gone"), Places("held")]
    made.end()
    assert made.ended and given_back == ["gone", "held"]
