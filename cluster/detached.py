"""A process session of its own for what a command starts and ends itself: its private Ray.

A scheduler signals the whole process group (`timeout`, a shell, CI) or all processes of the job
(systemd, Slurm). The command then saves a checkpoint, for which its Ray must still run. So Ray's
processes leave the command's session and block the signals that ask to end; the command itself ends
them by SIGKILL. When the command dies, however that happens, the kernel ends them too, by
PR_SET_PDEATHSIG, which Ray sets. That does not reach the agents that Ray's raylet has started, and
they wait for more than a minute for a head that is gone: a `Guard` ends those, and removes what
Ray has written.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_GUARD = Path(__file__).with_name("guard.py")
END_SECONDS = 5.0
_thread = threading.local()


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Gives what this thread forks a session of its own, in which SIGTERM and SIGHUP are blocked.

    Of the child processes of the `subprocess` module it reaches only those with a `preexec_fn`, as
    Ray's are: Python calls functions of os.register_at_fork in no others.
    """
    _thread.detaches = True
    try:
        yield
    finally:
        _thread.detaches = False


class Guard:
    """A process that ends a Ray and removes its folder at `close`, or when this process dies.

    `cluster/guard.py` says how it knows the processes of that Ray.

    Args:
        folder: Where that Ray, which need not have started yet, keeps all its files.
    """

    def __init__(self, folder: Path) -> None:
        session = os.getsid(0)
        command = [sys.executable, "-I", "-S", str(_GUARD), str(folder), str(session)]
        with detached():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # at whose end that Ray is ended
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: None,  # without one `detached` does not reach it
            )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)


def _after_fork() -> None:
    if getattr(_thread, "detaches", False):
        _thread.detaches = False  # the new process's own children stay in its session
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)


os.register_at_fork(after_in_child=_after_fork)
