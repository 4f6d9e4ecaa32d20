"""By which signal a worker has died, and where: read from its log, in words for a person.

A process that dies by a signal of its own making (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) writes
that first: Python's faulthandler, which every worker enables, and Ray's own handler do so. A
process that is killed from outside writes nothing.
https://docs.python.org/3/library/faulthandler.html
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

FATAL = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
    "Aborted": "SIGABRT",
}
"""The signals by the names that faulthandler gives them."""
MEANING = {
    "SIGSEGV": "it accessed memory that does not belong to it",
    "SIGBUS": (
        "memory that it accessed was not available: is /dev/shm full, or was a file that it has "
        "mapped truncated?"
    ),
    "SIGFPE": "an operation on whole numbers that has no result, such as a division by zero",
    "SIGILL": "its code has an instruction that this processor does not support",
    "SIGABRT": "a library aborted the process",
}
FATAL_LINE = re.compile(
    r"^Fatal Python error: (" + "|".join(FATAL) + r")|^\*\*\* (SIG[A-Z]+) received at time",
    re.MULTILINE,
)
"""The line with the signal: faulthandler's, or that of Ray's handler."""
STACK_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE
)
LIBRARY = re.compile(r"/lib/python\d|/site-packages/|/dist-packages/|^<")
"""Matches files that are not the user's program."""
READ_BYTES = 1 << 20
"""How much of the end of a log is read at most; what a dying process writes is short."""
READ_BYTES_IN_ALL = 64 << 20
"""How much of all logs together is read at most, unless `LEAST_BYTES` of each are more."""
LEAST_BYTES = 16 << 10
"""How much of each log is read at least: enough for faulthandler's report with its stack."""


def log_sizes(logs: Path) -> dict[str, int]:
    """The size in bytes of each worker's log, by the log's name.

    Read before an attempt, because the logs also hold what earlier attempts wrote.
    """
    sizes = {}
    for log in logs.glob("rank-*.log"):
        with contextlib.suppress(OSError):
            sizes[log.name] = log.stat().st_size
    return sizes


def bytes_of_each_log(logs: int) -> int:
    """How much of the end of each of so many logs is read."""
    return max(LEAST_BYTES, min(READ_BYTES, READ_BYTES_IN_ALL // max(1, logs)))


def fatal_signal(
    log: Path, sizes: Mapping[str, int], read_bytes: int = READ_BYTES
) -> tuple[str, str] | None:
    """The signal that a worker has died by since `sizes`, according to its log.

    Args:
        log: The worker's log.
        sizes: What `log_sizes` returned before the attempt.
        read_bytes: How much of its end is read.

    Returns:
        As `find_signal`; None also if the log cannot be read.
    """
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(sizes.get(log.name, 0), end - read_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return find_signal(text)


def find_signal(text: str) -> tuple[str, str] | None:
    """The first fatal signal that a text reports.

    Args:
        text: What a process has written.

    Returns:
        The signal's name, and the innermost line of Python outside libraries as
        "FILE:LINE in FUNCTION" ("" if none is known); None if the text reports no signal.
    """
    fatal_line = FATAL_LINE.search(text)
    if fatal_line is None:
        return None
    faulthandler_name, ray_name = fatal_line.groups()
    name = FATAL[faulthandler_name] if faulthandler_name else ray_name
    frames = list(STACK_FRAME.finditer(text, fatal_line.end()))
    if not frames:
        return name, ""
    user_frames = [frame for frame in frames if not LIBRARY.search(frame["file"])]
    innermost = user_frames[0] if user_frames else frames[0]
    return name, f"{innermost['file']}:{innermost['line']} in {innermost['function']}"


def sentence(name: str, where: str) -> str:
    """A clause such as `by SIGSEGV (…) at model.py:12 in forward`.

    Args:
        name: The signal's name.
        where: The line of the program; "" if it is not known.
    """
    clause = f"by {name}"
    if name in MEANING:
        clause += f" ({MEANING[name]})"
    if where:
        clause += f" at {where}"
    return clause
