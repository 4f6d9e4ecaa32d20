"""Work in the background while the main thread waits for something else, as for Ray to start."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Generic, TypeVar

from app.run.stopping import Raised, is_importing

SIGNAL = signal.SIGURG
"""Wakes the main thread. By default it is ignored, so that one that comes too late does no harm."""
RESEND_SECONDS = 0.1
Result = TypeVar("Result")


class _WorkFailed(BaseException):
    """Ends what the main thread does; no Exception, which what it calls might handle."""


class BackgroundWork(Generic[Result]):
    """Calls a function in a thread that does not keep the process from ending.

    Args:
        function: What is called.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._future: Future[Result] = Future()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the call, the first time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._call, daemon=True)
            self._thread.start()

    def _call(self) -> None:
        try:
            self._future.set_result(self._function())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Result:
        """Waits for the call; what the function returns, or raises what it raises."""
        self.start()
        return self._future.result()

    @property
    def _has_failed(self) -> bool:
        return self._future.done() and self._future.exception() is not None

    @contextlib.contextmanager
    def failure_interrupts(self) -> Iterator[None]:
        """In this context, a failure of the work ends what the main thread does.

        The context then raises what the function has raised. Outside of the main thread, which
        alone can be interrupted, it does so at its end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            self._raise_failure()
            return
        main_thread = threading.get_ident()
        is_over = threading.Event()
        raised = Raised()

        def interrupt(number: int, frame: FrameType | None) -> None:
            # During an import, the import machinery would keep a lock for ever.
            is_due = raised.is_gone and not is_over.is_set()
            if self._has_failed and is_due and not is_importing(frame):
                raised.throw(_WorkFailed())

        def wake_main_thread(future: Future[Result]) -> None:
            while self._has_failed and not is_over.is_set():
                signal.pthread_kill(main_thread, SIGNAL)
                time.sleep(RESEND_SECONDS)

        previous_handler = signal.signal(SIGNAL, interrupt)
        try:
            if self._future.done():
                self._raise_failure()
            else:
                self._future.add_done_callback(wake_main_thread)
            yield
        except _WorkFailed:
            pass
        finally:
            is_over.set()
            signal.signal(SIGNAL, previous_handler)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._has_failed:
            self._future.result()
