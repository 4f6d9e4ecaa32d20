"""What the writer remembers and tells: two small files in the spool's folder, and locks that die with their holder.

delivered.json   how far MLflow has got; read by the next writer
status.json      what the writer is doing; read by the driver
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from app.tracking.spool import Position


def write_json(path: Path, value: object) -> None:
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


@dataclass
class Delivered:
    """How far delivery has got. Lost, it is rebuilt: the spool is read again and MLflow asked what it has."""

    segment: int = 1
    offset: int = 0
    run_id: str | None = None
    experiment_id: str | None = None
    start: dict[str, Any] = field(default_factory=dict)
    """The start event of the attempt whose events are being delivered."""
    open: bool = False
    """Whether that attempt has not been finished yet."""
    last_time: float = 0.0
    """Unix seconds of the last event delivered; a killed run ended then."""
    steps: dict[str, int] = field(default_factory=dict)
    """Per metric the highest step MLflow has: what is not above it is a replay."""
    tries: int = 0
    """How often the event at `offset` has been begun, for events that could kill the writer (a model)."""

    @property
    def position(self) -> Position:
        return Position(self.segment, self.offset)

    @position.setter
    def position(self, position: Position) -> None:
        self.segment, self.offset = position.segment, position.offset

    @classmethod
    def load(cls, folder: Path) -> Delivered:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in read_json(folder / "delivered.json").items() if k in known})

    def save(self, folder: Path) -> None:
        write_json(folder / "delivered.json", asdict(self))


@dataclass
class Status:
    """What the writer says of itself."""

    pid: int = 0
    run_id: str | None = None
    experiment_id: str | None = None
    uri: str = ""
    """Tracking URI, masked."""
    progress: float = 0.0
    """Unix seconds of the last thing that was delivered."""
    contact: bool = False
    """Whether the first try to reach MLflow is over, one way or the other."""
    away: bool = False
    """The tracking server (or database) did not take the last attempt."""
    problem: str = ""
    """One sentence: why nothing can be delivered just now."""
    upload: str = ""
    """What long thing is being uploaded just now."""

    @classmethod
    def load(cls, folder: Path) -> Status:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in read_json(folder / "status.json").items() if k in known})

    def save(self, folder: Path) -> None:
        write_json(folder / "status.json", asdict(self))


class FileLock:
    """An exclusive lock on a file, freed by the kernel when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> bool:
        """Take the lock; False if somebody else has it."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the file's lock, waiting for it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
