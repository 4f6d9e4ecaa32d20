"""The root of the tree in the driver's own process, where all workers run on its machine.

A command that has started Ray for itself needs no process between itself and its workers. They
reach it by a socket in Ray's private folder, which no other user can open.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from app.launchers.aggregator import (
    Answer,
    Beat,
    Orders,
    RankAssignment,
    Report,
    RootAggregator,
    StoreAddress,
)

BACKLOG = 128
"""How many workers may connect at once."""
FAMILY = "AF_UNIX"
RETRY_SECONDS = 0.1
"""Until a connection is accepted again, after one could not be."""


class LocalQueue:
    """The messages between the workers and the driver, with threads of the driver that listen.

    Args:
        folder: Where the socket is made; its path may have 107 bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.root = RootAggregator()
        self.path = str(folder / f"events-{uuid.uuid4().hex[:8]}")
        self._closed = False
        self._listener = Listener(self.path, family=FAMILY, backlog=BACKLOG)
        threading.Thread(target=self._accept, daemon=True, name="events").start()

    def begin(self, attempt: int, world_size: int) -> None:
        """See `Aggregator`."""
        self.root.begin(attempt, world_size)

    def drain(self, stop: bool) -> Report:
        """See `RootAggregator`."""
        return self.root.drain(stop)

    def ask(self, question: str) -> None:
        """See `RootAggregator`."""
        self.root.ask(question)

    def answered(self) -> dict[str, list[int]]:
        """See `Aggregator`."""
        return self.root.answered()

    def close(self) -> None:
        """Accepts no more workers."""
        self._closed = True
        with contextlib.suppress(OSError):
            Client(self.path, family=FAMILY).close()  # a thread waits for the next one
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # the process may have too many open files, until others are closed
                connection = None
                time.sleep(RETRY_SECONDS)
            if self._closed:
                return
            if connection is not None:
                arguments = (connection,)
                threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        """Answers the calls of one thread of a worker, until that has ended."""
        with connection, contextlib.suppress(EOFError, OSError):
            while True:
                method, arguments = connection.recv()
                connection.send(getattr(self.root, method)(*arguments))


Put = tuple[int, bytes, bool]
"""The arguments of `Aggregator.put`."""


class SocketLink:
    """A worker's way to a `LocalQueue`; thread-safe.

    Args:
        path: Of its socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._of_thread = threading.local()
        """Each thread has a connection of its own, so that none waits for another's answer."""
        self._unsent: queue.SimpleQueue[tuple[Put, Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._send_events, daemon=True, name="events").start()

    def put(self, attempt: int, events: bytes, urgent: bool = False) -> Callable[[], object]:
        """See `Link`."""
        arrived: Future[None] = Future()
        self._unsent.put(((attempt, events, urgent), arrived))
        return arrived.result

    def beat(self, attempt: int, rank: int, beat: Beat, answer: Answer | None) -> Orders:
        """See `Link`."""
        orders: Orders = self._call("beat", attempt, rank, beat, answer)
        return orders

    def join(self, attempt: int, rank: int, node: str, store: StoreAddress | None) -> None:
        """See `Link`."""
        self._call("join", attempt, rank, node, store)

    def meeting(self, attempt: int, rank: int, node: str) -> RankAssignment | None:
        """See `Link`."""
        assignment: RankAssignment | None = self._call("meeting", attempt, rank, node)
        return assignment

    def node_rank(self, attempt: int, node: str) -> int:
        """See `Link`."""
        number: int = self._call("node_rank", attempt, node)
        return number

    def _send_events(self) -> None:
        """Sends events in their order, so that training never waits for the driver."""
        while True:
            arguments, arrived = self._unsent.get()
            try:
                self._call("put", *arguments)
            except (EOFError, OSError) as error:
                arrived.set_exception(error)
            else:
                arrived.set_result(None)

    def _call(self, method: str, *arguments: object) -> Any:
        """Calls a method of the driver's `RootAggregator`."""
        connection = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = Client(self._path, family=FAMILY)
            self._of_thread.connection = connection
        connection.send((method, arguments))
        return connection.recv()
