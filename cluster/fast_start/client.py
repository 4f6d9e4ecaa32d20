"""A stand-in for a worker process that Ray starts: has it forked from a process that has everything imported.

Ray starts this instead of its own worker (`warm.py` tells it to). It asks the node's fork server for the worker,
which takes tenths of a second where importing torch and Ray takes seconds, and ends. Where there is no fork server, it
starts one; where that is not possible, it becomes the worker itself, as Ray would have had it.

Only the standard library is imported here, and of that little: it runs before every worker.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LOADED_WITH = (
    "OMP_",
    "GOMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "MALLOC_",
    "LD_",
    "PYTHON",
    "TORCH_",
    "PYTORCH_",
    "RAY_TRAIN_",
)
"""Beginnings of variables that count when a library is loaded: a process with others is no one to be forked from."""
SET_LATER = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")
SPACES = ("mnt", "pid", "net", "ipc", "user")
"""Namespaces: /tmp may be one for several containers."""
SOCKET = "TRIREME_FORK_SERVER"
"""Variable with the path of the one fork server that all workers of a Ray are forked from."""
NO_JOB = "ffffffff"
ANSWER_SECONDS = 60.0
"""A server may still be importing when it is asked; one that is silent for longer is stuck."""
WORKER = "default_worker.py"


def folder() -> str:
    """Where this user's fork servers listen; nobody else may look into it.

    Raises OSError where the folder is another's.
    """
    path = f"/tmp/trireme-{os.getuid()}"
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's alone")
    return path


def key(preload: str, environment: Mapping[str, str]) -> str:
    """Names what a process must have in common with another to be one that it can be forked from."""
    same = sorted((name, value) for name, value in environment.items() if _counts(name))
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in SPACES]
    parts = json.dumps([os.path.realpath(sys.executable), sys.prefix, ROOT, preload, same, spaces])
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


def _counts(name: str) -> bool:
    return name.startswith(LOADED_WITH) and name not in SET_LATER


def found(preload: str, environment: Mapping[str, str]) -> str | None:
    """The socket of a server on this machine that such processes can be forked from."""
    start = key(preload, environment)
    for name in os.listdir(folder()):
        path = os.path.join(folder(), name)
        if name.startswith(start) and _listens(path):
            return path
    return None


def ensure(preload: str, owner: int, seconds: float, environment: Mapping[str, str]) -> str:
    """The same, of one that ends with the process `owner`, as its forks do; it is started where there is none.

    Raises OSError where that is not possible."""
    with locked():
        path = os.path.join(folder(), f"{key(preload, environment)}-{owner}.socket")
        if not _listens(path):
            _tidy()
            start(path, preload, owner, seconds, environment)
    return path


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Only one process at a time starts a server, or looks which are gone."""
    with open(os.path.join(folder(), "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tidy() -> None:
    """Removes the sockets of servers that were killed."""
    for name in os.listdir(folder()):
        path = os.path.join(folder(), name)
        if name.endswith(".socket") and not _listens(path):
            with contextlib.suppress(OSError):
                os.unlink(path)


def start(path: str, preload: str, owner: int, seconds: float, environment: Mapping[str, str]) -> int:
    """Starts a fork server that listens at `path` (at once: whoever comes before it has imported waits); its pid.

    owner: a process; the server ends with it. seconds: without a request and without a child after which it ends.
    """
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)
    listener.listen(64)
    os.set_inheritable(listener.fileno(), True)
    code = f"import sys; sys.path[0] = {ROOT!r}; from cluster.fast_start.server import main; main()"
    words = [sys.executable, "-c", code, path, str(listener.fileno()), preload, str(owner), str(seconds)]
    # One thread for OpenMP, since more could not be forked: each child sets its own number (app/launchers/inbox.py).
    # Ray reads the job when it is imported, and whom to end with: workers of no job serve any.
    with open(os.devnull, "r+b") as nothing:
        pid = os.posix_spawn(
            sys.executable,
            words,
            {**environment, "OMP_NUM_THREADS": "1", "RAY_JOB_ID": NO_JOB, "RAY_RAYLET_PID": str(owner)},
            file_actions=[(os.POSIX_SPAWN_DUP2, nothing.fileno(), fd) for fd in (0, 1, 2)],
            setsid=True,
            setsigmask=(),
            setsigdef=[number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)],
        )
    listener.close()
    return pid


