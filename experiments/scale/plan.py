"""What a study is asked for, what is wrong with that, and what its points say together."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

from app.config import Config
from app.config_io import with_values
from app.errors import UserError

MEASURES = 2
"""What a point holds; a study that was begun when it held something else begins anew."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    workers: tuple[int, ...]
    strategies: tuple[str, ...]
    weak: bool
    repeats: int
    blocks: int
    steps: int  # in each block
    price: float | None = None  # of one worker for an hour

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Strategy and number of workers of each point."""
        return [(strategy, n) for strategy in self.strategies for n in sorted(set(self.workers))]


def check(config: Config, plan: Plan) -> None:
    """Raises UserError for a plan that no cluster could carry out."""
    if not plan.workers or any(n < 1 for n in plan.workers):
        raise UserError("--workers needs numbers greater than 0: write for instance --workers 1,2,4")
    if len(set(plan.workers)) < 2:
        raise UserError(f"--workers {plan.workers[0]} is one point, which shows no scaling: write for instance 1,2")
    if plan.price is not None and not 0 <= plan.price < math.inf:
        raise UserError(f"--price is {plan.price:g}, but it must not be negative")
    batch = config.train.global_batch_size
    for n in plan.workers:
        if not plan.weak and batch % n:
            raise UserError(
                f"train.global_batch_size is {batch}, which {n} workers cannot share evenly: write a multiple of "
                f"{n}, or --weak"
            )


def point_of(config: Config, plan: Plan, task: Any, strategy: str, workers: int) -> tuple[Config, Any]:
    """The configuration of a point, and what prepares it.

    Raises:
        UserError, LayoutError: it cannot be trained so.
    """
    from app.run.prepare import prepare

    batch = config.train.global_batch_size * (workers if plan.weak else 1)
    values: dict[str, Any] = {"workers": str(workers), "strategy": strategy, "train.global_batch_size": batch}
    if workers == 1:
        values |= {"strategy": "single", "parallel": type(config.parallel)()}
    config = with_values(config, values | {"checkpoint.weights": False})
    prepared = prepare(config, task, workers, devices_per_node=None)
    return prepared.config, prepared


def times_of(points: list[dict[str, Any]], strategy: str) -> dict[int, list[float]]:
    """Workers → seconds per step, repeated."""
    found: dict[int, list[float]] = {}
    for point in points:
        if point["strategy"] == strategy:
            found.setdefault(point["workers"], []).append(point["step"])
    return dict(sorted(found.items()))


def predicted(config: Config, task: Any, prepared: Any) -> float | None:
    """What the planner says of a step, in seconds, of the cluster that we are connected to; None where it cannot."""
    with contextlib.suppress(Exception):  # a study is not refused because nobody could predict it
        from app.planner.auto import predict

        return float(predict(config, task, prepared.layout).step_seconds)
    return None
