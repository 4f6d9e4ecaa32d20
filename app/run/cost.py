"""What a run costs over all its starts, in dollars, and when its budget is spent.

rate      = sum over nodes of price per hour × the share of the node's GPUs (else CPUs) that the
            run's workers hold
cost      = rate × time since the workers were asked for
wasted    = cost until the first step of a start, and from a failure until training continues
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from app.errors import UserError
from cluster.files import cluster_file, read_cluster
from cluster.shape import ClusterShape, NodeState, living_nodes

if TYPE_CHECKING:
    from app.config import Config
    from app.storage.storage import Storage

RESERVE_SECONDS = 60.0
"""The part of the budget, in seconds, that is kept for the last checkpoint and the workers' end."""
SAVE_SECONDS = 15.0
"""Seconds between two writes of cost.json."""


@dataclass
class Spent:
    """What a run has cost so far; kept in its folder as cost.json, so that later starts add to it.

    Args:
        total: Dollars.
        wasted: Dollars until a start's first step, and from a failure until training continued.
    """

    total: float = 0.0
    wasted: float = 0.0


def rate_of(
    workers: int,
    per_worker: Mapping[str, float],
    nodes: Sequence[NodeState],
    shape: ClusterShape | None,
) -> float | None:
    """Dollars per hour of a run's workers.

    A worker pays for the share of its node that it asks for. The most expensive nodes are counted
    first, so that the rate is never below what is spent.

    Args:
        workers: How many there are.
        per_worker: Ray resources of one worker.
        nodes: Nodes that the workers may be on.
        shape: The cluster's file with its prices; None without a file.

    Returns:
        None if a price is not known.
    """
    resource = "GPU" if per_worker.get("GPU") else "CPU"
    amount = per_worker.get(resource, 0.0)
    if amount <= 0:
        return None
    worker_rates: list[float] = []
    for node in nodes:
        node_amount = node.total.get(resource, 0.0)
        workers_of_node = int(node_amount / amount + 1e-9)
        if not workers_of_node:
            continue
        price = _price_of_node(node, shape)
        if price is None:
            return None
        worker_rates += [price * amount / node_amount] * workers_of_node
    most_expensive = sorted(worker_rates, reverse=True)[:workers]
    if not most_expensive:
        return None
    workers_on_nodes_to_come = workers - len(most_expensive)
    return sum(most_expensive) + workers_on_nodes_to_come * most_expensive[0]


def _price_of_node(node: NodeState, shape: ClusterShape | None) -> float | None:
    """Dollars per hour of a node.

    Taken from the cluster's file, or else from the catalogue's cheapest machine with this GPU.
    """
    from cluster.hardware import HardwareError, cheapest

    if shape is not None:
        price = shape.price_of(node.kind, head=node.is_head)
        if price is not None or not node.total.get("GPU"):
            return price
    with contextlib.suppress(HardwareError):
        offer = cheapest(node.gpu) if node.gpu else None
        if offer:
            return offer.price_per_gpu_hour * node.total["GPU"]
    return None


def rate_here(
    config: Config,
    workers: int,
    per_worker: Mapping[str, float],
    for_evaluation: Mapping[str, float] | None = None,
) -> float | None:
    """`rate_of` on the cluster that this process is connected to.

    Args:
        config: Names the cluster's file.
        workers: How many there are.
        per_worker: Ray resources of one worker.
        for_evaluation: Those of a worker that evaluates. Its CPUs are free where workers pay for
            the GPUs of their nodes.
    """
    file = cluster_file(config.cluster.file)
    shape = read_cluster(file) if file else None
    nodes = living_nodes()
    rate = rate_of(workers, per_worker, nodes, shape)
    resource = "GPU" if per_worker.get("GPU") else "CPU"
    amount = (for_evaluation or {}).get(resource, 0.0)
    if rate is None or not amount:
        return rate
    return rate + (rate_of(1, {resource: amount}, nodes, shape) or 0.0)


