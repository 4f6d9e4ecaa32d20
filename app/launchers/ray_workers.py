"""What both launchers in Ray share: the driver's `RayWorkers`, and what every worker has around its training.

A worker's events and heartbeats go to the `EventQueue`, its output to a file of its own. One worker of each node
samples the node's system metrics and watches for a preemption notice, at which all save a checkpoint.
"""

import contextlib
import os
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import ray
from ray import cloudpickle

from app.console.terminal import worker_output
from app.launchers.driver_actors import EventQueue, start_here
from app.launchers.heartbeats import Beat, HeartbeatThread, Reply
from app.launchers.recovery import oom_kills
from app.launchers.room import is_placed, on_node
from app.launchers.threads import set_by_user, share, take, usable_cores
from app.launchers.workers import (
    Failures,
    Poll,
    Status,
    WorkerLost,
    Workers,
    kill_process,
    start_system_sampler,
)
from app.training.events import (
    FROM_ANY_RANK,
    Event,
    MetricsLogged,
    NodePreempted,
    WorkerDied,
    WorkerFailed,
    WorkerInfo,
    WorkerStarted,
)
from app.training.job import Job, Place, SilentChannel
from cluster.environment import THREADS
from cluster.ray_internals import raylet_pid

POLL_SECONDS = 0.05
ANSWER_SECONDS = 3.0
GATHER_SECONDS = 3.0
"""After the first failure, for the others' exceptions: one of them may be the cause."""


class RayWorkers(Workers):
    """Base of both launchers; a subclass starts and ends the processes."""

    restartable = True

    def __init__(self) -> None:
        self.queue: Any = start_here(EventQueue)
        self.queue_died = False
        self.attempt = 0

    def begin_attempt(self, world_size: int) -> None:
        self.attempt, self.world_size = self.attempt + 1, world_size
        self.infos: dict[int, WorkerInfo] = {}
        self.failures: dict[int | None, BaseException] = {}
        self.failed_at: float | None = None
        self.finished = False
        if self.queue_died:
            self.queue, self.queue_died = start_here(EventQueue), False
        self.queue.begin.remote(self.attempt)

    # --- the interface ------------------------------------------------------------------------------------------

    def poll(self, stop: bool) -> Poll:
        self.wait()
        try:
            said, beats = ray.get(self.queue.drain.remote(stop))
        except ray.exceptions.RayActorError as error:
            self.queue_died = True
            return Poll(ended={None: WorkerLost("the process between the driver and its workers", str(error))})
        events = [event for part in said for event in cloudpickle.loads(part)]
        statuses = {rank: Status(*beat) for rank, beat in beats.items()}
        self.finished = len(statuses) == self.world_size and all(s.phase == "finished" for s in statuses.values())
        events = [event for event in events if not self._take(event)]
        return Poll(events, statuses, self._ended(), placed=bool(self.infos) or is_placed())

    def ask(self, question: str) -> dict[int, str]:
        ray.get(self.queue.ask.remote(question))
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            found = ray.get(self.queue.answered.remote())
            if len(found) == self.world_size or time.monotonic() > until:
                return found
            time.sleep(0.1)

    def kill(self, infos: list[WorkerInfo]) -> None:
        for info in infos:
            on_node(info.node, kill_process, info.pid)

    def close(self) -> None:
        """Ends what outlives attempts."""
        self.stop()
        ray.kill(self.queue)

    # --- for subclasses -----------------------------------------------------------------------------------------

    @abstractmethod
    def wait(self) -> None:
        """Waits a fraction of a second, until something has happened to the processes."""

    @abstractmethod
    def lost(self) -> Failures:
        """The ranks whose processes have ended without an exception of their own, as far as is known."""

    def _take(self, event: Event) -> bool:
        """Keeps what is this object's own; whether that is all of the event."""
        match event:
            case WorkerStarted(info=info):
                self.infos[info.rank] = info
            case WorkerFailed(rank=rank, error=error):
                self.failures.setdefault(rank, error)
                return True
            case WorkerDied(rank=rank, details=details):
                self.failures.setdefault(rank, WorkerLost(details=details))
                return True
        return False

    def _ended(self) -> Failures | None:
        for rank, error in self.lost().items():
            self.failures.setdefault(rank, error)
        if not self.failures:
            return {} if self.finished else None
        now = time.monotonic()
        self.failed_at = self.failed_at or now
        complete = len(self.failures) >= self.world_size or any(
            isinstance(error, WorkerLost) for error in self.failures.values()
        )
        return dict(self.failures) if complete or now - self.failed_at > GATHER_SECONDS else None

    def end_attempt(self) -> None:
        """Ends every process that is known, also stopped ones, which Ray's own way would wait for."""
        if not self.finished:
            self.kill(list(self.infos.values()))


