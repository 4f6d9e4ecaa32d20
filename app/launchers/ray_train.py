"""Launcher: Ray Train's TorchTrainer starts the workers, watches them, and sets up their process group.

Metrics do not go through `ray.train.report`, which is a barrier over all ranks: rank 0 sends its events to an `Inbox`
actor (no CPU of its own, on the driver's node), and the driver reads them there. Checkpoints are ours too, so a
restart is a new worker group that finds the newest commit by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer

from app.driver import Driver
from app.errors import Interrupted, NonFiniteError, RunFailed, UserError
from app.faults import Failure, Kind, decide
from app.job import Job, Place
from app.launchers.output import worker_output
from app.storage import Storage

POLL_SECONDS = 0.1
# Ray Train's controller looks at its workers at this interval, and a group ends no sooner than it looks.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION", "0")


@ray.remote(num_cpus=0)
class Inbox:
    """What workers have said and the driver has not yet heard; and whether they are to stop."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.stop = False

    def put(self, events: list[dict[str, Any]]) -> bool:
        self.events += events
        return self.stop

    def drain(self, stop: bool) -> list[dict[str, Any]]:
        self.stop = self.stop or stop
        events, self.events = self.events, []
        return events


class InboxChannel:
    """A worker's Channel. Sending does not wait; metrics wait for the next other event, about a second."""

    def __init__(self, inbox: Any, rank: int) -> None:
        self.inbox, self.rank = inbox, rank
        self.waiting: list[dict[str, Any]] = []
        self.answer: Any = None
        self.stop = False

    def emit(self, event: dict[str, Any]) -> None:
        if self.rank and event["type"] not in ("warning", "system"):
            return
        self.waiting.append(event)
        if event["type"] != "metrics":
            events, self.waiting = self.waiting, []
            self.answer = self.inbox.put.remote(events)

    def stop_requested(self) -> bool:
        if self.answer is not None and ray.wait([self.answer], timeout=0)[0]:
            self.stop = self.stop or ray.get(self.answer)
            self.answer = None
        return self.stop


def worker_main(loop: dict[str, Any]) -> None:
    """What every Ray Train worker runs."""
    from ray.train import get_context
    from ray.train.torch import get_device

    from app import worker
    from app.tracking.system import SystemSampler

    context, job = get_context(), loop["job"]
    if os.path.isdir(job.cwd):  # Ray Train puts workers in a folder of its own, where relative paths mean nothing
        os.chdir(job.cwd)
        sys.path.insert(0, job.cwd)
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    channel = InboxChannel(loop["inbox"], rank)
    with worker_output(Storage(job.folder), rank), contextlib.ExitStack() as stack:
        if local_rank == 0:  # one worker of each node watches it
            node, every = f"node-{context.get_node_rank()}", job.config.tracking.system_metrics_every
            sampler = SystemSampler(lambda event: channel.emit({"type": "system", "event": event}), node, every)
            stack.callback(sampler.close)
        summary = worker.train(job, Place(rank, context.get_world_size(), local_rank, get_device()), channel)
        channel.emit({"type": "done", "summary": summary})
        if channel.answer is not None:
            ray.get(channel.answer)  # the process may end as soon as this function has


def launch(job: Job, driver: Driver, *, workers: int, per_worker: dict[str, float]) -> None:
    """Trains, starting the workers again after a failure as long as `decide` says so.

    Raises:
        UserError, NonFiniteError: a worker found something that trying again cannot mend.
        RunFailed: the restarts are used up.
        Interrupted: asked to stop, and the checkpoint is saved.
    """
    history: list[Failure] = []
    while True:
        error = _attempt(job, driver, workers, per_worker, len(history))
        if error is None:
            break
        failure = classify(error, driver)
        history.append(failure)
        decision = decide(history, job.config.fault.max_restarts)
        if not decision.retry:
            raise root_cause(error, decision.reason)
        driver.console.say(f"{failure.sentence}; starting again from the last checkpoint")
        driver.tracker.tags({"trireme.restarts": str(len(history)), "trireme.last_failure": failure.sentence})
    if driver.summary.get("stopped"):
        raise Interrupted(f"stopped after step {driver.summary['step']:,}")