def meter_for(
    config: Config,
    storage: Storage,
    workers: int,
    per_worker: Mapping[str, float],
    for_evaluation: Mapping[str, float] | None = None,
) -> Meter | None:
    """The meter of a start; None if no price is known and no budget is given.

    Args:
        config: Names the budget and the cluster's file.
        storage: The run's folder.
        workers: How many there are at first.
        per_worker: Ray resources of one worker.
        for_evaluation: Those of a worker that evaluates.

    Raises:
        UserError: There is a budget without prices, or earlier starts have spent it already.
    """
    rate = rate_here(config, workers, per_worker, for_evaluation=for_evaluation)
    check_budget(config.budget, rate)
    if rate is None:
        return None

    def rate_with(workers: int) -> float | None:
        return rate_here(config, workers, per_worker, for_evaluation=for_evaluation)

    meter = Meter(rate, config.budget, storage, rate_with)
    if must_stop(meter.spent.total, rate, config.budget):
        raise UserError(f"the run's budget is spent: {meter.sentence()}; raise budget to continue")
    return meter


def check_budget(budget: float | None, rate: float | None) -> None:
    """Checks that there is a price to count a budget with.

    Args:
        budget: Dollars; None without one.
        rate: Dollars per hour; None if a price is not known.

    Raises:
        UserError: There is a budget and no price.
    """
    if budget is not None and rate is None:
        raise UserError(
            f"budget is {budget:g}, but the price of the nodes is not known: name the cluster's "
            "file with cluster.file, and write price_per_hour under metadata.trireme.nodes there"
        )


def must_stop(spent: float, rate: float, budget: float | None) -> bool:
    """Whether to save and stop now, so that the cost of the end itself is still within the budget.

    The reserve for the end is at most a tenth of the budget, so that a small budget is not spent on
    the reserve alone.

    Args:
        spent: Dollars.
        rate: Dollars per hour.
        budget: Dollars; None without one.
    """
    if budget is None:
        return False
    reserve = min(rate * RESERVE_SECONDS / 3600, 0.1 * budget)
    return spent + reserve >= budget


class Meter:
    """Counts the cost of one start of a run.

    Args:
        rate: Dollars per hour.
        budget: Dollars; None without one.
        storage: The run's folder.
        rate_with: The rate for another number of workers; None if it is not known.
    """

    def __init__(
        self,
        rate: float,
        budget: float | None,
        storage: Storage,
        rate_with: Callable[[int], float | None],
    ) -> None:
        self.rate = rate
        self.budget = budget
        self.storage = storage
        self.rate_with = rate_with
        self.spent = _read(storage)
        self._counted_time = time.time()
        self._saved_time = 0.0

    def count(self, *, stepping: bool) -> bool:
        """Adds the cost since the last call; cheap enough to be called often.

        Args:
            stepping: Whether training takes steps. Otherwise the cost is wasted.

        Returns:
            Whether to save and stop now.
        """
        now = time.time()
        dollars = self.rate * max(0.0, now - self._counted_time) / 3600
        self._counted_time = now
        self.spent.total += dollars
        if not stepping:
            self.spent.wasted += dollars
        if now - self._saved_time >= SAVE_SECONDS:
            self._saved_time = now
            self.save()
        return must_stop(self.spent.total, self.rate, self.budget)

    def resize(self, workers: int) -> None:
        """Changes the rate to that of another number of workers."""
        self.rate = self.rate_with(workers) or self.rate

    def save(self) -> None:
        """Writes down what was spent, so that the next start of the run continues from it."""
        self.storage.write_bytes("cost.json", json.dumps(asdict(self.spent)).encode())

    def metrics(self) -> dict[str, float]:
        """The metrics for MLflow."""
        return {
            "cost/dollars": self.spent.total,
            "cost/wasted_dollars": self.spent.wasted,
            "cost/dollars_per_hour": self.rate,
        }

    def total(self) -> str:
        """What the run has cost, for a person."""
        return (
            f"${self.spent.total:.2f}, of which ${self.spent.wasted:.2f} before the first step "
            "and after failures"
        )

    def sentence(self) -> str:
        """How much of the budget is spent, for a person."""
        return f"${self.spent.total:.2f} spent of a budget of ${self.budget:.2f}"


def _read(storage: Storage) -> Spent:
    try:
        return Spent(**json.loads(storage.read_bytes("cost.json")))
    except (OSError, ValueError, TypeError):
        return Spent()
