"""What a fork does first: it becomes the process that was asked for, as if Python had been started with its words."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import random
import resource
import runpy
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

LOST_OUTPUT = 120
"""Python's exit code where its last output could not be written."""


def become(streams: list[int], request: dict[str, Any]) -> NoReturn:
    """Runs the script or module that the request names, with its words, environment, folder and streams; does not
    return.

    request: argv (its first word a file, or "-m" and a module), env, and `cluster.fast_start.client.bearings`.
    """
    code = 1
    try:
        _take(streams, request)
        code = _run(request["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """What Python does at its end. The way up is barred: there stand the server's own frames."""
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            last()
    try:
        sys.stdout.flush()
    except BaseException:
        code = code or LOST_OUTPUT
    os._exit(code & 0xFF)


def _take(streams: list[int], request: dict[str, Any]) -> None:
    os.setsid()  # a raylet ends the whole process group of a worker that has ended
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in request.get("ignored", ()):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in request.get("ignored", ()):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        if fd > 2:
            os.close(fd)
    _open_streams()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.umask(request.get("umask", 0o022))
    time.tzset()
    for name, (soft, hard) in request.get("limits", {}).items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (soft, hard))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, request.get("cores") or os.sched_getaffinity(0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(str(request.get("oom", 0)))
    random.seed()  # the server's generators stand where every other fork's do
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "ray._raylet" in sys.modules:  # Ray's own settings are read when it is imported: authentication is one of them
        sys.modules["ray._raylet"].Config.initialize("")
    if "torch" in sys.modules:
        _take_threads(sys.modules["torch"])


def _open_streams() -> None:
    """Python's own streams, as it opens them when it starts: the server's lead nowhere."""
    now = os.environ.get("PYTHONUNBUFFERED", "") != ""
    code = sys.stdout.encoding
    sys.stdin = open(0, encoding=code, closefd=False)  # noqa: SIM115
    for name, fd, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = open(fd, "wb", buffering=-1, closefd=False)  # noqa: SIM115
        text = io.TextIOWrapper(raw, code, errors, line_buffering=fd == 2 or os.isatty(fd), write_through=now)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _take_threads(torch: Any) -> None:
    """Gives torch the number of threads that it would have taken from the environment when it is imported."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    cores = len(os.sched_getaffinity(0))
    if torch.backends.mkl.is_available():  # it counts cores, and not what hyper-threading makes of them
        import psutil

        cores = min(cores, psutil.cpu_count(logical=False) or cores)
    torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) else cores)


def _run(words: list[str]) -> int:
    """Runs it as the main program; its exit code."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    return 0
