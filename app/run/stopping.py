"""How a command ends on Ctrl-C, on SIGTERM (a scheduler) and on SIGHUP (its terminal is gone).

While a run trains, its driver is asked to save and stop (`stop_signals`). Before that, and in
commands that have nothing to save, the main thread gets the exception `Stopped` (`end_on_signals`).
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from app.errors import EXIT_STOPPED
from app.run.abort import abort

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 1.0
"""A signal this soon after another is the same request.

`timeout` signals its child and then the group that both are in, systemd sends SIGHUP after SIGTERM,
and torchrun passes on what its ranks have got themselves.
"""
END_SECONDS = 30.0
"""How long a command that was asked to stop may take to tidy up."""
RESEND_SECONDS = 0.1
BLOCK_SECONDS = 5.0
"""How long a block of `stop_signals` may take to end once it is ended by the program itself."""


class Stopped(KeyboardInterrupt):
    """The command was asked to stop, and there is nothing to save.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {name_of(number)}")


def name_of(number: int) -> str:
    """A signal's name for a person."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def end_on_signals() -> None:
    """From now on the first of these signals raises `Stopped`; call it in the main thread.

    An exception that a signal's handler raises may be lost: Python ignores it in a finalizer, C and
    C++ code may clear it, and the import machinery would keep a lock for ever. So nothing is raised
    during an import, but right after it; what was lost is raised again; and a process that is still
    there `END_SECONDS` later is ended.
    """
    global _request
    _request = _StopRequest()
    for number in SIGNALS:
        if not _is_ignored(number):
            signal.signal(number, _request.on_signal)


def _is_ignored(number: int) -> bool:
    """Whether this process was started so that it ignores a signal, as nohup does."""
    return signal.getsignal(number) is signal.SIG_IGN


class Raised:
    """An exception that a signal's handler has raised, and whether it is still on its way.

    Whoever unwinds for an exception, or handles it, refers to it. One that nothing refers to any
    more was handled, or was lost.
    """

    def __init__(self) -> None:
        self._reference: weakref.ref[BaseException] | None = None

    def throw(self, error: BaseException) -> NoReturn:
        """Raises an exception, and refers to it weakly."""
        self._reference = weakref.ref(error)
        try:
            raise error
        finally:
            del error  # its traceback has this frame, so it would keep itself alive

    @property
    def is_gone(self) -> bool:
        """Whether nothing refers to the exception any more, or none has been raised."""
        return self._reference is None or self._reference() is None


class _StopRequest:
    """The first signal that asked this process to stop, and what has become of it."""

    def __init__(self) -> None:
        self.number = 0
        self.request_clock = 0.0
        self.raise_clock = 0.0
        self.is_taken_over = False
        self._raised = Raised()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number = number
            self.request_clock = now
            # Not a threading.Thread, which takes locks that a signal's handler must not wait for.
            _thread.start_new_thread(self._enforce, ())
        if self.raise_clock and now - self.raise_clock < REPEAT_SECONDS:
            return
        if not is_importing(frame):
            self.raise_clock = now
            self._raised.throw(Stopped(self.number))

    def take_over(self) -> bool:
        """Leaves a request that has not ended this process to who asks; whether there is one."""
        self.is_taken_over = bool(self.number)
        return self.is_taken_over

    def _enforce(self) -> None:
        """Sends the signal until it ends this process, and ends one that does not end."""
        was_due = False
        while time.monotonic() - self.request_clock < END_SECONDS:
            time.sleep(RESEND_SECONDS)
            if self.is_taken_over:
                return
            # Twice, because a command that has handled the exception is about to set the handlers
            # of `end_at_once`.
            is_due = self._is_due()
            if is_due and was_due:
                signal.pthread_kill(threading.main_thread().ident or 0, self.number)
            was_due = is_due
        abort(
            EXIT_STOPPED,
            f"trireme: stopped by {name_of(self.number)}; what had been started did not end within "
            f"{END_SECONDS:.0f} s",
        )

    def _is_due(self) -> bool:
        """Whether the signal has raised nothing yet, or what it raised has been lost."""
        is_recent = self.raise_clock and time.monotonic() - self.raise_clock < REPEAT_SECONDS
        is_ours = signal.getsignal(self.number) == self.on_signal
        return is_ours and self._raised.is_gone and not is_recent


_request: _StopRequest | None = None
"""Of the command that this process runs."""


def end_at_once(exit_code: int) -> None:
    """From now on a signal ends this process at once, because its work is done and reported.

    Args:
        exit_code: Of the process.
    """
    for number in SIGNALS:
        if not _is_ignored(number):
            signal.signal(number, lambda *_: abort(exit_code))


def is_importing(frame: FrameType | None) -> bool:
    """Whether a signal's handler has interrupted an import.

    Args:
        frame: The frame that the handler was called with.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class BlockEnded(KeyboardInterrupt):
    """The program itself ends a block of `stop_signals`."""


