"""What a fork does first: it becomes the process that was asked for, as if Python had been started with its words."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
from typing import Any


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
    code: Any = 1
    try:
        run(request["argv"])
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        raise
    finally:
        connection.sendall(json.dumps({"exit": code & 0xFF}).encode() + b"\n")


def end_with(connection: socket.socket) -> None:
    """Ends this process when its command was killed: no signal can reach it any more."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def take_over(request: dict[str, Any], streams: list[int]) -> None:
    """Gives this process what it has from who asked, where it has its server's."""
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
