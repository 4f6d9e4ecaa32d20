"""By which signal a worker has died: what its log says of it, in words for a person.

A process that has done what it must not (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) writes so before it dies: Python's
faulthandler, which every worker has on, and Ray's own handler. A process that was killed from outside writes nothing.
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
"""What faulthandler calls them."""
MEANING = {
    "SIGSEGV": "it used memory that is not its own",
    "SIGBUS": "memory that it used could not be had: is /dev/shm full, or a file that it has mapped cut off?",
    "SIGFPE": "an operation on whole numbers that has no result, such as a division by zero",
    "SIGILL": "its code has an instruction that this processor does not know",
    "SIGABRT": "a library gave up",
}
SIGN = re.compile(r"^Fatal Python error: (" + "|".join(FATAL) + r")|^\*\*\* (SIG[A-Z]+) received at time", re.MULTILINE)
PLACE = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)
LIBRARY = re.compile(r"/lib/python\d|/site-packages/|/dist-packages/|^<")
READ_BYTES = 1 << 20
"""Of the end of a log, at most: what a process writes when it dies is short."""


def log_sizes(logs: Path) -> dict[str, int]:
    """Bytes of each worker's log by its name, to be asked before an attempt: earlier attempts wrote into the same."""
    sizes = {}
    for log in logs.glob("rank-*.log"):
        with contextlib.suppress(OSError):
            sizes[log.name] = log.stat().st_size
    return sizes


def fatal_signal(log: Path, sizes: Mapping[str, int]) -> tuple[str, str] | None:
    """The signal that a worker's log says it died by since `sizes`, and where in the program; None where its log says
    nothing of the kind.

    Args:
        log: Of the worker.
        sizes: Of `log_sizes`.
    Returns:
        The signal's name, and the innermost line of Python that is not in a library ("" where none is known).
    """
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(sizes.get(log.name, 0), end - READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    signs = list(SIGN.finditer(text))
    if not signs:
        return None
    name = FATAL.get(signs[0][1] or "", signs[0][2] or "")
    places = list(PLACE.finditer(text, signs[0].end()))
    place = next((each for each in places if not LIBRARY.search(each["file"])), places[0] if places else None)
    where = f"{place['file']}:{place['line']} in {place['function']}" if place else ""
    return name, where


def sentence(name: str, where: str) -> str:
    """`by SIGSEGV (it used memory that is not its own) in /x/model.py:12 in forward`."""
    meaning = f" ({MEANING[name]})" if name in MEANING else ""
    return f"by {name}{meaning}" + (f" at {where}" if where else "")
