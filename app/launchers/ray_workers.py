"""What both launchers in Ray share, in the driver (`RayWorkers`) and around a worker's training.

A worker's events and heartbeats go to the `EventQueue`, or to the driver itself if it has started
Ray for itself, and its output to a file of its own. One worker of each node samples the node's
system metrics and watches for a preemption notice, at which all workers save a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray import cloudpickle

from app.console.terminal import LOG_TIME, worker_output
from app.errors import keep_line, own_line
from app.launchers.aggregator import (
    DIRECT_RANKS,
    Answer,
    Beat,
    RankAssignment,
    StoreAddress,
)
from app.launchers.driver_actors import ActorQueue, QueueDied, Uplink, start_aggregators
from app.launchers.event_socket import LocalQueue
from app.launchers.heartbeats import HeartbeatThread, Reply, with_ranks
from app.launchers.recovery import oom_kills
from app.launchers.room import on_node, placed_nodes
from app.launchers.threads import set_by_user, share, take, usable_cores
from app.launchers.workers import (
    Failures,
    Poll,
    Status,
    WorkerLost,
    Workers,
    kill_processes,
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
from cluster.connect import Cluster
from cluster.environment import THREADS
from cluster.ray_internals import raylet_pid

if TYPE_CHECKING:
    from cluster.preemption import PreemptionWatcher

POLL_SECONDS = 0.2
"""Between two polls; the end of a worker is noticed at once."""
LOOK_SECONDS = 0.0002
"""Between two looks whether the workers have their places, for each worker."""
ANSWER_SECONDS = 3.0
"""How long ranks may take to answer a question."""
GATHER_SECONDS = 3.0
"""How long to wait, after the first failure, for those of other ranks: one may be the cause."""


def queue_for(cluster: Cluster) -> ActorQueue | LocalQueue:
    """The queue of a run's workers: in this process if they cannot be on another machine."""
    return LocalQueue(cluster.folder) if cluster.folder is not None else ActorQueue()


