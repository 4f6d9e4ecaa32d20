"""Launcher: a thread of this process trains, one worker. No Ray, no process group."""

import queue
import sys
import threading
from typing import Any

import torch

from app.errors import Interrupted
from app.launchers.workers import Failures, Poll, start_system_sampler
from app.training import loop
from app.training.events import Event, TrainingDone, WorkerInfo
from app.training.job import Job, Place, SilentChannel

POLL_SECONDS = 0.1
JOIN_SECONDS = 60.0
"""How long what a failed driver has left is waited for; a thread that hangs ends with the process."""


class QueueChannel(SilentChannel):
    """The Channel of a worker in the driver's own process."""

    def __init__(self) -> None:
        super().__init__()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.closed = False

    def stop_requested(self) -> bool:
        """Raises Interrupted if nobody listens any more."""
        if self.closed:
            raise Interrupted("the driver has ended")
        return self.stopping

    def emit(self, event: Event) -> None:
        self.events.put(event)

    def drain(self, seconds: float) -> list[Event]:
        """What has come; waits so long for the first."""
        found: list[Event] = []
        try:
            found.append(self.events.get(timeout=seconds) if seconds else self.events.get_nowait())
            while True:
                found.append(self.events.get_nowait())
        except queue.Empty:
            return found


class TrainingThread:
    """Trains in a thread, so that the process's main thread supervises and receives signals."""

    def __init__(self, job: Job, place: Place, channel: QueueChannel) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                sampler = start_system_sampler(channel, "node-0", job.config.tracking.system_metrics_every)
                try:
                    channel.emit(TrainingDone(summary=loop.train(job, place, channel)))
                finally:
                    sampler.close()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True, name="training")
        self.thread.start()

    def ended(self) -> Failures | None:
        if self.thread.is_alive():
            return None
        return {} if self.error is None else {0: self.error}


class LocalWorkers:
    """One worker, here."""

    restartable = False

    def __init__(self) -> None:
        self.channel = QueueChannel()
        self.training: TrainingThread | None = None

    def start(self, job: Job) -> None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        place = Place(rank=0, world_size=1, local_rank=0, device=device)
        self.training = TrainingThread(job, place, self.channel)

    def poll(self, stop: bool) -> Poll:
        assert self.training is not None
        self.channel.stopping = self.channel.stopping or stop
        ended = self.training.ended()  # asked first, so that no event comes after the last
        return Poll(self.channel.drain(POLL_SECONDS if ended is None else 0.0), {}, ended)

    def ask(self, question: str) -> dict[int, str]:
        return {}

    def kill(self, infos: list[WorkerInfo]) -> Any: ...

    def stop(self) -> None:
        """Where the driver has failed, training ends at its next boundary and saves nothing: what this process trains
        next, such as a sweep's next trial, has the processors and the random numbers to itself."""
        self.channel.closed = True
        if self.training is not None and not isinstance(sys.exception(), KeyboardInterrupt):
            self.training.thread.join(JOIN_SECONDS)
