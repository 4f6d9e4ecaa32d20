"""The writer's process, seen from the driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

TRAINING, HASTE = "t", "\n"
"""What the writer is told through its standard input."""


class WriterProcess:
    """Starts a writer on a spool and knows when it has ended.

    The writer is nobody's child and in a session of its own: neither Ctrl-C in the terminal nor `ray job stop`, which
    ends a driver with all its descendants, takes it along, so that it can still say how the run ended. We hear of it
    through a pipe, and it of us: each sees the other's end close.

    Args:
        folder: the spool.
        uri: tracking URI, credentials included.
        attempt: the start that the writer serves; None: it delivers what is there and ends.
    """

    def __init__(self, folder: Path, uri: str, *, attempt: str | None) -> None:
        environment = {
            **os.environ,
            # By the environment, not by argument or file: the URI may hold a password.
            "MLFLOW_TRACKING_URI": uri,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
        }
        command = [sys.executable, "-m", "app.tracking.writer", str(folder), "--driver", str(os.getpid())]
        command += ["--attempt", attempt] if attempt else []
        with (folder / "writer.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
                text=True,
            )
        self._told = False
        self.pid: int | None = None
        self.delivering = False
        """Whether it has the spool to itself; before that, another writer has it."""
        self.clean = False
        """Whether it ended because there was nothing more for it to do."""
        self.ended = threading.Event()
        threading.Thread(target=self._listen, name="tracking-writer", daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "done\n":
                self.clean = True
            elif line == "delivering\n":
                self.delivering = True
            else:
                self.pid = int(line)
                self._process.wait()  # the writer's parent, which has ended already
        self._process.wait()
        self.ended.set()

    def trains(self) -> None:
        """Tell it, once, that the workers have started: it keeps out of their way until then."""
        if not self._told:
            self._told = True
            self._say(TRAINING)

    def wake(self) -> None:
        """Ask for haste: somebody waits."""
        self._say(HASTE)

    def _say(self, what: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has just ended, and the caller will see that
            self._process.stdin.write(what)
            self._process.stdin.flush()

    def kill(self) -> None:
        """End it at once; the spool and what it knows of its delivery stay right."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid is None:
                self._process.kill()
            else:
                os.kill(self.pid, signal.SIGKILL)
        self.ended.wait(10)
