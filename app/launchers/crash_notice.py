"""Says by which signal a worker in the driver's own process has died, after that process is gone.

With `launcher=local`, and on rank 0 of torchrun, a SIGSEGV ends the driver too, so nobody is left
to classify the failure. faulthandler then writes into a pipe to a second process (this file as a
program), which tells the person in one sentence and keeps the stack in the run's log.
https://docs.python.org/3/library/faulthandler.html
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from app.launchers.crash import find_signal, sentence

END_OF_RUN = b"\x04"
"""The last byte in the pipe of a process that did not crash."""
END_SECONDS = 5.0
"""How long to wait for the second process at the end."""


@contextlib.contextmanager
def announce_crash(worker: str, log: Path, terminal: IO[str]) -> Iterator[None]:
    """Announces a crash of this process until the context ends.

    Args:
        worker: Names the worker at the beginning of the sentence, for example
            "worker 0, process 12 on node-1,".
        log: The file that the stack is appended to.
        terminal: The stream that the sentence is written to. Without a descriptor, as in a
            notebook, nothing is announced.
    """
    try:
        process = _start_second_process(worker, log, terminal)
    except (OSError, ValueError, AttributeError):  # no descriptor, or no room for a process
        yield
        return
    assert process.stdin is not None
    was_enabled = faulthandler.is_enabled()
    faulthandler.enable(process.stdin, all_threads=False)
    try:
        yield
    finally:
        faulthandler.disable()
        if was_enabled:
            faulthandler.enable(terminal, all_threads=False)
        with contextlib.suppress(OSError):
            process.stdin.write(END_OF_RUN)
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)


def _start_second_process(worker: str, log: Path, terminal: IO[str]) -> subprocess.Popen[bytes]:
    """Starts the process in a session of its own, so that Ctrl-C does not end it."""
    trireme_root = str(Path(__file__).parents[2])
    search_path = os.pathsep.join([trireme_root, *filter(None, sys.path)])
    # -P: a package called app in the current folder does not come first.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "app.launchers.crash_notice", worker, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        env={**os.environ, "PYTHONPATH": search_path},
        start_new_session=True,
    )


def describe_crash(worker: str, stack: str, log: Path) -> str | None:
    """The sentence for a person.

    Args:
        worker: See `announce_crash`.
        stack: What faulthandler has written.
        log: Where the stack is kept.

    Returns:
        None if the text names no fatal signal.
    """
    crash = find_signal(stack)
    if crash is None:
        return None
    return (
        f"{worker} died {sentence(*crash)} (see {log}): run the same command again to continue "
        "from the last checkpoint; if it dies there again, the fault is in the program"
    )


def main(worker: str, log: Path) -> None:
    """Reads the pipe to its end, and announces the crash if there was one."""
    written = sys.stdin.buffer.read()
    crashed = not written.endswith(END_OF_RUN)
    stack = written.removesuffix(END_OF_RUN).decode(errors="replace")
    if stack:
        with contextlib.suppress(OSError):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as file:
                file.write(stack)
    notice = describe_crash(worker, stack, log)
    if crashed and notice:
        print(f"trireme: {notice}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
