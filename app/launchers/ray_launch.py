"""A run's workers in Ray: how many, the wait for their places, and the supervisor that trains with them."""

import contextlib
import math
import os
import time
from dataclasses import replace
from functools import partial

import psutil
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from app.config import Config
from app.console.terminal import Console
from app.launchers.elastic import Elastic
from app.launchers.ray_workers import RayWorkers
from app.launchers.room import free_by_node, ray_nodes, reserve, why_pending
from app.launchers.supervisor import Supervisor
from app.run.abort import abort
from app.run.cost import Meter, meter_for
from app.run.driver import Driver
from app.run.prepare import Prepared, check_devices, prepare, with_idle_gpus
from app.storage.storage import Storage
from app.tasks.base import Task
from cluster import ClusterError
from cluster.connect import Cluster
from cluster.files import read_cluster
from cluster.pending import Diagnosis, autoscaler_now, check_feasible
from cluster.watch import GONE_SECONDS, OWN_SECONDS, RayWatch, addresses
from strategies import registry
from strategies.dims import MESH_DIMS

LOOK_SECONDS = 1.0
FREE_SECONDS = 5.0
END_SECONDS = 10.0  # that a run has to end by itself when Ray is gone
RESTARTS = "TRIREME_RESTARTS"
"""Variable that counts them, in the environment of a command that has begun anew."""
ASK_AUTOSCALER_SECONDS = 10.0
"""Asking it is a process of a second or two."""


class RayLaunch:
    """One start's workers, until `close`."""

    def __init__(self, cluster: Cluster, config: Config, console: Console) -> None:
        self.cluster, self.config, self.console = cluster, config, console
        self.workers, self.per_worker = resources_to_ask_for(config, cluster)
        self.group: PlacementGroup | None = None  # keeps the workers' places while the run is prepared
        self.ray_workers: RayWorkers | None = None
        self.watch: RayWatch | None = None
        # On the CPUs of one machine Ray Train's own five processes take longer to start than the workers.
        laptop = config.launcher == "auto" and cluster.private and not cluster.gpus
        self.only_actors = laptop or config.launcher == "actors"
        if not self.only_actors and (config.parallel.pp or 1) == 1 and "pipeline" not in config.strategy:
            from app.launchers.ray_train import RayTrainWorkers

            self.ray_workers = RayTrainWorkers(self.per_worker)  # its first process starts while the data is read

    def close(self) -> None:
        """Ends the workers, and gives their resources back."""
        self.give_back()
        if self.ray_workers is not None:
            self.ray_workers.close()
        if self.watch is not None:
            self.watch.close()

    def give_back(self) -> None:
        """Frees what has kept the workers' places, and waits a moment until Ray's tables show it."""
        group, self.group = self.group, None
        if group is None:
            return
        demand, until = [self.per_worker] * self.workers, time.monotonic() + FREE_SECONDS
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(group)
            while why_pending(demand, None, self.config.cluster.exclude_nodes) and time.monotonic() < until:
                time.sleep(0.1)

    def wait_for_room(self) -> int:
        """How many workers there will be; waits until there is room for them, and says why there is none. After
        `cluster.wait_seconds` it does what `cluster.when_pending` says: shrinks, or ends.

        The whole group is asked for meanwhile, so that an autoscaling cluster grows to it, and kept, since machines
        that stood idle while a run prepares would be taken away again.

        Raises:
            ClusterError: the places can never come, or did not come in time; one sentence that says which and why.
        """
        config, console, workers = self.config, self.console, self.workers
        if config.parallel.stage_resources:
            return workers
        known = read_cluster(config.cluster.file) if config.cluster.file else self.cluster.shape
        check_feasible(known, workers, self.per_worker)
        demand, excluded = [self.per_worker] * workers, config.cluster.exclude_nodes
        look = partial(why_pending, demand, known if known.path else None, excluded)
        autoscaling = bool(self.cluster.max_resources)
        if not autoscaling and look() is None:
            return workers
        self.group, began, report = reserve(demand, excluded), time.monotonic(), None
        said, asked_at = "", 0.0
        while not self.group.wait(LOOK_SECONDS):
            now = time.monotonic()
            if autoscaling and now - asked_at > ASK_AUTOSCALER_SECONDS:
                report, asked_at = autoscaler_now(), now
            found = look(report)
            if found is None:
                continue
            if found.sentence != said:
                said = found.sentence
                console.say(f"waiting for resources: {said}")
            if now - began > config.cluster.wait_seconds or not found.ever:
                self.workers = when_over(config, found, workers)
                console.say(f"continuing with {self.workers} of {workers} workers: {said}")
                self.give_back()
                break
        return self.workers

    def prepare(self, task: Task, workers: int, config: Config | None = None) -> Prepared:
        gpus = self.per_worker.get("GPU", 0)
        check_devices(config or self.config, "cuda" if gpus else "cpu")
        per_node = int(self.cluster.gpus_of_largest / gpus) if gpus else None
        prepared = prepare(config or self.config, task, workers, devices_per_node=per_node)
        return with_idle_gpus(prepared, workers, gpus, self.cluster.gpus, "the cluster")

    def meter(self, storage: Storage) -> Meter | None:
        """What counts the cost of a run in this storage; see `meter_for`."""
        return meter_for(self.config, storage, self.workers, self.per_worker)

    def supervisor(self, driver: Driver, prepared: Prepared, task: Task) -> Supervisor:
        """What trains with workers of Ray Train, or with actors where there are stages or they are asked for."""
        elastic = None
        if not self.config.parallel.stage_resources:
            elastic = Elastic(
                self.config,
                prepared,
                self.per_worker,
                prepare=lambda config, workers: self.prepare(task, workers, config),
                free=free_by_node,
                autoscaling=bool(self.cluster.max_resources),
            )
        self.give_back()
        private = self.cluster.private
        lost = partial(ray_is_gone, driver, private=private)
        self.watch = RayWatch(addresses(), OWN_SECONDS if private else GONE_SECONDS, driver.note, lost)
        nodes = replace(ray_nodes(), reachable=self.watch.whole)
        return Supervisor(self._workers_for(prepared), driver, elastic, nodes=nodes)

    def _workers_for(self, prepared: Prepared) -> RayWorkers:
        if prepared.layout.dims.pp > 1 or self.only_actors:
            from app.launchers.actors import ActorWorkers

            if self.ray_workers is not None:
                self.ray_workers.close()
            self.ray_workers = ActorWorkers(self.per_worker, self.cluster)
        assert self.ray_workers is not None
        return self.ray_workers


