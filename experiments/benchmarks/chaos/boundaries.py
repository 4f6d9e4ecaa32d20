"""A worker's file operations while a checkpoint is saved, counted; and its death just before a chosen one.

Nothing of the product knows of this: Python's audit hooks tell of every opening, making, renaming and removing of a
file, and `os.fsync`, of which they do not tell, is put in an envelope. What counts is done by the thread that saves
("checkpoint"); a process numbers the operations of each save from 1, and they are the same in every save once old
checkpoints are being removed.

FOLDER/boundaries/RANK.jsonl    what the operations were, one save a line (while FOLDER/list is there)
FOLDER/order-RANK.json          {"boundary": n, "signal": number, "torn": share or null}: what to do, once
FOLDER/struck.json              that it was done: {"time": …, "pid": …, "what": …}
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

THREAD = "checkpoint"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
NAMES = {"os.mkdir": "make", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove folder"}


class Boundaries(threading.local):
    """Of one thread, that is of one save, as each has a thread of its own."""

    folder: Path | None = None  # of the class: where orders are; None: nobody counts
    rank = 0

    def __init__(self) -> None:
        self.inside = False  # what is done here is not to be counted
        self.count = 0
        self.seen: list[str] = []
        self.order: dict[str, Any] | None = None

    def pass_by(self, what: str, descriptor: int | None = None) -> None:
        """One operation is about to be done."""
        if self.inside or self.folder is None or threading.current_thread().name != THREAD:
            return
        self.inside = True
        try:
            self._count(what, descriptor, self.folder)
        finally:
            self.inside = False

    def _count(self, what: str, descriptor: int | None, folder: Path) -> None:
        self.count += 1
        path = folder / f"order-{self.rank}.json"
        if self.count == 1 and path.exists():
            self.order = json.loads(path.read_text())
        if (folder / "list").exists():
            self.seen.append(what)
            (folder / "boundaries").mkdir(exist_ok=True)
            with (folder / "boundaries" / f"{self.rank}.jsonl").open("a") as file:
                file.write(json.dumps([threading.get_ident(), self.count, what]) + "\n")
        if self.order and self.order["boundary"] == self.count:
            path.unlink()
            torn = self.order["torn"]
            if torn is not None and descriptor is not None:
                os.ftruncate(descriptor, int(os.fstat(descriptor).st_size * torn))  # a power cut: not yet synced
            note = {"time": time.time(), "pid": os.getpid(), "what": what, "rank": self.rank}
            part = folder / "struck.part"
            part.write_text(json.dumps(note))
            part.rename(folder / "struck.json")
            os.kill(os.getpid(), self.order["signal"])


_here = Boundaries()
_sync = os.fsync


def watch(folder: str, rank: int) -> None:
    """From now on this process obeys the orders in the folder; "" stops that."""
    if Boundaries.folder is None and folder:
        sys.addaudithook(_heard)
        os.fsync = _fsync  # type: ignore[assignment]
    Boundaries.folder, Boundaries.rank = (Path(folder) if folder else None), rank


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & WRITES and isinstance(path, (str, bytes)):
            _here.pass_by(f"open {_short(path)}")
    elif event in NAMES:
        _here.pass_by(f"{NAMES[event]} {_short(arguments[1 if event == 'os.rename' else 0])}")


def _fsync(descriptor: Any) -> None:
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    name = _short(os.readlink(f"/proc/self/fd/{number}"))
    regular = not os.path.isdir(f"/proc/self/fd/{number}")
    _here.pass_by(f"sync {name}", number if regular else None)
    _sync(descriptor)
    _here.pass_by(f"after sync {name}")


def _short(path: Any) -> str:
    """The file's name without what differs from one save to the next."""
    name = os.path.basename(os.fsdecode(path))
    if name.startswith("step-"):
        return "step folder"
    return "COMMIT.json part" if name.startswith(".COMMIT.json.") else name


def operations(folder: Path) -> list[tuple[int, int, str]]:
    """The file operations of one save, as the fullest save in the middle of a calm run had them: (rank, number,
    what)."""
    found: list[tuple[int, int, str]] = []
    for path in sorted((folder / "boundaries").glob("*.jsonl")):
        saves: list[list[str]] = []
        for line in path.read_text().splitlines():
            _, number, what = json.loads(line)
            if number == 1:
                saves.append([])
            saves[-1].append(what)
        fullest = max(saves[1:-1], key=len)
        found += [(int(path.stem), number, what) for number, what in enumerate(fullest, start=1)]
    return found
