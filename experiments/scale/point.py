"""One point of a study: so many workers in a placement group of their own, the loop's own steps timed in them.

Blocks of whole steps take turns with blocks of steps that leave communication out (where the layout allows that: DDP's
`no_sync`), so that what communication adds, beyond what is hidden behind computing, is measured under the same
conditions. Each worker's own block without communication shows who has more to do than others.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.errors import RunFailed
from app.job import Job, Place, memory_bytes

START_SECONDS = 120.0


@dataclass
class Measured:
    """Seconds per step, medians over blocks; `local` per worker, None where communication cannot be left out."""

    step: float
    data: float
    local: list[float] | None
    memory: list[int]


class _Silence:
    """Nobody listens, nobody asks to stop."""

    def emit(self, event: dict[str, Any]) -> None:
        return

    def stop_requested(self) -> bool:
        return False

    def follow(self, beat: Any) -> None:
        return


@ray.remote
class Worker:
    """One worker of a point."""

    def open_store(self) -> tuple[str, int]:
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def measure(self, job: Job, rank: int, size: int, store: tuple[str, int], gpu: bool, plan: tuple[int, int]) -> Any:
        """This worker's (whole steps, data waits, local steps, memory): seconds per step of each block."""
        import torch
        import torch.distributed as dist

        from app.worker import Training

        if os.path.isdir(job.cwd):
            os.chdir(job.cwd)
            sys.path.insert(0, job.cwd)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if size > 1:
            own = self.store if rank == 0 else dist.TCPStore(*store, is_master=False)
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=own, rank=rank, world_size=size)
        device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        training = Training(job, Place(rank, size, rank, device), _Silence())
        batches = training.batches()
        blocks, each = plan

        def settle() -> None:
            if gpu:
                torch.cuda.synchronize()
            if size > 1:
                dist.barrier()

        def block(step: Any) -> tuple[float, float]:
            settle()
            waited, began = 0.0, time.perf_counter()
            for _ in range(each):
                asked = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - asked
                step(batch)
            if gpu:
                torch.cuda.synchronize()
            return (time.perf_counter() - began) / each, waited / each

        block(training.step)  # warms up
        whole, data, local = [], [], []
        for number in range(blocks):
            kinds = [training.step, _local_step(training)] if _separable(training) else [training.step]
            for kind in kinds if number % 2 else reversed(kinds):
                seconds, waited = block(kind)
                if kind == training.step:
                    whole.append(seconds)
                    data.append(waited)
                else:
                    local.append(seconds)
        getattr(batches, "close", lambda: None)()
        training.close()
        settle()
        if size > 1:
            dist.destroy_process_group()
        return whole, data, local, memory_bytes(device)


def _separable(training: Any) -> bool:
    """Whether a step can be done without communication: replicas that average whole gradients."""
    from torch.distributed.tensor import DTensor

    dims = training.dims
    sharded = any(isinstance(p, DTensor) for p in training.parallel.parameters())
    return dims.dp > 1 and dims.tp == dims.pp == 1 and not sharded


def _local_step(training: Any) -> Any:
    """The step with gradients averaged over nobody. Replicas drift apart, which no timing notices."""

    def step(micro_batches: list[Any]) -> None:
        parallel = training.parallel
        for batch, weight in zip(micro_batches, training._shares(micro_batches)):
            with parallel.micro_step(last=False):
                with parallel.autocast():
                    value = training.task.loss(parallel.module, batch)
                (value * (weight * training.dims.dp)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)

    return step


def run(job: Job, workers: int, per_worker: dict[str, float], plan: tuple[int, int]) -> Measured:
    """Measures one point, alone on the cluster.

    plan: blocks, and steps in each.
    Raises:
        RunFailed: its workers could not be placed, or one of them failed.
    """
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
        store, gpu = ray.get(actors[0].open_store.remote()), bool(per_worker.get("GPU"))
        calls = [a.measure.remote(job, rank, workers, store, gpu, plan) for rank, a in enumerate(actors)]
        answers = ray.get(calls)
    except ray.exceptions.RayError as error:
        first = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
        raise RunFailed(f"the point with {workers} workers failed: {first}") from error
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        remove_placement_group(group)
    local = [statistics.median(answer[2]) for answer in answers] if answers[0][2] else None
    return Measured(
        max(statistics.median(answer[0]) for answer in answers),
        max(statistics.median(answer[1]) for answer in answers),
        local,
        [answer[3] for answer in answers],
    )


def scratch_folder() -> str:
    """A place for runs of which nothing is kept."""
    return tempfile.mkdtemp(prefix="trireme-scale-")
