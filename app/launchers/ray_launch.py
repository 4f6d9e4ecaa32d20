"""A run's workers in Ray, from the wait for their resources to the supervisor that trains with them."""

from __future__ import annotations

import math
from typing import Any

from app.config import Config
from app.console import Console
from app.launchers.elastic import Elastic, free_by_node
from app.launchers.ray_workers import RayWorkers, ray_nodes
from app.launchers.room import Reserved, wait_for_room
from app.launchers.supervisor import Supervisor
from app.run.cost import Prices, meter_for
from app.run.driver import Driver
from app.run.prepare import Prepared, prepare
from app.tasks.base import Task
from cluster.connect import Cluster
from strategies import registry


class RayLaunch:
    """A context: at its end the workers are gone, and their resources given back."""

    def __init__(self, cluster: Cluster, config: Config, console: Console) -> None:
        self.cluster, self.config, self.console = cluster, config, console
        self.workers, self.per_worker = resources_to_ask_for(config, cluster)
        self.reserved = Reserved(self.workers)
        self.ray_workers: RayWorkers | None = None
        if config.launcher != "actors" and (config.parallel.pp or 1) == 1 and "pipeline" not in config.strategy:
            from app.launchers.ray_train import RayTrainWorkers

            self.ray_workers = RayTrainWorkers(self.per_worker)  # its first process starts while the data is read

    def __enter__(self) -> RayLaunch:
        return self

    def __exit__(self, *error: object) -> None:
        self.reserved.give_back()
        if self.ray_workers is not None:
            self.ray_workers.close()

    def wait_for_room(self) -> int:
        """How many workers there will be; waits until there is room for them. Raises ClusterError: there is none."""
        if not self.config.parallel.stage_resources:
            self.reserved = wait_for_room(self.config, self.cluster, self.workers, self.per_worker, self.console)
        return self.reserved.workers

    def prepare(self, task: Task, workers: int, config: Config | None = None) -> Prepared:
        gpus = self.per_worker.get("GPU", 0)
        per_node = int(self.cluster.largest.get("GPU", 0) / gpus) if gpus else None
        return prepare(config or self.config, task, workers, devices_per_node=per_node)

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
        driver.meter = meter_for(self.config, driver.run.storage, self.reserved.workers, self.per_worker)
        workers: Any = self._workers_for(prepared)
        return Supervisor(workers, driver, elastic, nodes=ray_nodes(), reprice=lambda n: self._reprice(driver, n))

    def _workers_for(self, prepared: Prepared) -> RayWorkers:
        if prepared.layout.dims.pp > 1 or self.config.launcher == "actors":
            from app.launchers.actors import ActorWorkers

            if self.ray_workers is not None:
                self.ray_workers.close()
            self.ray_workers = ActorWorkers(self.per_worker, self.cluster)
        assert self.ray_workers is not None
        self.ray_workers.give_back = self.reserved.give_back
        return self.ray_workers

    def _reprice(self, driver: Driver, workers: int) -> None:
        if driver.meter is not None:
            driver.meter.rate = Prices(self.config).rate(workers, self.per_worker) or driver.meter.rate


def resources_to_ask_for(config: Config, cluster: Cluster) -> tuple[int, dict[str, float]]:
    """How many workers, and the resources of each.

    A strategy of one process is one worker; those that spread over a worker's GPUs ask for all of the largest node's
    (ddp_model_parallel: for two each)."""
    per_worker = dict(config.resources_per_worker)
    if config.workers == "auto":
        per_worker = per_worker or ({"GPU": _gpus_each(config, cluster)} if cluster.gpus else {"CPU": 1.0})
        if any(record.one_process for record in registry.written(config.strategy)):
            return 1, per_worker
        if per_worker.get("GPU"):
            return max(1, int(cluster.gpus / per_worker["GPU"])), per_worker
        wanted = config.parallel
        degrees = math.prod(n or 1 for n in (wanted.dp_replicate, wanted.dp_shard, wanted.tp, wanted.pp))
        return max(2, degrees), per_worker
    workers = int(config.workers)
    gpus = _gpus_each(config, cluster)
    return workers, per_worker or ({"GPU": gpus} if cluster.gpus >= workers * gpus else {"CPU": 1.0})


def _gpus_each(config: Config, cluster: Cluster) -> float:
    """GPUs of one worker where the configuration does not say."""
    most = max(1.0, cluster.largest.get("GPU", 0.0))
    several = [record for record in registry.written(config.strategy) if record.several_devices]
    if not several:
        return 1.0
    if several[0].one_process:
        return most
    return min(2.0, most) if config.workers == "auto" or cluster.gpus >= 2 * int(config.workers) else 1.0
