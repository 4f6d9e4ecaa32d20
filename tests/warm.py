"""Commands and MLflow's writers as forks of one process that has imported what they need.

A command imports torch, and its writer MLflow: together some twelve seconds of a processor, where
the training of most tests takes one. A fork has a process, streams, signals, an environment, a
folder and an exit code of its own, as if it had been started by itself. Tests of how a command or a
writer starts ask for the fixture `real_start`.

The process that forks has neither Ray nor threads. It ends when its standard input does, which is a
pipe from the processes of the tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import io
import json
import logging
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from app.tracking.spool import ANOTHER_DELIVERS
from app.tracking.tracker import WHILE_TRAINING, WriterProcess

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "app.cli.fork",
    "app.cli.look",
    "app.cli.runs",
    "app.launchers.local",
    "app.launchers.supervisor",
    "app.planner.auto",
    "app.run.driver",
    "app.run.prepare",
    "app.training.loop",
    "app.tracking.uploader",
    "app.tracking.writer",
    "fsspec",
    "mlflow.store.tracking.sqlalchemy_store",
    "sqlalchemy.dialects.sqlite",
    "strategies.parallelize",
    "tests.chain",
    "torch._dynamo",
]
ADDRESS = "TRIREME_TESTS_WARM"
"""The variable with the path of the socket, for commands that start a writer."""
START_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What a fork is to become.

    Args:
        arguments: Of `trireme`, or of `app.tracking.writer`.
        env: The environment.
        cwd: The folder.
        is_writer: Whether it is a writer of MLflow, in place of a command.
    """

    arguments: list[str]
    env: dict[str, str]
    cwd: str
    is_writer: bool


# --- for tests ------------------------------------------------------------------------------------


class WarmCommand:
    """A command, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: Of `trireme`.
        env: Its environment.

    Attributes:
        pid: Its process.
        stdout: What it writes.
        stderr: The same of its standard error.
        returncode: None until the end was waited for; negative after a signal.
    """

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        address = _address()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        request = _Request(
            arguments=arguments, env={**env, ADDRESS: address}, cwd=str(ROOT), is_writer=False
        )
        self.args = arguments
        self._connection = _ask(address, request, [out_end, err_end])
        self.pid = int(self._connection.readline())
        os.close(out_end)
        os.close(err_end)
        self.stdout: TextIO = os.fdopen(out)
        self.stderr: TextIO = os.fdopen(err)
        self.returncode: int | None = None
        self._texts: list[str] = ["", ""]
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit code."""
        if self.returncode is None:
            ready, _, _ = select.select([self._connection], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._connection.readline())
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end; returns what was written on both streams."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._read, args=(number,), daemon=True)
                for number in range(2)
            ]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._texts[0], self._texts[1]

    def _read(self, number: int) -> None:
        stream = (self.stdout, self.stderr)[number]
        self._texts[number] = stream.read()
        stream.close()

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def spawn_writer(self: WriterProcess, niceness: int = WHILE_TRAINING) -> str:
    """Starts a writer in place of `WriterProcess._spawn`; see there."""
    address = os.environ.get(ADDRESS) or _address()
    request = _Request(
        arguments=[str(self._folder), self.attempt],
        env={
            **os.environ,
            "MLFLOW_TRACKING_URI": self._uri,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        cwd=os.getcwd(),
        is_writer=True,
    )
    out, out_end = os.pipe()
    with (self._folder / "writer.log").open("ab") as log, os.fdopen(out) as output:
        _ask(address, request, [out_end, log.fileno()]).close()
        os.close(out_end)
        # The writer closes its end when it has the spool, or prints why it has not.
        return output.read().strip()


def import_nothing_ahead(self: WriterProcess) -> None:
    """In place of `WriterProcess.import_ahead`: a writer that is forked has imported already."""


_server: list[Any] = []
"""What the process that forks runs on: it ends when nobody keeps the other end of its input."""


@functools.cache
def _address() -> str:
    """The socket of the process that forks; whoever needs it first starts it.

    The processes of pytest-xdist share one, and each keeps an end of its input, a named pipe.
    """
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    folder = Path(f"/tmp/tests-warm-{session}")
    folder.mkdir(exist_ok=True)
    address = folder / "socket"
    pipe = folder / "input"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if address.exists():
            _server.append(os.open(pipe, os.O_WRONLY))
        else:
            os.mkfifo(pipe)
            # A pipe can be opened for writing only after it is open for reading.
            reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            _server.append(os.open(pipe, os.O_WRONLY))
            _start_server(str(address), reading)
            os.close(reading)
    return str(address)


def _start_server(address: str, stdin: int) -> None:
    """Starts the process that forks, and waits until it can be asked."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.warm", address]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=stdin)
    _server.append(process)
    deadline = time.monotonic() + START_SECONDS
    while not Path(address).exists():
        assert process.poll() is None, "the process that forks has ended"
        assert time.monotonic() < deadline, "the process that forks has not started"
        time.sleep(0.05)


