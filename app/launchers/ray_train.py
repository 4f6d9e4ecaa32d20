"""Launcher: Ray Train's TorchTrainer starts the workers, places them, and forms their group.

The trainer is a plain one. It runs in an actor of its own (`driver_actors.py`) on the driver's
node, so that an attempt can be ended at any moment, even while its workers start: when the actor
ends, so do Ray Train's controller, the workers and their placement group. Events, metrics and
checkpoints do not go through Ray Train.
"""

from collections.abc import Mapping
from typing import Any

import ray

from app.launchers.driver_actors import Scaling, TrainerHost, WorkerConfig, start_here
from app.launchers.ray_workers import (
    POLL_SECONDS,
    RayChannel,
    RayWorkers,
    enter,
    error_of,
    queue_for,
    surroundings,
)
from app.launchers.room import groups_of_this_job, node_selector, remove_groups_but
from app.launchers.workers import Failures
from app.storage.storage import Storage
from app.training.events import TrainingDone
from app.training.job import Job, Place
from cluster.connect import Cluster


def train_loop(worker_config: WorkerConfig) -> None:
    """Runs in every worker."""
    from ray.train import get_context
    from ray.train.torch import get_device

    from app.training import loop

    job = ray.cloudpickle.loads(worker_config["job"])
    context = get_context()
    place = Place(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        device=get_device(),
    )
    channel = RayChannel(worker_config["uplink"], place.rank)
    enter(job, channel)
    with surroundings(job, place, channel, context.get_node_rank()):
        channel.emit(TrainingDone(summary=loop.train(job, place, channel)))


class RayTrainWorkers(RayWorkers):
    """Workers of a TorchTrainer.

    Args:
        per_worker: Ray resources of one worker.
        cluster: The cluster.
    """

    def __init__(self, per_worker: Mapping[str, float], cluster: Cluster) -> None:
        super().__init__(queue_for(cluster))
        self.per_worker = dict(per_worker)
        self.folder = ""
        """Of Ray Train's own files; "" before the first attempt."""
        self.other_groups = groups_of_this_job()
        """Placement groups of a user's own program around the run; usually none."""
        self.host: Any = start_here(TrainerHost)  # imports while the driver prepares the run
        self.call: ray.ObjectRef[None] | None = None

    def start(self, job: Job) -> None:
        """See `Workers`."""
        world_size = job.layout.dims.world_size
        self.folder = f"{job.folder}/.ray_train"  # every node must see it
        # An earlier attempt's trainer may have asked for a group while it was ended.
        remove_groups_but(self.other_groups, self.per_worker)
        self.begin_attempt(job)
        if self.host is None:
            self.host = start_here(TrainerHost)
        worker_config = WorkerConfig(
            function=ray.cloudpickle.dumps(train_loop),
            job=ray.cloudpickle.dumps(job),
            uplink=self.uplink,
        )
        scaling = Scaling(
            num_workers=world_size,
            use_gpu=self.per_worker.get("GPU", 0) > 0,
            resources_per_worker=self.per_worker,
            label_selector=node_selector(job.excluded_nodes),
        )
        name = f"{job.attempt}-{self.attempt}"
        self.call = self.host.fit.remote(worker_config, scaling, name, self.folder)

    def stop(self) -> None:
        """See `Workers`."""
        if self.call is None:
            return
        self.call = None
        ray.kill(self.host)
        self.end_attempt()
        remove_groups_but(self.other_groups, self.per_worker)
        self.host = None

    def close(self) -> None:
        """Ends what outlives attempts, and removes Ray Train's files from the run's folder."""
        super().close()
        if self.host is not None:
            ray.kill(self.host)
        if self.folder:
            Storage(self.folder).remove_tree()

    def wait(self) -> None:
        """See `RayWorkers`."""
        ray.wait([self.call], timeout=POLL_SECONDS)

    def lost(self) -> Failures:
        """See `RayWorkers`."""
        if self.call is None or self.failures or self.finished:
            return {}
        ended, _ = ray.wait([self.call], timeout=0)
        if ended:
            error = error_of(self.call, "the process of Ray Train's trainer")
            if error is not None:
                return {None: error}
            self.finished = True
        return {}
