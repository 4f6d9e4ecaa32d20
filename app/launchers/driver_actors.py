"""The actors beside the driver: the queue between it and the workers in Ray, and the host of Ray Train's trainer.

Metrics do not go through `ray.train.report`, which is a barrier over all ranks. Little is imported at the top, and what
passes through is pickled already: these processes start sooner without the strategies and the loop, which only workers
need, and the driver without Ray Train.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.training.events import WorkerDied

if TYPE_CHECKING:
    from app.launchers.heartbeats import Beat


def start_here(actor: Any) -> Any:
    """An actor of this class on this node. The affinity must be hard: Ray puts an actor without CPUs on a random node
    otherwise, and a worker may not reach that one."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return actor.options(scheduling_strategy=here).remote()


@ray.remote(num_cpus=0)
class EventQueue:
    """What workers have sent and the driver has not yet read, what the driver asks, and where ranks meet. Calls of
    workers of an earlier attempt are ignored."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, attempt: int) -> None:
        self.attempt = attempt
        self.events: list[bytes] = []
        self.beats: dict[int, tuple[Beat, float]] = {}
        self.answers: dict[int, str] = {}
        self.stop = False
        self.question, self.number = "", 0
        self.members: dict[int, str] = {}
        self.store: tuple[str, int] | None = None

    # --- workers ------------------------------------------------------------------------------------------------

    def put(self, attempt: int, events: bytes) -> None:
        if attempt == self.attempt:
            self.events.append(events)

    def beat(self, attempt: int, rank: int, beat: Beat, answer: tuple[int, str] | None) -> tuple[bool, str, int]:
        """Takes a heartbeat and an answer; returns whether to stop, the question, and its number."""
        if attempt != self.attempt:
            return True, "", 0
        self.beats[rank] = beat, time.monotonic()
        if answer is not None and answer[0] == self.number:
            self.answers[rank] = answer[1]
        return self.stop, self.question, self.number

    def join(self, attempt: int, rank: int, node: str, store: tuple[str, int] | None) -> None:
        """A rank is there, on this node; rank 0 brings the address of the store where they meet."""
        if attempt == self.attempt:
            self.members[rank] = node
            self.store = store or self.store

    def everyone(self, attempt: int, world_size: int) -> tuple[list[str], tuple[str, int]] | None:
        """The node of each rank and the store's address, once all have joined."""
        if attempt != self.attempt or len(self.members) < world_size or self.store is None:
            return None
        return [self.members[rank] for rank in range(world_size)], self.store

    # --- the driver ---------------------------------------------------------------------------------------------

    def drain(self, stop: bool) -> tuple[list[bytes], dict[int, tuple[Any, ...]]]:
        """The events since the last call, and each rank's newest heartbeat, its age in seconds last."""
        self.stop = self.stop or stop
        events, self.events = self.events, []
        now = time.monotonic()
        return events, {rank: (*beat, now - at) for rank, (beat, at) in self.beats.items()}

    def ask(self, question: str) -> None:
        self.question, self.number, self.answers = question, self.number + 1, {}

    def answered(self) -> dict[int, str]:
        return dict(self.answers)


# --- Ray Train --------------------------------------------------------------------------------------------------------


def run_worker(given: dict[str, Any]) -> None:
    """What every worker of Ray Train runs: the function that it is given."""
    ray.cloudpickle.loads(given["function"])(given)


def lost_workers(queue: Any, attempt: int) -> Any:
    """A callback that tells the driver at once which workers are gone; `fit` returns only when Ray Train has cleaned
    up."""
    from ray.train import UserCallback

    class LostWorkers(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            events = [WorkerDied(rank=rank, details=str(error)) for rank, error in worker_exceptions.items()]
            ray.get(queue.put.remote(attempt, ray.cloudpickle.dumps(events)))

    return LostWorkers()


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerHost:
    """Runs one TorchTrainer."""

    def __init__(self) -> None:
        import ray.train.torch  # noqa: F401  before it is asked for

    def fit(self, given: dict[str, Any], scaling: dict[str, Any], name: str, folder: str) -> None:
        """given: of `ray_train.train_loop`. scaling: of `ray.train.ScalingConfig`. folder: for its files."""
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        callbacks: list[Any] = [lost_workers(given["queue"], given["attempt"])]
        TorchTrainer(
            run_worker,
            train_loop_config=given,
            scaling_config=ScalingConfig(**scaling),
            run_config=RunConfig(name=name, storage_path=folder, callbacks=callbacks),
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if scaling["use_gpu"] else "gloo"),
        ).fit()
