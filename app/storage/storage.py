"""Where runs are kept: a local or shared folder, or an object store, behind the same few calls.

    storage = Storage("s3://bucket/runs").join("mnist", "checkpoints")
    storage.write_bytes("COMMIT.json", data)

Thin over fsspec. Paths handed to a method are relative to the storage's own place; "" is that place itself.
A whole file appears at once or not at all: locally by writing beside it, fsync (which fsspec does not know) and rename,
and on an object store by a single put.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from app.errors import UserError

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Protocols that need one of our optional dependencies."""
_WITH_FOLDERS = {"file", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"}
"""Protocols whose folders must be made first. An object store has none, and making one may make a bucket."""


class Storage:
    """A folder somewhere.

    url: a local path (made absolute, `~` expanded), file://, memory://, s3://, gs://, or whatever else fsspec
        knows. Credentials and endpoints come from where each library looks (AWS_*, GOOGLE_*, FSSPEC_*).
    Raises UserError for a protocol that is unknown or whose package is missing.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.fspath(url)
        self._protocol = protocol = urlsplit(text).scheme if "://" in text else "file"
        self.is_local = protocol == "file"
        path = os.path.abspath(os.path.expanduser(text.removeprefix("file://")))
        self.url = path if self.is_local else text.rstrip("/")
        self._fs, self._root = _file_system(protocol, self.url)

    def __str__(self) -> str:
        return self.url

    @property
    def local_path(self) -> Path:
        """The folder on this machine. Raises ValueError for an object store."""
        if not self.is_local:
            raise ValueError(f"{self.url} is not a local folder")
        return Path(self.url)

    def join(self, *parts: str) -> Storage:
        """The storage of a folder (or file) below this one."""
        return Storage(self._at("/".join(parts)))

    def _at(self, path: str) -> str:
        return f"{self.url}/{path.strip('/')}" if path else self.url

    @property
    def _fresh(self) -> Any:
        """The file system, which has forgotten what it has listed before."""
        self._fs.invalidate_cache()
        return self._fs

    # -- reading

    def exists(self, path: str = "") -> bool:
        """Whether there is a file or a folder."""
        return bool(self._fresh.exists(self._at(path)))

    def size(self, path: str) -> int:
        """Size of a file in bytes. Raises FileNotFoundError."""
        return int(self._fresh.size(self._at(path)))

    def modified(self, path: str) -> float:
        """When a file was last written, Unix seconds by the storage's clock. Raises FileNotFoundError."""
        return float(self._fresh.modified(self._at(path)).timestamp())

    def list(self, path: str = "") -> list[str]:
        """Names of what is in a folder, sorted; [] when it does not exist."""
        try:
            here = f"{self._root}/{path}".rstrip("/")
            found = {str(entry).rstrip("/") for entry in self._fresh.ls(here, detail=False)}
            return sorted(entry.rsplit("/", 1)[-1] for entry in found if entry != here)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read_bytes(self, path: str) -> bytes:
        """Raises FileNotFoundError."""
        with self.open(path) as file:
            return file.read()

    def open(self, path: str, mode: str = "rb") -> IO[bytes]:
        """An open file; "wb" is not atomic and makes no folders."""
        return cast(IO[bytes], self._fs.open(self._at(path), mode))

    # -- writing

    def make(self, path: str = "") -> None:
        """Make a folder and those above it; nothing happens on an object store, which has no folders."""
        if self._protocol in _WITH_FOLDERS:
            self._fs.makedirs(self._at(path), exist_ok=True)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a whole file atomically and durably, making the folders it needs."""
        target = self._at(path)
        self.make(os.path.dirname(path))
        if not self.is_local:
            self._fs.pipe_file(target, data)
            return
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.sync(os.path.dirname(path))

    def rename(self, old: str, new: str) -> None:
        """Rename a file over another. On an object store this copies."""
        self._fs.mv(self._at(old), self._at(new))

    def remove(self, path: str) -> None:
        """Remove a file; nothing happens if there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def remove_tree(self, path: str = "") -> None:
        """Remove a folder with everything in it, or a file; nothing happens if there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._fresh.rm(self._at(path), recursive=True)

    def sync(self, path: str = "") -> None:
        """fsync a local folder, so that names made in it survive a power cut; object stores need no such thing."""
        if not self.is_local:
            return
        descriptor = os.open(self._at(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:
            pass  # some network file systems refuse to fsync a folder; they order names themselves
        finally:
            os.close(descriptor)

    def check_writable(self) -> None:
        """Raises UserError, in one sentence, if nothing can be written here."""
        probe = f".writable-{uuid.uuid4().hex[:8]}"
        try:
            self.write_bytes(probe, b"trireme")
            self.remove(probe)
        except Exception as error:  # each object store library has its own exceptions
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = "give another folder, or the right to write there"
            raise UserError(f"the storage {self.url} cannot be written ({why}): {hint}") from error


def _file_system(protocol: str, url: str) -> tuple[Any, str]:
    """The file system, and the folder's path in it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, **({"use_listings_cache": False} if _EXTRAS.get(protocol) else {}))
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        install = f"pip install 'trireme[{extra}]'" if extra else f"the package fsspec asks for ({error})"
        raise UserError(f"the storage {url} needs a package that is not installed: {install}") from error
    except ValueError as error:
        known = "a local path, s3://… or gs://…"
        raise UserError(f"the storage {url} is of an unknown kind ({protocol}://): use {known}") from error
