"""Where a Ray that one command starts keeps its files: a folder of the user's alone, gone with the command.

Its maker holds a lock in it. What a killed command has left is removed by its fork server (`fast_start`), else by the
next command that starts a Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "tr-ray-"  # short: Ray's sockets lie in it, and a socket's path has 107 bytes at most
TRIES = 20


class TemporaryFolder:
    """A new one, until `remove`; in RAY_TMPDIR, else /tmp. Raises OSError."""

    def __init__(self) -> None:
        sweep()
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=_base()))
        self._lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name[1:]))  # under its name it has always been locked

    def remove(self) -> None:
        remove(self.path)
        os.close(self._lock)


def sweep() -> None:
    """Removes the folders of commands that are gone."""
    for folder in _base().glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except FileNotFoundError:  # a process of Ray that was ending made it again after it was removed
            with contextlib.suppress(FileNotFoundError):
                if folder.stat().st_uid == os.getuid():
                    remove(folder)
            continue
        except OSError:
            continue  # another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def remove(folder: Path) -> None:
    """A process of Ray that is just ending may still write there."""
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _base() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp")