def ask(path: str, request: Mapping[str, Any], streams: Sequence[int] = (0, 1, 2)) -> socket.socket:
    """A connection to the server at `path`, the request and the three streams sent, this process' own if not said.

    Raises OSError where nobody listens."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendmsg([b"3"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))])
        connection.sendall(json.dumps(request).encode() + b"\n")
    except OSError:
        connection.close()
        raise
    return connection


def bearings() -> dict[str, Any]:
    """What a process has from whoever started it, and a fork is to have from whoever asked for it."""
    import resource

    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    mask = os.umask(0o022)
    os.umask(mask)
    with open("/proc/self/oom_score_adj") as score:
        return {
            "cwd": os.getcwd(),
            "umask": mask,
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
            "cores": sorted(os.sched_getaffinity(0)),
            "oom": int(score.read()),
            "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        }


def answer(connection: socket.socket) -> dict[str, Any] | None:
    """The next line that the server says; None where it has ended, or says nothing within the connection's time."""
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n"):
            part = connection.recv(1)
            if not part:
                return None
            line += part
    return json.loads(line) if line.endswith(b"\n") else None


def forked(path: str, request: Mapping[str, Any]) -> bool:
    """Whether the server at `path` has forked what is asked for."""
    try:
        connection = ask(path, request)
    except OSError:
        return False
    with connection:
        connection.settimeout(ANSWER_SECONDS)
        return bool((answer(connection) or {}).get("pid"))


def from_this_node(preload: str, seconds: float, request: Mapping[str, Any]) -> bool:
    """Has it forked by the node's server for such processes, which is started where there is none."""
    raylet = int(os.environ.get("RAY_RAYLET_PID", "0"))
    if not raylet:
        return False
    # A server whose code is not what is on disk any more says so by ending.
    return any(forked(ensure(preload, raylet, seconds, os.environ), request) for _ in range(3))


def _listens(path: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)  # of a server whose queue is full
        probe.connect(path)
        return True
    return False


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Our own flags, which stand before Ray's script, and the words from there on."""
    at = next(i for i, word in enumerate(words) if word.endswith(WORKER))
    return dict(word[2:].split("=", 1) for word in words[:at] if "=" in word), list(words[at:])


def runtime_environment(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What Ray's setup_worker.py takes from a worker's words, and the words without it."""
    mine = ("--serialized-runtime-env-context=", "--language=")
    context = next((word.split("=", 1)[1] for word in words if word.startswith(mine[0])), "")
    return json.loads(context or "{}"), [word for word in words if not word.startswith(mine)]


def main() -> None:
    flags, words = split(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        request = {"argv": words, **bearings()}
        if flags:  # as a job's py_executable: Ray has set the environment
            if from_this_node(flags["preload"], float(flags["seconds"]), request | {"env": dict(os.environ)}):
                return
        else:  # in place of Ray's setup_worker.py
            context, plain = runtime_environment(words)
            wanted = {name: value for name, value in context.items() if name not in ("py_executable",)}
            simple = not any(value for name, value in wanted.items() if name != "env_vars")
            env = os.environ | {k: os.path.expandvars(v) for k, v in (context.get("env_vars") or {}).items()}
            own = context.get("py_executable") in (None, sys.executable)
            if simple and own and forked(os.environ.get(SOCKET, ""), request | {"argv": plain, "env": dict(env)}):
                return
    if not flags:
        words.insert(0, os.path.join(os.path.dirname(words[0]), "setup_worker.py"))
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules are not for import by their bare names
    main()