def ray_is_gone(driver: Driver, why: str, *, private: bool) -> None:
    """What a run does then, in a thread: Ray's calls in the main one may not return. With a Ray of its own the command
    begins anew, as the same process; else it ends."""
    again = int(os.environ.get(RESTARTS, "0"))
    if private and driver.restart is not None and not driver.stopping and again < driver.config.fault.max_restarts:
        driver.console.say(f"{why}: starting Ray and the run again, from the last checkpoint")
        os.environ[RESTARTS] = str(again + 1)
        driver.run.lease.release()
        children = psutil.Process().children(recursive=True)  # Ray's
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=END_SECONDS)
        driver.console.restore()
        driver.restart()
    driver.fail(f"{why}: when it is there again, run the same command again to continue")
    time.sleep(END_SECONDS)
    if driver.run.lease.taken and not driver.run.lease.released:
        abort(1, f"trireme: {driver.failed}", say=driver.console.error)


def when_over(config: Config, found: Diagnosis, workers: int) -> int:
    """With how many workers to continue when the time is over.

    Raises:
        ClusterError: to end.
    """
    after = f"after {config.cluster.wait_seconds:g} s" if found.ever else "and waiting would not help"
    if config.cluster.when_pending == "shrink":
        batch, least = config.train.global_batch_size, config.cluster.min_workers
        smaller = next((n for n in range(min(found.placed, workers - 1), 0, -1) if batch % n == 0), 0)
        if smaller >= least:
            return smaller
        after += f" (the largest number that makes a layout is {smaller}, below cluster.min_workers={least})"
    raise ClusterError(f"there is room for {found.placed} of {workers} workers {after}: {found.sentence}")


def resources_to_ask_for(config: Config, cluster: Cluster) -> tuple[int, dict[str, float]]:
    """How many workers, and the resources of each.

    A strategy of one process is one worker; those that spread over a worker's GPUs ask for all of the largest node's
    (ddp_model_parallel: for two each)."""
    per_worker = dict(config.resources_per_worker)
    if config.workers == "auto":
        per_worker = per_worker or ({"GPU": _gpus_each(config, cluster)} if cluster.gpus else {"CPU": 1.0})
        if any(record.one_process for record in registry.known_records(config.strategy)):
            return 1, per_worker
        if per_worker.get("GPU"):
            return max(1, int(cluster.gpus / per_worker["GPU"])), per_worker
        wanted = config.parallel
        degrees = math.prod(getattr(wanted, name) or 1 for name in MESH_DIMS)
        return max(2, degrees), per_worker
    workers = int(config.workers)
    gpus = _gpus_each(config, cluster)
    return workers, per_worker or ({"GPU": gpus} if cluster.gpus >= workers * gpus else {"CPU": 1.0})


def _gpus_each(config: Config, cluster: Cluster) -> float:
    """GPUs of one worker where the configuration does not say."""
    most = max(1.0, float(cluster.gpus_of_largest))
    several = [record for record in registry.known_records(config.strategy) if record.several_devices]
    if not several:
        return 1.0
    if several[0].one_process:
        return most
    return min(2.0, most) if config.workers == "auto" or cluster.gpus >= 2 * int(config.workers) else 1.0
