"""Paths of data, data files inside installed packages, and the cache of processed data."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from app.errors import MissingData, UserError
from cluster.environment import below_home


def existing(path: str | Path, key: str) -> Path:
    """Check that there is a file or a folder at a path.

    Args:
        path: Where to look; `~` is expanded.
        key: The configuration key that holds the path, for messages.

    Returns:
        The expanded path.

    Raises:
        MissingData: There is nothing at the path that `task_args.data` holds.
        UserError: There is nothing at the path that another key holds.
    """
    if "://" in str(path):
        raise UserError(
            f"{key} is the address {str(path)!r}, but data is read from this machine's folders: "
            "download it and write its path"
        )
    expanded = Path(path).expanduser()
    if not expanded.exists():
        kind = MissingData if key == "task_args.data" else UserError
        raise kind(
            f"{key}: there is no {str(path)!r} (looked in {Path.cwd()}); "
            "write the path of existing data"
        )
    return expanded


def package_file(package: str, relative: str, *, data: str, install: str) -> Path:
    """A data file inside an installed package, found without importing the package.

    Importing some packages takes seconds.

    Args:
        package: The name under which the package is imported.
        relative: The file's path inside the package.
        data: The built-in data set that needs the file, for messages.
        install: What `pip install` calls the package.

    Raises:
        UserError: The package is not installed or does not have the file.
    """
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / relative if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise UserError(
            f"task_args.data: the built-in set {data!r} is part of the package {install}, "
            f"which is not installed; run pip install {install}"
        )
    return path


def cache_folder() -> Path:
    """The folder of the cache.

    It is $XDG_CACHE_HOME/trireme or ~/.cache/trireme, or, if that is not writable, a folder of this
    user's in the temporary folder.

    Raises:
        UserError: Other users may write to the folder in the temporary folder.
    """
    folder = below_home("XDG_CACHE_HOME", ".cache") / "trireme"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"trireme-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_private or status.st_mode & 0o022:
        raise UserError(
            f"{folder} can be written by others, who could change what is trained on: remove it"
        )
    return folder


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """A file of the cache, made if it does not exist.

    If several processes ask at once, one makes the file and the others wait for it. The file
    appears only when it is complete.

    Args:
        name: The file's name in the cache.
        make: Writes the file at the path that it receives.
    """
    path = cache_folder() / name
    if path.exists():
        return path
    with (
        open(path.with_name(f".{name}.lock"), "w") as lock,
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
    ):
        # Without locks, as on some network file systems, several processes make the file.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(Path(folder) / name)
            os.replace(Path(folder) / name, path)
    return path


def identity(*paths: Path) -> str:
    """A hash of the contents of files, in this order, as 16 hexadecimal digits.

    The cache keeps the hash for as long as the files' paths, sizes and modification times are the
    same.
    """
    stats = []
    for path in paths:
        status = path.stat()
        stats.append((str(path.resolve()), status.st_size, status.st_mtime_ns))

    def digest(cache_file: Path) -> None:
        total = hashlib.sha256()
        for path in paths:
            with open(path, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        cache_file.write_text(total.hexdigest()[:16])

    key = hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
    return cached(f"digest-{key}.txt", digest).read_text()
