"""`trireme plan --max-batch`: the largest micro-batch of a layout that really runs, each try in new processes.

A try trains a few steps with the strategies alone, without the loop around them. Its memory on a GPU is the peak that
torch allocated; on a CPU that of the process beyond what it took before, bounded by the memory that a plan counts with.
"""

from __future__ import annotations

import contextlib
import re
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.errors import RunFailed
from app.planner.auto import FIRST_USE
from app.planner.estimate import Estimate
from app.planner.output import experiment
from app.planner.plan import GIB, Plan
from app.planner.processes import in_processes
from strategies.dims import NAMES, LayoutError
from strategies.pipeline.schedules import require

TIMEOUT = 240.0
STEPS = 3
"""Optimizer steps of a try; the last is timed."""


@dataclass(frozen=True)
class Trial:
    """What became of one micro-batch. seconds: of a step; None if it did not run. bytes: as plans count them."""

    seconds: float | None = None
    bytes: float = 0.0
    failure: str = ""


def max_batch(
    plan: Plan, attempt: Callable[[dict[str, Any]], Trial] | None = None
) -> tuple[str, Estimate | None, dict[str, Any]]:
    """The largest micro-batch of the best layout that runs: a sentence, that layout if one runs, and figures.

    The predicted one goes first; then twice as much while that runs, up to the worker's share of the batch, and halves
    of what is left between. attempt: how an experiment is tried.
    """
    row = plan.best or plan.rows[0]
    sizes, tries = _sizes(plan, row), dict[int, Trial]()
    fitting = [size for size in sizes if _with_size(plan, row, size).fits]

    def runs(place: int) -> bool:
        tree = _experiment(plan, row, sizes[place])
        tries[sizes[place]] = trial = attempt(tree) if attempt else run(tree, plan.machine.world, plan.machine.capacity)
        return trial.seconds is not None

    place = search(max(len(fitting) - 1, 0), sizes, runs)
    layout = plan.layout(row)
    found = {key: layout[key] for key in ("strategy", "parallel", "activation_checkpointing", "precision")}
    largest, predicted = sizes[place] if place >= 0 else 0, fitting[-1] if fitting else 0
    found |= {"predicted": predicted, "largest": largest, "share": sizes[-1]}
    found["tries"] = [{"micro_batch_size": size, **asdict(trial)} for size, trial in tries.items()]
    said = f"{largest} is the largest that runs ({tries[largest].bytes / GIB:.2f} GiB)" if largest else "none runs"
    failed = min((size for size, trial in tries.items() if trial.seconds is None), default=None)
    end = f"{failed} does not ({tries[failed].failure})" if failed else "it is the worker's whole share of the batch"
    sentence = f"largest micro-batch under {layout['strategy']}: predicted {predicted}, tried: {said}; {end}"
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
    if candidate.dims.pp == 1:
        return list(range(1, share + 1))
    found = []
    for size in (size for size in range(1, share + 1) if share % size == 0):
        with contextlib.suppress(LayoutError):
            require(candidate.schedule, candidate.dims.pp, share // size, candidate.chunks)
            found.append(size)
    return found


def _with_size(plan: Plan, row: Estimate, size: int) -> Estimate:
    share = plan.space.global_batch // row.candidate.dims.dp
    return plan.estimator.estimate(row.candidate._replace(micro_batch=size, micro_batches=-(-share // size)))


def _experiment(plan: Plan, row: Estimate, size: int) -> dict[str, Any]:
    """The layout with that micro-batch; two of them a step, unless it is a pipeline, whose memory depends on more."""
    dims, tree = row.candidate.dims, experiment(plan, _with_size(plan, row, size))
    if dims.pp == 1:
        tree["train"]["global_batch_size"] = min(plan.space.global_batch, 2 * size * dims.dp)
    return tree


def run(tree: dict[str, Any], workers: int, limit: float) -> Trial:
    """Tries a whole configuration on so many processes here. limit: bytes that a process on a CPU may take beside what
    it has before the model; beyond that it fails, as if memory had ended."""
    try:
        return Trial(*in_processes(_train, workers, tree, limit, timeout=TIMEOUT))
    except RunFailed as error:
        return Trial(failure=str(error))


def _train(rank: int, device: Any, tree: dict[str, Any], limit: float) -> tuple[float, float]:
    """Seconds of the last step and bytes of a few: the most of all ranks."""
    import torch
    import torch.distributed as dist

    from app.config_io import from_dict
    from app.data.loader import fetch, micro_batch_slices
    from app.job import memory_bytes, strategy_options
    from app.optimizer import build_optimizer
    from app.tasks import load_task
    from strategies.layout import choose
    from strategies.parallelize import parallelize
    from strategies.tree import tree_map

    config = from_dict(tree)
    task, train = load_task(config.task, config.task_args), config.train
    layout = choose(config.strategy, dist.get_world_size(), **{name: tree["parallel"][name] for name in NAMES})
    data, before = task.train_data(), memory_bytes(device) + (FIRST_USE if device.type == "cpu" else 0)
    if device.type == "cpu":
        used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        most = 1024 * int(used[1]) + int(limit) if used else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    parallel = parallelize(
        task.build_model,
        layout,
        replace(strategy_options(config), float_output=task.float_output),
        device=device,
        blocks=task.blocks,
        tensor_plan=task.tensor_plan,
        example=(task.loss, fetch(data, [(0, 0)])) if layout.dims.pp > 1 else None,
    )
    optimizer = parallel.prepare_optimizer(build_optimizer(config.optimizer, parallel.parameters()))
    samples = len(data)  # type: ignore[arg-type]
    slices = micro_batch_slices(train.global_batch_size // layout.dims.dp, train.micro_batch_size)
    batches = [fetch(data, [(i % samples, i) for i in range(part.start, part.stop)]) for part in slices]
    batches = [tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, batch) for batch in batches]
    weights = [(part.stop - part.start) / train.global_batch_size for part in slices]
    for _ in range(STEPS):
        begun = time.perf_counter()
        parallel.forward_backward(batches, weights, task.loss)
        parallel.grad_norm_(train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    most_of_all = torch.tensor([time.perf_counter() - begun, memory_bytes(device) - before], dtype=torch.float64)
    most_of_all = most_of_all.clamp(min=0).to(device)
    dist.all_reduce(most_of_all, op=dist.ReduceOp.MAX)
    return float(most_of_all[0]), float(most_of_all[1])
