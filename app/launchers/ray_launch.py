"""A run's workers in Ray: how many there are, the wait for their places, and their supervisor."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import psutil
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from app.config import Config
from app.config.layout_requirement import ANY_LAYOUT, Requirement
from app.console.terminal import Console
from app.errors import UserError
from app.launchers.elastic import Elastic
from app.launchers.evaluation import SeparateEvaluation
from app.launchers.ray_workers import RayWorkers
from app.launchers.room import (
    free_by_node,
    not_placed_yet,
    ray_nodes,
    reserve,
    why_pending,
)
from app.launchers.supervisor import Supervisor
from app.run.abort import abort
from app.run.cost import Meter, meter_for
from app.run.driver import Driver
from app.run.prepare import Prepared, check_devices, prepare, with_idle_gpus
from app.run.resolve import with_batches
from app.storage.storage import Storage
from app.tasks.base import Task
from cluster import ClusterError
from cluster.connect import Cluster
from cluster.files import read_cluster
from cluster.pending import (
    AutoscalerReport,
    Diagnosis,
    autoscaler_now,
    check_feasible,
    format_resources,
    place,
)
from cluster.shape import ClusterShape
from cluster.watch import GONE_SECONDS, OWN_SECONDS, RayWatch, addresses
from strategies import registry
from strategies.dims import MESH_DIMS

LOOK_SECONDS = 1.0
"""Seconds between two looks at the cluster."""
PLACING_SECONDS = 5.0
"""How long Ray may take to place workers for which there is room, without a word about it."""
FREE_SECONDS = 5.0
"""How long Ray's tables may take to show that places are free again."""
END_SECONDS = 10.0
"""How long a run may take to end by itself when Ray is gone."""
RESTARTS = "TRIREME_RESTARTS"
"""The environment variable that counts how often a command has begun anew."""
ASK_AUTOSCALER_SECONDS = 10.0
"""Seconds between two questions to the autoscaler; each is a process of a second or two."""


