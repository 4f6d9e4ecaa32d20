"""What Ray starts in place of a worker: it has the worker forked by a server that has everything imported, and ends.

It asks the server that TRIREME_FORK_SERVER names (that of one command's own Ray), else its node's, which it starts; in
vain, it becomes the worker itself, as Ray would have started it. It runs before every worker, so it imports little.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOCKET = "TRIREME_FORK_SERVER"
READ_AT_IMPORT = ("OMP_", "GOMP_", "MKL_", "KMP_", "MALLOC_", "LD_", "PYTHON", "PYTORCH_", "RAY_AUTH_", "RAY_TRAIN_")
"""Beginnings of variables that libraries read when they are loaded: a process with others cannot be forked from."""
SET_IN_FORK = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")
WORKER = "default_worker.py"
ANSWER_SECONDS = 60.0  # a server may still be importing when it is asked


def main() -> None:
    """`client.py MODULE default_worker.py …`: as a job's py_executable; the module is what a server is to import.
    `client.py default_worker.py …`: in place of the setup_worker.py of a lean head's Ray."""
    preload, worker = ("", sys.argv[1:]) if sys.argv[1].endswith(WORKER) else (sys.argv[1], sys.argv[2:])
    variables: dict[str, str] | None = {}
    if not preload:
        variables, worker = set_up(worker)
    request = {"argv": worker, "env": os.environ | (variables or {}), **inherited()}
    with contextlib.suppress(OSError, KeyError):
        if variables is not None and SOCKET in os.environ and has_forked(os.environ[SOCKET], request):
            return
        if preload and has_forked(ensure(preload, int(os.environ["RAY_RAYLET_PID"]), os.environ), request):
            return
    words = worker if preload else [os.path.join(os.path.dirname(worker[0]), "setup_worker.py"), *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *words])


def set_up(words: list[str]) -> tuple[dict[str, str] | None, list[str]]:
    """What Ray's setup_worker.py does with a worker's words: its environment variables, None where there is more to set
    up than those, and the words that the worker itself gets."""
    flags = ("--serialized-runtime-env-context=", "--language=")
    context = json.loads(next((word.split("=", 1)[1] for word in words if word.startswith(flags[0])), "") or "{}")
    variables = {name: os.path.expandvars(value) for name, value in (context.pop("env_vars", None) or {}).items()}
    simple = context.pop("py_executable", sys.executable) == sys.executable and not any(context.values())
    return variables if simple else None, [word for word in words if not word.startswith(flags)]


def has_forked(path: str, request: Mapping[str, Any]) -> bool:
    """Whether the server at `path` has forked what is asked for; it ends if its code is not what is on disk any more.

    Raises OSError where there is no server."""
    with ask(path, request) as connection:
        return answer(connection, ANSWER_SECONDS) is not None


def ask(path: str, request: Mapping[str, Any], streams: Sequence[int] = (0, 1, 2)) -> socket.socket:
    """A connection to the server at `path`, over which the request and three streams have gone. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [b"3"], list(streams))
    connection.sendall(json.dumps(request).encode() + b"\n")
    return connection


def answer(connection: socket.socket, seconds: float | None = None) -> dict[str, Any] | None:
    """The next line from the server or its fork; None where there is none within that time."""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError, ValueError), connection.makefile("rb", buffering=0) as lines:
        return json.loads(lines.readline())
    return None


def inherited() -> dict[str, Any]:
    """What a process has from its parent, and a fork is to have from the process that asked for it."""
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    with open("/proc/self/oom_score_adj") as score:
        return {
            "cwd": os.getcwd(),
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
            "cores": sorted(os.sched_getaffinity(0)),
            "oom": score.read(),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }


def folder() -> str:
    """Where this user's fork servers listen, closed to others. Raises OSError where the folder is another user's."""
    path = f"/tmp/trireme-{os.getuid()}"
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's alone")
    return path


def key(preload: str, environment: Mapping[str, str]) -> str:
    """Names what a process must have in common with another to be one that it can be forked from."""
    same = sorted((k, v) for k, v in environment.items() if k.startswith(READ_AT_IMPORT) and k not in SET_IN_FORK)
    container = os.readlink("/proc/self/ns/pid")  # /tmp may be shared by several
    parts = json.dumps([os.path.realpath(sys.executable), sys.prefix, ROOT, preload, same, container])
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


def ensure(preload: str, owner: int, environment: Mapping[str, str]) -> str:
    """The socket of the server for such processes that ends with the process `owner`; started where there is none.

    Raises OSError where that is not possible."""
    path = os.path.join(folder(), f"{key(preload, environment)}-{owner}.socket")
    with open(os.path.join(folder(), "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep()
        if not is_listening(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            start(path, preload, owner, environment)
    return path


def sweep() -> None:
    """Removes the sockets of servers that were killed. The caller holds the folder's lock."""
    for name in os.listdir(folder()):
        if name.endswith(".socket"):
            path = os.path.join(folder(), name)
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(0.0)  # one that is there takes it at once, or its queue is full
                    probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError:
                continue


def is_listening(path: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)  # of a server whose queue is full
        probe.connect(path)
        return True
    return False


def start(path: str, preload: str, owner: int, environment: Mapping[str, str]) -> int:
    """Starts a fork server that listens at `path` (at once: who comes before it has imported waits); its pid.

    preload: the module that it imports. owner: a process; the server ends with it."""
    code = f"import sys; sys.path[0] = {ROOT!r}; from cluster.fast_start.server import main; main()"
    # One thread for OpenMP, since more could not be forked: each fork sets its own number. Ray reads the job, and whom
    # to end with, when it is imported: workers of no job serve any.
    fixed = {"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(owner)}
    with socket.socket(socket.AF_UNIX) as listener, open(os.devnull, "r+b") as null:
        listener.bind(path)
        listener.listen(64)
        os.set_inheritable(listener.fileno(), True)
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", code, path, str(listener.fileno()), preload, str(owner)],
            {**environment, **fixed},
            file_actions=[(os.POSIX_SPAWN_DUP2, null.fileno(), fd) for fd in (0, 1, 2)],
            setsid=True,
            setsigmask=(signal.SIGTERM, signal.SIGHUP),  # it ends with its owner, which may have something to save
            setsigdef=[number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)],
        )


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules are not for import by their bare names
    main()
