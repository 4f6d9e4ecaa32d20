"""Launcher: Ray actors, one per rank, placed by the layout; for pipelines and any other layout.

Ray places, watches and ends the processes; tensors go from worker to worker directly. A run is one
Ray call per rank. Pure functions decide where the ranks are placed (bundles of a placement group):
what communicates most is kept together. That is a whole copy of the model on one node if it fits,
or else a stage (its shards and tensor-parallel peers) on one node with the stages close to each
other, or else each rank by itself.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import Config
from app.errors import UserError
from app.launchers.aggregator import StoreAddress
from app.launchers.driver_actors import Uplink
from app.launchers.ray_workers import (
    POLL_SECONDS,
    RayChannel,
    RayWorkers,
    enter,
    error_of,
    queue_for,
    surroundings,
)
from app.launchers.room import reserve
from app.launchers.store import open_store
from app.launchers.workers import Failures
from app.training.events import TrainingDone, WorkerInfo
from app.training.job import Job, Place
from cluster.connect import Cluster
from cluster.pending import format_resources, place
from cluster.shape import NodeState, living_nodes
from strategies.layout import ParallelDims

if TYPE_CHECKING:
    from torch.distributed import Store

CALLS_PER_SECOND = 10_000
"""How many calls Ray is asked about in a second; less than every poll with more than 500 ranks."""
PROCESS_GROUP_SECONDS = 1800.0
"""Timeout of collectives. The hang detector ends what hangs long before."""
Resources = dict[str, float]
"""Ray resources by name."""


@ray.remote(max_restarts=0, max_task_retries=0)
class WorkerActor:
    """One rank's process."""

    def import_ahead(self) -> None:
        """Imports what training needs, before it is known what is trained."""
        from app.training import loop  # noqa: F401

    def run(self, job: Job, rank: int, label: str, use_gpu: bool, uplink: Uplink) -> None:
        """Meets the other ranks, and trains to the end.

        Args:
            job: What is trained.
            rank: Of this worker.
            label: Describes the worker, such as "stage 2 of 4".
            use_gpu: Whether the worker has a GPU.
            uplink: How it reaches the driver.
        """
        import torch
        import torch.distributed as dist

        from app.training import loop

        channel = RayChannel(uplink, rank)
        info = enter(job, channel, label)
        world_size = job.layout.dims.world_size
        local_rank, store = _meet(info, channel)
        # One rank of a node asks, for all ranks of its node.
        node_rank = channel.node_rank(info.node) if local_rank == 0 else 0
        os.environ["RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(world_size)
        os.environ["LOCAL_RANK"] = str(local_rank)
        device = torch.device("cpu")
        if use_gpu:
            device = torch.device("cuda", 0)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PROCESS_GROUP_SECONDS),
        )
        place = Place(rank=rank, world_size=world_size, local_rank=local_rank, device=device)
        with surroundings(job, place, channel, node_rank):
            channel.emit(TrainingDone(summary=loop.train(job, place, channel)))
        dist.barrier()  # no rank closes its connections while another still uses them


def _meet(info: WorkerInfo, channel: RayChannel) -> tuple[int, Store]:
    """Waits until all ranks have started.

    Args:
        info: Of this worker.
        channel: Of this worker.

    Returns:
        This worker's rank among those of its node, and a store for all ranks.
    """
    from torch.distributed import TCPStore

    interface = _find_interface(info.ip)
    if interface:
        # Otherwise gloo takes the address that the host's own name resolves to, which may be
        # 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    own_store: TCPStore | None = None
    address: StoreAddress | None = None
    if info.rank == 0:
        own_store = open_store(info.ip)
        address = (info.ip, own_store.port)
    channel.join(info, address)
    start = time.monotonic()
    while True:
        assignment = channel.meeting(info)
        if assignment is not None:
            break
        time.sleep(min(1.0, 0.02 + (time.monotonic() - start) / 20))
    host, port = assignment.store
    if own_store is not None:
        return assignment.local_rank, own_store
    return assignment.local_rank, TCPStore(host, port, is_master=False)