class RayLaunch:
    """The workers of one start of a run, until `close`.

    Args:
        cluster: The cluster.
        config: The configuration as it was written.
        console: Where a person sees what happens.
    """

    def __init__(self, cluster: Cluster, config: Config, console: Console) -> None:
        self.cluster = cluster
        self.config = config
        self.console = console
        self.workers, self.per_worker = resources_to_ask_for(config, cluster)
        self.group: PlacementGroup | None = None
        """Keeps the workers' places while the run is prepared."""
        self.ray_workers: RayWorkers | None = None
        self.watch: RayWatch | None = None
        self.preparing_seconds = 0.0
        """What preparing the run for a layout has taken, the last time."""
        self.evaluation: SeparateEvaluation | None = None
        self.for_evaluation: dict[str, float] = {}
        """Ray resources of the worker that evaluates; empty if it needs none of its own."""
        if config.train.eval_separate:
            asked = evaluation_resources(
                config, cluster, workers=self.workers, per_worker=self.per_worker
            )
            self.for_evaluation = {name: amount for name, amount in asked.items() if amount}
        self.only_actors = config.launcher == "actors" or (
            config.launcher == "auto"
            and fits_on_one_machine_without_gpus(
                config, cluster, workers=self.workers, per_worker=self.per_worker
            )
        )
        has_stages = (config.parallel.pp or 1) > 1 or "pipeline" in config.strategy
        if not self.only_actors and not has_stages:
            from app.launchers.ray_train import RayTrainWorkers

            # Its first process starts while the data is read.
            self.ray_workers = RayTrainWorkers(self.per_worker, cluster)

    def close(self) -> None:
        """Ends the workers, and gives their resources back."""
        self.give_back()
        if self.ray_workers is not None:
            self.ray_workers.close()
        if self.evaluation is not None:
            self.evaluation.close()
        if self.watch is not None:
            self.watch.close()

    def give_back(self) -> None:
        """Frees what has kept the workers' places, and waits until Ray's tables show it."""
        group = self.group
        self.group = None
        if group is None:
            return
        demand = self._demand()
        excluded = self.config.cluster.exclude_nodes
        deadline = time.monotonic() + FREE_SECONDS
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(group)
            while why_pending(demand, None, excluded) and time.monotonic() < deadline:
                time.sleep(0.1)

    def _demand(self) -> list[dict[str, float]]:
        """What is asked of the cluster: a place for each worker, and one for evaluation."""
        demand = [self.per_worker] * self.workers
        return [*demand, self.for_evaluation] if self.for_evaluation else demand

    @property
    def description(self) -> str:
        """The processes that train and evaluate, for a person."""
        device_kind = "GPU" if self.per_worker.get("GPU", 0) else "CPU"
        plural = "s" if self.workers > 1 else ""
        text = f"{self.workers} {device_kind} worker{plural} in Ray"
        if not self.config.train.eval_separate:
            return text
        if self.for_evaluation:
            return f"{text} and one that evaluates ({format_resources(self.for_evaluation)})"
        return f"{text} and one that evaluates on their processors"

    def wait_for_room(self) -> int:
        """Waits until there is room for the workers, and says why there is none.

        After `cluster.wait_seconds` it does what `cluster.when_pending` says: shrinks, or ends.
        Meanwhile the whole group is asked for, so that an autoscaling cluster grows to it, and it
        is kept, because machines that are idle while a run prepares would be taken away again.

        Returns:
            How many workers there will be.

        Raises:
            ClusterError: The places can never come, or did not come in time; one sentence that says
                which and why.
        """
        config = self.config
        workers = self.workers
        if config.parallel.stage_resources:
            return workers
        shape = self.cluster.shape
        if config.cluster.file:
            shape = read_cluster(config.cluster.file)
        check_feasible(shape, workers, self.per_worker)
        excluded = config.cluster.exclude_nodes
        demand = self._demand()
        known_shape = shape if shape.path else None
        autoscaling = bool(self.cluster.max_resources)
        if not autoscaling and why_pending(demand, known_shape, excluded) is None:
            return workers
        self.group = reserve(demand, excluded)
        diagnosis = self._wait_for_group(self.group, demand, known_shape)
        if diagnosis is not None:
            self.workers = workers_after_waiting(config, diagnosis, workers)
            self.console.say(
                f"continuing with {self.workers} of {workers} workers: {diagnosis.sentence}"
            )
            self.give_back()
        return self.workers

    def _wait_for_group(
        self, group: PlacementGroup, demand: list[dict[str, float]], shape: ClusterShape | None
    ) -> Diagnosis | None:
        """Waits until a placement group has its places, and says what it waits for.

        Args:
            group: The placement group.
            demand: Its bundles.
            shape: The cluster's file; None if it is not known.

        Returns:
            Why it has none when there is no more to wait for; None if it has them.

        Raises:
            ClusterError: Ray has not placed it in time, though there seems to be room.
        """
        excluded = self.config.cluster.exclude_nodes
        wait_seconds = self.config.cluster.wait_seconds
        autoscaling = bool(self.cluster.max_resources)
        start = time.monotonic()
        room_clock: float | None = None
        """Since when there seems to be room."""
        last_sentence = ""
        report: AutoscalerReport | None = None
        report_clock = 0.0
        while not group.wait(LOOK_SECONDS):
            now = time.monotonic()
            if autoscaling and now - report_clock > ASK_AUTOSCALER_SECONDS:
                report = autoscaler_now()
                report_clock = now
            diagnosis = why_pending(demand, shape, excluded, autoscaler=report)
            if diagnosis is not None:
                room_clock = None
                sentence = diagnosis.sentence
            else:
                room_clock = room_clock or now
                if now - room_clock < PLACING_SECONDS:
                    continue
                sentence = not_placed_yet(demand, excluded)
            if sentence != last_sentence:
                last_sentence = sentence
                self.console.say(f"waiting for resources: {sentence}")
                # Said again every now and then, as long as it is so.
                limit = f"at most {wait_seconds:g} s, cluster.wait_seconds"
                self.console.waits_for(f"resources ({limit}): {sentence}", since=start)
            is_over = now - start > wait_seconds
            if diagnosis is not None and (is_over or not diagnosis.ever):
                return diagnosis
            if is_over:
                raise ClusterError(
                    f"the workers have no places after {wait_seconds:g} s "
                    f"(cluster.wait_seconds): {sentence}"
                )
        return None

    def start_ahead(self, workers: int) -> None:
        """Starts workers for which there is room now, so that they import meanwhile.

        A run that is refused afterwards gives their places back at once.

        Args:
            workers: How many there will be.
        """
        config = self.config
        has_equal_workers = not config.parallel.stage_resources and not config.train.eval_separate
        if self.only_actors and has_equal_workers and self.group is None:
            from app.launchers.actors import ActorWorkers

            actor_workers = ActorWorkers(self.per_worker, self.cluster)
            self.ray_workers = actor_workers
            actor_workers.start_ahead(workers, config.cluster.exclude_nodes)

    def prepare(
        self,
        task: Task,
        workers: int,
        config: Config | None = None,
        requirement: Requirement = ANY_LAYOUT,
    ) -> Prepared:
        """Prepares the run for a number of workers; see `app.run.prepare.prepare`.

        Args:
            task: What is trained.
            workers: How many there are.
            config: Another configuration than the one as it was written.
            requirement: What is known beforehand of the layout that auto chooses.
        """
        start = time.monotonic()
        config = config or self.config
        gpus = self.per_worker.get("GPU", 0)
        check_devices(config, "cuda" if gpus else "cpu")
        workers_per_node = int(self.cluster.gpus_of_largest / gpus) if gpus else None
        prepared = prepare(
            config,
            task,
            workers,
            devices_per_node=workers_per_node,
            requirement=requirement,
        )
        self.preparing_seconds = time.monotonic() - start
        return with_idle_gpus(
            prepared,
            workers=workers,
            gpus_per_worker=gpus,
            gpus=self.cluster.gpus,
            pool="the cluster",
        )

    def meter(self, storage: Storage) -> Meter | None:
        """Counts the cost of a run in this storage; see `meter_for`."""
        return meter_for(
            self.config,
            storage,
            workers=self.workers,
            per_worker=self.per_worker,
            for_evaluation=self.for_evaluation,
        )

    def supervisor(self, driver: Driver, prepared: Prepared, task: Task) -> Supervisor:
        """Makes the supervisor of the run's workers, and starts the watch over Ray.

        Args:
            driver: Of the run.
            prepared: What the run starts with.
            task: What is trained.
        """
        elastic: Elastic | None = None
        if not self.config.parallel.stage_resources:
            elastic = Elastic(
                config=self.config,
                first=prepared,
                per_worker=self.per_worker,
                prepare=lambda config, workers, requirement: self.prepare(
                    task, workers, config, requirement
                ),
                free=free_by_node,
                autoscaling=bool(self.cluster.max_resources),
                has_stages=self.only_actors or prepared.layout.dims.pp > 1,
                step_seconds=partial(planned_seconds, task),
                request=self._request,
            )
        self.give_back()
        private = self.cluster.private
        self.watch = RayWatch(
            at=addresses(),
            patience=OWN_SECONDS if private else GONE_SECONDS,
            say=driver.note,
            lost=partial(ray_is_gone, driver, private=private),
        )
        nodes = replace(ray_nodes(), reachable=self.watch.is_usable)
        if self.config.train.eval_separate:
            from app.launchers.ray_evaluation import RayEvaluationWorker

            check_devices(self.config, "cuda" if self.for_evaluation.get("GPU") else "cpu")
            self.evaluation = SeparateEvaluation(RayEvaluationWorker(self.for_evaluation))
        follower = None
        if prepared.plan is not None:
            from app.launchers.follow import PlanFollower

            follower = PlanFollower(
                driver, prepared, elastic, preparing_seconds=self.preparing_seconds
            )
        return Supervisor(
            self._workers_for(prepared),
            driver,
            elastic,
            nodes=nodes,
            evaluation=self.evaluation,
            follower=follower,
        )

    def _request(self, workers: int, excluded: Sequence[str]) -> Callable[[], object]:
        """Asks for places of further workers; returns what gives them back.

        Args:
            workers: How many.
            excluded: Ids of nodes that they must not use.
        """
        group = reserve([self.per_worker] * workers, excluded)

        def withdraw() -> None:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(group)

        return withdraw

    def _workers_for(self, prepared: Prepared) -> RayWorkers:
        """Actors if there are stages or they are asked for, and otherwise Ray Train's workers."""
        if prepared.layout.dims.pp > 1 or self.only_actors:
            from app.launchers.actors import ActorWorkers

            if not isinstance(self.ray_workers, ActorWorkers):
                if self.ray_workers is not None:
                    self.ray_workers.close()
                self.ray_workers = ActorWorkers(self.per_worker, self.cluster)
        assert self.ray_workers is not None
        return self.ray_workers


