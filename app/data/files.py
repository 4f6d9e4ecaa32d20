"""Where data comes from and where what was made of it is kept: paths, installed packages, the cache."""

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
from typing import Any

from app.errors import MissingData, UserError
from cluster.environment import below_home


def existing(path: str | Path, key: str) -> Path:
    """The path, with ~ expanded, if something is there; `key` is the configuration key it came from."""
    found = Path(path).expanduser()
    if not found.exists():
        kind = MissingData if key == "task_args.data" else UserError
        raise kind(f"{key}: there is no {str(path)!r} (looked in {Path.cwd()}); write the path of existing data")
    return found


def package_file(package: str, relative: str, *, data: str, install: str) -> Path:
    """A data file inside an installed package, which is not imported: that can take seconds.

    Raises UserError with what to install for the built-in set `data` where package or file are missing.
    """
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / relative if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise UserError(
            f"task_args.data: the built-in set {data!r} is part of the package {install}, which is not installed; "
            f"run pip install {install}"
        )
    return path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/trireme or ~/.cache/trireme; where that cannot be written, one in the temporary folder."""
    folder = below_home("XDG_CACHE_HOME", ".cache") / "trireme"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"trireme-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(f"{folder} can be written by others, who could change what is trained on: remove it")
    return folder


def cached(name: str, make: Callable[[Path], Any]) -> Path:
    """The file `name` of the cache, made by `make(path)` if it is not there yet.

    Of several processes that ask at once, one makes the file and the others wait for it. It appears whole or
    not at all.
    """
    path = cache_folder() / name
    if path.exists():
        return path
    with open(path.with_name(f".{name}.lock"), "w") as lock, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # Some network file systems have no locks. Then the work is done more than once, but never half.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(Path(folder) / name)
            os.replace(Path(folder) / name, path)
    return path


def identity(*paths: Path) -> str:
    """A hash of the files' contents in this order, 16 hexadecimal digits; computed once for their sizes and times."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    def digest(kept: Path) -> None:
        total = hashlib.sha256()
        for path in paths:
            with open(path, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        kept.write_text(total.hexdigest()[:16])

    return cached(f"digest-{hashlib.sha256(repr(stats).encode()).hexdigest()[:16]}.txt", digest).read_text()