def _find_interface(ip: str) -> str | None:
    """The network interface with this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    return None


@dataclass(frozen=True)
class _Reservation:
    """A placement group that attempts keep as long as they ask for the same.

    Args:
        request: What was asked for; None before any job is known.
        group: The placement group.
        bundle_of_rank: The number of each rank's bundle.
    """

    request: tuple[ParallelDims, list[Resources], list[str]] | None
    group: PlacementGroup
    bundle_of_rank: list[int]


class ActorWorkers(RayWorkers):
    """Workers that are Ray actors.

    Args:
        per_worker: Ray resources of one worker, unless the configuration gives those of its stage.
        cluster: The cluster.
        reserved: A placement group with a bundle for each worker, which stays. None makes one that
            attempts keep as long as they ask for the same, because Ray takes up to a second to
            place another after workers have died.
    """

    def __init__(
        self,
        per_worker: Resources,
        cluster: Cluster,
        reserved: PlacementGroup | None = None,
    ) -> None:
        super().__init__(queue_for(cluster))
        self.per_worker = per_worker
        self.cluster = cluster
        self.reserved = reserved
        self.calls: dict[ray.ObjectRef[None], int] = {}
        """The ranks of the calls that have not ended."""
        self.call_clock = 0.0
        """When it was last looked which calls have ended."""
        self.actors: list[Any] = []
        self.dead: dict[int | None, BaseException] = {}
        self._runs = False
        self._reservation: _Reservation | None = None
        self._started_ahead: list[Any] = []
        """Actors that import, one in each bundle of the reservation, until the first attempt."""

    def start_ahead(self, count: int, excluded: Sequence[str]) -> None:
        """Starts workers, which import while the driver prepares what they will train.

        Args:
            count: How many there will be, as far as it is known.
            excluded: Ids of nodes that they must not use.
        """
        group = reserve([self.per_worker] * count, excluded)
        self._reservation = _Reservation(None, group, [*range(count)])
        for bundle in range(count):
            actor = _start_actor(self.per_worker, group, bundle)
            actor.import_ahead.remote()
            self._started_ahead.append(actor)

    def start(self, job: Job) -> None:
        """See `Workers`.

        Raises:
            UserError: The stages ask for resources that the cluster does not have.
        """
        dims = job.layout.dims
        per_stage = resources_of_stages(job.config, dims, self.per_worker)
        self.begin_attempt(job)
        self.dead = {}
        started_ahead = self._take_started_ahead(job, per_stage)
        group, bundle_of_rank = self._places(dims, per_stage, job.excluded_nodes)
        self._runs = True
        job_ref = ray.put(job)
        for rank in range(dims.world_size):
            stage = dims.coordinates(rank)["pp"]
            resources = per_stage[stage]
            if started_ahead:
                actor = started_ahead[rank]
            else:
                actor = _start_actor(resources, group, bundle_of_rank[rank])
            self.actors.append(actor)
            call = actor.run.remote(
                job_ref,
                rank=rank,
                label=f"stage {stage} of {dims.pp}" if dims.pp > 1 else "",
                use_gpu=resources.get("GPU", 0) > 0,
                uplink=self.uplink,
            )
            self.calls[call] = rank

    def _take_started_ahead(self, job: Job, per_stage: list[Resources]) -> list[Any]:
        """The workers that were started ahead, in the order of ranks; [] where others are needed.

        Args:
            job: What they are to train.
            per_stage: Ray resources of one worker of each stage.
        """
        actors = self._started_ahead
        self._started_ahead = []
        dims = job.layout.dims
        are_equal = all(resources == self.per_worker for resources in per_stage)
        if len(actors) == dims.world_size and are_equal and self._reservation is not None:
            request = (dims, per_stage, job.excluded_nodes)
            self._reservation = replace(self._reservation, request=request)
            return actors
        if actors:
            for actor in actors:
                ray.kill(actor)
            self._give_back()
        return []

    def _places(
        self, dims: ParallelDims, per_stage: list[Resources], excluded: Sequence[str]
    ) -> tuple[PlacementGroup, list[int]]:
        """The placement group, and the number of each rank's bundle."""
        if self.reserved is not None:
            node_of_bundle = placement_group_table(self.reserved)["bundles_to_node_id"]
            # The ranks of a node are neighbours.
            bundles = sorted(node_of_bundle, key=lambda bundle: (node_of_bundle[bundle], bundle))
            return self.reserved, bundles
        nodes = living_nodes(excluded)
        request = (dims, per_stage, list(excluded))
        if self._reservation is not None:
            is_same = self._reservation.request == request
            if not is_same or not _is_intact(self._reservation.group, nodes):
                self._give_back()
        if self._reservation is None:
            layout = placement(
                dims,
                per_stage,
                nodes,
                limits=self.cluster.max_resources,
                returning=self.attempt > 1,
            )
            group = reserve(layout.bundles, excluded)
            self._reservation = _Reservation(request, group, layout.bundle_of_rank)
        return self._reservation.group, self._reservation.bundle_of_rank

    def stop(self) -> None:
        """See `Workers`."""
        if not self._runs:
            return
        for actor in self.actors:
            ray.kill(actor)
        self.end_attempt()
        self.actors = []
        self.calls = {}
        self._runs = False
        if self.finished:
            self._give_back()

    def close(self) -> None:
        """Ends what outlives attempts."""
        super().close()
        for actor in self._started_ahead:
            ray.kill(actor)
        self._started_ahead = []
        self._give_back()

    def _give_back(self) -> None:
        if self._reservation is not None:
            remove_placement_group(self._reservation.group)
        self._reservation = None

    def wait(self) -> None:
        """See `RayWorkers`."""
        if self._look_is_due():
            ray.wait(list(self.calls), timeout=POLL_SECONDS)
        else:
            time.sleep(POLL_SECONDS)

    def _look_is_due(self) -> bool:
        """Whether to look which calls have ended: the more there are, the more seldom."""
        look_seconds = len(self.calls) / CALLS_PER_SECOND
        return bool(self.calls) and time.monotonic() - self.call_clock >= look_seconds

    def lost(self) -> Failures:
        """See `RayWorkers`."""
        if self._look_is_due():
            self.call_clock = time.monotonic()
            ended, _ = ray.wait(list(self.calls), num_returns=len(self.calls), timeout=0)
            for call in ended:
                rank = self.calls.pop(call)
                # The rank has told its own exception, if it could.
                error = error_of(call)
                if error is not None:
                    self.dead[rank] = error
        return self.dead


