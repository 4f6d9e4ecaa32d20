"""One point of a study: some workers in a placement group of their own, and the loop's own steps timed in them.

Whole steps are timed in blocks; then a few are profiled, which tells what of them is communication that nothing hides
(app/training/profiler.py), and of a pipeline what its stages did.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.profiler import ProfilerActivity, profile

from app.config import Config
from app.errors import RunFailed
from app.launchers.ray_workers import work_in
from app.training.job import Job, Place, SilentChannel, memory_bytes
from app.training.loop import Training
from app.training.persistence import NullPersistence
from app.training.profiler import seconds_by_kind
from cluster.remote import free_port
from strategies.pipeline.simulate import COMPUTE, Span, figures

START_SECONDS = 120.0
EVEN = 0.95
"""Workers whose mean computing time is at least this share of the slowest's have the same to do."""


@dataclass
class Told:
    """What one worker tells. Seconds per step, one for each block."""

    node: str
    steps: list[float] = field(default_factory=list)  # whole steps
    data: list[float] = field(default_factory=list)  # of them, waiting for data
    shares: dict[str, float] = field(default_factory=dict)  # of several workers: what `shares` says of profiled steps
    spans: list[list[tuple[Any, ...]]] = field(default_factory=list)  # of a pipeline: per profiled step
    memory: int = 0  # bytes, at most


@dataclass
class Measured:
    """A point. Seconds per step: step = computing + bubble + communication + data."""

    step: float
    computing: float
    bubble: float  # of a pipeline: what its schedule leaves idle with the measured times
    communication: float  # what is not hidden behind computing
    data: float
    balance: float  # mean of the workers' computing over the largest
    memory: int  # bytes, of the worker with most
    notes: list[str]


def measured(told: Sequence[Told], config: Config) -> Measured:
    """Medians over blocks; of the workers the slowest, since the others wait for it."""
    step = max(statistics.median(t.steps) for t in told)
    data = min(step, max(statistics.median(t.data) for t in told))
    own = [statistics.median(t.steps) - statistics.median(t.data) for t in told]
    bubble, sent, notes = 0.0, 0.0, list[str]()
    if told[0].spans:
        ranks = [[[Span(*span) for span in spans] for spans in t.spans] for t in told]
        wanted = config.parallel
        profiles = [figures(list(r), wanted.schedule, wanted.chunks) for r in zip(*ranks)]
        ideal = statistics.median(f["pipeline/seconds"] * f["pipeline/bubble_by_simulation"] for f in profiles)
        own = [
            statistics.median(sum(span.end - span.start for span in spans if span.kind in COMPUTE) for spans in steps)
            for steps in ranks
        ]
        bubble = min(ideal, step - data)
        sent = max(0.0, step - data - bubble - statistics.mean(own))
    elif len(told) > 1:  # the worker that waits least is the one that the others wait for
        sent = (step - data) * min(t.shares["exposed_communication_seconds"] / t.shares["step_seconds"] for t in told)
        own = [t.shares["computing_seconds"] for t in told]
    balance, slowest = statistics.mean(own) / max(own), own.index(max(own))
    if balance < EVEN:
        what = f"worker {slowest} on {told[slowest].node}"
        notes = [f"{what} computes {1 / balance:.2f} times as long as the mean, and the others wait for it"]
    computing = step - data - bubble - sent
    return Measured(step, computing, bubble, sent, data, balance, max(t.memory for t in told), notes)


# --- in the workers ---------------------------------------------------------------------------------------------------


class Bench:
    """One worker of a point."""

    def __init__(self, place: Place, blocks: int, steps: int) -> None:
        self.place, self.blocks, self.steps = place, blocks, steps
        self.gpu = place.device.type == "cuda"

    def address(self) -> str:
        """Where this worker, the first, will be found by the others."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"

    def measure(self, job: Job, address: str) -> Told:
        """What this worker has to tell."""
        work_in(job.cwd)
        told = Told(ray.util.get_node_ip_address())
        with self._training(job, address) as (training, batches):
            for _ in range(self.blocks):
                seconds, waited = self._block(training, batches)
                told.steps.append(seconds)
                told.data.append(waited)
            told.memory = memory_bytes(self.place.device)
            if job.layout.dims.pp > 1:
                for _ in range(self.steps):
                    spans = training.parallel.profile(lambda: training.step(next(batches)))
                    told.spans.append([astuple(span) for span in spans])
            elif self.place.world_size > 1:
                activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])]
                with profile(activities=activities) as profiled:
                    self._block(training, batches)
                told.shares = seconds_by_kind(profiled.events(), self.steps, self.gpu)
        return told

    @contextlib.contextmanager
    def _training(self, job: Job, address: str) -> Iterator[tuple[Any, Any]]:
        """The loop, and its batches."""
        if self.place.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if self.gpu else "gloo"
            dist.init_process_group(backend, address, rank=self.place.rank, world_size=self.place.world_size)
        training = Training(job, self.place, SilentChannel(), persistence_class=NullPersistence)
        batches = training.batches()
        try:
            yield training, batches
        finally:
            getattr(batches, "close", lambda: None)()
            training.close()
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()

    def _block(self, training: Any, batches: Any) -> tuple[float, float]:
        """Seconds per step, and seconds of it waiting for data; the first one follows another, to warm up."""
        for _ in range(0 if training.steps_done else self.steps):
            training.step(next(batches))
        if dist.is_initialized():
            dist.barrier()
        waited, began = 0.0, time.perf_counter()
        for _ in range(self.steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            training.step(batch)
        if self.gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / self.steps, waited / self.steps


def run(job: Job, workers: int, per_worker: dict[str, float], blocks: int, steps: int) -> list[Told]:
    """What each worker of one point tells, alone on the cluster.

    Raises:
        RunFailed: its workers could not be placed, or one of them failed.
    """
    group = placement_group([dict(per_worker) for _ in range(workers)], strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(START_SECONDS):
            raise RunFailed(f"Ray gave no place for {workers} workers within {START_SECONDS:.0f} s")
        needs, device = dict(per_worker), torch.device("cuda", 0) if per_worker.get("GPU") else torch.device("cpu")
        options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
        for rank in range(workers):
            inside = PlacementGroupSchedulingStrategy(group, rank)
            worker: Any = ray.remote(Bench).options(scheduling_strategy=inside, **options)
            actors.append(
                worker.remote(Place(rank=rank, world_size=workers, local_rank=rank, device=device), blocks, steps)
            )
        address = ray.get(actors[0].address.remote())
        calls = [actor.measure.remote(job, address) for actor in actors]
        left: list[Any] = calls
        while left:  # raises as soon as one of them fails, since the others would wait for it
            ready, left = ray.wait(left)
            ray.get(ready)
        return list(ray.get(calls))
    except ray.exceptions.RayError as error:
        first = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
        raise RunFailed(f"the point with {workers} workers failed: {first}") from error
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