def planned_seconds(task: Task, prepared: Prepared, batch: int) -> float:
    """The planned seconds of a step.

    Args:
        task: What is trained.
        prepared: With how many workers, and which layout.
        batch: The global batch.
    """
    from app.planner.advice import predict

    config = with_batches(prepared.config, (batch,))
    return predict(config, task, prepared.layout).step_seconds


def ray_is_gone(driver: Driver, reason: str, *, private: bool) -> None:
    """Reacts to the end of Ray, in a thread, because Ray's calls in the main one may not return.

    A command with a Ray of its own begins anew, as the same process. Another one ends.

    Args:
        driver: Of the run.
        reason: What has happened, for a person.
        private: Whether this command has started the Ray.
    """
    restarts = int(os.environ.get(RESTARTS, "0"))
    may_restart = private and not driver.stopping
    if may_restart and driver.restart is not None and restarts < driver.config.fault.max_restarts:
        driver.console.say(f"{reason}: starting Ray and the run again, from the last checkpoint")
        os.environ[RESTARTS] = str(restarts + 1)
        driver.run.lease.release()
        ray_processes = psutil.Process().children(recursive=True)
        for process in ray_processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(ray_processes, timeout=END_SECONDS)
        driver.console.restore()
        driver.restart()
    driver.fail(f"{reason}: when it is there again, run the same command again to continue")
    time.sleep(END_SECONDS)
    if driver.run.lease.taken and not driver.run.lease.released:
        abort(1, f"trireme: {driver.failed}", say=driver.console.error)


