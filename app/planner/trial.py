"""`trireme plan --max-batch`: tries layouts on this machine's devices.

A trial takes a few steps of the training loop. Its memory on a GPU is the peak that torch has
allocated. On a CPU it is what the process has taken beyond what it had before, limited to the
memory with which a plan reckons.
"""

import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.config.io import from_dict
from app.errors import RunFailed
from app.planner.estimate import Estimate
from app.planner.layouts import schedules_of
from app.planner.output import experiment
from app.planner.plan import GIB, Plan
from app.planner.processes import in_processes
from app.training.job import Job, Place, SilentChannel, memory_bytes
from app.training.loop import Training
from strategies.dims import DEGREES
from strategies.layout import choose

TIMEOUT = 240.0
STEPS = 3
"""Optimizer steps of a trial; the last is timed."""
PRECISION = 32
"""The search ends when it knows the largest micro-batch to one part in so many."""


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial.

    Args:
        seconds: Of a step; None if it did not run.
        bytes: Of memory, as plans count it.
        failure: Why it did not run; "" if it did.
    """

    seconds: float | None = None
    bytes: float = 0.0
    failure: str = ""


def max_batch(plan: Plan) -> tuple[str, Estimate | None, dict[str, Any]]:
    """Find the largest micro-batch with which the best layout runs.

    The predicted one is tried first. While trials run, the micro-batch is doubled, up to a worker's
    share of the batch; then what is left between is halved.

    Returns:
        (a sentence; the layout with that micro-batch, None if none runs; figures for JSON)
    """
    row = plan.best or plan.rows[0]
    sizes = _possible_sizes(plan, row)
    fitting = [size for size in sizes if _with_size(plan, row, size).fits]
    trials: dict[int, Trial] = {}

    def runs(index: int) -> bool:
        size = sizes[index]
        tree = _experiment(plan, row, size)
        trials[size] = run(tree, plan.machine.world, plan.machine.device.capacity)
        return trials[size].seconds is not None

    index = search(max(len(fitting) - 1, 0), sizes, runs)
    largest = sizes[index] if index >= 0 else 0
    predicted = fitting[-1] if fitting else 0
    if largest:
        result = f"{largest} is the largest that runs ({trials[largest].bytes / GIB:.2f} GiB)"
    else:
        result = "none runs"
    failed = [size for size, trial in trials.items() if trial.seconds is None]
    if failed:
        limit = f"{min(failed)} does not ({trials[min(failed)].failure})"
    else:
        limit = "it is the worker's whole share of the batch"
    sentence = (
        f"largest micro-batch under {row.candidate.layout.name}: predicted {predicted}, "
        f"tried: {result}; {limit}"
    )
    figures = {
        "predicted": predicted,
        "largest": largest,
        "share": sizes[-1],
        "tries": [{"micro_batch_size": size, **asdict(trial)} for size, trial in trials.items()],
    }
    return sentence, _with_size(plan, row, largest) if largest else None, figures


def search(first: int, sizes: Sequence[int], runs: Callable[[int], bool]) -> int:
    """The index of the largest size that runs, provided that all smaller ones do.

    It ends when what is left between is a thirty-second of what runs, because every trial starts
    all processes.

    Args:
        first: The index that is tried first.
        sizes: In ascending order.
        runs: Tries the size with an index.

    Returns:
        The index; -1 if none runs.
    """
    running = -1  # the largest index that is known to run
    failing = len(sizes)  # the smallest index that is known not to
    index = first
    while failing - running > 1:
        if running >= 0 and failing < len(sizes):
            gap = sizes[failing] - sizes[running]
            if gap <= sizes[running] // PRECISION:
                break
        if runs(index):
            running = index
        else:
            failing = index
        if failing == len(sizes):
            index = min(2 * running + 1, len(sizes) - 1)
        else:
            index = (running + failing) // 2
    return running


def _possible_sizes(plan: Plan, row: Estimate) -> list[int]:
    """The micro-batches that a layout can have.

    Those of a pipeline are of one size, and as many as its schedule needs.
    """
    candidate = row.candidate
    pp = candidate.dims.pp
    samples = plan.space.global_batch // candidate.dims.dp
    if pp == 1:
        return list(range(1, samples + 1))
    fixed = {
        "parallel.schedule": candidate.schedule,
        "parallel.chunks": candidate.chunks,
    }
    return [
        size
        for size in range(1, samples + 1)
        if samples % size == 0 and schedules_of(pp, samples // size, plan.space.blocks, fixed)
    ]


def _with_size(plan: Plan, row: Estimate, size: int) -> Estimate:
    samples = plan.space.global_batch // row.candidate.dims.dp
    candidate = row.candidate._replace(micro_batch=size, micro_batches=-(-samples // size))
    return plan.estimator.estimate(candidate)


def _experiment(plan: Plan, row: Estimate, size: int) -> dict[str, Any]:
    """The configuration of a trial.

    A step has two micro-batches. Only a pipeline has all of them, because its memory depends on how
    many there are.
    """
    dims = row.candidate.dims
    tree = experiment(plan, _with_size(plan, row, size))
    if dims.pp == 1:
        tree["train"]["global_batch_size"] = min(plan.space.global_batch, 2 * size * dims.dp)
    tree["train"]["batch_schedule"] = []
    tree["train"]["data_workers"] = 0
    tree["checkpoint"]["load"] = None
    return tree


def run(tree: dict[str, Any], workers: int, limit: float) -> Trial:
    """Try a configuration in new processes of this machine.

    Args:
        tree: The configuration.
        workers: The number of processes.
        limit: Bytes that a process on a CPU may take beyond what it has before the model. With more
            it fails, as if memory had run out.
    """
    try:
        seconds, size = in_processes(_train, workers, tree, limit, timeout=TIMEOUT)
    except RunFailed as error:
        return Trial(failure=str(error))
    return Trial(seconds, size)


def _train(
    rank: int, device: torch.device, tree: dict[str, Any], limit: float
) -> tuple[float, float]:
    """Train a few steps in one of the processes.

    Returns:
        (seconds of the last step, bytes of memory), the most of all ranks
    """
    if device.type == "cpu":
        _limit_memory(limit)
    config = from_dict(tree)
    world = dist.get_world_size()
    degrees = {name: tree["parallel"][name] for name in DEGREES}
    layout = choose(config.strategy, world, **degrees)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            config=config,
            layout=layout,
            folder=folder,
            attempt="trial",
            run_uid="",
            steps=STEPS,
            cwd=os.getcwd(),
        )
        place = Place(rank=rank, world_size=world, local_rank=rank, device=device)
        training = Training(job, place, SilentChannel())
        for micro_batches in training.batches():
            begin = time.perf_counter()
            training.step(micro_batches)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        size = max(0, memory_bytes(device) - training.memory_before)
        training.close()
    most_of_ranks = torch.tensor([seconds, size], dtype=torch.float64, device=device)
    dist.all_reduce(most_of_ranks, op=dist.ReduceOp.MAX)
    return float(most_of_ranks[0]), float(most_of_ranks[1])


def _limit_memory(limit: float) -> None:
    """Let this process take that many bytes more than it has; allocations beyond that fail."""
    used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    soft_limit = resource.RLIM_INFINITY
    if used is not None:
        soft_limit = 1024 * int(used[1]) + int(limit)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard_limit))
