"""A function that runs in a thread of its own, but only while somebody waits for it.

For a library whose loop cannot be left and entered again (Lightning's Trainer): its collectives and those of the
thread that waits go through one process group, and a group's collectives must have one order on every rank. Two
threads that run at the same time have none; two of which always exactly one runs have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class TakesTurns:
    """`function(pause)` runs up to its next `pause()` each time `advance` is called, and first while this is made.

    Whatever it does between its last step and `pause()` belongs to the turn, its collectives too. What it raises,
    `advance` raises.
    """

    def __init__(self, function: Callable[[Callable[[], None]], object], timeout: float = 600.0) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._timeout, self._ended = timeout, False
        self._error: BaseException | None = None

        def run() -> None:
            self._go.acquire()
            try:
                function(self._pause)
            except BaseException as error:
                self._error = error
            self._ended = True
            self._back.release()

        threading.Thread(target=run, daemon=True).start()
        self.advance()

    def advance(self) -> None:
        """Lets it run to its next pause, or to its end.

        Raises:
            RuntimeError: it has ended, raised, or not come to a pause within `timeout` seconds.
        """
        if self._ended:
            raise RuntimeError("what takes turns has ended") from self._error
        self._go.release()
        if not self._back.acquire(timeout=self._timeout):
            raise RuntimeError(f"what takes turns came to no pause within {self._timeout:g} s")
        if self._error is not None:
            raise RuntimeError(f"what takes turns failed: {self._error!r}") from self._error

    def _pause(self) -> None:
        self._back.release()
        self._go.acquire()
