"""Ends this process at once, where its main thread may wait for something that never comes.

This is the only place that does so. Who notices that nothing comes (the lease, the watch over Ray,
a rank's watch over rank 0) only reports it to a callback, and the callback ends the process here.
"""

import contextlib
import os
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable
from typing import NoReturn

SAY_SECONDS = 3.0
"""How long the last sentence may take, so that a pipe that nobody reads keeps no process alive."""

_first_to_abort = threading.Lock()
"""Never released, so that only one of two threads that end the process says why."""


_before: list[Callable[[int, str], object]] = []
_say: list[Callable[[str], object]] = []


def before_abort(report: Callable[[int, str], object], *, say: Callable[[str], object]) -> None:
    """Tells `abort` of the command that this process runs, instead of an earlier one.

    Args:
        report: Is called with the exit code and the sentence.
        say: Prints the sentence where a person sees it: standard error may be a log by then.
    """
    _before[:] = [report]
    _say[:] = [say]


def write_line(sentence: str, *, descriptor: int = 2) -> None:
    """Writes a line without the locks of Python's streams.

    Args:
        sentence: The line.
        descriptor: Of the file to write to; standard error by default.
    """
    os.write(descriptor, f"{sentence}\n".encode())


def abort(
    exit_code: int,
    sentence: str = "",
    *,
    say: Callable[[str], object] | None = None,
) -> NoReturn:
    """Says why, flushes what has been printed, and ends this process; any thread may call it.

    No `finally` and no exit handler runs any more.

    Args:
        exit_code: Of the process.
        sentence: Why, for a person; "" if that has been said.
        say: Prints the sentence, by default as `before_abort` was told, or on standard error.
    """
    if _first_to_abort.acquire(timeout=SAY_SECONDS):
        _say_and_flush(exit_code, sentence, [say] if say else [*_say, write_line])
    os._exit(exit_code)


def _say_and_flush(exit_code: int, sentence: str, ways: list[Callable[[str], object]]) -> None:
    """Uses a thread of its own, because another thread may hold a stream's lock for ever."""
    done = threading.Event()

    def speak() -> None:
        for say in ways if sentence else []:
            with contextlib.suppress(Exception):
                say(sentence)
                break
        for report in _before:
            with contextlib.suppress(Exception):
                report(exit_code, sentence)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # nobody reads it, or there is none
                stream.flush()
        done.set()

    # Not a threading.Thread, which takes locks that a signal's handler must not wait for.
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down already
        start_new_thread(speak, ())
        done.wait(SAY_SECONDS)
