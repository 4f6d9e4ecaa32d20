"""The actors beside the driver: between it and its workers, and the host of a trainer.

A driver whose workers all run on its machine has no queue here (event_socket.py).

Metrics do not go through `ray.train.report`, which is a barrier over all ranks. So that these
processes start quickly, little is imported at the top (not Ray Train, nor the strategies and the
loop, which only workers need), and values pass through them in pickled form.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.launchers.aggregator import (
    PERIOD_SECONDS,
    Aggregator,
    Answer,
    Beat,
    Link,
    Orders,
    RankAssignment,
    Report,
    RootAggregator,
    StoreAddress,
    parents,
)
from app.launchers.event_socket import SocketLink
from app.training.events import WorkerDied

LEAST_SECONDS = 0.1
"""Between two reports of an aggregator, however urgent."""
LOOK_SECONDS = 0.2
"""Between two looks of a worker for the aggregator of its node."""


def start_here(actor_class: Any) -> Any:
    """Starts an actor on this node.

    The affinity is hard, because Ray would otherwise put an actor without CPUs on a random node,
    which a worker may not be able to reach.
    """
    this_node = ray.get_runtime_context().get_node_id()
    affinity = NodeAffinitySchedulingStrategy(this_node, soft=False)
    return actor_class.options(scheduling_strategy=affinity).remote()


@ray.remote(num_cpus=0)
class EventQueue(RootAggregator):
    """The root of the tree, as an actor beside the driver."""


@ray.remote(num_cpus=0, max_restarts=0)
class NodeAggregator(Aggregator):
    """Reports what the ranks of a node say to the aggregator above, or to the queue.

    Args:
        attempt: The number of the attempt.
        name: Identifies it.
        parent: The actor above.
    """

    def __init__(self, attempt: int, name: str, parent: Any) -> None:
        super().__init__()
        self.begin(attempt, 0)  # only the queue has to know how many ranks there are
        self.name = name
        self.parent = parent
        threading.Thread(target=self._report_forever, daemon=True, name="report").start()

    def _report_forever(self) -> None:
        while True:
            self.urgent.wait(PERIOD_SECONDS)
            call = self.parent.report.remote(self.attempt, self.name, self.take())
            # The next report has all that comes meanwhile. If nothing is left above, the driver
            # ends this process.
            ray.wait([call])
            time.sleep(LEAST_SECONDS)


def start_aggregators(
    queue: Any, attempt: int, prefix: str, nodes: Sequence[str], running: dict[str, Any]
) -> None:
    """Starts an aggregator on each of these nodes that has none.

    Args:
        queue: The EventQueue.
        attempt: The number of the attempt.
        prefix: Of the actors' names; the node's id follows.
        nodes: Ids of nodes.
        running: Those that run, by the node's id; the new ones are added.
    """
    new_nodes = [node for node in nodes if node not in running]
    actors: list[Any] = []
    for node, parent in zip(new_nodes, parents(len(new_nodes)), strict=True):
        affinity = NodeAffinitySchedulingStrategy(node, soft=False)
        options = NodeAggregator.options(  # type: ignore[attr-defined]
            name=f"{prefix}/{node}", scheduling_strategy=affinity
        )
        above = queue if parent is None else actors[parent]
        actor = options.remote(attempt, node, above)
        above.adopt.remote(attempt, actor)
        actors.append(actor)
        running[node] = actor


class QueueDied(Exception):
    """The queue's process has died, and with it the attempt."""


class ActorQueue:
    """The messages between the workers and the driver, in an `EventQueue` beside the driver."""

    def __init__(self) -> None:
        self.actor: Any = start_here(EventQueue)
        self._died = False

    def begin(self, attempt: int, world_size: int) -> None:
        """See `Aggregator`; starts another queue if this one has died."""
        if self._died:
            self.actor = start_here(EventQueue)
            self._died = False
        self.actor.begin.remote(attempt, world_size)

    def drain(self, stop: bool) -> Report:
        """See `RootAggregator`.

        Raises:
            QueueDied: The queue's process has died.
        """
        try:
            report: Report = ray.get(self.actor.drain.remote(stop))
        except ray.exceptions.RayActorError as error:
            self._died = True
            raise QueueDied(str(error)) from error
        return report

    def ask(self, question: str) -> None:
        """See `RootAggregator`."""
        ray.get(self.actor.ask.remote(question))

    def answered(self) -> dict[str, list[int]]:
        """See `Aggregator`."""
        answers: dict[str, list[int]] = ray.get(self.actor.answered.remote())
        return answers

    def close(self) -> None:
        """Ends the queue's process."""
        ray.kill(self.actor)


