"""Launcher: Ray Train's TorchTrainer starts the workers, places them, and sets up their process group.

The trainer is a plain one. It runs in an actor of its own (`driver_actors.py`) on the driver's node, so that an attempt
can be ended at any moment, also while its workers start: with the actor go Ray Train's controller, the workers and
their placement group. Events, metrics and checkpoints do not go through Ray Train.
"""

from collections.abc import Mapping
from typing import Any

import ray

from app.launchers.driver_actors import TrainerHost, start_here
from app.launchers.ray_workers import POLL_SECONDS, RayChannel, RayWorkers, enter, error_of, surroundings
from app.launchers.room import groups_of_this_job, node_selector, remove_groups_but
from app.launchers.workers import Failures
from app.storage.storage import Storage
from app.training.events import TrainingDone
from app.training.job import Job, Place


def train_loop(given: dict[str, Any]) -> None:
    """What every worker runs."""
    from ray.train import get_context
    from ray.train.torch import get_device

    from app.training import loop

    job, context = ray.cloudpickle.loads(given["job"]), get_context()
    place = Place(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        device=get_device(),
    )
    channel = RayChannel(given["queue"], given["attempt"], place.rank)
    enter(job, channel)
    with surroundings(job, place, channel, context.get_node_rank()):
        channel.emit(TrainingDone(summary=loop.train(job, place, channel)))


class RayTrainWorkers(RayWorkers):
    """per_worker: Ray resources of one worker."""

    def __init__(self, per_worker: Mapping[str, float]) -> None:
        super().__init__()
        self.per_worker, self.folder = dict(per_worker), ""
        self.others = groups_of_this_job()  # none, but in a program of the user's own
        self.host: Any = start_here(TrainerHost)  # it imports while the driver prepares the run
        self.call: Any = None

    def start(self, job: Job) -> None:
        self.folder = f"{job.folder}/.ray_train"  # of Ray Train's own few files, which every node must see
        remove_groups_but(
            self.others, self.per_worker
        )  # what an earlier attempt's trainer asked for while it was ended
        self.begin_attempt(job.layout.dims.world_size)
        self.host = self.host or start_here(TrainerHost)
        scaling = {
            "num_workers": job.layout.dims.world_size,
            "use_gpu": self.per_worker.get("GPU", 0) > 0,
            "resources_per_worker": self.per_worker,
            "label_selector": node_selector(job.excluded_nodes),
        }
        pickled = {"function": ray.cloudpickle.dumps(train_loop), "job": ray.cloudpickle.dumps(job)}
        given = pickled | {"queue": self.queue, "attempt": self.attempt}
        self.call = self.host.fit.remote(given, scaling, f"{job.attempt}-{self.attempt}", self.folder)

    def stop(self) -> None:
        if self.call is None:
            return
        self.call = None
        ray.kill(self.host)
        self.end_attempt()
        remove_groups_but(self.others, self.per_worker)
        self.host = None

    def close(self) -> None:
        """Ends what outlives attempts, and removes what Ray Train has left in the run's folder."""
        super().close()
        if self.host is not None:
            ray.kill(self.host)
        if self.folder:
            Storage(self.folder).remove_tree()

    def wait(self) -> None:
        ray.wait([self.call], timeout=POLL_SECONDS)

    def lost(self) -> Failures:
        if not self.failures and not self.finished and ray.wait([self.call], timeout=0)[0]:
            if error := error_of(self.call, "the process of Ray Train's trainer"):
                return {None: error}
            self.finished = True
        return {}
