"""How workers in Ray reach the driver, and what each of them runs: shared by all launchers that use Ray.

Metrics do not go through `ray.train.report`, which is a barrier over all ranks: rank 0 sends its events to an `Inbox`
actor (no CPU of its own, on the driver's node), and the driver reads them there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from app.heartbeat import Beat
from app.job import Job, Place
from app.launchers import sigterm
from app.launchers.box import Inbox
from app.launchers.output import worker_output
from app.launchers.whereabouts import NO_NEWS, Where, here
from app.storage import Storage
from cluster.notice import Watch

if TYPE_CHECKING:
    from app.run.driver import Driver


class InboxChannel:
    """A worker's Channel. Sending does not wait; metrics wait for the next other event, about a second."""

    def __init__(self, inbox: Any, rank: int) -> None:
        self.inbox, self.rank = inbox, rank
        self.waiting: list[dict[str, Any]] = []
        self.answer: Any = None
        self.stop = False
        self.beat = Beat()

    def emit(self, event: dict[str, Any]) -> None:
        if self.rank and event["type"] not in NO_NEWS:
            return
        self.waiting.append(event)
        if event["type"] != "metrics":
            events, self.waiting = self.waiting, []
            self.answer = self.inbox.put.remote(cloudpickle.dumps(events))

    def stop_requested(self) -> bool:
        if self.answer is not None and ray.wait([self.answer], timeout=0)[0]:
            self.stop = self.stop or ray.get(self.answer)
            self.answer = None
        return self.stop

    def follow(self, beat: Beat) -> None:
        self.beat = beat

    def flush(self) -> None:
        """Waits until what was sent has arrived: the process may end as soon as its work has."""
        if self.answer is not None:
            ray.get(self.answer)


def open_inbox() -> Any:
    """An Inbox on this node. Affinity must be hard: Ray puts an actor without CPUs on a random node otherwise, and that
    may be one that a worker cannot reach."""
    here = ray.get_runtime_context().get_node_id()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
    return Inbox.options(scheduling_strategy=affinity).remote()  # type: ignore[attr-defined]


def hear(inbox: Any, driver: Driver) -> int:
    """Hands what has come to the driver; how many events tell that training gets on."""
    said = ray.get(inbox.drain.remote(driver.stop_requested() or driver.more is not None))
    events = [event for part in said for event in cloudpickle.loads(part)]
    for event in events:
        driver.emit(event)
    return sum(event["type"] not in NO_NEWS for event in events)


def _heed_notice(job: Job, channel: InboxChannel) -> Watch:
    """Has a checkpoint saved when this node is about to be taken away, and says so."""

    def told(why: str) -> None:
        channel.beat.save = True
        text = f"the node {ray.util.get_node_ip_address()} is about to go ({why}): saving a checkpoint"
        node = ray.get_runtime_context().get_node_id()
        channel.emit({"type": "notice", "node": node, "why": why, "text": text})

    return Watch(job.spot, told)


def _heed_sigterm(rank: int, channel: InboxChannel) -> contextlib.AbstractContextManager[None]:
    """Has all ranks finish their step, save and end when this process is asked to end, and says so."""

    def told() -> None:
        channel.stop = True
        text = f"worker {rank}, process {os.getpid()}, was asked to end (SIGTERM): saving a checkpoint first"
        channel.emit({"type": "notice", "rank": rank, "why": "SIGTERM", "text": text})

    return sigterm.heeded(told)


def _here(job: Job, rank: int) -> Where:
    context, storage = ray.get_runtime_context(), Storage(job.folder)
    log = storage.local_path / "logs" / f"rank-{rank}.log" if storage.is_local else None
    return here(rank, ray.util.get_node_ip_address(), context.get_node_id(), log, context.current_actor)


def _take_threads() -> None:
    """Gives torch the threads that Ray has told this worker to have: one that was forked had imported torch before."""
    import torch

    if (wanted := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(wanted) != torch.get_num_threads():
        torch.set_num_threads(int(wanted))


def work(job: Job, place: Place, channel: InboxChannel, node_rank: int) -> None:
    """What every worker in Ray does: the whole of training, its output in a file of its own."""
    from app import loop
    from app.tracking.system import SystemSampler

    if os.path.isdir(job.cwd):  # Ray puts workers in folders of their own, where relative paths mean nothing
        os.chdir(job.cwd)
        if job.cwd not in sys.path:
            sys.path.insert(0, job.cwd)
    _take_threads()
    channel.emit({"type": "here", "where": _here(job, place.rank)})
    with worker_output(Storage(job.folder), place.rank), contextlib.ExitStack() as stack:
        stack.enter_context(_heed_sigterm(place.rank, channel))
        if place.local_rank == 0:  # one worker of each node watches it
            every = job.config.tracking.system_metrics_every
            sampler = SystemSampler(
                lambda event: channel.emit({"type": "system", "event": event}), f"node-{node_rank}", every
            )
            stack.callback(sampler.close)
            stack.callback(_heed_notice(job, channel).close)
        summary = loop.train(job, place, channel)
        channel.emit({"type": "done", "summary": summary})
        channel.flush()