def _attempt(job: Job, driver: Driver, workers: int, per_worker: dict[str, float], number: int) -> BaseException | None:
    """One worker group's life; what ended it, or None if it finished."""
    here = ray.get_runtime_context().get_node_id()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=True)
    inbox = Inbox.options(scheduling_strategy=affinity).remote()  # type: ignore[attr-defined]
    use_gpu = per_worker.get("GPU", 0) > 0
    trainer = TorchTrainer(
        worker_main,
        train_loop_config={"job": job, "inbox": inbox},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=per_worker),
        run_config=RunConfig(name=f"{job.attempt}-{number}", storage_path=_train_folder(job.folder)),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
    )
    ended: list[BaseException | None] = []

    def fit() -> None:
        try:
            trainer.fit()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=fit, daemon=True, name="fit")
    thread.start()
    while thread.is_alive():
        _hear(inbox, driver)
        thread.join(POLL_SECONDS)
    _hear(inbox, driver)
    ray.kill(inbox)
    return ended[0]


def _hear(inbox: Any, driver: Driver) -> None:
    for event in ray.get(inbox.drain.remote(driver.stop_requested())):
        driver.emit(event)


# --- what went wrong --------------------------------------------------------------------------------------------


def classify(error: BaseException, driver: Driver) -> Failure:
    """What ended a worker group, in one sentence, and what kind of thing it was."""
    rank, cause = first_cause(error)
    original = getattr(cause, "_base_exc", cause)
    if isinstance(original, UserError | NonFiniteError | RunFailed):
        kind, sentence = Kind.HOPELESS, str(original)
    elif _is_death(original):
        kind, sentence = Kind.DIED, f"worker {rank} died" if rank is not None else "a worker died"
    else:
        text = (str(original).strip().splitlines() or [""])[0]
        at = f" on worker {rank}" if rank is not None else ""
        log = f" (see {driver.run.local_folder}/logs/rank-{rank}.log)" if rank is not None else ""
        kind, sentence = Kind.EXCEPTION, f"{type(original).__name__}{at}: {text}{log}"
    return Failure(kind, sentence, driver.step, driver.progressed)


def root_cause(error: BaseException, reason: str) -> Exception:
    """What to raise when the run is given up."""
    original = getattr(first_cause(error)[1], "_base_exc", None)
    if isinstance(original, UserError | NonFiniteError):
        return original
    return RunFailed(reason)


def first_cause(error: BaseException) -> tuple[int | None, BaseException]:
    """The rank and the exception that came first: a peer that lost its connection is a consequence."""
    if not isinstance(error, WorkerGroupError) or not error.worker_failures:
        return None, getattr(error, "controller_failure", error)

    def order(item: tuple[int, BaseException]) -> int:
        original = getattr(item[1], "_base_exc", item[1])
        if isinstance(original, UserError | NonFiniteError):
            return 0
        if _is_death(original):
            return 1
        return 3 if _is_consequence(original) else 2

    return min(error.worker_failures.items(), key=order)


def _is_death(error: BaseException) -> bool:
    return type(error).__name__.startswith("WorkerHealthCheck") or isinstance(error, ray.exceptions.RayActorError)


def _is_consequence(error: BaseException) -> bool:
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "connectFullMesh", "NCCL", "Broken pipe", "gloo")
    return type(error).__name__.startswith("Dist") or any(sign in text for sign in signs)


def clean_up(folder: str) -> None:
    """Removes what Ray Train left in the run's folder; nothing of it is needed again."""
    with contextlib.suppress(OSError):
        Storage(_train_folder(folder)).remove_tree()


def _train_folder(folder: str) -> str:
    """Where Ray Train keeps its own few files; every node must see it, so it is in the run's folder."""
    return f"{folder}/.ray_train"