class StopSignals:
    """What signals do in a block of `stop_signals`.

    Args:
        ask: Asks what runs to save and stop.
    """

    def __init__(self, ask: Callable[[], object]) -> None:
        self.ask = ask
        self.request_clock: float | None = None
        """When it was asked to stop, in seconds of the monotonic clock."""
        self._handlers: dict[int, signal.Handlers | int | Callable[..., object] | None] = {}
        """Of each signal, the one that was there before."""
        self._lock = threading.Lock()
        """Held while a signal is sent, so that none comes when the handlers are gone."""
        self._is_sent = False
        """Whether a signal of `end` is on its way."""
        self._raised = Raised()

    def install(self) -> None:
        """Takes the signals; call it in the main thread."""
        for number in SIGNALS:
            if number is signal.SIGHUP and _is_ignored(number):
                continue  # under nohup the run is to outlive its terminal
            self._handlers[number] = signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Gives the signals back."""
        with self._lock:
            handlers = self._handlers
            self._handlers = {}
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def request(self) -> None:
        """Asks to save and stop."""
        self.request_clock = time.monotonic()
        self.ask()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_sent:
            self._is_sent = False
            if self._handlers and not is_importing(frame):
                self._raised.throw(BlockEnded())
        elif self.request_clock is None:
            self.request()
        elif time.monotonic() - self.request_clock >= REPEAT_SECONDS:
            raise KeyboardInterrupt

    def end(self, is_over: threading.Event, *, last_resort: Callable[[], object]) -> None:
        """Ends the block at once by `BlockEnded`, from another thread; returns when it is over.

        The exception is raised again as long as it gets lost, as in a finalizer (see
        `end_on_signals`).

        Args:
            is_over: Set when the block has ended.
            last_resort: Called at once where signals are the program's own, and otherwise if the
                block has not ended `BLOCK_SECONDS` later.
        """
        deadline = time.monotonic() + BLOCK_SECONDS
        while self._send() and time.monotonic() < deadline:
            if is_over.wait(RESEND_SECONDS):
                return
        last_resort()
        while not is_over.wait(RESEND_SECONDS) and self._send():
            pass

    def _send(self) -> bool:
        """Has `BlockEnded` raised, unless it is on its way; whether signals are handled here."""
        with self._lock:
            if self._handlers and self._raised.is_gone:
                self._is_sent = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return bool(self._handlers)


@contextlib.contextmanager
def stop_signals(ask: Callable[[], object]) -> Iterator[StopSignals]:
    """The first Ctrl-C, SIGTERM or SIGHUP calls `ask`; a later one raises KeyboardInterrupt.

    One that came before calls it at once: its exception has been lost, or was not raised yet.

    Python handles signals in the main thread only. In another thread this does nothing, and signals
    are the program's own.

    Args:
        ask: Asks what runs to save and stop.

    Yields:
        What another thread can end the block with.
    """
    signals = StopSignals(ask)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    signals.install()
    try:
        if _request is not None and _request.take_over():
            signals.request()
        yield signals
    finally:
        signals.remove()


# --- streams that are missing ---------------------------------------------------------------------


def open_streams() -> None:
    """Opens the standard streams that this process was started without (`>&-`).

    Otherwise the next file that is opened would get their numbers, and what other programs print
    would be written into it.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, flags)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def drop_streams() -> None:
    """Discards further output if its reader (`| head -1`) or the terminal has gone.

    Otherwise the interpreter's last flush would fail.
    """
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
