"""Launcher: Ray actors, one for each rank, placed by the layout: the stages of a pipeline, or any layout's workers.

Ray places, watches and ends the processes; tensors go from worker to worker directly. A run is one Ray call for each
rank. Where each rank is placed is decided by a pure function, `placement.placement`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.job import Job, Place
from app.launchers.placement import Resources, placement, resources_of_stages
from app.launchers.ray_workers import POLL_SECONDS, RayWorkers
from app.launchers.room import node_selector, nodes_now
from app.launchers.worker_process import RayChannel, enter, surroundings
from app.launchers.workers import Failures, WorkerLost
from cluster.connect import Cluster
from cluster.pending import NodeState
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

        from app import loop

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
        place = Place(rank, len(nodes), local_rank, device)
        with surroundings(job, place, channel, node_rank):
            channel.done(loop.train(job, place, channel))
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

    reserved: a placement group with a bundle for each worker, which stays; None: each attempt makes its own.
    """

    def __init__(self, per_worker: Resources, cluster: Cluster, reserved: PlacementGroup | None = None) -> None:
        super().__init__()
        self.per_worker, self.cluster, self.reserved = per_worker, cluster, reserved
        self.calls: dict[Any, int] = {}
        self.actors: list[Any] = []
        self.dead: dict[int | None, BaseException] = {}

    def start(self, job: Job) -> None:
        """Raises UserError: the stages ask for resources that the cluster does not have."""
        dims, excluded = job.layout.dims, job.config.cluster.exclude_nodes
        nodes = nodes_now(excluded)
        per_stage = resources_of_stages(job.config, dims, self.per_worker)
        self.begin_attempt(dims.world_size)
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
        chosen = placement(dims, per_stage, nodes, self.cluster.max_resources)
        only = node_selector(excluded)
        labels = [only] * len(chosen.bundles) if only else None
        group = placement_group(chosen.bundles, strategy=chosen.strategy, bundle_label_selector=labels)
        return group, chosen.bundle_of_rank

    def stop(self) -> None:
        if self.group is None:
            return
        for actor in self.actors:
            ray.kill(actor)
        self._end_attempt(keep_group=self.reserved is not None)
        self.actors, self.calls = [], {}

    def close(self) -> None:
        self.stop()
        super().close()

    def _wait(self) -> None:
        if self.calls:
            ray.wait(list(self.calls), timeout=POLL_SECONDS)
        else:
            time.sleep(POLL_SECONDS)

    def _lost(self) -> Failures:
        ready = ray.wait(list(self.calls), num_returns=len(self.calls), timeout=0)[0] if self.calls else []
        for call in ready:
            rank = self.calls.pop(call)
            try:
                ray.get(call)
            except ray.exceptions.RayTaskError as error:  # the rank has told its own exception, if it could
                self.dead[rank] = getattr(error, "cause", None) or error
            except ray.exceptions.RayError as error:
                self.dead[rank] = WorkerLost(details=str(error))
        return self.dead
