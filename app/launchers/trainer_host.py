"""What runs in Ray for launcher=ray: the actor that holds a TorchTrainer, and what every worker runs.

Little is imported at the top, and the job travels as bytes: the trainer's actor and Ray Train's controller start sooner
without the strategies and the loop, which only workers need, and the driver without Ray Train.
"""

from __future__ import annotations

import os
from typing import Any

import ray

SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how soon a dead worker is noticed; 2 s by default
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # cluster/preemption.py does it, for clouds as well
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else what a model prints appears twice
}
"""Documented settings of Ray Train, which its controller reads from the environment."""


def train_loop(given: dict[str, Any]) -> None:
    """What every worker runs."""
    from ray.train import get_context
    from ray.train.torch import get_device

    from app import loop
    from app.job import Place
    from app.launchers.worker_process import RayChannel, enter, surroundings

    job, context = ray.cloudpickle.loads(given["job"]), get_context()
    place = Place(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), get_device())
    channel = RayChannel(given["queue"], given["attempt"], place.rank)
    enter(job, channel)
    with surroundings(job, place, channel, context.get_node_rank()):
        channel.done(loop.train(job, place, channel))


def lost_workers(queue: Any, attempt: int) -> Any:
    """A callback that tells the driver at once which workers are gone; `fit` returns only when Ray Train has cleaned
    up."""
    from ray.train import UserCallback

    class LostWorkers(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            found = {rank: str(error) for rank, error in worker_exceptions.items()}
            event = {"type": "lost", "ranks": found}
            ray.get(queue.put.remote(attempt, ray.cloudpickle.dumps([event])))

    return LostWorkers()


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerHost:
    """Runs one TorchTrainer."""

    def __init__(self) -> None:
        import ray.train.torch  # noqa: F401  before it is asked for

        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)

    def fit(self, given: dict[str, Any], scaling: dict[str, Any], name: str, folder: str) -> None:
        """given: of `train_loop`. scaling: of `ray.train.ScalingConfig`. folder: where Ray Train keeps its files."""
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        callbacks: list[Any] = [lost_workers(given["queue"], given["attempt"])]
        TorchTrainer(
            train_loop,
            train_loop_config=given,
            scaling_config=ScalingConfig(**scaling),
            run_config=RunConfig(name=name, storage_path=folder, callbacks=callbacks),
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if scaling["use_gpu"] else "gloo"),
        ).fit()
