"""Launcher: Ray actors, one for each rank, placed by the layout: the stages of a pipeline, or any layout's workers.

Ray places, watches and ends the processes; tensors go from worker to worker directly. A run is one Ray call for each
rank. Where the ranks are placed (bundles of a placement group) is decided by pure functions: what communicates most is
kept together, a whole copy of the model on one node where it fits; else a stage (its shards
and tensor-parallel peers) on one node, the stages close; else each rank by itself.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import Config
from app.errors import UserError
from app.launchers.ray_workers import POLL_SECONDS, RayChannel, RayWorkers, enter, error_of, surroundings
from app.launchers.room import reserve
from app.launchers.workers import Failures
from app.training.events import TrainingDone
from app.training.job import Job, Place
from cluster.connect import Cluster
from cluster.pending import format_resources, place
from cluster.shape import NodeState, living_nodes
from strategies.layout import ParallelDims

PROCESS_GROUP_SECONDS = 1800.0
"""The hang detector ends what hangs long before this."""


@ray.remote(max_restarts=0, max_task_retries=0)
class WorkerActor:
    """One rank's process."""

    def run(self, job: Job, rank: int, label: str, use_gpu: bool, queue: Any, attempt: int) -> None:
        """From meeting the other ranks to the end of training."""
        import torch
        import torch.distributed as dist

        from app.training import loop

        channel = RayChannel(queue, attempt, rank)
        info = enter(job, channel, label)
        nodes, store = _meet(rank, job.layout.dims.world_size, info.ip, info.node, queue, attempt)
        local_rank = nodes[:rank].count(nodes[rank])
        node_rank = list(dict.fromkeys(nodes)).index(nodes[rank])
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(nodes)), "LOCAL_RANK": str(local_rank)}
        device = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=len(nodes),
            timeout=timedelta(seconds=PROCESS_GROUP_SECONDS),
        )
        place = Place(rank=rank, world_size=len(nodes), local_rank=local_rank, device=device)
        with surroundings(job, place, channel, node_rank):
            channel.emit(TrainingDone(summary=loop.train(job, place, channel)))
        dist.barrier()  # no rank closes its connections while another still uses them


def _meet(rank: int, world_size: int, ip: str, node: str, queue: Any, attempt: int) -> tuple[list[str], Any]:
    """The node of every rank, and a store of them all; waits until all are there."""
    from torch.distributed import TCPStore

    if interface := _interface(ip):
        # Without it gloo takes the address that the host's own name resolves to, which may be 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    own = TCPStore(ip, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    ray.get(queue.join.remote(attempt, rank, node, (ip, own.port) if own is not None else None))
    began = time.monotonic()
    while (found := ray.get(queue.everyone.remote(attempt, world_size))) is None:
        time.sleep(min(1.0, 0.02 + (time.monotonic() - began) / 20))
    nodes, (host, port) = found
    return nodes, own if own is not None else TCPStore(host, port, is_master=False)


