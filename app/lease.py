"""The lease of a run: which start may write to its folder, and that its driver lives. Two drivers cannot both write.

A driver writes `lease.json` again every `HEARTBEAT_SECONDS`. No clock is believed in judging it, neither this machine's
nor another's, since clocks jump and differ: on the same machine the kernel says whether that very process lives, and
of one elsewhere what counts is whether the file changes while one looks at it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from app.storage import Storage

FILE = "lease.json"
HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0  # a driver on another machine that has been silent for this long is taken for dead
LOOK_SECONDS = 0.5

Lease = dict[str, Any]


def write_lease(storage: Storage, attempt: str, beat: int) -> None:
    """Takes or renews it for this process; beat: another number each time."""
    lease = {
        "attempt": attempt,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": process_started(os.getpid()),
        "beat": beat,
    }
    storage.write_bytes(FILE, json.dumps(lease).encode())


def read_lease(storage: Storage) -> Lease | None:
    """None if there is none, or what is there is no lease: such a file locks no start out."""
    try:
        lease = json.loads(storage.read_bytes(FILE))
    except (FileNotFoundError, ValueError):
        return None
    kinds: dict[str, Any] = {"attempt": str, "host": str, "pid": int, "process_started": (int, float)}
    if not isinstance(lease, dict) or not all(isinstance(lease.get(key), kind) for key, kind in kinds.items()):
        return None
    return lease if 0 < lease["pid"] < 2**31 else None


def is_current(folder: str, attempt: str) -> bool:
    """Whether `attempt` holds the lease of the run in `folder`; a superseded start must not commit.

    Raises OSError where there is no lease at all: the storage is not there just now (a mount that is gone leaves an
    empty folder, which must not be taken for it), or this run is not being trained.
    """
    lease = read_lease(Storage(folder))
    if lease is None:
        raise FileNotFoundError(errno.ENOENT, "the storage cannot be reached", folder)
    return lease["attempt"] == attempt


def is_here(lease: Lease) -> bool:
    """Whether its driver is on this machine."""
    return lease["host"] == socket.gethostname()


def is_alive(storage: Storage, lease: Lease, seconds: float = LEASE_SECONDS) -> bool:
    """Whether the driver that holds it lives; of one elsewhere, whether it renews it within `seconds`, or lets go of it
    for another."""
    if is_here(lease):
        return process_started(lease["pid"]) == lease["process_started"]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(LOOK_SECONDS, seconds))
        now = read_lease(storage)
        if now != lease:
            return now is not None
    return False


def process_started(pid: int) -> float:
    """When a living process began, in clock ticks since this machine did; 0.0 where there is none.

    With its number it tells a process from a later one of the same number. Without Linux's /proc it is psutil's time of
    day, which changes with the clock.
    """
    try:
        if not Path("/proc/self/stat").exists():
            return float(psutil.Process(pid).create_time())
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return float(fields[19]) if fields[0] not in "ZX" else 0.0
    except (OSError, IndexError, psutil.Error):
        return 0.0
