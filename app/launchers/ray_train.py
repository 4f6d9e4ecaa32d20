"""Launcher: Ray Train's TorchTrainer starts the workers, places them, and sets up their process group.

The trainer is a plain one. It runs in an actor of its own on the driver's node, so that an attempt can be ended at any
moment, also while its workers start: with the actor go Ray Train's controller, the workers and their placement group.
Events, metrics and checkpoints do not go through Ray Train.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.job import Job, Place
from app.launchers.ray_workers import POLL_SECONDS, RayWorkers
from app.launchers.room import node_selector
from app.launchers.worker_process import RayChannel, enter, surroundings
from app.launchers.workers import Failures, WorkerLost
from app.storage import Storage

SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how soon a dead worker is noticed; 2 s by default
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # cluster/preemption.py does it, for clouds as well
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else what a model prints appears twice
}
"""Documented settings of Ray Train, which its controller reads from the environment."""


class LostWorkers(UserCallback):
    """Tells the driver at once which workers are gone; `fit` returns only when Ray Train has cleaned up."""

    def __init__(self, queue: Any, attempt: int) -> None:
        self.queue, self.attempt = queue, attempt

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        found = {rank: str(error) for rank, error in worker_exceptions.items()}
        event = {"type": "lost", "ranks": found}
        ray.get(self.queue.put.remote(self.attempt, ray.cloudpickle.dumps([event])))


def train_loop(given: dict[str, Any]) -> None:
    """What every worker runs."""
    from ray.train import get_context
    from ray.train.torch import get_device

    from app import loop

    context = get_context()
    place = Place(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), get_device())
    channel = RayChannel(given["queue"], given["attempt"], place.rank)
    enter(given["job"], channel)
    with surroundings(given["job"], place, channel, context.get_node_rank()):
        channel.done(loop.train(given["job"], place, channel))


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerHost:
    """Runs one TorchTrainer."""

    def __init__(self) -> None:
        import app.loop  # noqa: F401  the job's classes, before they are asked for

        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)

    def fit(self, job: Job, queue: Any, attempt: int, per_worker: dict[str, float]) -> None:
        use_gpu = per_worker.get("GPU", 0) > 0
        where: dict[str, Any] = {"label_selector": node_selector(job.config.cluster.exclude_nodes)}
        callbacks: list[Any] = [LostWorkers(queue, attempt)]
        TorchTrainer(
            train_loop,
            train_loop_config={"job": job, "queue": queue, "attempt": attempt},
            scaling_config=ScalingConfig(
                num_workers=job.layout.dims.world_size, use_gpu=use_gpu, resources_per_worker=per_worker, **where
            ),
            run_config=RunConfig(
                name=f"{job.attempt}-{attempt}", storage_path=_train_folder(job.folder), callbacks=callbacks
            ),
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        ).fit()


class RayTrainWorkers(RayWorkers):
    """per_worker: Ray resources of one worker."""

    def __init__(self, per_worker: Mapping[str, float]) -> None:
        super().__init__()
        self.per_worker, self.folder = dict(per_worker), ""
        self.host = _start_host()  # it imports while the driver prepares the run
        self.call: Any = None
        self.gone: dict[int | None, BaseException] = {}

    def start(self, job: Job) -> None:
        self.folder = _train_folder(job.folder)
        self.begin_attempt(job.layout.dims.world_size)
        self.gone = {}
        self.host = self.host or _start_host()
        self.call = self.host.fit.remote(job, self.queue, self.attempt, self.per_worker)

    def stop(self) -> None:
        if self.call is None:
            return
        self.call = None
        ray.kill(self.host)
        self._kill_all()
        self.host = None

    def close(self) -> None:
        """Ends what outlives attempts, and removes what Ray Train has left in the run's folder."""
        self.stop()
        if self.host is not None:
            ray.kill(self.host)
        super().close()
        if self.folder:
            Storage(self.folder).remove_tree()

    def _wait(self) -> None:
        ray.wait([self.call], timeout=POLL_SECONDS)

    def _take(self, event: dict[str, Any]) -> bool:
        if event["type"] == "lost":
            self.gone |= {rank: WorkerLost(details=said) for rank, said in event["ranks"].items()}
            return True
        return super()._take(event)

    def _lost(self) -> Failures:
        if not self.gone and not self.finished and ray.wait([self.call], timeout=0)[0]:
            try:
                ray.get(self.call)
                self.finished = True
            except ray.exceptions.RayTaskError as error:
                return {None: getattr(error, "cause", None) or error}
            except ray.exceptions.RayError as error:
                return {None: WorkerLost("the process of Ray Train's trainer", str(error))}
        return self.gone


def _start_host() -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return TrainerHost.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]


def _train_folder(folder: str) -> str:
    """Where Ray Train keeps its own few files; every node must see it, so it is in the run's folder."""
    return f"{folder}/.ray_train"