def _interface(ip: str) -> str | None:
    """The network interface with this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    return None


class ActorWorkers(RayWorkers):
    """per_worker: Ray resources of one worker, where the configuration gives no stage's own.

    reserved: a placement group with a bundle for each worker, which stays; None: one of its own, which attempts keep as
    long as they ask for the same (to place another takes Ray up to a second after workers have died).
    """

    def __init__(self, per_worker: Resources, cluster: Cluster, reserved: PlacementGroup | None = None) -> None:
        super().__init__()
        self.per_worker, self.cluster, self.reserved = per_worker, cluster, reserved
        self.group: PlacementGroup | None = None
        self.calls: dict[Any, int] = {}
        self.actors: list[Any] = []
        self.dead: dict[int | None, BaseException] = {}
        self.kept: tuple[Any, PlacementGroup, list[int]] | None = None  # what was asked for, and what there is

    def start(self, job: Job) -> None:
        """Raises UserError: the stages ask for resources that the cluster does not have."""
        dims = job.layout.dims
        excluded = job.excluded_nodes
        per_stage = resources_of_stages(job.config, dims, self.per_worker)
        self.begin_attempt(dims.world_size)
        nodes = living_nodes(excluded)
        self.dead = {}
        self.group, bundle_of_rank = self._reserve(dims, per_stage, nodes, excluded)
        job_ref = ray.put(job)
        for rank in range(dims.world_size):
            stage = dims.coordinates(rank)["pp"]
            needs = Counter(per_stage[stage])
            actor = WorkerActor.options(  # type: ignore[attr-defined]
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, bundle_of_rank[rank]),
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                resources=dict(needs),
            ).remote()
            label = f"stage {stage} of {dims.pp}" if dims.pp > 1 else ""
            use_gpu = per_stage[stage].get("GPU", 0) > 0
            self.actors.append(actor)
            self.calls[actor.run.remote(job_ref, rank, label, use_gpu, self.queue, self.attempt)] = rank

    def _reserve(
        self, dims: ParallelDims, per_stage: list[Resources], nodes: Sequence[NodeState], excluded: Sequence[str]
    ) -> tuple[PlacementGroup, list[int]]:
        """The placement group, and the bundle of each rank."""
        if self.reserved is not None:  # ranks of a node are to be neighbours
            node_of = placement_group_table(self.reserved)["bundles_to_node_id"]
            return self.reserved, sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
        wanted = (dims, per_stage, list(excluded))
        if self.kept:
            table, alive = placement_group_table(self.kept[1]), {node.id for node in nodes}
            there = table["state"] == "CREATED" and set(table["bundles_to_node_id"].values()) <= alive
            if self.kept[0] != wanted or not there:
                self._give_back()
        if self.kept is None:
            chosen = placement(dims, per_stage, nodes, self.cluster.max_resources, self.attempt > 1)
            self.kept = (wanted, reserve(chosen.bundles, excluded), chosen.bundle_of_rank)
        return self.kept[1:]

    def stop(self) -> None:
        if self.group is None:
            return
        for actor in self.actors:
            ray.kill(actor)
        self.end_attempt()
        self.actors, self.calls, self.group = [], {}, None
        if self.finished:
            self._give_back()

    def close(self) -> None:
        super().close()
        self._give_back()

    def _give_back(self) -> None:
        if self.kept is not None:
            remove_placement_group(self.kept[1])
        self.kept = None

    def wait(self) -> None:
        if self.calls:
            ray.wait(list(self.calls), timeout=POLL_SECONDS)
        else:
            time.sleep(POLL_SECONDS)

    def lost(self) -> Failures:
        ready = ray.wait(list(self.calls), num_returns=len(self.calls), timeout=0)[0] if self.calls else []
        for call in ready:
            rank = self.calls.pop(call)
            if error := error_of(call):  # the rank has told its own exception, if it could
                self.dead[rank] = error
        return self.dead


# --- where the ranks are placed ---------------------------------------------------------------------------------------

Resources = dict[str, float]
GROUPINGS = (("dp_replicate",), ("dp_replicate", "pp"), ("dp_replicate", "pp", "dp_shard", "cp", "tp"))
"""What is kept on one node, from the coarsest: a copy of the model, a stage of it, a worker."""


@dataclass(frozen=True)
class Placement:
    """bundles: what Ray is to keep together on a node, each; bundle_of_rank: which one each rank is in."""

    bundles: list[Resources]
    bundle_of_rank: list[int]


def placement(
    dims: ParallelDims,
    per_stage: list[Resources],
    nodes: Sequence[NodeState],
    limits: Mapping[str, float] | None = None,
    returning: bool = False,
) -> Placement:
    """The coarsest grouping for which there is room now; else for which there is once other jobs have ended.

    per_stage: resources of one worker of each stage. limits: what the cluster may grow to, where it grows. returning:
    a node that has left may come back.

    Raises:
        UserError: there is room for none, and no node will be added.
    """
    chosen = [_grouped(dims, per_stage, sides) for sides in GROUPINGS]
    emptied = [replace(node, available=node.total) for node in nodes]
    for state in (nodes, emptied):
        for found in chosen:
            if _missing(found.bundles, state) is None:
                return found
    grows = limits and all(amount <= limits.get(name, 0.0) for stage in per_stage for name, amount in stage.items())
    if returning or grows:
        whole = (found for found in chosen if all(_missing([b], emptied) is None for b in found.bundles))
        return next(whole, chosen[-1])
    rank = _missing(found.bundles, emptied) or 0
    number = dims.coordinates(rank)["pp"]
    raise UserError(
        f"the {dims.world_size} workers do not fit on the nodes of this cluster: worker {rank} (stage {number} of "
        f"{dims.pp}) asks for {format_resources(per_stage[number])}, for which no node has room beside the others: "
        "ask for less in parallel.stage_resources or resources_per_worker, or use fewer workers"
    )


def _grouped(dims: ParallelDims, per_stage: list[Resources], sides: tuple[str, ...]) -> Placement:
    """A bundle for all workers whose places on these sides of the grid are the same."""
    places = [dims.coordinates(rank) for rank in range(dims.world_size)]
    keys = [tuple(place[side] for side in sides) for place in places]
    order = list(dict.fromkeys(keys))
    bundles: list[Counter[str]] = [Counter() for _ in order]
    for where, own in zip(places, keys, strict=True):
        bundles[order.index(own)].update(per_stage[where["pp"]])
    return Placement([dict(bundle) for bundle in bundles], [order.index(own) for own in keys])


def _missing(bundles: Sequence[Resources], nodes: Sequence[NodeState]) -> int | None:
    """The first bundle that finds no room, the largest first; None: all find some."""
    order = sorted(range(len(bundles)), key=lambda i: -sum(bundles[i].values()))
    first = place([bundles[i] for i in order], nodes)[1]
    return None if first is None else order[first]


def resources_of_stages(config: Config, dims: ParallelDims, per_worker: Resources) -> list[Resources]:
    """What one worker of each stage asks for.

    Raises:
        UserError: as many entries as there are stages are wanted, and one kind of device.
    """
    wanted = config.parallel.stage_resources
    if not wanted:
        return [dict(per_worker)] * dims.pp
    if len(wanted) != dims.pp:
        raise UserError(
            f"parallel.stage_resources has {len(wanted)} entries, but there are {dims.pp} stages: write one for each"
        )
    per_stage = [{"CPU": 1.0} | dict(stage) if not stage.get("GPU") else dict(stage) for stage in wanted]
    if len({bool(stage.get("GPU")) for stage in per_stage}) > 1:
        raise UserError(
            "parallel.stage_resources gives GPUs to some stages and none to others: all stages compute on one kind of "
            "device"
        )
    return per_stage
