"""Tries layouts for a few steps in processes of their own, so that one that runs out of memory harms nothing."""

from __future__ import annotations

from typing import Any

from app.planner.evaluate import Machine
from app.planner.measure import Measured
from app.planner.measure import measure as measured
from app.planner.plan import Plan


def measure(experiment: dict[str, Any], machine: Machine) -> Measured:
    """One experiment, on as many of this machine's devices as it has workers."""
    return measured([experiment], machine.world, timeout=120.0, budget=1.5)[0]


def largest(plan: Plan, row: int, predicted: int) -> str:
    """The largest micro-batch that really runs: the predicted one is tried, then halves of the interval around it."""
    from app.planner.actions import experiment

    base = experiment(plan, row)
    share = plan.config.train.global_batch_size // int(plan.table.dp[row])

    def runs(size: int) -> Measured:
        tree = dict(base, train=base["train"] | {"micro_batch_size": size})
        return measure(tree, plan.machine)

    first = runs(predicted)
    if first.seconds is None and predicted > 1:
        low, high = 0, predicted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if runs(middle).seconds is not None else (low, middle)
        return f"but {predicted} did not run ({first.failure}); the largest that did is {low or 'none'}"
    if first.seconds is None:
        return f"but it did not run ({first.failure})"
    seen = f"which ran: {first.seconds:.4g} s per step, {first.bytes / 2**30:.2f} GiB"
    if predicted >= share:
        return f"{seen}; it is the worker's whole share of the batch"
    return f"{seen}"
