"""One point of a study: workers in a placement group of their own, which time the loop's own steps.

Whole steps are timed in blocks. Then a few are profiled, which tells how much of them is
communication that nothing hides (app/training/profiler.py), and in a pipeline what its stages did.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
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
from strategies.pipeline.parallel import PipelineParallel
from strategies.pipeline.simulate import COMPUTE, Span, pipeline_metrics

START_SECONDS = 120.0
MIN_BALANCE = 0.95
"""Below this share of mean to slowest computing time the study says which worker is slow."""


@dataclass(kw_only=True)
class WorkerTimes:
    """What one worker has measured.

    Attributes:
        node: The address of its node.
        steps: Seconds per step of each block.
        data: Seconds per step of each block in which it waited for data.
        shares: What `app.training.profiler.seconds_by_kind` says of the profiled steps; empty for
            one worker and for a pipeline.
        spans: For a pipeline, the fields of each `Span` of each profiled step.
        memory: The most bytes that it used.
    """

    node: str
    steps: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    spans: list[list[dict[str, Any]]] = field(default_factory=list)
    memory: int = 0


@dataclass(kw_only=True)
class Measurement:
    """A measurement of a point; seconds per step = computing + bubble + communication + data.

    Attributes:
        step: Seconds per step.
        computing: Seconds of computing.
        bubble: Seconds that a pipeline's schedule leaves idle with the measured times.
        communication: Seconds of communication that is not hidden behind computing.
        data: Seconds of waiting for data.
        balance: The mean of the workers' computing over the largest.
        memory: Bytes of the worker with most.
        notes: What a person should know.
    """

    step: float
    computing: float
    bubble: float
    communication: float
    data: float
    balance: float
    memory: int
    notes: list[str]


def combine(workers: Sequence[WorkerTimes], config: Config) -> Measurement:
    """The measurement of a point from those of its workers.

    It has medians over blocks, and of the workers the slowest, since the others wait for it.

    Args:
        workers: What the workers have measured, in the order of their ranks.
        config: What they have trained.
    """
    step = max(statistics.median(worker.steps) for worker in workers)
    data = min(step, max(statistics.median(worker.data) for worker in workers))
    bubble = 0.0
    communication = 0.0
    if workers[0].spans:
        computing_by_worker = [_computing_of_stage(worker) for worker in workers]
        bubble = min(_pipeline_bubble(workers, config), step - data)
        mean_computing = statistics.mean(computing_by_worker)
        communication = max(0.0, step - data - bubble - mean_computing)
    elif len(workers) > 1:
        computing_by_worker = [worker.shares["computing_seconds"] for worker in workers]
        # The worker that waits least is the one that the others wait for.
        exposed_share = min(
            worker.shares["exposed_communication_seconds"] / worker.shares["step_seconds"]
            for worker in workers
        )
        communication = (step - data) * exposed_share
    else:
        computing_by_worker = [step - data]
    slowest = max(computing_by_worker)
    balance = statistics.mean(computing_by_worker) / slowest
    notes = []
    if balance < MIN_BALANCE:
        rank = computing_by_worker.index(slowest)
        worker = f"worker {rank} on {workers[rank].node}"
        times = f"{1 / balance:.2f} times as long as the mean"
        notes.append(f"{worker} computes {times}, and the others wait for it")
    return Measurement(
        step=step,
        computing=step - data - bubble - communication,
        bubble=bubble,
        communication=communication,
        data=data,
        balance=balance,
        memory=max(worker.memory for worker in workers),
        notes=notes,
    )


def _computing_of_stage(worker: WorkerTimes) -> float:
    """The median seconds per step in which a worker of a pipeline computes."""
    seconds = []
    for step in worker.spans:
        spans = [Span(**fields) for fields in step]
        seconds.append(sum(span.end - span.start for span in spans if span.kind in COMPUTE))
    return statistics.median(seconds)


def _pipeline_bubble(workers: Sequence[WorkerTimes], config: Config) -> float:
    """The median seconds per step that the schedule leaves idle with the measured times."""
    parallel = config.parallel
    bubbles = []
    for step_of_each_worker in zip(*(worker.spans for worker in workers)):
        spans = [[Span(**fields) for fields in step] for step in step_of_each_worker]
        metrics = pipeline_metrics(spans, parallel.schedule, parallel.chunks)
        bubbles.append(metrics["pipeline/seconds"] * metrics["pipeline/bubble_by_simulation"])
    return statistics.median(bubbles)


# --- in the workers -------------------------------------------------------------------------------


class BenchmarkWorker:
    """One worker of a point, a Ray actor.

    Args:
        place: Its rank and device.
        blocks: How many blocks are timed.
        steps: How many steps a block has.
    """

    def __init__(self, place: Place, *, blocks: int, steps: int) -> None:
        self.place = place
        self.blocks = blocks
        self.steps = steps
        self.is_on_gpu = place.device.type == "cuda"

    def address(self) -> str:
        """The address at which the workers meet, if this is the first of them."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"

    def measure(self, job: Job, address: str) -> WorkerTimes:
        """Trains, and times the steps.

        Args:
            job: What is trained.
            address: Where the workers meet.
        """
        work_in(job.cwd)
        times = WorkerTimes(node=ray.util.get_node_ip_address())
        with self._training(job, address) as (training, batches):
            self._run_steps(training, batches)  # to warm up
            for _ in range(self.blocks):
                seconds, waited = self._time_block(training, batches)
                times.steps.append(seconds)
                times.data.append(waited)
            times.memory = memory_bytes(self.place.device)
            if job.layout.dims.pp > 1:
                times.spans = self._profile_pipeline(training, batches)
            elif self.place.world_size > 1:
                times.shares = self._profile(training, batches)
        return times

    @contextlib.contextmanager
    def _training(self, job: Job, address: str) -> Iterator[tuple[Training, Iterator[Any]]]:
        """The training loop and its batches, in a process group of the point's workers."""
        if self.place.world_size > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.is_on_gpu else "gloo",
                address,
                rank=self.place.rank,
                world_size=self.place.world_size,
            )
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

    def _run_steps(self, training: Training, batches: Iterator[Any]) -> float:
        """Trains for the steps of a block.

        Returns:
            The seconds in which it waited for data.
        """
        waited = 0.0
        for _ in range(self.steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            training.step(batch)
        return waited

    def _time_block(self, training: Training, batches: Iterator[Any]) -> tuple[float, float]:
        """Seconds per step of a block, and seconds per step of waiting for data."""
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        waited = self._run_steps(training, batches)
        if self.is_on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return seconds / self.steps, waited / self.steps

    def _profile_pipeline(
        self,
        training: Training,
        batches: Iterator[Any],
    ) -> list[list[dict[str, Any]]]:
        """The fields of each `Span` of each profiled step."""
        pipeline = training.parallel
        assert isinstance(pipeline, PipelineParallel)
        steps = []
        for _ in range(self.steps):
            spans = pipeline.profile(lambda: training.step(next(batches)))
            steps.append([asdict(span) for span in spans])
        return steps

    def _profile(self, training: Training, batches: Iterator[Any]) -> dict[str, float]:
        """Seconds per step of computing and of communication, from torch's profiler."""
        activities = [ProfilerActivity.CPU]
        if self.is_on_gpu:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            self._time_block(training, batches)
        return seconds_by_kind(profiler.events(), self.steps, self.is_on_gpu)


def measure_point(
    job: Job,
    workers: int,
    per_worker: Mapping[str, float],
    *,
    blocks: int,
    steps: int,
) -> list[WorkerTimes]:
    """Measures one point, alone on the cluster.

    Args:
        job: What is trained.
        workers: The number of workers.
        per_worker: The resources of one worker.
        blocks: How many blocks are timed.
        steps: How many steps a block has.

    Returns:
        What each worker has measured, in the order of their ranks.

    Raises:
        RunFailed: The workers could not be placed, or one of them failed.
    """
    group = placement_group([dict(per_worker) for _ in range(workers)], strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(START_SECONDS):
            problem = f"Ray did not place {workers} workers"
            raise RunFailed(f"{problem} within {START_SECONDS:.0f} s")
        for rank in range(workers):
            actor_class = _actor_class(group, rank, per_worker)
            device = torch.device("cuda", 0) if per_worker.get("GPU") else torch.device("cpu")
            place = Place(rank=rank, world_size=workers, local_rank=rank, device=device)
            actors.append(actor_class.remote(place, blocks=blocks, steps=steps))
        address = ray.get(actors[0].address.remote())
        calls = [actor.measure.remote(job, address) for actor in actors]
        pending: list[Any] = calls
        while pending:
            # This raises as soon as a worker fails; the others would wait for it.
            ready, pending = ray.wait(pending)
            ray.get(ready)
        return list(ray.get(calls))
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        reason = str(cause).strip().splitlines()[-1]
        raise RunFailed(f"the point with {workers} workers failed: {reason}") from error
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _actor_class(group: PlacementGroup, bundle: int, per_worker: Mapping[str, float]) -> Any:
    """The Ray actor class of a worker in a bundle of a placement group."""
    resources = dict(per_worker)
    return ray.remote(BenchmarkWorker).options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
    )
