"""A fork server: one process that has imported what workers need, and forks a new one whenever asked.

Importing torch and Ray takes seconds, a fork of a process that has them takes milliseconds, and every fork is a
process of its own: nothing of one run is left for the next. Like CPython's `multiprocessing.forkserver`, but reached by
processes that it did not start, over a Unix socket (`cluster/fast_start/client.py` is the other side).

The server never starts a thread, computes anything or touches a GPU: after a fork there is only the thread that called
it, and CUDA in a parent would be unusable in its children.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from cluster.fast_start import fork

TURN_SECONDS = 0.5
REQUEST_SECONDS = 5.0
MOST_BYTES = 4_000_000


class Server:
    """path, listener: where it listens. owner: a process that it ends with. seconds: without a request and without a
    child after which it ends."""

    def __init__(self, path: str, listener: socket.socket, owner: int, seconds: float) -> None:
        self.path, self.listener, self.seconds = path, listener, seconds
        self.owner = os.pidfd_open(owner)
        self.made = os.stat(path).st_ino
        self.sources = sources()
        self.children: dict[int, socket.socket | None] = {}
        self.used = time.monotonic()
        self.wake, self.waker = os.pipe()
        os.set_blocking(self.waker, False)
        signal.set_wakeup_fd(self.waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until its owner has ended, it has been idle, or what it has imported is not what is on disk any more."""
        try:
            while not self._is_over():
                watched: list[Any] = [self.listener, self.owner, self.wake, *self._waiting()]
                ready, _, _ = select.select(watched, [], [], TURN_SECONDS * 10)
                if self.owner in ready:
                    return
                if self.wake in ready:
                    os.read(self.wake, 4096)
                self._reap()
                self._end_abandoned(ready)
                if self.listener in ready:
                    self._accept()
        finally:
            self._vanish()
        while self.children:  # nobody comes any more, but somebody may wait for their end
            watched = [self.wake, *self._waiting()]
            ready, _, _ = select.select(watched, [], [], TURN_SECONDS)
            self._reap()
            self._end_abandoned(ready)

    def _waiting(self) -> list[socket.socket]:
        return [connection for connection in self.children.values() if connection is not None]

    def _end_abandoned(self, ready: list[Any]) -> None:
        """Kills the children whose commands were killed: nobody is there who would hand them a signal."""
        for pid, connection in list(self.children.items()):
            if connection is not None and connection in ready:
                os.kill(pid, signal.SIGKILL)
                connection.close()
                self.children[pid] = None

    def _is_over(self) -> bool:
        if self.children:
            self.used = time.monotonic()
        elif time.monotonic() - self.used > self.seconds:
            return True
        return not self._is_known()

    def _is_known(self) -> bool:
        """Whether the socket on disk is still this one's."""
        with contextlib.suppress(OSError):
            return os.stat(self.path).st_ino == self.made
        return False

    def _vanish(self) -> None:
        if self._is_known():
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.listener.close()

    def _reap(self) -> None:
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.children.clear()
                return
            if pid == 0:
                return
            waits = self.children.pop(pid, None)
            if waits is not None:
                _say(waits, {"exit": os.waitstatus_to_exitcode(status)})
                waits.close()

    def _accept(self) -> None:
        """Answers one client; what goes wrong with it (no more processes, no more files) ends nobody else's work."""
        streams: list[int] = []
        connection = None
        try:
            connection, _ = self.listener.accept()
            connection.settimeout(REQUEST_SECONDS)
            request = receive(connection, streams)
            if request is None or _is_gone(connection):
                connection.close()
                return
            self.used = time.monotonic()
            if sources() != self.sources:  # whoever asks starts another server
                self._vanish()
                connection.close()
            else:
                self._fork(connection, streams, request)
        except (OSError, ValueError):
            if connection is not None:
                connection.close()
        finally:
            for fd in streams:
                os.close(fd)

    def _fork(self, connection: socket.socket, streams: list[int], request: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self.listener.close()
            connection.close()
            for other in self.children.values():
                if other is not None:
                    other.close()
            for fd in (self.owner, self.wake, self.waker):
                os.close(fd)
            fork.become(streams, request)
        waits = bool(request.get("wait"))
        self.children[pid] = connection if waits else None
        _say(connection, {"pid": pid})
        if not waits:
            connection.close()


def receive(connection: socket.socket, streams: list[int]) -> dict[str, Any] | None:
    """The request that a client has sent, its three streams put into `streams`; None where it only looked whether there
    is a server.

    Raises ValueError or OSError for anything else."""
    first, found, _, _ = socket.recv_fds(connection, 1, 3)
    streams += found
    if not first:
        return None
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part or len(line) > MOST_BYTES:
            raise ValueError("a request that does not end")
        line += part
    if len(streams) != 3:
        raise ValueError("three streams are wanted")
    return dict(json.loads(line))


def _is_gone(connection: socket.socket) -> bool:
    """Whether a client has left while it waited: it has gone another way, and a fork would be one too many."""
    connection.settimeout(0)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(REQUEST_SECONDS)


def _say(connection: socket.socket, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(what).encode() + b"\n")


def sources() -> frozenset[tuple[str, int, int]]:
    """What the code beside this package is made of, and the packages that are installed: another answer later means
    that something was changed since."""
    root = Path(__file__).parents[2]
    files = [file for part in ("app", "strategies", "cluster") for file in (root / part).rglob("*.py")]
    found = set()
    for path in [*files, Path(sysconfig.get_path("purelib"))]:
        with contextlib.suppress(OSError):
            about = path.stat()
            found.add((str(path), about.st_mtime_ns, about.st_size))
    return frozenset(found)


@contextlib.contextmanager
def _ray_draws_nothing() -> Iterator[None]:
    """While it lasts Ray's own generator of random ids is not used: once it was, its state would be the same in all
    forks, and so would be what they draw. It is used for every class that is declared to be an actor's."""
    try:
        from ray import actor
    except ImportError:
        yield
        return

    class Ids:
        @staticmethod
        def from_random() -> Any:
            return kind(os.urandom(kind.size()))

    kind = actor.ActorClassID
    with mock.patch.object(actor, "ActorClassID", Ids):
        yield


def main() -> None:
    """path, number of its listening socket, modules to import (with commas), owner's pid, seconds."""
    path, fd, preload, owner, seconds = sys.argv[1:6]
    os.closerange(3, int(fd))  # what the command that started this had open is not this one's to keep
    os.closerange(int(fd) + 1, os.sysconf("SC_OPEN_MAX"))
    server = Server(path, socket.socket(fileno=int(fd)), int(owner), float(seconds))
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # read when Ray Train is imported
    gc.disable()  # what is imported is kept: looking through it again and again is a fifth of the time
    with _ray_draws_nothing():
        for name in preload.split(","):
            importlib.import_module(name)
    os.chdir("/")  # keeps no folder busy
    gc.enable()
    gc.freeze()  # objects that exist now are not looked at by a child's collector: their memory stays shared
    server.serve()
