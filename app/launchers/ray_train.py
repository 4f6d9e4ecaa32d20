"""Launcher: Ray Train's TorchTrainer starts the workers, places them, and sets up their process group.

The trainer is a plain one. It runs in an actor of its own (`trainer_host.py`) on the driver's node, so that an attempt
can be ended at any moment, also while its workers start: with the actor go Ray Train's controller, the workers and
their placement group. Events, metrics and checkpoints do not go through Ray Train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.job import Job
from app.launchers.ray_workers import POLL_SECONDS, RayWorkers
from app.launchers.room import node_selector
from app.launchers.trainer_host import TrainerHost
from app.launchers.workers import Failures, WorkerLost
from app.storage import Storage


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
        scaling = {
            "num_workers": job.layout.dims.world_size,
            "use_gpu": self.per_worker.get("GPU", 0) > 0,
            "resources_per_worker": self.per_worker,
            "label_selector": node_selector(job.config.cluster.exclude_nodes),
        }
        given = {"job": ray.cloudpickle.dumps(job), "queue": self.queue, "attempt": self.attempt}
        self.call = self.host.fit.remote(given, scaling, f"{job.attempt}-{self.attempt}", self.folder)

    def stop(self) -> None:
        if self.call is None:
            return
        self.call = None
        ray.kill(self.host)
        self._end_attempt()
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
