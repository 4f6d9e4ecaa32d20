"""The spool: what a run reports, in a folder on the driver's disk, and what MLflow has of it.

    events.jsonl      the events, in order, as JSON lines; the driver appends
    start.json        where and under which names the run is tracked
    delivered.json    `State`: which events are delivered; the writer replaces it
    driver.lock       held by the driver until it appends no more; contains its attempt
    writer.lock       held by the process that delivers; contains the attempt that it serves

An event is one line and one `write` on a file opened for appending. When `append` returns, the
kernel has the event, so that it survives a `kill -9` of either side. Readers skip a line that was
only partly written when the machine died.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

Event = dict[str, Any]

ANOTHER_DELIVERS = "another process is delivering this spool"
"""What a writer prints that cannot have a spool."""
WAITS = "wait"
"""The argument of a writer that is started before there is a spool."""
BEGIN = "begin"
"""What such a writer reads from its standard input once there is one."""


class Spool:
    """The appending end of a spool; thread-safe, one per driver.

    Args:
        folder: A local folder, which is made if it does not exist.
        warn: Called with a sentence when the disk is full. Events then wait in memory, in order.

    Raises:
        OSError: The folder cannot be made or written.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object] = lambda sentence: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._warn = warn
        self._is_full = False
        self._lock = threading.Lock()
        self._file = (folder / "events.jsonl").open("ab", buffering=0)
        # A driver that died may have left a partial line: end it.
        self._pending = bytearray(b"\n")

    def append(self, event: Event) -> None:
        """Add an event, whose floats may be nan or infinite; takes about 10 µs."""
        with self._lock:
            if not self._file.closed:  # a sampling thread may come too late
                self._pending += json.dumps(event, separators=(",", ":")).encode() + b"\n"
                self._write()

    def close(self, timeout: float = 0.0) -> None:
        """Write what is left, and close the file.

        Args:
            timeout: How many seconds to wait for room on the disk.
        """
        deadline = time.monotonic() + timeout
        with self._lock, self._file:
            while not self._write() and time.monotonic() < deadline:
                time.sleep(0.2)

    def _write(self) -> bool:
        """Write the pending events; returns whether all are written."""
        was_full = self._is_full
        self._is_full = False
        try:
            while self._pending:
                written = self._file.write(self._pending)
                del self._pending[:written]
        except OSError as error:
            self._is_full = True
            if not was_full:
                self._warn(
                    "metrics wait in memory until there is room: "
                    f"{self._folder}: {error.strerror or error}"
                )
        return not self._is_full


def size(folder: Path) -> int:
    """The size of the spool's events in bytes."""
    events = folder / "events.jsonl"
    return events.stat().st_size if events.exists() else 0


def read(folder: Path, offset: int) -> list[tuple[Event, int]]:
    """Read the next events, about 1 MiB at most.

    A line that is still being written is not read. A damaged line is an event of type "damaged".

    Args:
        folder: The spool.
        offset: Where to begin, in bytes.

    Returns:
        (event, the offset after it) of each; [] at the end.
    """
    with (folder / "events.jsonl").open("rb") as file:
        file.seek(offset)
        data = file.read(2**20)
        if b"\n" not in data:  # the event is longer than that
            file.seek(offset)
            data = file.readline()
    events: list[tuple[Event, int]] = []
    for line in io.BytesIO(data[: data.rfind(b"\n") + 1]):
        offset += len(line)
        event: Any = None
        with contextlib.suppress(ValueError):
            event = json.loads(line)
        is_event = isinstance(event, dict) and "type" in event
        events.append((event if is_event else {"type": "damaged"}, offset))
    return events


@dataclass
class State:
    """How far delivery has come.

    If this is lost, it is rebuilt from the spool and from what MLflow has.

    Args:
        offset: The place in events.jsonl up to which events are delivered, in bytes.
        run_id: MLflow's id of the run.
        experiment_id: MLflow's id of the experiment.
        open: Whether a start has been delivered without its finish.
        last_time: Unix seconds of the newest event delivered; if the run is killed, its end.
        tries: How often the upload at `offset` has been tried. Some uploads always fail, or kill
            the writer.
        problem: Why nothing can be delivered now, as a sentence.
        left_out: Why there is no model.
        writer: The process id of the last writer.
    """

    offset: int = 0
    run_id: str = ""
    experiment_id: str = ""
    open: bool = False
    last_time: float = 0.0
    tries: int = 0
    problem: str = ""
    left_out: str = ""
    writer: int | None = None

    def has_all(self, folder: Path) -> bool:
        """Whether the whole spool is delivered and the run has ended."""
        return self.offset >= size(folder) and not self.open

    @classmethod
    def load(cls, folder: Path) -> State:
        """Read the state of a spool; a new state if there is none."""
        values = read_json(folder / "delivered.json")
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})

    def save(self, folder: Path) -> None:
        """Write the state into a spool."""
        write_json(folder / "delivered.json", asdict(self))


def last_start(folder: Path) -> dict[str, Any]:
    """Where and under which names the run was tracked at its newest start.

    Returns:
        uri, experiment, artifact_location, run_name, run_uid, tags and parent; {} for an empty
        spool.
    """
    return read_json(folder / "start.json")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file in one step, so that a reader sees the old one or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value))
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def take_lock(folder: Path, name: str, *, seconds: float = 0.0, text: str = "") -> int | None:
    """Take an exclusive lock.

    Args:
        folder: The spool.
        name: The lock's file is NAME.lock.
        seconds: How long to wait for another process to release it.
        text: Written into the lock's file.

    Returns:
        The file descriptor that holds the lock until it is closed or this process dies, whatever
        its children do; None if another process kept the lock.
    """
    fd = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + seconds
    while not _try_lock(fd, fcntl.LOCK_EX):
        if time.monotonic() >= deadline:
            os.close(fd)
            return None
        time.sleep(0.05)
    os.ftruncate(fd, 0)
    os.write(fd, text.encode())
    return fd


def look_at_lock(folder: Path, name: str) -> tuple[bool, str]:
    """(whether another process holds the lock, the text of its last holder)"""
    path = folder / f"{name}.lock"
    if not path.exists():
        return False, ""
    with path.open() as file:
        return not _try_lock(file.fileno(), fcntl.LOCK_SH), file.read()


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
