"""What a run costs: dollars by the hour of what it holds, summed over all its starts, and when its budget is spent.

rate      = sum over nodes of price per hour × the share of the node's GPUs (else CPUs) that the run's workers hold
cost      = rate × time since the workers were asked for
wasted    = cost until the first step of this start, and from a failure until training continues
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

RESERVE_SECONDS = 60.0  # kept for the last checkpoint and the end of the workers
SAVE_SECONDS = 15.0


@dataclass
class Spent:
    """What a run has cost so far, in dollars; kept in its folder as cost.json, so that later starts go on from it."""

    total: float = 0.0
    wasted: float = 0.0  # until a start's first step, and from a failure until training went on


def rate_of(
    workers: int, per_worker: Mapping[str, float], nodes: Sequence[NodeState], shape: ClusterShape | None
) -> float | None:
    """Dollars an hour of `workers` workers on these nodes; None if a price is not known.

    A worker takes the share of its node that it asks for; the most expensive nodes are counted first, so that the rate
    is not less than what is spent.
    """
    scarce = "GPU" if per_worker.get("GPU") else "CPU"
    amount = per_worker.get(scarce, 0.0)
    if amount <= 0:
        return None
    places: list[float] = []
    for node in nodes:
        room = int(node.total.get(scarce, 0.0) / amount + 1e-9)
        if not room:
            continue
        price = _price_of_node(node, shape)
        if price is None:
            return None
        places += [price * amount / node.total[scarce]] * room
    chosen = sorted(places, reverse=True)[:workers]
    if not chosen:
        return None
    return sum(chosen) + (workers - len(chosen)) * chosen[0]


def _price_of_node(node: NodeState, shape: ClusterShape | None) -> float | None:
    """Dollars an hour of a node: from the cluster's file, else of the catalogue's cheapest machine with this GPU."""
    from cluster.hardware import HardwareError, cheapest

    price = shape.price_of(node.kind, head=node.is_head) if shape else None
    if shape and (price is not None or not node.total.get("GPU")):
        return price
    with contextlib.suppress(HardwareError):
        if node.gpu and (offer := cheapest(node.gpu)):
            return offer.price_per_gpu_hour * node.total["GPU"]
    return None


def rate_here(config: Config, workers: int, per_worker: Mapping[str, float]) -> float | None:
    """`rate_of` on the cluster that this process is connected to."""
    file = cluster_file(config.cluster.file)
    return rate_of(workers, per_worker, living_nodes(), read_cluster(file) if file else None)


def meter_for(config: Config, storage: Storage, workers: int, per_worker: Mapping[str, float]) -> Meter | None:
    """What counts this start's cost; None where no price is known and no budget is given.

    Raises:
        UserError: a budget without prices, or one that earlier starts have spent already.
    """
    rate = rate_here(config, workers, per_worker)
    check_budget(config.budget, rate)
    if rate is None:
        return None
    meter = Meter(rate, config.budget, storage, lambda workers: rate_here(config, workers, per_worker))
    if must_stop(meter.spent.total, rate, config.budget):
        raise UserError(f"the run's budget is spent: {meter.sentence()}; raise budget to continue")
    return meter


def check_budget(budget: float | None, rate: float | None) -> None:
    """Raises UserError if there is a budget and no price to count it with."""
    if budget is not None and rate is None:
        raise UserError(
            f"budget is {budget:g}, but the price of the nodes is not known: name the cluster's file with cluster.file"
            ", and write price_per_hour under metadata.trireme.nodes there"
        )


def must_stop(spent: float, rate: float, budget: float | None) -> bool:
    """Whether to save and stop now: what the end itself will cost must still be within the budget.

    The reserve is at most a tenth of the budget, so that a small one is not spent on nothing.
    """
    return budget is not None and spent + min(rate * RESERVE_SECONDS / 3600, 0.1 * budget) >= budget


class Meter:
    """Counts one start of a run. `look` is called often and cheap; it says when the budget is spent.

    rate: dollars an hour. rate_with: the same for another number of workers, None where that is not known."""

    def __init__(
        self, rate: float, budget: float | None, storage: Storage, rate_with: Callable[[int], float | None]
    ) -> None:
        self.rate, self.budget, self.storage, self.rate_with = rate, budget, storage, rate_with
        self.spent = _read(storage)
        self._last = time.time()
        self._saved = 0.0

    def look(self, *, stepping: bool) -> bool:
        """Adds the time since the last look; whether it is time to save and stop."""
        now = time.time()
        dollars = self.rate * max(0.0, now - self._last) / 3600
        self._last = now
        self.spent.total += dollars
        if not stepping:
            self.spent.wasted += dollars
        if now - self._saved >= SAVE_SECONDS:
            self._saved = now
            self.save()
        return must_stop(self.spent.total, self.rate, self.budget)

    def resize(self, workers: int) -> None:
        """From now on the run has this many workers."""
        self.rate = self.rate_with(workers) or self.rate

    def save(self) -> None:
        """Notes what was spent, so that the next start of the run continues from it."""
        self.storage.write_bytes("cost.json", json.dumps(asdict(self.spent)).encode())

    def metrics(self) -> dict[str, float]:
        """For MLflow."""
        return {
            "cost/dollars": self.spent.total,
            "cost/wasted_dollars": self.spent.wasted,
            "cost/dollars_per_hour": self.rate,
        }

    def total(self) -> str:
        """What it came to, for a person."""
        return f"${self.spent.total:.2f}, of which ${self.spent.wasted:.2f} before the first step and after failures"

    def sentence(self) -> str:
        return f"${self.spent.total:.2f} spent of a budget of ${self.budget:.2f}"


def _read(storage: Storage) -> Spent:
    try:
        return Spent(**json.loads(storage.read_bytes("cost.json")))
    except (OSError, ValueError, TypeError):
        return Spent()