def error_of(call: Any, who: str = "") -> BaseException | None:
    """With what a call that has ended did so: its own exception, or a WorkerLost of `who`."""
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return getattr(error, "cause", None) or error
    except ray.exceptions.RayError as error:
        return WorkerLost(who, str(error))
    return None


# --- in a worker ------------------------------------------------------------------------------------------------------


class RayChannel(SilentChannel):
    """A worker's Channel. Sending does not wait; metrics wait for the next other event, about a second."""

    def __init__(self, queue: Any, attempt: int, rank: int) -> None:
        super().__init__()
        self.queue, self.attempt, self.rank = queue, attempt, rank
        self._waiting: list[Event] = []
        self._newest: Any = None
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        if self.rank and not isinstance(event, FROM_ANY_RANK):
            return
        with self._lock:
            self._waiting.append(event)
            if not isinstance(event, MetricsLogged):
                events, self._waiting = self._waiting, []
                self._newest = self.queue.put.remote(self.attempt, cloudpickle.dumps(events))

    def send_beat(self, beat: Beat, answer: tuple[int, str] | None) -> Reply:
        return Reply(*ray.get(self.queue.beat.remote(self.attempt, self.rank, beat, answer)))

    def on_reply(self, reply: Reply) -> None:
        self.stopping = self.stopping or reply.stop

    def failed(self, error: BaseException) -> None:
        """Tells the driver with what exception this rank ends."""
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # an exception that cannot travel
            error = RuntimeError(f"{type(error).__name__}: {error}")
        self.emit(WorkerFailed(rank=self.rank, error=error))
        self.flush()

    def flush(self) -> None:
        """Waits until what was sent has arrived: the process may end as soon as its work has."""
        if self._newest is not None:
            ray.get(self._newest)


@contextlib.contextmanager
def surroundings(job: Job, place: Place, channel: RayChannel, node_rank: int) -> Iterator[None]:
    """What every worker has around its training: output in a file, heartbeats, metrics of its node, news at the end."""
    with worker_output(job, place.rank), contextlib.ExitStack() as stack:
        beats = HeartbeatThread(channel.heartbeat, channel.send_beat, channel.on_reply)
        stack.callback(beats.close)
        if place.local_rank == 0:
            every = job.config.tracking.system_metrics_every
            sampler = start_system_sampler(channel, f"node-{node_rank}", every)
            stack.callback(sampler.close)
            stack.callback(_watch_preemption(job, channel).close)
        try:
            yield
        except BaseException as error:
            channel.failed(error)
            raise
        channel.flush()
        channel.heartbeat.phase = "finished"
        channel.send_beat(beats.beat(), None)


def enter(job: Job, channel: RayChannel, label: str = "") -> WorkerInfo:
    """The first thing a worker does: goes to the driver's folder, and says where it is."""
    work_in(job.cwd)
    info = WorkerInfo(
        rank=channel.rank,
        pid=os.getpid(),
        ip=ray.util.get_node_ip_address(),
        node=ray.get_runtime_context().get_node_id(),
        label=label,
        oom_kills=oom_kills(),
    )
    channel.emit(WorkerStarted(info=info))
    return info


def work_in(folder: str) -> None:
    """Goes to the driver's folder, and takes the number of threads that Ray has set for this process; one with GPUs its
    share of the node's cores."""
    import torch

    if os.path.isdir(folder):  # Ray puts workers in folders of their own, where relative paths mean nothing
        os.chdir(folder)
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if threads := _share_of_cores():
        take(threads)
    elif (wanted := os.environ.get(THREADS, "")).isdigit() and int(wanted) != torch.get_num_threads():
        torch.set_num_threads(int(wanted))


def _share_of_cores() -> int:
    """Threads of a worker with GPUs; 0 where it has none, or the user has set their number."""
    here = ray.get_runtime_context()
    own = here.get_assigned_resources().get("GPU", 0.0)
    asked = here.runtime_env.get("env_vars") or {}
    if not own or THREADS in asked or set_by_user(raylet_pid()):
        return 0
    gpus = next(
        (node["Resources"].get("GPU", own) for node in ray.nodes() if node["NodeID"] == here.get_node_id()), own
    )
    return share(usable_cores(), gpus, own)


def _watch_preemption(job: Job, channel: RayChannel) -> Any:
    """Has a checkpoint saved when this node is about to be taken away, and tells the driver."""
    from cluster.preemption import PreemptionWatcher

    def on_notice(why: str) -> None:
        channel.heartbeat.save_requested = True
        text = f"the node {ray.util.get_node_ip_address()} is about to go ({why}): saving a checkpoint"
        node = ray.get_runtime_context().get_node_id()
        channel.emit(NodePreempted(node=node, reason=why, message=text))

    return PreemptionWatcher(job.spot_provider, on_notice)