def _start_actor(resources: Resources, group: PlacementGroup, bundle: int) -> Any:
    """Starts a worker's process.

    Args:
        resources: Of the worker.
        group: Where it is placed.
        bundle: The number of its bundle there.
    """
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return WorkerActor.options(  # type: ignore[attr-defined]
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources=others,
    ).remote()


def _is_intact(group: PlacementGroup, nodes: Sequence[NodeState]) -> bool:
    """Whether a placement group has its places on nodes that live."""
    table = placement_group_table(group)
    group_nodes = set(table["bundles_to_node_id"].values())
    return bool(table["state"] == "CREATED" and group_nodes <= {node.id for node in nodes})


# --- where the ranks are placed -------------------------------------------------------------------

GROUPINGS = (
    ("dp_replicate",),
    ("dp_replicate", "pp"),
    ("dp_replicate", "pp", "dp_shard", "cp", "tp"),
)
"""What is kept on one node, the coarsest first: a copy of the model, a stage of it, a worker.

Ranks with the same coordinates on these dimensions are kept together.
"""


@dataclass(frozen=True)
class Placement:
    """How ranks are grouped for Ray.

    Args:
        bundles: What Ray is to keep together on a node, each.
        bundle_of_rank: The number of each rank's bundle.
    """

    bundles: list[Resources]
    bundle_of_rank: list[int]


