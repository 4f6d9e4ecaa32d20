"""The lease of a run: which start may write to the run's folder, and whether its driver lives.

A driver writes `lease.json` every `HEARTBEAT_SECONDS`, so that two drivers cannot both write to the
run. No clock decides whether a driver lives, since clocks jump and differ between machines: on the
same machine the kernel knows whether exactly that process lives, and a driver on another machine
lives if the file changes while it is watched. Reading and writing the lease is one atomic operation
(`exclusive`) if the file system has locks.
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from app.errors import UserError
from app.storage.storage import Storage

FILE = "lease.json"
HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0  # after which a silent driver on another machine counts as dead
LOOK_SECONDS = 0.5  # between two looks at the lease of another start
OWN_SECONDS = 2.0  # between two looks at one's own lease, to learn that another has taken over
END_SECONDS = 20.0  # that a superseded start then has to end by itself
LOCK_SECONDS = 5.0  # that the lock is waited for; a process that was stopped may hold it
LARGEST_PID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The content of lease.json."""

    attempt: str
    """The start of the run that has the lease."""
    host: str
    pid: int
    process_started: float
    """From `process_started`; tells the process from a later one with the same pid."""
    beat: int | None = None
    """Differs each time the lease is renewed."""
    since: int | None = None
    """When the start began, in Unix seconds by the clock of its machine."""
    step: int | None = None
    """The newest optimizer step."""
    steps: int | None = None
    """Optimizer steps of the whole run."""


def write_lease(
    storage: Storage,
    attempt: str,
    beat: int,
    *,
    since: int | None = None,
    step: int | None = None,
    steps: int | None = None,
) -> None:
    """Take or renew the lease for this process.

    Args:
        storage: The run's folder.
        attempt: This start.
        beat: Another number each time.
        since: See `Lease`, as the next two.
        step: For a person.
        steps: For a person.
    """
    lease = Lease(
        attempt=attempt,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_started=process_started(os.getpid()),
        beat=beat,
        since=since,
        step=step,
        steps=steps,
    )
    values = {key: value for key, value in asdict(lease).items() if value is not None}
    storage.write_bytes(FILE, json.dumps(values).encode())


def read_lease(storage: Storage) -> Lease | None:
    """The lease of a run.

    Returns:
        None if there is none, or if the file is not a lease: such a file must not lock a run.
    """
    try:
        values = json.loads(storage.read_bytes(FILE))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(values, dict):
        return None
    attempt = values.get("attempt")
    host = values.get("host")
    pid = values.get("pid")
    started = values.get("process_started")
    if not isinstance(attempt, str) or not isinstance(host, str):
        return None
    if not isinstance(pid, int) or not 0 < pid <= LARGEST_PID:
        return None
    if not isinstance(started, (int, float)):
        return None
    return Lease(
        attempt=attempt,
        host=host,
        pid=pid,
        process_started=started,
        beat=_int_or_none(values.get("beat")),
        since=_int_or_none(values.get("since")),
        step=_int_or_none(values.get("step")),
        steps=_int_or_none(values.get("steps")),
    )


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) else None


def describe(lease: Lease) -> str:
    """Who has the lease, such as `process 71 on a, for 0:00:42, at step 120 of 400`.

    The age is by the clocks of both machines, which is good enough for a person.
    """
    process = f"process {lease.pid} on {lease.host}"
    since = lease.since
    step = lease.step
    steps = lease.steps
    if since is None or step is None or steps is None or min(since, step, steps) < 0:
        return process
    age = timedelta(seconds=max(0, int(time.time()) - since))
    return f"{process}, for {age}, at step {step:,} of {steps:,}"


@contextlib.contextmanager
def exclusive(storage: Storage) -> Iterator[None]:
    """A context for one process at a time.

    On an object store, and on a file system without locks for folders, it excludes nobody.
    """
    folder = None
    with contextlib.suppress(OSError):
        if storage.is_local:
            folder = os.open(storage.local_path, os.O_RDONLY)
            deadline = time.monotonic() + LOCK_SECONDS
            while not _try_lock(folder) and time.monotonic() < deadline:
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


# --- who has it -----------------------------------------------------------------------------------


def is_current(folder: str, attempt: str) -> bool:
    """Whether a start has the lease of a run; a superseded one must not commit.

    Args:
        folder: The run's folder.
        attempt: The start.

    Raises:
        FileNotFoundError: There is no lease: the storage is away (a mount that is gone leaves an
            empty folder), or the run is not being trained.
    """
    lease = read_lease(Storage(folder))
    if lease is None:
        raise FileNotFoundError(errno.ENOENT, "the storage cannot be reached", folder)
    return lease.attempt == attempt


def is_here(lease: Lease) -> bool:
    """Whether the driver is on this machine."""
    return lease.host == socket.gethostname()


def is_alive(storage: Storage, lease: Lease, seconds: float = LEASE_SECONDS) -> bool:
    """Whether the driver that has the lease lives.

    Args:
        storage: The run's folder.
        lease: The lease when it was read.
        seconds: How long a driver on another machine has to renew the lease or pass it on.
    """
    if is_here(lease):
        return process_started(lease.pid) == lease.process_started
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(LOOK_SECONDS, seconds))
        lease_now = read_lease(storage)
        if lease_now != lease:
            return lease_now is not None
    return False


