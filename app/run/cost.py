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
from typing import TYPE_CHECKING, Any

from app.errors import UserError
from cluster.files import cluster_file, read_cluster
from cluster.shape import ClusterShape, living_nodes

if TYPE_CHECKING:
    from app.config import Config
    from app.storage import Storage

Nodes = Sequence[tuple[str, Mapping[str, float]]]
"""Type and total resources of each living node."""

RESERVE_SECONDS = 60.0  # kept for the last checkpoint and the end of the workers
SAVE_SECONDS = 15.0


@dataclass(frozen=True)
class Rate:
    """Dollars an hour of a run's workers, and where the figure is from."""

    dollars_per_hour: float
    source: str


@dataclass
class Spent:
    """What a run has cost so far, in dollars; kept in its folder as cost.json, so that later starts go on from it."""

    total: float = 0.0
    start: float = 0.0  # until a start's first step
    restarts: float = 0.0  # from a failure until training went on

    @property
    def wasted(self) -> float:
        return self.start + self.restarts


def rate_of(workers: int, per_worker: Mapping[str, float], nodes: Nodes, shape: ClusterShape | None) -> Rate | None:
    """Dollars an hour of `workers` workers on these nodes; None if a price is not known.

    A worker takes the share of its node that it asks for; the most expensive nodes are counted first, so that the rate
    is not less than what is spent.
    """
    scarce = "GPU" if per_worker.get("GPU") else "CPU"
    amount = per_worker.get(scarce, 0.0)
    if amount <= 0:
        return None
    places: list[float] = []
    sources: set[str] = set()
    for kind, total in nodes:
        room = int(total.get(scarce, 0.0) / amount + 1e-9)
        if not room:
            continue
        price, source = _price_of_node(kind, total, shape)
        if price is None:
            return None
        places += [price * amount / total[scarce]] * room
        sources.add(source)
    chosen = sorted(places, reverse=True)[:workers]
    if not chosen:
        return None
    dollars = sum(chosen) + (workers - len(chosen)) * chosen[0]
    return Rate(dollars, ", ".join(sorted(sources)))


def _price_of_node(kind: str, total: Mapping[str, float], shape: ClusterShape | None) -> tuple[float | None, str]:
    """Dollars an hour of a node, and where the figure is from: the cluster's file, else the catalogue's cheapest
    machine with this GPU, and its date."""
    from cluster.hardware import HardwareError, cheapest

    price = shape.price_of(kind, head="node:__internal_head__" in total) if shape else None
    if shape and (price is not None or not total.get("GPU")):
        return price, shape.path
    gpu = next((name.partition(":")[2] for name in total if name.startswith("accelerator_type:")), "")
    with contextlib.suppress(HardwareError):
        if gpu and (offer := cheapest(gpu)):
            source = f"list price of {offer.provider} {offer.name}, {offer.date}"
            return offer.price_per_gpu_hour * total["GPU"], source
    return None, ""


class Prices:
    """The nodes of the cluster that this process is connected to, and what they cost."""

    def __init__(self, config: Config) -> None:
        file = cluster_file(config.cluster.file)
        self.shape = read_cluster(file) if file else None

    def rate(self, workers: int, per_worker: Mapping[str, float]) -> Rate | None:
        """Of this run's workers."""
        nodes = [(node.kind, node.total) for node in living_nodes()]
        return rate_of(workers, per_worker, nodes, self.shape)


def meter_for(config: Config, storage: Storage, workers: int, per_worker: Mapping[str, float]) -> Meter | None:
    """What counts this start's cost; None where no price is known and no budget is given.

    Raises:
        UserError: a budget without prices, or one that earlier starts have spent already.
    """
    prices = Prices(config)
    rate = prices.rate(workers, per_worker)
    check_budget(config.budget, rate)
    if rate is None:
        return None
    meter = Meter(rate, config.budget, storage)
    if config.budget is not None and must_stop(meter.before, rate.dollars_per_hour, config.budget):
        raise UserError(f"the run's budget is spent: {meter.sentence()}; raise budget to continue")
    return meter


def check_budget(budget: float | None, rate: Rate | None) -> None:
    """Raises UserError if there is a budget and no price to count it with."""
    if budget is not None and rate is None:
        raise UserError(
            f"budget is {budget:g}, but the price of the nodes is not known: name the cluster's file with cluster.file"
            ", and write price_per_hour under metadata.trireme.nodes there"
        )


def must_stop(spent: float, rate: float, budget: float | None, reserve: float = RESERVE_SECONDS) -> bool:
    """Whether to save and stop now: what the end itself will cost must still be within the budget.

    The reserve is at most a tenth of the budget, so that a small one is not spent on nothing.
    """
    return budget is not None and spent + min(rate * reserve / 3600, 0.1 * budget) >= budget


class Meter:
    """Counts one start of a run. `look` is called often and cheap; it says when the budget is spent."""

    def __init__(
        self, rate: Rate, budget: float | None, storage: Storage, clock: Callable[[], float] = time.time
    ) -> None:
        self.rate, self.budget, self.storage, self.clock = rate, budget, storage, clock
        self.spent = _read(storage)
        self.before = self.spent.total
        self._last = clock()
        self._saved = 0.0
        self.over = False

    def look(self, *, stepping: bool, started: bool) -> bool:
        """Adds the time since the last look; True, once, when it is time to save and stop.

        started: this start has taken a step. stepping: and it goes on now.
        """
        now = self.clock()
        dollars = self.rate.dollars_per_hour * max(0.0, now - self._last) / 3600
        self._last = now
        self.spent.total += dollars
        if not started:
            self.spent.start += dollars
        elif not stepping:
            self.spent.restarts += dollars
        if now - self._saved >= SAVE_SECONDS:
            self._saved = now
            self.save()
        first = not self.over and must_stop(self.spent.total, self.rate.dollars_per_hour, self.budget)
        self.over = self.over or first
        return first

    def save(self) -> None:
        """Notes what was spent, so that the next start of the run continues from it."""
        self.storage.write_bytes("cost.json", json.dumps(asdict(self.spent)).encode())

    def metrics(self, samples: float) -> dict[str, float]:
        """For MLflow. samples: those this run has seen over all its starts."""
        found = {
            "cost/dollars": self.spent.total,
            "cost/wasted_dollars": self.spent.wasted,
            "cost/dollars_per_hour": self.rate.dollars_per_hour,
        }
        if samples > 0:
            found["cost/dollars_per_million_samples"] = self.spent.total / samples * 1e6
        return found

    def total(self) -> str:
        """What it came to, for a person."""
        return f"${self.spent.total:.2f}, of which ${self.spent.wasted:.2f} before the first step and after failures"

    def sentence(self) -> str:
        return f"${self.spent.total:.2f} spent of a budget of ${self.budget:.2f}"


def _read(storage: Storage) -> Spent:
    try:
        known: dict[str, Any] = json.loads(storage.read_bytes("cost.json"))
        return Spent(**{key: float(known.get(key, 0.0)) for key in ("total", "start", "restarts")})
    except (FileNotFoundError, ValueError, OSError, AttributeError):
        return Spent()
