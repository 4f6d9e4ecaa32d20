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


def before_abort(report: Callable[[int, str], object]) -> None:
    """Let `abort` call this with the exit code and its sentence, instead of an earlier one."""
    _before[:] = [report]


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
    say: Callable[[str], object] = write_line,
) -> NoReturn:
    """Says why, flushes what has been printed, and ends this process; any thread may call it.

    No `finally` and no exit handler runs any more.

    Args:
        exit_code: Of the process.
        sentence: Why, for a person; "" if that has been said.
        say: Prints the sentence, by default on standard error.
    """
    if _first_to_abort.acquire(timeout=SAY_SECONDS):
        _say_and_flush(exit_code, sentence, say)
    os._exit(exit_code)


def _say_and_flush(exit_code: int, sentence: str, say: Callable[[str], object]) -> None:
    """Uses a thread of its own, because another thread may hold a stream's lock for ever."""
    done = threading.Event()

    def speak() -> None:
        if sentence:
            with contextlib.suppress(Exception):
                say(sentence)
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
