"""The actors beside the driver: the queue between it and its workers, and the host of a trainer.

Metrics do not go through `ray.train.report`, which is a barrier over all ranks. Little is imported
at the top, and values pass through pickled already, so that these processes start sooner: without
the strategies and the loop, which only workers need. The driver starts sooner without Ray Train.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypedDict

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.training.events import WorkerDied

if TYPE_CHECKING:
    from app.launchers.heartbeats import Answer, Beat

StoreAddress = tuple[str, int]
"""Host and port of the store in which ranks meet."""


def start_here(actor_class: Any) -> Any:
    """Starts an actor on this node.

    The affinity is hard, because Ray would otherwise put an actor without CPUs on a random node,
    which a worker may not be able to reach.
    """
    this_node = ray.get_runtime_context().get_node_id()
    affinity = NodeAffinitySchedulingStrategy(this_node, soft=False)
    return actor_class.options(scheduling_strategy=affinity).remote()


@ray.remote(num_cpus=0)
class EventQueue:
    """Events of workers for the driver, questions of the driver, and where ranks meet.

    Calls of workers of an earlier attempt are ignored.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Forgets everything, for a new attempt."""
        self.attempt = attempt
        self.events: list[bytes] = []
        self.beats: dict[int, tuple[Beat, float]] = {}
        """Each rank's newest heartbeat, and when it came."""
        self.answers: dict[int, str] = {}
        self.stop = False
        self.question = ""
        self.question_number = 0
        self.nodes: dict[int, str] = {}
        """The node's id of each rank that has joined."""
        self.store: StoreAddress | None = None

    # --- workers ----------------------------------------------------------------------------------

    def put(self, attempt: int, events: bytes) -> None:
        """Takes events, as a pickled list."""
        if attempt == self.attempt:
            self.events.append(events)

    def beat(
        self, attempt: int, rank: int, beat: Beat, answer: Answer | None
    ) -> tuple[bool, str, int]:
        """Takes a heartbeat and an answer.

        Returns:
            Whether to stop, the question, and its number.
        """
        if attempt != self.attempt:
            return True, "", 0
        self.beats[rank] = (beat, time.monotonic())
        if answer is not None:
            number, text = answer
            if number == self.question_number:
                self.answers[rank] = text
        return self.stop, self.question, self.question_number

    def join(self, attempt: int, rank: int, node: str, store: StoreAddress | None) -> None:
        """Notes that a rank has started.

        Args:
            attempt: Of the rank.
            rank: The rank.
            node: The id of its node.
            store: On rank 0 the address of the store where ranks meet; None on others.
        """
        if attempt == self.attempt:
            self.nodes[rank] = node
            self.store = store or self.store

    def meeting(self, attempt: int, world_size: int) -> tuple[list[str], StoreAddress] | None:
        """The node of each rank and the store's address; None until all ranks have joined."""
        if attempt != self.attempt or len(self.nodes) < world_size or self.store is None:
            return None
        return [self.nodes[rank] for rank in range(world_size)], self.store

    # --- the driver -------------------------------------------------------------------------------

    def drain(self, stop: bool) -> tuple[list[bytes], dict[int, tuple[Beat, float]]]:
        """Returns the events since the last call, and the newest heartbeats.

        Args:
            stop: Whether the workers are to save and stop.

        Returns:
            Lists of events, pickled; each rank's heartbeat and its age in seconds.
        """
        self.stop = self.stop or stop
        events = self.events
        self.events = []
        now = time.monotonic()
        beats = {rank: (beat, now - clock) for rank, (beat, clock) in self.beats.items()}
        return events, beats

    def ask(self, question: str) -> None:
        """Asks every rank."""
        self.question = question
        self.question_number += 1
        self.answers = {}

    def answered(self) -> dict[int, str]:
        """The answers so far, by rank."""
        return dict(self.answers)


# --- Ray Train ------------------------------------------------------------------------------------


class WorkerConfig(TypedDict):
    """What every worker of Ray Train gets.

    Args:
        function: The function that it runs, pickled; called with this dictionary.
        job: The job, pickled.
        queue: The EventQueue.
        attempt: The number of the attempt.
    """

    function: bytes
    job: bytes
    queue: Any
    attempt: int


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


def lost_workers(queue: Any, attempt: int) -> Any:
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
            ray.get(queue.put.remote(attempt, ray.cloudpickle.dumps(events)))

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

        callback = lost_workers(worker_config["queue"], worker_config["attempt"])
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