class RayWorkers(Workers):
    """Base of both launchers; a subclass starts and ends the processes.

    Args:
        queue: The messages between the workers and the driver.
    """

    restartable = True

    def __init__(self, queue: ActorQueue | LocalQueue) -> None:
        self.queue = queue
        self.attempt = 0
        self.aggregators: dict[str, Any] = {}
        """By the id of their node; {} if ranks report to the queue itself."""

    def begin_attempt(self, job: Job) -> None:
        """Forgets the attempt before, for one of this job."""
        self.attempt += 1
        self.world_size = job.layout.dims.world_size
        self.begun: set[int] = set()
        """Ranks that have sent a heartbeat."""
        self.finished_ranks: set[int] = set()
        self.silent: frozenset[int] = frozenset()
        """Ranks that do not answer."""
        self.placed = False
        self.look_clock = 0.0
        """When it was last looked whether the workers have their places."""
        self.infos: dict[int, WorkerInfo] = {}
        self.failures: dict[int | None, BaseException] = {}
        self.failure_clock: float | None = None
        """When the first failure came, in seconds of the monotonic clock."""
        self.finished = False
        self.queue.begin(self.attempt, self.world_size)
        if isinstance(self.queue, LocalQueue):
            self.uplink = Uplink(attempt=self.attempt, socket=self.queue.path)
        else:
            prefix = f"{job.attempt}/{self.attempt}" if self.world_size > DIRECT_RANKS else ""
            self.uplink = Uplink(attempt=self.attempt, queue=self.queue.actor, prefix=prefix)

    # --- the interface ----------------------------------------------------------------------------

    def poll(self, stop: bool) -> Poll:
        """See `Workers`."""
        self.wait()
        # A rank sends its exception, with the line of a person's own code, and waits until that has
        # arrived, before its call ends. So what has ended is looked up first.
        lost = self.lost()
        try:
            report = self.queue.drain(stop)
        except QueueDied as error:
            lost_queue = WorkerLost("the process between the driver and its workers", str(error))
            return Poll(ended={None: lost_queue})
        statuses: dict[int, Status] = {}
        for beat, ranks in report.beats.items():
            statuses |= dict.fromkeys(ranks, Status.of(beat))
            if beat[0] == "finished":
                self.finished_ranks.update(ranks)
        self.begun |= statuses.keys()
        self.finished = len(self.finished_ranks) == self.world_size
        if report.silent is not None:
            self.silent = report.silent
        events: list[Event] = []
        for pickled_list in report.events:
            for event in cloudpickle.loads(pickled_list):
                if not self._take(event):
                    events.append(event)
        return Poll(
            events=events,
            statuses=statuses,
            silent=self.silent,
            ended=self._ended(lost),
            placed=self._look_for_places(),
        )

    def _look_for_places(self) -> bool:
        """Whether every worker has its place; starts the aggregators of their nodes then."""
        if len(self.begun) == self.world_size or (self.infos and not self.uplink.prefix):
            return True
        now = time.monotonic()
        # The more places, the longer looking takes, and the more seldom it is done.
        if now - self.look_clock >= LOOK_SECONDS * self.world_size:
            self.look_clock = now
            nodes = placed_nodes()
            self.placed = bool(nodes)
            if self.uplink.prefix:
                start_aggregators(
                    self.uplink.queue, self.attempt, self.uplink.prefix, nodes, self.aggregators
                )
        return self.placed

    def ask(self, question: str, ranks: Collection[int] = ()) -> dict[int, str]:
        """See `Workers`."""
        self.queue.ask(with_ranks(question, ranks))
        expected = len(ranks) or self.world_size
        answers: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < expected and time.monotonic() < deadline:
            time.sleep(0.1)
            for text, answering_ranks in self.queue.answered().items():
                answers |= dict.fromkeys(answering_ranks, text)
        return answers

    def kill(self, infos: list[WorkerInfo]) -> None:
        """See `Workers`."""
        pids_by_node: dict[str, list[int]] = defaultdict(list)
        for info in infos:
            pids_by_node[info.node].append(info.pid)
        for node, pids in pids_by_node.items():
            on_node(node, kill_processes, pids)

    def close(self) -> None:
        """Ends what outlives attempts."""
        self.stop()
        self.queue.close()

    # --- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def wait(self) -> None:
        """Waits until something has happened to the processes, a fraction of a second at most."""

    @abstractmethod
    def lost(self) -> Failures:
        """Ranks whose processes or calls have ended with an error, as far as known.

        The rank None has an error of the whole attempt, which the errors of ranks explain better.
        """

    def _take(self, event: Event) -> bool:
        """Notes what concerns this object; returns whether the event is then done with."""
        match event:
            case WorkerStarted(info=info):
                self.infos[info.rank] = info
            case WorkerFailed(rank=rank, error=error, line=line):
                keep_line(error, line)
                self.failures.setdefault(rank, error)
                return True
            case WorkerDied(rank=rank, details=details):
                self.failures.setdefault(rank, WorkerLost(details=details))
                return True
        return False

    def _ended(self, lost: Failures) -> Failures | None:
        """What ended the attempt; None while it runs, or other ranks may still say why."""
        for rank, error in lost.items():
            if rank is not None or not self.failures:
                self.failures.setdefault(rank, error)
        if not self.failures:
            return {} if self.finished else None
        now = time.monotonic()
        if self.failure_clock is None:
            self.failure_clock = now
        all_have_failed = len(self.failures) >= self.world_size
        one_died = any(isinstance(error, WorkerLost) for error in self.failures.values())
        if all_have_failed or one_died or now - self.failure_clock > GATHER_SECONDS:
            return dict(self.failures)
        return None

    def end_attempt(self) -> None:
        """Ends every process that is known, even stopped ones, for which Ray itself would wait."""
        if not self.finished:
            self.kill(list(self.infos.values()))
        for aggregator in self.aggregators.values():
            ray.kill(aggregator)
        self.aggregators = {}


def error_of(call: ray.ObjectRef[None], who: str = "") -> BaseException | None:
    """The error that a call has ended with.

    Args:
        call: The reference of a call that has ended.
        who: Names the process of the call.

    Returns:
        The call's own exception; a WorkerLost if its process has died; None without an error.
    """
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return getattr(error, "cause", None) or error
    except ray.exceptions.RayError as error:
        return WorkerLost(who, str(error))
    return None


# --- in a worker ----------------------------------------------------------------------------------


class RayChannel(SilentChannel):
    """A worker's Channel.

    Sending does not wait. Metrics are sent with the next event of another kind, after about a
    second.

    Args:
        uplink: How it reaches the driver.
        rank: Of the worker.
    """

    def __init__(self, uplink: Uplink, rank: int) -> None:
        super().__init__()
        self.attempt = uplink.attempt
        self.above = uplink.find()
        self.rank = rank
        self._unsent: list[Event] = []
        self._wait_for_newest: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """See `Channel`."""
        if self.rank and not isinstance(event, FROM_ANY_RANK):
            return
        with self._lock:
            self._unsent.append(event)
            if isinstance(event, MetricsLogged):
                return
            pickled_events = cloudpickle.dumps(self._unsent)
            self._unsent = []
            is_urgent = isinstance(event, WorkerFailed | NodePreempted)
            self._wait_for_newest = self.above.put(self.attempt, pickled_events, is_urgent)

    def join(self, info: WorkerInfo, store: StoreAddress | None) -> None:
        """Reports that this rank has started, and on rank 0 where the ranks meet."""
        self.above.join(self.attempt, self.rank, info.node, store)

    def meeting(self, info: WorkerInfo) -> RankAssignment | None:
        """What this rank learns when all have started; None before."""
        return self.above.meeting(self.attempt, self.rank, info.node)

    def node_rank(self, node: str) -> int:
        """The number of a node, once all ranks have started."""
        return self.above.node_rank(self.attempt, node)

    def send_beat(self, beat: Beat, answer: Answer | None) -> Reply:
        """Sends a heartbeat and an answer, and waits for the driver's reply."""
        orders = self.above.beat(self.attempt, self.rank, beat, answer)
        return Reply(stop=orders.stop, question=orders.question, number=orders.number)

    def on_reply(self, reply: Reply) -> None:
        """Notes whether to stop."""
        self.stopping = self.stopping or reply.stop

    def failed(self, error: BaseException) -> None:
        """Tells the driver the exception that this rank ends with."""
        line = own_line(error)
        self.emit(WorkerFailed(rank=self.rank, error=picklable(error), line=line))
        self.flush()

    def flush(self) -> None:
        """Waits until what was sent has arrived: the process may end as soon as its work has."""
        self._wait_for_newest()


