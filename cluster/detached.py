"""A process session of its own for what a command starts and ends itself: its private Ray.

A scheduler signals the whole process group (`timeout`, a shell, CI) or all processes of the job
(systemd, Slurm). The command then saves a checkpoint, for which its Ray must still run. So Ray's
processes leave the command's session and block the signals that ask to end; the command itself ends
them by SIGKILL. When the command dies, however that happens, the kernel ends them too, by
PR_SET_PDEATHSIG, which Ray sets.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
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


def _after_fork() -> None:
    if getattr(_thread, "detaches", False):
        _thread.detaches = False  # the new process's own children stay in its session
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)


os.register_at_fork(after_in_child=_after_fork)
