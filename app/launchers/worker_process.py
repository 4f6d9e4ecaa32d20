"""What every worker process in Ray has around its training, under either launcher.

Its events and heartbeats go to the `EventQueue`, its output to a file of its own. One worker of each node samples the
node's system metrics and watches for a preemption notice, at which all save a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray import cloudpickle

from app.heartbeat import Heartbeat
from app.job import Job, Place
from app.launchers.heartbeats import Beat, HeartbeatThread, Reply
from app.launchers.output import worker_output
from app.launchers.recovery import oom_kills
from app.launchers.workers import WorkerInfo
from app.storage import Storage

FROM_ANY_RANK = ("warning", "worker", "preemption", "system", "failed")
"""Events that are sent by ranks other than 0 too."""


class RayChannel:
    """A worker's Channel. Sending does not wait; metrics wait for the next other event, about a second."""

    def __init__(self, queue: Any, attempt: int, rank: int) -> None:
        self.queue, self.attempt, self.rank = queue, attempt, rank
        self.heartbeat = Heartbeat()
        self.stop = False
        self._waiting: list[dict[str, Any]] = []
        self._newest: Any = None
        self._lock = threading.Lock()

    def emit(self, event: dict[str, Any]) -> None:
        if self.rank and event["type"] not in FROM_ANY_RANK:
            return
        with self._lock:
            self._waiting.append(event)
            if event["type"] != "metrics":
                events, self._waiting = self._waiting, []
                self._newest = self.queue.put.remote(self.attempt, cloudpickle.dumps(events))

    def stop_requested(self) -> bool:
        return self.stop

    def send_beat(self, beat: Beat, answer: tuple[int, str] | None) -> Reply:
        return Reply(*ray.get(self.queue.beat.remote(self.attempt, self.rank, beat, answer)))

    def on_reply(self, reply: Reply) -> None:
        self.stop = self.stop or reply.stop

    def failed(self, error: BaseException) -> None:
        """Tells the driver with what exception this rank ends."""
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # an exception that cannot travel
            error = RuntimeError(f"{type(error).__name__}: {error}")
        self.emit({"type": "failed", "rank": self.rank, "error": error})
        self.flush()

    def done(self, summary: dict[str, Any]) -> None:
        """The last event of a worker that has trained to its end."""
        self.emit({"type": "done", "summary": summary})

    def flush(self) -> None:
        """Waits until what was sent has arrived: the process may end as soon as its work has."""
        if self._newest is not None:
            ray.get(self._newest)


@contextlib.contextmanager
def surroundings(job: Job, place: Place, channel: RayChannel, node_rank: int) -> Iterator[None]:
    """What every worker has around its training: output in a file, heartbeats, metrics of its node, news at the end."""
    from app.tracking.environment import SystemSampler

    with worker_output(Storage(job.folder), place.rank), contextlib.ExitStack() as stack:
        beats = HeartbeatThread(channel.heartbeat, channel.send_beat, channel.on_reply)
        stack.callback(beats.close)
        if place.local_rank == 0:
            sampler = SystemSampler(
                lambda event: channel.emit({"type": "system", "event": event}),
                f"node-{node_rank}",
                job.config.tracking.system_metrics_every,
            )
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
    if os.path.isdir(job.cwd):  # Ray puts workers in folders of their own, where relative paths mean nothing
        os.chdir(job.cwd)
        if job.cwd not in sys.path:
            sys.path.insert(0, job.cwd)
    _set_threads()
    storage = Storage(job.folder)
    log = storage.local_path / "logs" / f"rank-{channel.rank}.log" if storage.is_local else None
    info = WorkerInfo(
        channel.rank,
        os.getpid(),
        ray.util.get_node_ip_address(),
        ray.get_runtime_context().get_node_id(),
        label,
        oom_kills(),
        log.stat().st_size if log is not None and log.exists() else 0,
    )
    channel.emit({"type": "worker", "info": info, "group": ray.util.get_current_placement_group()})
    return info


def _set_threads() -> None:
    """The number of threads that Ray has set for this worker; a forked one had imported torch before."""
    import torch

    if (wanted := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(wanted) != torch.get_num_threads():
        torch.set_num_threads(int(wanted))


def _watch_preemption(job: Job, channel: RayChannel) -> Any:
    """Has a checkpoint saved when this node is about to be taken away, and tells the driver."""
    from cluster.preemption import PreemptionWatcher

    def on_notice(why: str) -> None:
        channel.heartbeat.save_requested = True
        text = f"the node {ray.util.get_node_ip_address()} is about to go ({why}): saving a checkpoint"
        node = ray.get_runtime_context().get_node_id()
        channel.emit({"type": "preemption", "node": node, "why": why, "text": text})

    return PreemptionWatcher(job.spot_provider, on_notice)