class ActorLink:
    """A worker's way to an actor; see `Link`.

    Args:
        actor: The queue, or the aggregator of the worker's node.
        queue: The queue.
    """

    def __init__(self, actor: Any, queue: Any) -> None:
        self._actor = actor
        self._queue = queue

    def put(self, attempt: int, events: bytes, urgent: bool = False) -> Callable[[], object]:
        """See `Link`."""
        return partial(ray.get, self._actor.put.remote(attempt, events, urgent))

    def beat(self, attempt: int, rank: int, beat: Beat, answer: Answer | None) -> Orders:
        """See `Link`."""
        orders: Orders = ray.get(self._actor.beat.remote(attempt, rank, beat, answer))
        return orders

    def join(self, attempt: int, rank: int, node: str, store: StoreAddress | None) -> None:
        """See `Link`."""
        ray.get(self._actor.join.remote(attempt, rank, node, store))

    def meeting(self, attempt: int, rank: int, node: str) -> RankAssignment | None:
        """See `Link`."""
        call = self._actor.meeting.remote(attempt, rank, node)
        assignment: RankAssignment | None = ray.get(call)
        return assignment

    def node_rank(self, attempt: int, node: str) -> int:
        """See `Link`."""
        number: int = ray.get(self._queue.node_rank.remote(attempt, node))
        return number


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """How a worker reaches the driver.

    Args:
        attempt: The number of the attempt.
        queue: The EventQueue; None without one.
        prefix: Of the names of the nodes' aggregators; "" if ranks report to the queue itself.
        socket: The path of the driver's socket; "" if there is a queue.
    """

    attempt: int
    queue: Any = None
    prefix: str = ""
    socket: str = ""

    def root(self) -> Link:
        """The way to the root."""
        return SocketLink(self.socket) if self.socket else ActorLink(self.queue, self.queue)

    def find(self) -> Link:
        """The way to what this worker reports to; waits until that has been started."""
        if not self.prefix:
            return self.root()
        name = f"{self.prefix}/{ray.get_runtime_context().get_node_id()}"
        while True:
            try:
                return ActorLink(ray.get_actor(name), self.queue)
            except ValueError:  # there is no such actor yet
                time.sleep(LOOK_SECONDS)


# --- Ray Train ------------------------------------------------------------------------------------


class WorkerConfig(TypedDict):
    """What every worker of Ray Train gets.

    Args:
        function: The function that it runs, pickled; called with this dictionary.
        job: The job, pickled.
        uplink: How it reaches the driver.
    """

    function: bytes
    job: bytes
    uplink: Uplink


class Scaling(TypedDict):
    """The arguments of `ray.train.ScalingConfig` that are used."""

    num_workers: int
    use_gpu: bool
    resources_per_worker: dict[str, float]
    label_selector: dict[str, str] | None


def run_worker(worker_config: dict[str, Any]) -> None:
    """Runs in every worker of Ray Train; `worker_config` is a `WorkerConfig`."""
    function = ray.cloudpickle.loads(worker_config["function"])
    function(worker_config)


def lost_workers(uplink: Uplink) -> Any:
    """A callback that tells the driver at once which workers are gone.

    `fit` itself returns only when Ray Train has cleaned up.
    """
    from ray.train import UserCallback

    class LostWorkers(UserCallback):
        def after_exception(
            self, run_context: Any, worker_exceptions: dict[int, Exception]
        ) -> None:
            events = [
                WorkerDied(rank=rank, details=str(error))
                for rank, error in worker_exceptions.items()
            ]
            pickled_events = ray.cloudpickle.dumps(events)
            wait = uplink.root().put(uplink.attempt, pickled_events)
            wait()

    return LostWorkers()


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerHost:
    """Runs one TorchTrainer."""

    def __init__(self) -> None:
        import ray.train.torch  # noqa: F401  imports it before `fit` is called

    def fit(self, worker_config: WorkerConfig, scaling: Scaling, name: str, folder: str) -> None:
        """Trains, and returns when all workers have ended.

        Args:
            worker_config: What every worker gets.
            scaling: How many workers there are, and with which resources.
            name: Of Ray Train's run.
            folder: For Ray Train's files.
        """
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        callback = lost_workers(worker_config["uplink"])
        backend = "cpu:gloo,cuda:nccl" if scaling["use_gpu"] else "gloo"
        # Type checkers see the ScalingConfig of Ray Train V1, which has no label_selector.
        scaling_arguments: dict[str, Any] = dict(scaling)
        trainer = TorchTrainer(
            run_worker,
            train_loop_config=dict(worker_config),
            scaling_config=ScalingConfig(**scaling_arguments),
            run_config=RunConfig(name=name, storage_path=folder, callbacks=[callback]),
            torch_config=TorchConfig(backend=backend),
        )
        trainer.fit()
