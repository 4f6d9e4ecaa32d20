"""Where a Ray that one command starts keeps its files: a folder that is removed with the command.

The folder is the user's alone, and the command holds a lock in it. What a killed command has left
behind is removed by the next command that starts a Ray.
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

PREFIX = "tr-ray-"
"""Short, since Ray's sockets lie below the folder."""
SOCKET_BYTES = 107
"""The longest path of a socket (unix(7))."""
LONGEST = "/tr-ray-12345678/r/session_2026-11-26_17-19-52_611822_4194304/sockets/plasma_store"
"""The longest path at which Ray puts one, below the folder in which a command makes its own."""
TRIES = 20


class TemporaryFolder:
    """A new folder, until `remove`, in RAY_TMPDIR or else in /tmp.

    Attributes:
        path: The folder.
        for_ray: A folder in it for Ray, which lets every user write to its own; no other user gets
            as far.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self) -> None:
        sweep()
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=_base()))
        self._lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed once it is locked, so that no other command sweeps it away in between.
        self.path = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        self.for_ray = self.path / "r"
        self.for_ray.mkdir()

    def remove(self) -> None:
        remove(self.path)
        os.close(self._lock)


def private_folder() -> TemporaryFolder:
    """A new folder for a Ray that this command starts.

    Raises:
        ClusterError: There is no place for one.
    """
    base = _base()
    place = f"RAY_TMPDIR={base}" if os.environ.get("RAY_TMPDIR") else str(base)
    suitable = "a folder that can be written and has a short name"
    advice = f"set RAY_TMPDIR to {suitable}, or unset it for /tmp"
    base_bytes = len(os.fsencode(base))
    most_bytes = SOCKET_BYTES - len(LONGEST)
    if base_bytes > most_bytes:
        raise ClusterError(
            f"{place} is too long a name for Ray's sockets to lie below it ({base_bytes} bytes, "
            f"at most {most_bytes}): {advice}"
        )
    try:
        return TemporaryFolder()
    except OSError as error:
        cause = error.strerror or error
        raise ClusterError(f"Ray's files cannot be kept in {place} ({cause}): {advice}") from error


def sweep() -> None:
    """Removes the folders of commands that have ended."""
    for folder in _base().glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except FileNotFoundError:
            # A process of Ray that was ending has made the folder again after it was removed.
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
            pass  # its command still runs
        finally:
            os.close(lock)


def remove(folder: Path) -> None:
    """Removes a folder in which a process of Ray that is just ending may still write."""
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _base() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp")
