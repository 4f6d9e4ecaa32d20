"""Launcher: one worker in a thread of this process. No Ray.

There is no process group either, unless the worker keeps its state in host memory, which
`fully_shard` does, over a group of one.
"""

import queue
import sys
import threading
from collections.abc import Collection

import torch
import torch.distributed as dist

from app.errors import Interrupted
from app.launchers.workers import Failures, Poll, start_system_sampler
from app.training import loop
from app.training.events import Event, TrainingDone, WorkerInfo
from app.training.job import Job, Place, SilentChannel
from strategies import registry

POLL_SECONDS = 0.1
JOIN_SECONDS = 60.0
"""How long to wait for the training thread after the driver has failed.

A thread that hangs ends with the process.
"""


class QueueChannel(SilentChannel):
    """The Channel of a worker in the driver's own process."""

    def __init__(self) -> None:
        super().__init__()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.closed = False
        """Whether the driver has ended."""

    def stop_requested(self) -> bool:
        """Whether the run is asked to save and stop.

        Raises:
            Interrupted: The driver has ended.
        """
        if self.closed:
            raise Interrupted("the driver has ended")
        return self.stopping

    def emit(self, event: Event) -> None:
        """Sends an event, and returns at once."""
        self.events.put(event)

    def drain(self, seconds: float) -> list[Event]:
        """The events that have come; waits at most so many seconds for the first."""
        events: list[Event] = []
        try:
            if seconds:
                events.append(self.events.get(timeout=seconds))
            while True:
                events.append(self.events.get_nowait())
        except queue.Empty:
            return events


class TrainingThread:
    """Trains in a thread, so that the main thread can supervise and receive signals.

    Args:
        job: What is trained.
        place: This rank's place among the others.
        channel: Takes the worker's events.
    """

    def __init__(self, job: Job, place: Place, channel: QueueChannel) -> None:
        self.job = job
        self.place = place
        self.channel = channel
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name="training")
        self.thread.start()

    def _run(self) -> None:
        try:
            every = self.job.config.tracking.system_metrics_every
            sampler = start_system_sampler(self.channel, "node-0", every)
            try:
                summary = loop.train(self.job, self.place, self.channel)
                self.channel.emit(TrainingDone(summary=summary))
            finally:
                sampler.close()
        except BaseException as error:
            self.error = error

    def ended(self) -> Failures | None:
        """What ended the thread; None while it runs."""
        if self.thread.is_alive():
            return None
        return {} if self.error is None else {0: self.error}


class LocalWorkers:
    """One worker, in this process."""

    restartable = False

    def __init__(self) -> None:
        self.channel = QueueChannel()
        self.training: TrainingThread | None = None
        self.has_group = False

    def start(self, job: Job) -> None:
        """See `Workers`."""
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        strategy = registry.data_strategy(job.layout, offload=job.config.parallel.offload)
        if strategy.is_sharded and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self.has_group = True
        place = Place(rank=0, world_size=1, local_rank=0, device=device)
        self.training = TrainingThread(job, place, self.channel)

    def poll(self, stop: bool) -> Poll:
        """See `Workers`."""
        assert self.training is not None
        self.channel.stopping = self.channel.stopping or stop
        # Before the events are read, so that none comes after the last poll.
        ended = self.training.ended()
        events = self.channel.drain(POLL_SECONDS if ended is None else 0.0)
        return Poll(events=events, ended=ended)

    def ask(self, question: str, ranks: Collection[int] = ()) -> dict[int, str]:
        """Answers nothing, because this process cannot watch itself hang."""
        return {}

    def kill(self, infos: list[WorkerInfo]) -> None:
        """Ends nothing, because the worker is the driver's own process."""

    def stop(self) -> None:
        """Ends training at its next boundary, without saving, if the driver has failed.

        Waits for that, so that what this process trains next, such as a sweep's next trial, has the
        processors and the random numbers to itself.
        """
        self.channel.closed = True
        if self.training is not None and not isinstance(sys.exception(), KeyboardInterrupt):
            self.training.thread.join(JOIN_SECONDS)
        if self.has_group and dist.is_initialized():
            dist.destroy_process_group()