def workers_after_waiting(config: Config, diagnosis: Diagnosis, workers: int) -> int:
    """With how many workers to continue when the time to wait is over.

    Args:
        config: Says whether to shrink.
        diagnosis: Why workers have no place.
        workers: How many are wanted.

    Raises:
        ClusterError: The run ends.
    """
    if diagnosis.ever:
        after = f"after {config.cluster.wait_seconds:g} s"
    else:
        after = "and waiting would not help"
    if config.cluster.when_pending == "shrink":
        least = config.cluster.min_workers
        most = min(diagnosis.placed, workers - 1)
        largest = _largest_divisor(config.train.batches.common_divisor, most)
        if largest >= least:
            return largest
        after += (
            f" (the largest number that makes a layout is {largest}, below "
            f"cluster.min_workers={least})"
        )
    raise ClusterError(
        f"there is room for {diagnosis.placed} of {workers} workers {after}: {diagnosis.sentence}"
    )


def _largest_divisor(batch: int, most: int) -> int:
    """The largest divisor of a batch that is at most `most`; 0 if there is none."""
    for divisor in range(most, 0, -1):
        if batch % divisor == 0:
            return divisor
    return 0


def resources_to_ask_for(config: Config, cluster: Cluster) -> tuple[int, dict[str, float]]:
    """How many workers there are, and the Ray resources of each.

    A strategy of one process is one worker. Strategies that spread over a worker's GPUs ask for all
    GPUs of the largest node, and ddp_model_parallel for two per worker.
    """
    per_worker = dict(config.resources_per_worker)
    if config.workers != "auto":
        workers = int(config.workers)
        if not per_worker:
            gpus = _gpus_per_worker(config, cluster)
            has_enough_gpus = cluster.gpus >= workers * gpus
            per_worker = {"GPU": gpus} if has_enough_gpus else {"CPU": 1.0}
        return workers, per_worker
    if not per_worker:
        has_gpus = bool(cluster.gpus)
        per_worker = {"GPU": _gpus_per_worker(config, cluster)} if has_gpus else {"CPU": 1.0}
    if any(record.one_process for record in registry.known_records(config.strategy)):
        return 1, per_worker
    if per_worker.get("GPU"):
        gpus = cluster.gpus
        if config.train.eval_separate:
            gpus -= math.ceil(config.train.eval_resources.get("GPU", 0.0))
        return max(1, int(gpus / per_worker["GPU"])), per_worker
    degrees = math.prod(getattr(config.parallel, name) or 1 for name in MESH_DIMS)
    return max(2, degrees), per_worker