def _ask(address: str, request: _Request, streams: list[int]) -> TextIO:
    """Asks for a fork; the answer's lines are its process and, at its end, its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        text = json.dumps(asdict(request)).encode()
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], streams)
        connection.sendall(text)
        return connection.makefile("r")


# --- the process that forks -----------------------------------------------------------------------


def _serve(address: str) -> tuple[_Request, list[int]]:
    """Forks for every request.

    Returns:
        In a fork, the request that it is for, and the streams.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules and threading.active_count() == 1
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is sys.stdin:
                shutil.rmtree(Path(address).parent, ignore_errors=True)
                os._exit(0)
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, streams = _received(connection)
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    _close_all(waiting)
                    return request, streams
                for stream in streams:
                    os.close(stream)
                _tell(connection, pid)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                pid, connection = key.data
                waiting.unregister(key.fileobj)
                os.close(int(key.fd))
                _, status = os.waitpid(pid, 0)
                _tell(connection, os.waitstatus_to_exitcode(status))
                connection.close()


def _close_all(waiting: selectors.BaseSelector) -> None:
    """Closes what belongs to the process that forks and to other forks.

    Objects that were left to the garbage collector would later close numbers that are those of
    other files by then.
    """
    for key in list(waiting.get_map().values()):
        if key.data is not None:
            os.close(key.fd)
            key.data[1].close()
        elif key.fileobj is not sys.stdin:
            key.fileobj.close()  # type: ignore[union-attr]
    waiting.close()


def _received(connection: socket.socket) -> tuple[_Request, list[int]]:
    header, streams, _, _ = socket.recv_fds(connection, 8, 2)
    with connection.makefile("rb") as stream:
        text = stream.read(int.from_bytes(header, "big"))
    return _Request(**json.loads(text)), streams


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it
        connection.sendall(f"{number}\n".encode())


# --- a fork ---------------------------------------------------------------------------------------


def _become(request: _Request, streams: list[int]) -> None:
    """Makes this fork a process like one that was started by itself."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = os.fdopen(0)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    paths = request.env["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [path for path in paths if path not in sys.path]


def _stream(number: int) -> Any:
    """An output stream, buffered by line if it is standard error, as Python opens it."""
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=number == 2)


def _run_writer(arguments: list[str]) -> None:
    """What app/tracking/writer.py does as a program; stdout is what the driver waits for.

    It is not nicer than its driver: the tests beside it would leave it no processor for seconds.
    It looks more often for the end of its run, for which a test waits.
    """
    from app.tracking import writer
    from app.tracking.writer import ENVIRONMENT, LOCK_SECONDS, claim, serve

    writer.POLL_SECONDS = 0.05

    folder, attempt = arguments
    os.setsid()
    os.environ.update(ENVIRONMENT)
    if not claim(Path(folder), attempt, LOCK_SECONDS):
        print(ANOTHER_DELIVERS, flush=True)
        return
    os.dup2(2, 1)
    logging.basicConfig()
    serve(Path(folder), os.environ["MLFLOW_TRACKING_URI"], attempt)


def _main() -> None:
    request, streams = _serve(sys.argv[1])
    _become(request, streams)
    if request.is_writer:
        _run_writer(request.arguments)
        return
    WriterProcess._spawn = spawn_writer  # type: ignore[method-assign]
    WriterProcess.import_ahead = import_nothing_ahead  # type: ignore[method-assign]
    sys.argv = [str(ROOT / "app" / "__main__.py"), *request.arguments]
    sys.orig_argv = [sys.executable, "-m", "app", *request.arguments]
    runpy.run_module("app", run_name="__main__")


if __name__ == "__main__":
    _main()
