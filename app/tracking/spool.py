"""The spool: everything a run tells the world, as JSON lines in a folder on the driver's disk.

One process appends (the driver), one reads (the writer). A line is one event and one `write` system call on a file
opened for appending, so it is in the kernel's hands when `append` returns and outlives a `kill -9` of either side.
A line that a dying machine left half written is skipped. The spool is cut into segments, so that the delivered part of
a very long run can be removed from the disk; every segment after the first begins with a copy of the last `start`
event, so that each can be delivered without the ones before it.

    FOLDER/events-000001.jsonl, events-000002.jsonl, …    what is to be delivered, in order
    FOLDER/files/                                         small artifacts, copied when they were handed over
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]

SEGMENT_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
KEEP_BYTES = 32 * 2**20
"""What is kept in memory at most while the disk takes nothing: a day of most runs' metrics."""


@dataclass(frozen=True, order=True)
class Position:
    """A place in the spool: the segment's number (from 1) and the byte in it that comes next."""

    segment: int = 1
    offset: int = 0


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"events-{number:06d}.jsonl"


def segments(folder: Path) -> list[int]:
    """The numbers of the segments that are on disk, ascending."""
    return sorted(int(path.stem.removeprefix("events-")) for path in folder.glob("events-*.jsonl"))


class Spool:
    """The appending end. Thread-safe; one per driver.

    Args:
        folder: a local folder, made when missing.
        segment_bytes: size after which a new segment is begun.
        keep_bytes: what is kept in memory at most while the disk takes nothing.
    Raises:
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, keep_bytes: int = KEEP_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._start: Event | None = None
        self._keep_bytes = keep_bytes
        self._kept = bytearray()  # what the disk has not taken yet
        self.lost = 0
        """Events for which there was no room on the disk, nor in memory."""
        self._open((segments(folder) or [1])[-1])

    def _open(self, number: int) -> None:
        path = segment_path(self.folder, number)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._number = number
        self._size = os.fstat(self._fd).st_size
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._kept += b"\n"  # ends the line a dying driver left half written, so that ours is not glued to it

    def _write_kept(self) -> None:
        """Raises OSError when the disk is full; what it did not take stays kept."""
        while self._kept:
            written = os.write(self._fd, self._kept[:CHUNK_BYTES])
            self._size += written
            del self._kept[:written]

    def append(self, event: Event) -> None:
        """Add one event (JSON; floats may be nan or infinite). About 10 µs.

        Raises OSError when the disk is full: the event is kept and written before the next one, unless it is `lost`.
        """
        line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
        with self._lock:
            if self._fd < 0:
                return  # closed: a straggling thread's sample
            if event["type"] == "start":
                self._start = event
            if self._size >= self._segment_bytes and not self._kept:
                self._rotate()
            if len(self._kept) + len(line) > self._keep_bytes:
                self.lost += 1
            else:
                self._kept += line
            self._write_kept()

    def flush(self) -> None:
        """Write what is kept. Raises OSError when the disk is still full."""
        with self._lock:
            if self._fd >= 0:
                self._write_kept()

    def _rotate(self) -> None:
        """Begins the next segment; where that cannot be made, this one goes on."""
        before = self._fd
        with contextlib.suppress(OSError):
            self._open(self._number + 1)
            os.close(before)
            if self._start is not None:
                again = {**self._start, "again": True}
                self._kept += (json.dumps(again, separators=(",", ":")) + "\n").encode()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Reader:
    """The reading end: whole lines after `position`, never one that is still being written."""

    def __init__(self, folder: Path, position: Position) -> None:
        self.folder = folder
        self.position = position
        self.corrupt = 0

    def waiting(self) -> bool:
        """Whether there may be something to read; costs one `stat` when there is nothing."""
        try:
            size = segment_path(self.folder, self.position.segment).stat().st_size
        except FileNotFoundError:
            return any(number > self.position.segment for number in segments(self.folder))
        return size > self.position.offset or segment_path(self.folder, self.position.segment + 1).exists()

    def read(self) -> list[tuple[Event, Position]]:
        """The next events, each with the position after it; about 1 MiB at most; empty at the end."""
        while True:
            data, last = self._chunk()
            if data:
                return list(self._events(data))
            if last:
                return []
            later = [number for number in segments(self.folder) if number > self.position.segment]
            self.position = Position(later[0], 0)

    def _chunk(self) -> tuple[bytes, bool]:
        """Whole lines from here on, and whether this is the last segment."""
        # Looked at before reading: once a later segment exists, nobody appends to this one any more.
        last = not any(number > self.position.segment for number in segments(self.folder))
        size = CHUNK_BYTES
        try:
            with segment_path(self.folder, self.position.segment).open("rb") as file:
                while True:
                    file.seek(self.position.offset)
                    data = file.read(size)
                    end = data.rfind(b"\n") + 1
                    if end or len(data) < size:
                        return data[:end], last
                    size *= 2  # one line longer than the chunk
        except FileNotFoundError:
            return b"", last

    def _events(self, data: bytes) -> Iterator[tuple[Event, Position]]:
        segment, offset = self.position.segment, self.position.offset
        for line in data.splitlines(keepends=True):
            offset += len(line)
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict) or "type" not in event:
                self.corrupt += bool(line.strip())
                event = {"type": "nothing"}
            yield event, Position(segment, offset)
        self.position = Position(segment, offset)

    def discard_delivered(self) -> None:
        """Remove the segments before the one that is being read."""
        for number in segments(self.folder):
            if number < self.position.segment:
                segment_path(self.folder, number).unlink(missing_ok=True)


def count_left(folder: Path, position: Position) -> int:
    """How many events are in the spool after `position`."""
    reader, left = Reader(folder, position), 0
    while events := reader.read():
        left += sum(event["type"] != "nothing" and not event.get("again") for event, _ in events)
    return left