def fits_on_one_machine_without_gpus(
    config: Config, cluster: Cluster, *, workers: int, per_worker: dict[str, float]
) -> bool:
    """Whether a run needs no more than the only node of a cluster that has no GPUs.

    There, Ray Train's own six processes take longer to start than the workers.

    Args:
        config: May let the run grow to more workers.
        cluster: The cluster.
        workers: How many train.
        per_worker: Ray resources of each of these.
    """
    if cluster.gpus or len(cluster.nodes) > 1:
        return False
    if cluster.private:
        return True
    if cluster.max_resources or config.cluster.max_workers:
        return False
    empty_nodes = [replace(node, available=node.total) for node in cluster.nodes]
    return place([per_worker] * workers, empty_nodes)[1] is None


def evaluation_resources(
    config: Config, cluster: Cluster, workers: int, per_worker: dict[str, float]
) -> dict[str, float]:
    """Ray resources of the worker that evaluates checkpoints.

    Args:
        config: May name them.
        cluster: The cluster.
        workers: How many train.
        per_worker: Ray resources of each of these.

    Raises:
        UserError: They are written, and the cluster has no room for them beside the workers'.
    """
    written = config.train.eval_resources
    asked = dict(written) or {"CPU": 1.0}
    empty_nodes = [replace(node, available=node.total) for node in cluster.nodes]
    missing = None
    if not cluster.max_resources:
        missing = place([*[per_worker] * workers, asked], empty_nodes)[1]
    if missing is None:
        return asked
    if not written:
        return {}
    if missing < workers:  # the workers themselves have no room; `wait_for_room` reports that
        return asked
    resources = "; ".join(format_resources(node.total) for node in cluster.nodes)
    raise UserError(
        f"train.eval_resources asks for {format_resources(asked)} beside {workers} workers of "
        f"{format_resources(per_worker)} each, for which the cluster ({resources}) has no room: "
        "write fewer workers, or leave train.eval_resources out"
    )


def _gpus_per_worker(config: Config, cluster: Cluster) -> float:
    """GPUs of one worker if the configuration does not say."""
    gpus_of_node = max(1.0, float(cluster.gpus_of_largest))
    records = registry.known_records(config.strategy)
    spreading = [record for record in records if record.several_devices]
    if not spreading:
        return 1.0
    if spreading[0].one_process:
        return gpus_of_node
    if config.workers == "auto" or cluster.gpus >= 2 * int(config.workers):
        return min(2.0, gpus_of_node)
    return 1.0
