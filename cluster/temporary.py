"""Where a Ray that one command starts keeps its files: a folder of the user's alone, gone with the command.

Its maker holds a lock in it. What a killed command has left is removed by the next
command that starts a Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from cluster import ClusterError

PREFIX = "tr-ray-"  # short: Ray's sockets lie in it
SOCKET_BYTES = 107
"""Of a socket's path, at most (unix(7))."""
LONGEST = "/tr-ray-12345678/session_2026-11-26_17-19-52_611822_4194304/sockets/plasma_store"
"""Where Ray puts one, below the folder in which this command makes its own."""
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


def private_folder() -> TemporaryFolder:
    """A new folder for a Ray of this command's own.

    Raises:
        ClusterError: There is no place for one.
    """
    base = _base()
    written = f"RAY_TMPDIR={base}" if os.environ.get("RAY_TMPDIR") else str(base)
    advice = "set RAY_TMPDIR to a folder that can be written and has a short name, or unset it for /tmp"
    if len(os.fsencode(base)) + len(LONGEST) > SOCKET_BYTES:
        most = SOCKET_BYTES - len(LONGEST)
        raise ClusterError(
            f"{written} is too long a name for Ray's sockets to lie below it ({len(os.fsencode(base))} bytes, at most "
            f"{most}): {advice}"
        )
    try:
        return TemporaryFolder()
    except OSError as error:
        raise ClusterError(f"Ray's files cannot be kept in {written} ({error.strerror or error}): {advice}") from error


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
