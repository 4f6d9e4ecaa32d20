"""How a command ends when it is asked to: by Ctrl-C, by SIGTERM (a scheduler) or by SIGHUP (its terminal is gone).

Until a run can save something, and in commands that have nothing to save, the request is raised as `Stopped` in the
main thread (`end_on_signals`). While a run trains, its driver is told instead and saves (`stop_signals`).
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
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from app.run.abort import abort

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 1.0
"""A signal so soon after another is the same request: `timeout` signals its child and then the group that both are in,
systemd sends SIGHUP after SIGTERM, and torchrun hands on what its ranks have got themselves."""
END_SECONDS = 30.0
"""How long a command that was asked to stop may take to tidy up."""
RESEND_SECONDS = 0.1


class Stopped(KeyboardInterrupt):
    """Raised in the main thread when the command is asked to stop, and there is nothing to save."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {name_of(number)}")


def name_of(number: int) -> str:
    """For a person."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def end_on_signals() -> None:
    """From now on the first of these signals raises `Stopped`; to be called in the main thread.

    An exception that a signal's handler raises may be lost: Python ignores it where it interrupts a finalizer, and the
    machinery of imports keeps a lock for ever. So nothing is raised while something is imported, but right after; and
    a process that is still there `END_SECONDS` later is ended.
    """
    request = _Request()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, or in a script's background
            signal.signal(number, request.on_signal)


class _Request:
    """What has been asked of this process, and whether it has been raised yet."""

    def __init__(self) -> None:
        self.number = 0
        self.asked_at = 0.0
        self.raised_at = 0.0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number = number
            self.asked_at = now
            # Not a threading.Thread, which takes locks that a signal's handler must not wait for.
            _thread.start_new_thread(self._see_to_it, ())
        if self.raised_at and now - self.raised_at < REPEAT_SECONDS:
            return
        if not _is_importing(frame):
            self.raised_at = now
            raise Stopped(self.number)

    def _see_to_it(self) -> None:
        """In a thread: asks again until it could be raised, and ends a process that does not end by itself."""
        while time.monotonic() - self.asked_at < END_SECONDS:
            time.sleep(RESEND_SECONDS)
            if not self.raised_at:
                signal.pthread_kill(threading.main_thread().ident or 0, self.number)
        what = f"what had been started did not end within {END_SECONDS:.0f} s"
        abort(128 + signal.SIGINT, f"trireme: stopped by {name_of(self.number)}; {what}")


def end_at_once(code: int) -> None:
    """From now on a signal ends this process with this code: its work is done and its outcome has been said."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: abort(code))


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def stop_signals(ask: Callable[[], object]) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP calls `ask`; a later one ends everything at once, by KeyboardInterrupt. In a
    thread other than the main one Python lets nobody handle signals: there they are the program's own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at: float | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            ask()
        elif now - asked_at >= REPEAT_SECONDS:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    for number in SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # under nohup the run is to outlive its terminal
        before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


# --- streams that are not there -------------------------------------------------------------------------------------


def open_streams() -> None:
    """Gives this process the standard streams that it was started without (`>&-`): else the next file that is opened
    would get their numbers, and what other programs print would be written into it."""
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
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
    """Sends what is still printed nowhere, if whoever read it has gone (`| head -1`) or the terminal has: so that the
    interpreter's last flush does not fail."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