def process_started(pid: int) -> float:
    """When a living process started, in clock ticks since the start of this machine.

    With the pid it identifies a process, because pids are used again. Without Linux's /proc it is
    the time of day from psutil, which changes with the clock.

    Returns:
        0.0 if there is no such process.
    """
    try:
        if not Path("/proc/self/stat").exists():
            return float(psutil.Process(pid).create_time())
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        is_dead = fields[0] in "ZX"  # a zombie, or being removed
        return 0.0 if is_dead else float(fields[19])
    except (OSError, IndexError, psutil.Error):
        return 0.0


def _is_stopped(pid: int) -> bool:
    """Whether a process waits for SIGCONT; until then it cannot learn that it was superseded."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


class LeaseHolder:
    """One start's hold on the lease of a run, from `take` to `release`.

    Args:
        storage: The run's folder.
        name: The run's name.
        attempt: Identifies this start.
        is_newest: Whether no later start has been here, for a lease that is gone without one.
        on_lost: Called in a thread, with a sentence, if another start has taken the run over and
            this one has not released the lease `END_SECONDS` later.

    Attributes:
        say: Shows a person a sentence.
        step: The newest step, for a person who reads the lease.
        steps: The last step of the run, for the same.
        successor: The lease of the start that has taken the run over from this one.
        taken: Whether this start has ever had the lease.
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
        """Check that no other driver is training the run.

        Args:
            seconds: How long a driver on another machine has to show that it lives.

        Returns:
            The lease of a driver that is dead, if there is one.

        Raises:
            UserError: Another driver is training the run.
        """
        lease = read_lease(self.storage)
        if lease is None:
            return None
        if seconds and not is_here(lease):
            self.say(
                f"a start of this run on {lease.host} did not end: "
                f"waiting up to {seconds:.0f} s to see if it lives"
            )
        if is_alive(self.storage, lease, seconds):
            raise self._held_by(lease)
        return lease

    def take(self, expected: Lease | None) -> None:
        """Take the lease, and keep it.

        Args:
            expected: The lease when it was last read.

        Raises:
            UserError: Another start has taken it since then.
        """
        expected_attempt = expected.attempt if expected is not None else None
        self.storage.make()
        with exclusive(self.storage):
            lease = read_lease(self.storage)
            if lease is not None and lease.attempt != expected_attempt:
                raise self._held_by(lease)
            self._write(0)
        self.taken = True
        threading.Thread(target=self._keep, daemon=True, name="lease").start()

    def take_over(self) -> None:
        """Take the lease from the start that has it, which then ends within seconds.

        One on this machine is waited for.
        """
        before = read_lease(self.storage)
        self.take(before)
        if before is None or not is_here(before) or not is_alive(self.storage, before):
            return
        seconds = 2 * END_SECONDS
        self.say(
            f"taking the run over from {describe(before)}: "
            f"waiting up to {seconds:.0f} s for it to end"
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not is_alive(self.storage, before) or _is_stopped(before.pid):
                return
            time.sleep(0.1)

    def check(self) -> None:
        """Check that this start still has the lease; without locks two may take it at once.

        Raises:
            UserError: Another start has it.
        """
        if self.is_superseded():
            assert self.successor is not None
            self._over.set()
            raise self._held_by(self.successor)

    def is_superseded(self) -> bool:
        """Read the lease: whether another start has taken the run over."""
        self._read()
        return self.successor is not None

    def release(self, before: Callable[[], None] = lambda: None) -> None:
        """Give the lease up.

        Args:
            before: Called first, unless another start has taken the run over.
        """
        with exclusive(self.storage):
            self._over.set()
            if not self.is_superseded():
                before()
                self.storage.remove(FILE)

    @property
    def released(self) -> bool:
        """Whether this start has given the lease up, or lost it."""
        return self._over.is_set()

    def superseded_message(self) -> str:
        """A sentence for a person, once another start has taken over."""
        successor = describe(self.successor) if self.successor else "another start"
        return (
            f"the run {self.name!r} was taken over by {successor}: "
            "this start ends, and leaves everything to it"
        )

    def _read(self) -> Lease | None:
        lease = read_lease(self.storage)
        if lease is not None and lease.attempt != self.attempt:
            self.successor = lease
        return lease

    def _held_by(self, lease: Lease) -> UserError:
        return UserError(
            f"the run {self.name!r} is being trained by {describe(lease)}: wait for it, add "
            "--take-over to end it there and continue it here, or use another run.name"
        )

    def _write(self, beat: int) -> None:
        write_lease(
            self.storage,
            self.attempt,
            beat,
            since=self._since,
            step=self.step,
            steps=self.steps,
        )

    def _keep(self) -> None:
        """Renew the lease until this start ends; report a superseded start that does not end."""
        beat = 1
        due = time.monotonic() + HEARTBEAT_SECONDS
        while not self._over.wait(OWN_SECONDS) and self.successor is None:
            # A storage that cannot be reached is tried again.
            with contextlib.suppress(Exception), exclusive(self.storage):
                lease = self._read()
                is_over = self.successor is not None or self._over.is_set()
                is_early = lease is not None and time.monotonic() < due
                if is_over or is_early:
                    continue
                # A lease that is gone is written again only if the run itself is still there.
                if lease is not None or self._is_newest():
                    self._write(beat)
                    beat += 1
                    due = time.monotonic() + HEARTBEAT_SECONDS
        if not self._over.wait(END_SECONDS):  # its main thread may wait for a Ray that is gone
            self._on_lost(self.superseded_message())
