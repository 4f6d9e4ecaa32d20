"""SIGTERM in a worker process of Ray: what a preemption, a `kubectl delete` or a batch system sends before it kills.

Ray ends a worker that gets it, at once. While a run is under way it is to finish its step and save instead. Python runs
a signal's handler in the main thread, which in such a process waits inside Ray's own code for minutes, while the run is
in another thread. So the handler does nothing: the interpreter also writes the signal's number to a socket, from the
signal itself (`signal.set_wakeup_fd`), and a thread that reads the socket acts on it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Ear:
    """told: what to call, in a thread of its own, when the signal comes; None: what was done before is done."""

    def __init__(self) -> None:
        self.told: Callable[[], None] | None = None
        self.before: Any = None
        self.ends: tuple[socket.socket, socket.socket] | None = None

    def install(self) -> None:
        """Hears the signal from now on; in the main thread of the process, again after a fork.

        Raises ValueError in any other thread.
        """
        self.ends = hears, says = socket.socketpair()
        says.setblocking(False)
        before = signal.signal(signal.SIGTERM, self._in_main_thread)
        if before != self._in_main_thread:
            self.before = before
        signal.set_wakeup_fd(says.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(hears,), daemon=True, name="sigterm").start()

    def _listen(self, hears: socket.socket) -> None:
        while numbers := hears.recv(64):
            told = self.told
            if signal.SIGTERM in numbers and told is not None:
                told()

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self.told is None:
            if callable(self.before):
                self.before(number, frame)
            else:
                raise SystemExit(128 + number)


EAR = Ear()
"""Of this process. Say `sigterm.EAR`: Ray sends an actor's class by value, with copies of the globals it names."""


@contextlib.contextmanager
def heeded(told: Callable[[], None]) -> Iterator[None]:
    """While this lasts the signal calls `told` and ends nothing; where `install` was not called, nothing changes."""
    EAR.told = told
    try:
        yield
    finally:
        EAR.told = None
