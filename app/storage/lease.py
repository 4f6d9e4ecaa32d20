"""The lease of a run: which start may write to its folder, and that its driver lives. Two drivers cannot both write.

A driver writes `lease.json` again every `HEARTBEAT_SECONDS`. No clock is believed in judging it, neither this machine's
nor another's, since clocks jump and differ: on the same machine the kernel says whether that very process lives, and
of one elsewhere what counts is whether the file changes while one looks at it. Reading it and writing it are one act
(`exclusive`), where the file system has locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from app.errors import UserError
from app.storage.storage import Storage

FILE = "lease.json"
HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0  # a driver on another machine that has been silent for this long is taken for dead
LOOK_SECONDS = 0.5  # from one look at another's lease to the next
OWN_SECONDS = 2.0  # and at one's own: how soon a start learns that another has taken over
END_SECONDS = 20.0  # that it then has to end by itself
LOCK_SECONDS = 5.0  # a process that was stopped while it had the lock keeps nobody waiting for longer

Lease = dict[str, Any]


def write_lease(storage: Storage, attempt: str, beat: int, **about: Any) -> None:
    """Takes or renews it for this process; beat: another number each time. about: for a person, see `describe`."""
    lease = {
        "attempt": attempt,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": process_started(os.getpid()),
        "beat": beat,
    }
    storage.write_bytes(FILE, json.dumps(lease | about).encode())


@contextlib.contextmanager
def exclusive(storage: Storage) -> Iterator[None]:
    """One process at a time; on an object store, and a file system without locks for folders, all at once."""
    folder = None
    with contextlib.suppress(OSError):
        if storage.is_local:
            folder, until = os.open(storage.local_path, os.O_RDONLY), time.monotonic() + LOCK_SECONDS
            while not _try_lock(folder) and time.monotonic() < until:
                time.sleep(0.02)
    try:
        yield
    finally:
        if folder is not None:
            os.close(folder)


def _try_lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def describe(lease: Lease) -> str:
    """Who holds it, since when and how far training is: `process 71 on a, for 0:00:42, at step 120 of 400`. By
    the clocks of both machines, which is good enough to be read."""
    who = f"process {lease['pid']} on {lease['host']}"
    numbers = [lease.get(key) for key in ("since", "step", "steps")]
    since, step, steps = (value if isinstance(value, int) else -1 for value in numbers)
    age = timedelta(seconds=max(0, int(time.time()) - since))
    return who if min(since, step, steps) < 0 else f"{who}, for {age}, at step {step:,} of {steps:,}"


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


def _is_stopped(pid: int) -> bool:
    """Whether it waits for SIGCONT; only then it learns that it was superseded."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


class Holder:
    """One start's hold on the lease of a run, from `take` to `release`.

    Attributes:
        say: Tells a person something.
        step: The newest step, for whoever asks.
        steps: The last step of the run.
        successor: The lease of the start that has taken the run over from this one.
        taken: Whether this start has ever held the lease.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        attempt: str,
        *,
        is_newest: Callable[[], bool],
        on_lost: Callable[[str], None],
    ) -> None:
        """Holds nothing yet.

        Args:
            storage: The run's folder.
            name: The run's.
            attempt: Identifies this start.
            is_newest: Whether no later start has been here, for a lease that is gone without one.
            on_lost: Called in a thread, with a sentence, if another start has taken the run over
                and this one has not released the lease `END_SECONDS` later.
        """
        self.storage = storage
        self.name = name
        self.attempt = attempt
        self._is_newest = is_newest
        self._on_lost = on_lost
        self.say: Callable[[str], None] = lambda text: None
        self.step = 0
        self.steps = 0
        self.successor: Lease | None = None
        self.taken = False
        self._since = int(time.time())
        self._over = threading.Event()

    def refuse_if_held(self, seconds: float = LEASE_SECONDS) -> Lease | None:
        """The lease of a driver that is dead, if there is one. seconds: that a driver elsewhere has to show that it
        lives.

        Raises:
            UserError: another driver is training this run now.
        """
        lease = read_lease(self.storage)
        if not lease:
            return None
        if seconds and not is_here(lease):
            where = lease["host"]
            self.say(f"a start of this run on {where} did not end: waiting up to {seconds:.0f} s to see if it lives")
        if is_alive(self.storage, lease, seconds):
            raise self._held(lease)
        return lease

    def take(self, before: Lease | None) -> None:
        """Takes the lease, which was `before` when it was looked at, and keeps it.

        Raises:
            UserError: another start has taken it since then.
        """
        self.storage.make()
        with exclusive(self.storage):
            now = read_lease(self.storage)
            if now and now["attempt"] != (before or {}).get("attempt"):
                raise self._held(now)
            self._write(0)
        self.taken = True
        threading.Thread(target=self._keep, daemon=True, name="lease").start()

    def take_over(self) -> None:
        """Takes the lease from whoever holds it, who ends within seconds; one on this machine is waited for."""
        before = read_lease(self.storage)
        self.take(before)
        if before is None or not (is_here(before) and is_alive(self.storage, before)):
            return
        seconds = 2 * END_SECONDS
        self.say(f"taking the run over from {describe(before)}: waiting up to {seconds:.0f} s for it to end")
        until = time.monotonic() + seconds
        while is_alive(self.storage, before) and not _is_stopped(before["pid"]) and time.monotonic() < until:
            time.sleep(0.1)

    def check(self) -> None:
        """Raises UserError if another start has it: where there are no locks, two may take it at the same moment."""
        if self.is_superseded():
            assert self.successor is not None
            self._over.set()
            raise self._held(self.successor)

    def is_superseded(self) -> bool:
        """Whether another start has taken the run over; asks the storage."""
        self._look()
        return self.successor is not None

    def release(self, last: Callable[[], None] = lambda: None) -> None:
        """Ends the hold; `last` is what is done just before, unless another start has taken the run over."""
        with exclusive(self.storage):
            self._over.set()
            if not self.is_superseded():
                last()
                self.storage.remove(FILE)

    @property
    def released(self) -> bool:
        return self._over.is_set()

    def _look(self) -> Lease | None:
        lease = read_lease(self.storage)
        if lease and lease["attempt"] != self.attempt:
            self.successor = lease
        return lease

    def _held(self, lease: Lease) -> UserError:
        return UserError(
            f"the run {self.name!r} is being trained by {describe(lease)}: wait for it, add --take-over to end it "
            "there and continue it here, or use another run.name"
        )

    def _write(self, beat: int) -> None:
        write_lease(self.storage, self.attempt, beat, since=self._since, step=self.step, steps=self.steps)

    def _keep(self) -> None:
        """Renews the lease until this start ends; reports one that was superseded and does not."""
        beat, due = 1, time.monotonic() + HEARTBEAT_SECONDS
        while not self._over.wait(OWN_SECONDS) and self.successor is None:
            with contextlib.suppress(Exception), exclusive(self.storage):  # one that cannot be reached is tried again
                lease = self._look()
                if self.successor or self._over.is_set() or (lease and time.monotonic() < due):
                    continue
                if lease or self._is_newest():  # it alone may be gone; a storage that is gone holds no run either
                    self._write(beat)
                    beat, due = beat + 1, time.monotonic() + HEARTBEAT_SECONDS
        if not self._over.wait(END_SECONDS):  # its main thread waits for a Ray that is gone, say
            self._on_lost(self.superseded())

    def superseded(self) -> str:
        """For a person, once another start has taken over."""
        who = describe(self.successor) if self.successor else "another start"
        return f"the run {self.name!r} was taken over by {who}: this start ends, and leaves everything to it"
