"""A fork server: one process that has imported what workers need, and forks a new one whenever asked. The fork becomes
the process that was asked for, as if Python had been started with its words.

Like CPython's `multiprocessing.forkserver`, but reached by processes that it did not start (`client.py`). It never
starts a thread, computes anything or touches a GPU: after a fork there is only the thread that called it, and CUDA in a
parent would be unusable in its children.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from cluster import ray_internals, temporary

IDLE_SECONDS = 600.0  # without a request and without a child, after which it ends
GONE_SECONDS = 3.0  # after a command was killed its Ray is gone
LOOK_SECONDS = 5.0  # without anything to do, and for one request to come whole
waiting: dict[socket.socket, int] = {}  # in a fork: who waits for its end, and the exit code so far
Request = tuple[dict[str, Any], list[int], socket.socket]  # arguments of become


class Server:
    """path, listener: where it listens. owner: a process that it ends with."""

    def __init__(self, path: str, listener: socket.socket, owner: int) -> None:
        self.path, self.listener = path, listener
        self.owner = os.pidfd_open(owner)
        self.inode = os.stat(path).st_ino
        self.sources = sources()
        self.children: list[int] = []  # as the owner, by file descriptors that are readable once they have ended
        self.workers: set[int] = set()  # processes, most of them children, that the owner's end is the end of
        self.used, self.began = time.monotonic(), time.time()

    def serve(self) -> Request | None:
        """In a fork: what it is to become. In the server: None, once its owner has ended, it has been idle for long, or
        what it has imported is not what is on disk any more."""
        while self._owns_socket() and (self.children or time.monotonic() - self.used < IDLE_SECONDS):
            watched = [self.listener.fileno(), self.owner, *self.children]
            ready, _, _ = select.select(watched, [], [], LOOK_SECONDS)
            if self.owner in ready:
                self._end_workers()
                break
            for child in set(self.children) & set(ready):
                os.waitid(os.P_PIDFD, child, os.WEXITED)
                os.close(child)
                self.children.remove(child)
                self.workers.discard(child)
                self.used = time.monotonic()
            if self.listener.fileno() in ready and (request := self._accept()):
                return request
        if self._owns_socket():
            os.unlink(self.path)
        return None

    def _end_workers(self) -> None:
        """Ray ends its processes with its raylet, but an agent may wait a minute for a head that is gone."""
        for child in self.workers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)

    def _owns_socket(self) -> bool:
        """Whether the socket on disk is still this server's."""
        with contextlib.suppress(OSError):
            return os.stat(self.path).st_ino == self.inode
        return False

    def _accept(self) -> Request | None:
        """Answers one client with a fork, in which it returns the request; what goes wrong with one client (no more
        processes, no more files) does not end the others' work."""
        streams: list[int] = []
        connection, _ = self.listener.accept()
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(LOOK_SECONDS)
            first, streams, _, _ = socket.recv_fds(connection, 1, 3)
            if first and sources() != self.sources:
                os.unlink(self.path)  # the next caller starts another server
            elif first:  # else it only looked whether there is a server
                with connection.makefile("rb") as lines:
                    request = json.loads(lines.readline())
                if request.get("end"):
                    self._end_workers()
                    os.unlink(self.path)
                    raise ConnectionError("ended by the command that it served, or by a person")
                if request.get("adopt"):
                    self.workers.update(map(os.pidfd_open, request["adopt"]))
                    raise ConnectionError("done")
                if request.get("about"):
                    about = {"pid": os.getpid(), "processes": len(self.children), "began": self.began}
                    connection.sendall(json.dumps(about).encode() + b"\n")
                    raise ConnectionError("answered")
                pid = os.fork()
                if pid == 0:
                    connection.settimeout(None)
                    self.listener.close()
                    for fd in (self.owner, *self.children):
                        os.close(fd)
                    return request, streams, connection
                self.children.append(os.pidfd_open(pid))
                if not request.get("wait"):
                    self.workers.add(self.children[-1])
                connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        connection.close()
        for fd in streams:
            os.close(fd)
        return None


def sources() -> frozenset[tuple[str, int, int]]:
    """The state of the code beside this package, and of the installed packages: another one later means a change."""
    found, root = set(), Path(__file__).parents[2]
    files = [file for part in ("app", "strategies", "cluster") for file in (root / part).rglob("*.py")]
    for path in [*files, Path(sysconfig.get_path("purelib"))]:
        with contextlib.suppress(OSError):
            about = path.stat()
            found.add((str(path), about.st_mtime_ns, about.st_size))
    return frozenset(found)


# --- in a fork -------------------------------------------------------------------------------------------------------


def become(request: dict[str, Any], streams: list[int], connection: socket.socket) -> None:
    """Runs the script or module that the request names as the main program, with its words, environment, folder and
    streams. The interpreter then ends as any does.

    request: argv (its first word a file, or "-m" and a module), env, and `cluster.fast_start.client.inherited`; with
        `wait` the connection stays open: the exit code goes over it, and who asked takes the fork along when it dies.
    """
    take_over(request, streams)
    if not request.get("wait"):
        connection.close()
        return run(request["argv"])
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    waiting[connection] = 1
    try:
        run(request["argv"])
        waiting[connection] = 0
    except SystemExit as ending:
        waiting[connection] = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        raise


def tell() -> None:
    """The last that an interpreter does at its end: once the exit code is known, nobody waits for what is not written
    yet."""
    for connection, code in waiting.items():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        connection.sendall(json.dumps({"exit": code & 0xFF}).encode() + b"\n")


def end_with(connection: socket.socket) -> None:
    """Ends this process when its command was killed: no signal can reach it any more."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def take_over(request: dict[str, Any], streams: list[int]) -> None:
    """Gives this process what it has from who asked, where it has its server's."""
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])  # the server does not heed some
    os.setsid()  # a raylet ends the whole process group of a worker that has ended
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for name, limits in request["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), tuple(limits))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, request["cores"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(request["oom"])
    if "numpy" in sys.modules:  # its generator stands where the server's does; os.fork seeds Python's own
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:  # which takes the number of threads from the environment when it is imported
        wanted = os.environ.get("OMP_NUM_THREADS", "")
        sys.modules["torch"].set_num_threads(int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0)))


def run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


# --- the server's process --------------------------------------------------------------------------------------------


def main() -> None:
    """path, number of its listening socket, module to import, owner's pid."""
    path, fd, preload, owner = sys.argv[1:5]
    os.closerange(3, int(fd))  # what the command that started this had open is not this one's to keep
    os.closerange(int(fd) + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        server = Server(path, socket.socket(fileno=int(fd)), int(owner))
    except ProcessLookupError:  # the owner has ended already
        return os.unlink(path)
    atexit.register(tell)  # before all others, so after all others
    gc.disable()  # what is imported is kept: looking through it again and again is a fifth of the time
    with ray_internals.actor_ids_from_system():
        importlib.import_module(preload)
    os.chdir("/")  # keeps no folder busy
    gc.enable()
    gc.freeze()  # objects that exist now are not looked at by a child's collector: their memory stays shared
    request = server.serve()
    del server
    if request:
        become(*request)
    else:
        time.sleep(GONE_SECONDS)
        temporary.sweep()