AnyError = TypeVar("AnyError", bound=BaseException)


def picklable(error: AnyError) -> AnyError | RuntimeError:
    """An exception, or one with the same words if it cannot go to another process."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextlib.contextmanager
def surroundings(job: Job, place: Place, channel: RayChannel, node_rank: int) -> Iterator[None]:
    """Surrounds every worker's training: a log, heartbeats, its node's metrics, and its end.

    Args:
        job: What is trained.
        place: The worker's place among the others.
        channel: Of the worker.
        node_rank: The number of the worker's node.
    """
    with worker_output(job, place.rank), contextlib.ExitStack() as stack:
        heartbeats = HeartbeatThread(
            channel.heartbeat, channel.send_beat, channel.on_reply, rank=place.rank
        )
        stack.callback(heartbeats.close)
        if place.local_rank == 0:
            every = job.config.tracking.system_metrics_every
            sampler = start_system_sampler(channel, f"node-{node_rank}", every)
            stack.callback(sampler.close)
            stack.callback(_watch_preemption(job, channel).close)
        _log_place(job, place)
        try:
            yield
        except BaseException as error:
            channel.failed(error)
            raise
        channel.flush()
        channel.heartbeat.phase = "finished"
        print(f"{time.strftime(LOG_TIME)} finished", flush=True)
        channel.send_beat(heartbeats.beat(), None)


def _log_place(job: Job, place: Place) -> None:
    """Writes into a worker's log where it runs and what it trains, so that no log is empty."""
    print(
        f"{time.strftime(LOG_TIME)} rank {place.rank} of {place.world_size}, process {os.getpid()} "
        f"on {socket.gethostname()}, {place.device}: trains {job.config.run.name} as {job.layout}",
        flush=True,
    )


def enter(job: Job, channel: RayChannel, label: str = "") -> WorkerInfo:
    """Begins a worker: changes to the driver's folder, and tells the driver where the worker is.

    Args:
        job: What is trained.
        channel: Of the worker.
        label: Describes the worker, such as "stage 2 of 4".
    """
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
    """Changes to the driver's folder, and sets the number of CPU threads.

    A worker with GPUs takes its share of the node's cores; another one takes the number that Ray
    has set for its process.
    """
    import torch

    # Ray starts workers in folders of their own, where relative paths mean nothing.
    if os.path.isdir(folder):
        os.chdir(folder)
        if folder not in sys.path:
            sys.path.insert(0, folder)
    threads = _share_of_cores()
    if threads:
        take(threads)
        return
    threads_of_ray = os.environ.get(THREADS, "")
    if threads_of_ray.isdigit() and int(threads_of_ray) != torch.get_num_threads():
        torch.set_num_threads(int(threads_of_ray))


def _share_of_cores() -> int:
    """Threads of a worker with GPUs; 0 if it has none, or the user has set the number."""
    context = ray.get_runtime_context()
    worker_gpus = context.get_assigned_resources().get("GPU", 0.0)
    variables = context.runtime_env.get("env_vars") or {}
    if not worker_gpus or THREADS in variables or set_by_user(raylet_pid()):
        return 0
    node_gpus = worker_gpus
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            node_gpus = node["Resources"].get("GPU", worker_gpus)
    return share(usable_cores(), gpus=node_gpus, worker_gpus=worker_gpus)


def _watch_preemption(job: Job, channel: RayChannel) -> PreemptionWatcher:
    """Has a checkpoint saved when this node is about to be taken away, and tells the driver."""
    from cluster.preemption import PreemptionWatcher

    def on_notice(reason: str) -> None:
        channel.heartbeat.save_requested = True
        address = ray.util.get_node_ip_address()
        channel.emit(
            NodePreempted(
                node=ray.get_runtime_context().get_node_id(),
                reason=reason,
                message=f"the node {address} is about to go ({reason}): saving a checkpoint",
            )
        )

    return PreemptionWatcher(job.spot_provider, on_notice)
