"""`trireme plan --max-batch`: layouts tried on this machine's devices.

A try takes a few steps of a run's own loop. Its memory on a GPU is the peak that torch allocated; on a CPU that of the
process beyond what it took before, bounded by the memory that a plan counts with.
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
"""Optimizer steps of a try; the last is timed."""


@dataclass(frozen=True)
class Trial:
    """What became of one micro-batch. seconds: of a step; None if it did not run. bytes: as plans count them."""

    seconds: float | None = None
    bytes: float = 0.0
    failure: str = ""


def max_batch(plan: Plan) -> tuple[str, Estimate | None, dict[str, Any]]:
    """The largest micro-batch of the best layout that runs: a sentence, that layout if one runs, and figures.

    The predicted one goes first; then twice as much while that runs, up to the worker's share of the batch, and halves
    of what is left between.
    """
    row = plan.best or plan.rows[0]
    sizes, tries = _sizes(plan, row), dict[int, Trial]()
    fitting = [size for size in sizes if _with_size(plan, row, size).fits]

    def runs(place: int) -> bool:
        tree = _experiment(plan, row, sizes[place])
        tries[sizes[place]] = trial = run(tree, plan.machine.world, plan.machine.device.capacity)
        return trial.seconds is not None

    place = search(max(len(fitting) - 1, 0), sizes, runs)
    largest, predicted = sizes[place] if place >= 0 else 0, fitting[-1] if fitting else 0
    found: dict[str, Any] = {"predicted": predicted, "largest": largest, "share": sizes[-1]}
    found["tries"] = [{"micro_batch_size": size, **asdict(trial)} for size, trial in tries.items()]
    said = f"{largest} is the largest that runs ({tries[largest].bytes / GIB:.2f} GiB)" if largest else "none runs"
    failed = min((size for size, trial in tries.items() if trial.seconds is None), default=None)
    end = f"{failed} does not ({tries[failed].failure})" if failed else "it is the worker's whole share of the batch"
    sentence = f"largest micro-batch under {row.candidate.layout.name}: predicted {predicted}, tried: {said}; {end}"
    return sentence, _with_size(plan, row, largest) if largest else None, found


def search(first: int, sizes: Sequence[int], runs: Callable[[int], bool]) -> int:
    """The place of the largest size that runs, if every one below it does; -1 for none. Begins with place `first`.

    Ends when what is left between is a thirty-second of what runs: a try is a start of all processes.
    """
    low, high, at = -1, len(sizes), first
    while high - low > 1:
        if low >= 0 and high < len(sizes) and sizes[high] - sizes[low] <= sizes[low] // 32:
            break
        if runs(at):
            low = at
        else:
            high = at
        at = min(2 * low + 1, len(sizes) - 1) if high == len(sizes) else (low + high) // 2
    return low


def _sizes(plan: Plan, row: Estimate) -> list[int]:
    """Micro-batches that the layout can have; a pipeline's are equal, and as many as its schedule can use."""
    candidate, share = row.candidate, plan.space.global_batch // row.candidate.dims.dp
    pp, as_it_is = candidate.dims.pp, {"parallel.schedule": candidate.schedule, "parallel.chunks": candidate.chunks}
    return [
        size
        for size in range(1, share + 1)
        if pp == 1 or (share % size == 0 and schedules_of(pp, share // size, plan.space.blocks, as_it_is))
    ]


def _with_size(plan: Plan, row: Estimate, size: int) -> Estimate:
    share = plan.space.global_batch // row.candidate.dims.dp
    return plan.estimator.estimate(row.candidate._replace(micro_batch=size, micro_batches=-(-share // size)))


def _experiment(plan: Plan, row: Estimate, size: int) -> dict[str, Any]:
    """The layout with that micro-batch; two of them a step, unless it is a pipeline, whose memory depends on more."""
    dims, tree = row.candidate.dims, experiment(plan, _with_size(plan, row, size))
    if dims.pp == 1:
        tree["train"]["global_batch_size"] = min(plan.space.global_batch, 2 * size * dims.dp)
    tree["train"]["data_workers"], tree["checkpoint"]["load"] = 0, None
    return tree


def run(tree: dict[str, Any], workers: int, limit: float) -> Trial:
    """Tries a whole configuration on several processes here. limit: bytes that a process on a CPU may take beside what
    it has before the model; beyond that it fails, as if memory had ended."""
    try:
        return Trial(*in_processes(_train, workers, tree, limit, timeout=TIMEOUT))
    except RunFailed as error:
        return Trial(failure=str(error))


def _train(rank: int, device: Any, tree: dict[str, Any], limit: float) -> tuple[float, float]:
    """Seconds of the last step and bytes of a few: the most of all ranks."""
    if device.type == "cpu":
        used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        most = 1024 * int(used[1]) + int(limit) if used else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    config, world = from_dict(tree), dist.get_world_size()
    layout = choose(config.strategy, world, **{name: tree["parallel"][name] for name in DEGREES})
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
            begun = time.perf_counter()
            training.step(micro_batches)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        seconds, size = time.perf_counter() - begun, max(0, memory_bytes(device) - training.memory_before)
        training.close()
    most_of_all = torch.tensor([seconds, size], dtype=torch.float64, device=device)
    dist.all_reduce(most_of_all, op=dist.ReduceOp.MAX)
    return float(most_of_all[0]), float(most_of_all[1])