def placement(
    dims: ParallelDims,
    per_stage: list[Resources],
    nodes: Sequence[NodeState],
    *,
    limits: Mapping[str, float] | None = None,
    returning: bool = False,
) -> Placement:
    """The coarsest grouping for which there is room now, or else once other jobs have ended.

    Args:
        dims: The degrees.
        per_stage: Resources of one worker of each stage.
        nodes: Those that may be used.
        limits: What an autoscaler may grow the cluster to; None or empty without one.
        returning: Whether a node that has left may come back.

    Raises:
        UserError: There is room for none, and no node will be added.
    """
    candidates = [_grouped(dims, per_stage, dimensions) for dimensions in GROUPINGS]
    empty_nodes = [replace(node, available=node.total) for node in nodes]
    for states in (nodes, empty_nodes):
        for candidate in candidates:
            if _first_without_room(candidate.bundles, states) is None:
                return candidate
    single_workers = candidates[-1]
    if returning or _may_grow(per_stage, limits or {}):
        # The coarsest of which every bundle fits on a node by itself.
        for candidate in candidates:
            kinds = {tuple(sorted(bundle.items())): bundle for bundle in candidate.bundles}
            if all(_first_without_room([kind], empty_nodes) is None for kind in kinds.values()):
                return candidate
        return single_workers
    rank = _first_without_room(single_workers.bundles, empty_nodes) or 0
    stage = dims.coordinates(rank)["pp"]
    raise UserError(
        f"the {dims.world_size} workers do not fit on the nodes of this cluster: worker {rank} "
        f"(stage {stage} of {dims.pp}) asks for {format_resources(per_stage[stage])}, for which no "
        "node has room beside the others: ask for less in parallel.stage_resources or "
        "resources_per_worker, or use fewer workers"
    )


def _may_grow(per_stage: list[Resources], limits: Mapping[str, float]) -> bool:
    """Whether an autoscaler may add what one worker of each stage asks for."""
    if not limits:
        return False
    return all(
        amount <= limits.get(name, 0.0)
        for resources in per_stage
        for name, amount in resources.items()
    )


def _grouped(
    dims: ParallelDims, per_stage: list[Resources], dimensions: tuple[str, ...]
) -> Placement:
    """A bundle for all workers with the same coordinates on these dimensions."""
    number_of_bundle: dict[tuple[int, ...], int] = {}
    bundles: list[Counter[str]] = []
    bundle_of_rank: list[int] = []
    for rank in range(dims.world_size):
        coordinates = dims.coordinates(rank)
        key = tuple(coordinates[dimension] for dimension in dimensions)
        if key not in number_of_bundle:
            number_of_bundle[key] = len(bundles)
            bundles.append(Counter())
        number = number_of_bundle[key]
        bundles[number].update(per_stage[coordinates["pp"]])
        bundle_of_rank.append(number)
    return Placement([dict(bundle) for bundle in bundles], bundle_of_rank)


def _first_without_room(bundles: Sequence[Resources], nodes: Sequence[NodeState]) -> int | None:
    """The number of the first bundle that finds no room, the largest first; None if all do."""
    by_size = sorted(range(len(bundles)), key=lambda number: -sum(bundles[number].values()))
    first = place([bundles[number] for number in by_size], nodes)[1]
    return None if first is None else by_size[first]


def resources_of_stages(
    config: Config, dims: ParallelDims, per_worker: Resources
) -> list[Resources]:
    """What one worker of each stage asks for.

    Args:
        config: May give the resources of each stage.
        dims: The degrees.
        per_worker: Resources of a worker if the configuration gives none.

    Raises:
        UserError: There are more or fewer entries than stages, or not one kind of device.
    """
    stage_resources = config.parallel.stage_resources
    if not stage_resources:
        return [dict(per_worker)] * dims.pp
    if len(stage_resources) != dims.pp:
        raise UserError(
            f"parallel.stage_resources has {len(stage_resources)} entries, but there are {dims.pp} "
            "stages: write one for each"
        )
    per_stage: list[Resources] = []
    for entry in stage_resources:
        if entry.get("GPU"):
            per_stage.append(dict(entry))
        else:
            per_stage.append({"CPU": 1.0, **entry})
    with_gpus = [bool(resources.get("GPU")) for resources in per_stage]
    if any(with_gpus) and not all(with_gpus):
        raise UserError(
            "parallel.stage_resources gives GPUs to some stages and none to others: all stages "
            "compute on one kind of device"
        )
    return per_stage
