"""Ray Train's TorchTrainer, without the processes whose work is done elsewhere here.

A plain `TorchTrainer.fit` starts, besides its workers, a process each for the controller, data sets, preemption
notices, resource requests and leftover placement groups. Every one of them imports Ray Train, which takes longer than
a small model's first steps. Here

- the controller runs in a thread of the driver, whose end Ray's job bookkeeping notices as well as a controller's;
- data sets are the task's (app/data), notices are heard by `cluster.notice`, placement groups go with the job;
- resources are requested only where an autoscaler could bring them;
- the actor at which workers wait for one another in `ray.train.report` is not there, since none of ours calls that;
- nothing is handed to workers in a runtime environment, so that they can be processes that Ray has started ahead.

`python -m experiments.benchmarks start` measures what this brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import ray
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import RayTrainWorker, WorkerGroup, state, worker_group
from ray.train.v2.torch.torch_trainer import TorchTrainer

from app.launchers import flight, sigterm

LOOK_SECONDS = 0.2
"""Ray Train's controller looks at its workers at this interval, and a group ends no sooner than it looks."""
ELSEWHERE = (DatasetsCallback, PlacementGroupCleanerCallback, PreemptionCallback)
"""Callbacks that would start a process each, whose work is done elsewhere."""


class QuietRayTrainWorker(RayTrainWorker):
    def __init__(self) -> None:
        os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # else what a model prints appears twice
        super().__init__()
        sigterm.EAR.install()
        flight.switch_on()


class Group(WorkerGroup):
    """A worker group whose controller is no actor, and whose processes may have been started ahead."""

    _worker_cls = QuietRayTrainWorker
    made: list[Any]  # placement groups, of all groups of one controller

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
        found = WorkerGroup._get_worker_runtime_env(custom_runtime_env)
        return found if found["env_vars"] else {name: value for name, value in found.items() if name != "env_vars"}

    def _init_train_context_on_workers(self, workers: Any, sync_actor: Any, train_context_args: dict[str, Any]) -> None:
        ray.get(
            [
                worker.actor.init_train_context.remote(
                    train_run_context=self._train_run_context,
                    distributed_context=worker.distributed_context,
                    synchronization_actor=sync_actor,
                    storage_context=self._storage_context,
                    worker_callbacks=self._worker_callbacks_to_propagate,
                    controller_actor=None,  # asked for by ray.train.get_all_reported_checkpoints alone
                    **{name: values[number] for name, values in train_context_args.items()},
                )
                for number, worker in enumerate(workers)
            ]
        )
        self._decorate_worker_log_file_paths(workers)

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        places = super()._create_placement_group(scaling_config, worker_group_context)
        self.made.append(places)
        return places


class Controller(TrainController):
    def __init__(self, made: list[Any], **named: Any) -> None:
        self.worker_group_cls = cast(Any, type("Group", (Group,), {"made": made}))
        with _logging_left_alone():
            super().__init__(**named)
        self._health_check_interval_s = LOOK_SECONDS
        self._worker_group_callbacks_to_propagate = _wanted(self._worker_group_callbacks_to_propagate)


class Nobody:
    """Stands where Ray Train has its SynchronizationActor."""

    @classmethod
    def options(cls, **named: Any) -> type[Nobody]:
        return cls

    @classmethod
    def remote(cls, **named: Any) -> Nobody:
        return cls()


class Unasked(FixedScalingPolicy):
    """Asks for nothing: the placement group does, and no node will be added."""

    def after_controller_start(self, train_run_context: Any) -> None:
        return

    def _maybe_send_resource_request(self) -> None:
        return


class Trainer(TorchTrainer):
    """grows: whether an autoscaler may add nodes."""

    def __init__(self, *arguments: Any, grows: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.grows = grows
        self.ended = False
        self.made: list[Any] = []

    def end(self) -> None:
        """Ends the workers, also those that are starting, and gives their places back; `fit` then raises, soon."""
        self.ended = True
        for places in self.made:
            with contextlib.suppress(Exception):  # it is gone already
                places.shutdown()

    def _create_default_callbacks(self) -> list[Any]:
        return _wanted(super()._create_default_callbacks())

    def _initialize_and_run_controller(self, **named: Any) -> Any:
        if not self.grows:
            named["scaling_policy"] = Unasked(cast(Any, self.scaling_config))
        decide = named["failure_policy"].make_decision

        def make_decision(*arguments: Any, **more: Any) -> Any:
            return FailureDecision.RAISE if self.ended else decide(*arguments, **more)

        named["failure_policy"].make_decision = make_decision
        controller = Controller(self.made, **named)
        with (
            mock.patch.object(worker_group, "SynchronizationActor", Nobody),
            mock.patch.object(state, "_shutdown_sync_actor", lambda nobody: None),
        ):
            asyncio.run(controller.run())
        return controller.get_result()


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """A controller would configure Python's logging, which in a process of its own harms nobody."""
    name = "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _wanted(callbacks: list[Any]) -> list[Any]:
    return [callback for callback in callbacks if not isinstance(callback, ELSEWHERE)]
