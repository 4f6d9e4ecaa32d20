"""The spool: what a run reports, as JSON lines in a folder on the driver's disk, and how much of it MLflow has.

    events.jsonl      the events, in order; the driver appends
    start.json        where and under which names the run is tracked
    delivered.json    `State`: up to where the events are delivered; the writer replaces it
    driver.lock       held by the driver until it appends no more; contains its attempt
    writer.lock       held by the process that delivers; contains the attempt that it serves

An event is one line and one `write` on a file opened for appending: it is with the kernel when `append` returns and
survives a `kill -9` of either side. A line that a dying machine left half written is skipped.
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


class Spool:
    """The appending end. Thread-safe; one per driver.

    folder: local, made when missing. warn: told when the disk is full; what it does not take waits in memory, in order.
    Raises OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object] = lambda sentence: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._warn, self._full = folder, warn, False
        self._lock, self._file = threading.Lock(), (folder / "events.jsonl").open("ab", buffering=0)
        self._waiting = bytearray(b"\n")  # ends the line that a dying driver may have left half written

    def append(self, event: Event) -> None:
        """Add one event (floats may be nan or infinite); about 10 µs."""
        with self._lock:
            if not self._file.closed:  # else it is a straggling thread's sample
                self._waiting += json.dumps(event, separators=(",", ":")).encode() + b"\n"
                self._write()

    def close(self, timeout: float = 0.0) -> None:
        """Wait for room on the disk, if there is none, for that many seconds."""
        until = time.monotonic() + timeout
        with self._lock, self._file:
            while not self._write() and time.monotonic() < until:
                time.sleep(0.2)

    def _write(self) -> bool:
        """Whether all is written."""
        before, self._full = self._full, False
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            self._full = True
            if not before:
                self._warn(f"metrics wait in memory until there is room: {self._folder}: {error.strerror or error}")
        return not self._full


def size(folder: Path) -> int:
    """Bytes in the spool."""
    events = folder / "events.jsonl"
    return events.stat().st_size if events.exists() else 0


def read(folder: Path, offset: int) -> list[tuple[Event, int]]:
    """The next events from `offset` on, each with the offset after it: about 1 MiB at most, [] at the end.

    Never a line that is still being written; a damaged one is an event of type "damaged".
    """
    with (folder / "events.jsonl").open("rb") as file:
        file.seek(offset)
        data = file.read(2**20)
        if b"\n" not in data:  # one event longer than that
            file.seek(offset)
            data = file.readline()
    found = []
    for line in io.BytesIO(data[: data.rfind(b"\n") + 1]):
        offset += len(line)
        event: Any = None
        with contextlib.suppress(ValueError):
            event = json.loads(line)
        found.append((event if isinstance(event, dict) and "type" in event else {"type": "damaged"}, offset))
    return found


@dataclass
class State:
    """How far delivery has come. Lost, it is rebuilt: the spool is read again, and MLflow asked what it has."""

    offset: int = 0
    run_id: str = ""
    experiment_id: str = ""
    open: bool = False  # whether the events delivered so far include a start without its finish
    last_time: float = 0.0  # Unix seconds of the newest event delivered: when a killed run ended
    tries: int = 0  # how often the upload at `offset` was begun, for uploads that fail for ever or kill the writer
    problem: str = ""  # one sentence: why nothing can be delivered just now
    left_out: str = ""  # why there is no model
    writer: int | None = None  # process id of the last writer

    def has_all(self, folder: Path) -> bool:
        """Whether all of the spool is delivered, and the run ended."""
        return self.offset >= size(folder) and not self.open

    @classmethod
    def load(cls, folder: Path) -> State:
        values = read_json(folder / "delivered.json")
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def save(self, folder: Path) -> None:
        write_json(folder / "delivered.json", asdict(self))


def last_start(folder: Path) -> dict[str, Any]:
    """Where and under which names the run was tracked at its newest start (uri, experiment, artifact_location,
    run_name, run_uid, tags, parent); {} in an empty spool."""
    return read_json(folder / "start.json")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file in one step: a reader sees the old one or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value))
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The file's object; {} if it is missing or damaged."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def take_lock(folder: Path, name: str, seconds: float = 0.0, text: str = "") -> int | None:
    """Take the exclusive lock `name`.lock and write `text` into it. Returns the descriptor that holds it until it is
    closed or this process dies (whatever its children do); None where another process has it for all that time."""
    fd, until = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644), time.monotonic() + seconds
    while not _try_lock(fd, fcntl.LOCK_EX):
        if time.monotonic() >= until:
            os.close(fd)
            return None
        time.sleep(0.05)
    os.ftruncate(fd, 0)
    os.write(fd, text.encode())
    return fd


def look_at_lock(folder: Path, name: str) -> tuple[bool, str]:
    """Whether another process holds the lock, and the text of its last holder."""
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
