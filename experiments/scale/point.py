"""One point of a study: so many workers in a placement group of their own, the loop's own steps timed in them.

Whole steps are timed in blocks, then checkpoints, then the same steps over a process group that sends nothing (torch's
`fake` backend, whose collectives return at once): what a step takes beyond that is exposed communication, whatever the
strategy. Points are repeated with the two in turns, so that drift cancels. A pipeline's stages cannot compute without
what their neighbours send; their steps are profiled instead (app/pipeline_profile.py), and `parts.py` does the sums.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.errors import RunFailed
from app.job import Job, Place, SilentChannel, memory_bytes
from experiments.scale import silence
from experiments.scale.parts import Told

START_SECONDS = 120.0
CHECKPOINTS = 2
"""The first one also makes the optimizer's state and the folders: the second counts."""


@ray.remote
class Worker:
    """One worker of a point."""

    def open_store(self) -> tuple[str, int]:
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def measure(self, job: Job, place: Place, store: tuple[str, int], plan: Plan) -> Told:
        """What this worker has to tell. place.device: whether there is a GPU; its own is number 0."""
        import torch
        from torch.distributed import TCPStore

        if os.path.isdir(job.cwd):
            os.chdir(job.cwd)
            sys.path.insert(0, job.cwd)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        own = self.store if place.rank == 0 else TCPStore(*store, is_master=False)
        bench = Bench(job, place, own, plan, Told(ray.util.get_node_ip_address()))
        bench.together()
        gc.collect()
        if place.world_size > 1 and job.layout.dims.pp == 1:
            # Not before: DTensor remembers which part of a tensor a process has, and alone it stands in for rank 0.
            bench.alone()
        return bench.told


Plan = tuple[int, int]
"""Blocks, and steps in each."""


class Bench:
    """The measurements of one worker, added to `told`."""

    def __init__(self, job: Job, place: Place, store: Any, plan: Plan, told: Told) -> None:
        self.job, self.place, self.store, self.plan, self.told = job, place, store, plan, told
        self.gpu = place.device.type == "cuda"
        self.meetings = 0

    def together(self) -> None:
        """Whole steps, checkpoints, and of a pipeline what its stages did."""
        import torch.distributed as dist

        if self.place.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if self.gpu else "gloo"
            own = dist.PrefixStore("together", self.store)
            dist.init_process_group(backend, store=own, rank=self.place.rank, world_size=self.place.world_size)
        training, batches = self._training("together", self.place.rank)
        self._block(training, batches)  # warms up
        for _ in range(self.plan[0]):
            seconds, waited, _ = self._block(training, batches)
            self.told.steps.append(seconds)
            self.told.data.append(waited)
        if self.job.layout.dims.pp > 1:
            training.parallel.profiling = True
            for _ in range(self.plan[1]):
                training.step(next(batches))
                self.told.spans.append([astuple(span) for span in training.parallel.profile()])
        self.told.memory = memory_bytes(self.place.device)
        for _ in range(CHECKPOINTS):
            training.step(next(batches))
            self._meet()
            began = time.perf_counter()
            training.kept.save(training.progress)
            self.told.stalls.append(time.perf_counter() - began)
            training.kept.checkpointer.wait()
            self.told.saves.append(time.perf_counter() - began)
        self._end(training, batches)
        if dist.is_initialized():
            dist.destroy_process_group()

    def alone(self) -> None:
        """The same steps, with nothing sent: what they compute means nothing, and takes as long. Where a strategy
        cannot do without answers, what it sends stays unknown."""
        meetings = self.meetings + self.plan[0] + 2
        try:
            self._alone()
        except Exception as error:
            self.told.alone, self.told.unknown = [], f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        while self.meetings < meetings:
            self._meet()

    def _alone(self) -> None:
        with silence.nothing_sent(self.place.world_size):
            training, batches = self._training("alone", rank=0)
            silence.fit(training.parallel)
            self._block(training, batches)  # warms up
            for _ in range(self.plan[0]):
                seconds, waited, busy = self._block(training, batches)
                self.told.alone.append(seconds - waited)
                self.told.busy.append(busy)
            self._end(training, batches)

    def _training(self, name: str, rank: int) -> tuple[Any, Any]:
        """The loop and its batches, which are this worker's own, also where it stands in as `rank`."""
        from app.data.batch import rows
        from app.loop import Training

        job = replace(self.job, folder=f"{self.job.folder}/{name}")  # one phase does not go on where another ended
        training = Training(job, replace(self.place, rank=rank), SilentChannel())
        training.data_rank = job.layout.dims.data_rank(self.place.rank)
        batches = training.batches()
        step = training.step

        def counted(micro_batches: list[Any]) -> None:
            task = training.task
            self.told.items = float(sum(task.items(b) if task.items_vary else rows(b) for b in micro_batches))
            training.step = step  # type: ignore[method-assign]  # once: later steps are timed
            step(micro_batches)

        training.step = counted  # type: ignore[method-assign]
        return training, batches

    def _block(self, training: Any, batches: Any) -> tuple[float, float, float]:
        """Seconds per step, seconds of it waiting for data, and CPU-seconds per second of this process."""
        import torch

        self._meet()
        waited, began, busy = 0.0, time.perf_counter(), time.process_time()
        for _ in range(self.plan[1]):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            training.step(batch)
        if self.gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return seconds / self.plan[1], waited / self.plan[1], (time.process_time() - busy) / seconds

    def _meet(self) -> None:
        """All workers begin together; through the store, since a process group that sends nothing cannot."""
        import torch

        if self.gpu:
            torch.cuda.synchronize()
        self.meetings += 1
        if self.store.add(f"meeting-{self.meetings}", 1) == self.place.world_size:
            self.store.set(f"begin-{self.meetings}", "1")
        self.store.wait([f"begin-{self.meetings}"])

    def _end(self, training: Any, batches: Any) -> None:
        getattr(batches, "close", lambda: None)()
        training.close()
        self._meet()


def run(job: Job, workers: int, per_worker: dict[str, float], plan: Plan) -> list[Told]:
    """What each worker of one point tells, alone on the cluster.

    Raises:
        RunFailed: its workers could not be placed, or one of them failed.
    """
    import torch

    group = placement_group([dict(per_worker) for _ in range(workers)], strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(START_SECONDS):
            raise RunFailed(f"Ray gave no place for {workers} workers within {START_SECONDS:.0f} s")
        needs = dict(per_worker)
        options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
        for rank in range(workers):
            inside = PlacementGroupSchedulingStrategy(group, rank)
            actors.append(Worker.options(scheduling_strategy=inside, **options).remote())  # type: ignore[attr-defined]
        store = ray.get(actors[0].open_store.remote())
        device = torch.device("cuda", 0) if per_worker.get("GPU") else torch.device("cpu")
        places = [Place(rank, workers, rank, device) for rank in range(workers)]
        return _all([a.measure.remote(job, p, store, plan) for a, p in zip(actors, places)])
    except ray.exceptions.RayError as error:
        first = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
        raise RunFailed(f"the point with {workers} workers failed: {first}") from error
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        remove_placement_group(group)


def _all(calls: list[Any]) -> list[Told]:
    """The answers in order; raises as soon as one of them fails, since the others would wait for it."""
    left: list[Any] = list(calls)
    get: Callable[[Any], Any] = ray.get
    while left:
        ready, left = ray.wait(left)
        get(ready)
    return list(get(calls))


def steps_of(plan: Plan) -> int:
    """Optimizer steps that a phase takes at most: the data must last so long."""
    return (plan[0] + 2) * plan[1] + CHECKPOINTS
