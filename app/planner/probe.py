"""Tries layouts for a few steps in processes of their own, so that one that runs out of memory harms nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from app.planner.evaluate import Evaluated, Machine, evaluate
from app.planner.measure import FIRST_USE, Measured
from app.planner.measure import measure as measured
from app.planner.plan import Plan
from app.planner.table import SCHEDULES, Table
from strategies.pipeline.schedules import least_micro_batches

TIMEOUT = 240.0
SIZES = 4096
"""Micro-batches that are looked at; where a share has more, they are spread evenly in logarithms."""


def measure(experiment: dict[str, Any], machine: Machine, budget: float = 1.5) -> Measured:
    """One experiment, on as many of this machine's devices as it has workers, with the memory that the plan gives."""
    limit = machine.capacity + FIRST_USE
    return measured([experiment], machine.world, timeout=TIMEOUT, budget=budget, limit=limit)[0]


@dataclass
class Largest:
    """What `largest` found; 0 is none. tries: in their order, micro-batch and what became of it."""

    predicted: int
    found: int
    share: int
    """The worker's part of the global batch: no micro-batch is larger."""
    tries: list[tuple[int, Measured]] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        ran = {size: seen for size, seen in self.tries if seen.seconds is not None}
        failed = {size: seen.failure for size, seen in self.tries if seen.seconds is None}
        said = f"predicted {self.predicted or 'none'}"
        if self.found:
            said += f", tried: {self.found} is the largest that runs ({ran[self.found].own / 2**30:.2f} GiB)"
        else:
            said += ", tried: none runs"
        if failed:
            return f"{said}; {min(failed)} does not ({failed[min(failed)]})"
        return f"{said}; it is the worker's whole share of the batch"


def largest(plan: Plan, row: int, attempt: Callable[[dict[str, Any]], Measured] | None = None) -> Largest:
    """The largest micro-batch of a layout that really runs, in new processes for every try.

    The predicted one goes first; then twice as much while that runs, up to the worker's share of the batch, and
    halves of what is left between. attempt: how an experiment is tried.
    """
    sizes = _sizes(plan, row)
    costs = costs_of(plan, row, sizes)
    fits = np.flatnonzero(costs.bytes <= plan.machine.capacity)
    found = Largest(int(sizes[fits[-1]]) if len(fits) else 0, 0, _share(plan, row))

    def runs(place: int) -> bool:
        tree = _experiment(plan, row, int(sizes[place]), costs, place)
        seen = attempt(tree) if attempt else measure(tree, plan.machine, budget=0.0)
        found.tries.append((int(sizes[place]), seen))
        return seen.seconds is not None

    place = search(int(fits[-1]) if len(fits) else 0, sizes, runs)
    found.found = int(sizes[place]) if place >= 0 else 0
    return found


def search(first: int, sizes: Sequence[int] | np.ndarray, runs: Callable[[int], bool]) -> int:
    """The place of the largest size that runs, if every one below it does; -1 for none. Begins with place `first`.

    Ends when what is left between is a thirty-second of what runs: a try is a start of all processes.
    """
    low, high = -1, len(sizes)
    at = first
    while high - low > 1:
        if low >= 0 and high < len(sizes) and sizes[high] - sizes[low] <= sizes[low] // 32:
            break
        if runs(at):
            low = at
        else:
            high = at
        at = min(2 * low + 1, len(sizes) - 1) if high == len(sizes) else (low + high) // 2
    return low


def _share(plan: Plan, row: int) -> int:
    return int(plan.config.train.global_batch_size // plan.table.dp[row])


def _sizes(plan: Plan, row: int) -> np.ndarray:
    """Micro-batches that the layout can have; a pipeline's are equal, and as many as its schedule can use."""
    share, pp = _share(plan, row), int(plan.table.pp[row])
    every = np.arange(1, share + 1)
    if pp == 1:
        return every if share <= SIZES else np.unique(np.geomspace(1, share, SIZES).round().astype(int))
    sizes = every[share % every == 0]
    name = SCHEDULES[plan.table.schedule[row]]
    many = share // sizes
    usable = many >= least_micro_batches(name, pp)
    if name == "interleaved_1f1b":
        usable &= many % pp == 0
    return sizes[usable] if usable.any() else plan.table.micro_batch[row : row + 1]


def costs_of(plan: Plan, row: int, sizes: np.ndarray) -> Evaluated:
    """What a layout costs with other micro-batches."""
    columns = {f.name: np.repeat(getattr(plan.table, f.name)[row], len(sizes)) for f in fields(Table)}
    columns |= {"micro_batch": sizes, "micro_batches": -(-_share(plan, row) // sizes)}
    return evaluate(plan.reader.read, Table(**columns), plan.machine, plan.settings)


def _experiment(plan: Plan, row: int, size: int, costs: Evaluated, place: int) -> dict[str, Any]:
    """The layout with that micro-batch; two of them a step, unless it is a pipeline, whose memory depends on more."""
    from app.planner.actions import experiment

    tree = experiment(plan, row, size)
    if costs.accumulates[place]:
        tree["parallel"] = tree["parallel"] | {"accumulate_sharded": bool(costs.scattered[place])}
    if plan.table.pp[row] == 1:
        batch = min(_share(plan, row), 2 * size) * int(plan.table.dp[row])
        tree["train"] = tree["train"] | {"global_batch_size": batch}
    return tree
