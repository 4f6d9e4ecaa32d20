"""Where runs are stored: a local or shared folder, or an object store, with the same few methods.

    storage = Storage("s3://bucket/runs").join("mnist", "checkpoints")
    storage.write_bytes("COMMIT.json", data)

It is a thin layer over fsspec. Paths that methods take are relative to the storage's own folder,
and "" is that folder. `write_bytes` writes a whole file or nothing: locally it writes a file beside
the old one, calls fsync, which fsspec does not know, and renames; on an object store it is a single
put.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from app.errors import UserError, free_space, says_full

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""The optional dependency that each of these protocols needs."""
_WITH_FOLDERS = {"file", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"}
"""Protocols whose folders must be made. Object stores have none; to make one may make a bucket."""

_COPIED_BYTES = 1 << 22
"""How much of a file a download has in memory."""


class Storage:
    """A folder, wherever it is.

    Args:
        url: A local path (`~` is expanded), file://, memory://, s3://, gs:// or another protocol of
            fsspec. Each library finds credentials and endpoints where it looks for them (AWS_*,
            GOOGLE_*, FSSPEC_*).

    Attributes:
        url: The URL, or the absolute path of a local folder.
        is_local: Whether it is a folder on this machine.

    Raises:
        UserError: The protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.fspath(url)
        self._protocol = urlsplit(text).scheme if "://" in text else "file"
        self.is_local = self._protocol == "file"
        if self.is_local:
            self.url = os.path.abspath(os.path.expanduser(text.removeprefix("file://")))
        else:
            self.url = text.rstrip("/")
        self._fs, self._root = _file_system(self._protocol, self.url)

    def __str__(self) -> str:
        return self.url

    @property
    def local_path(self) -> Path:
        """The folder on this machine.

        Raises:
            ValueError: It is not on this machine.
        """
        if not self.is_local:
            raise ValueError(f"{self.url} is not a local folder")
        return Path(self.url)

    def join(self, *parts: str) -> Storage:
        """The storage of a folder (or file) in this one."""
        return Storage(self._full_path("/".join(parts)))

    def _full_path(self, path: str) -> str:
        return f"{self.url}/{path.strip('/')}" if path else self.url

    @property
    def _uncached_fs(self) -> Any:
        """The file system, after it has forgotten what it has listed before."""
        self._fs.invalidate_cache()
        return self._fs

    # --- reading ----------------------------------------------------------------------------------

    def exists(self, path: str = "") -> bool:
        """Whether there is a file or a folder."""
        return bool(self._uncached_fs.exists(self._full_path(path)))

    def size(self, path: str) -> int:
        """The size of a file in bytes.

        Raises:
            FileNotFoundError: There is no such file.
        """
        return int(self._uncached_fs.size(self._full_path(path)))

    def modified(self, path: str) -> float:
        """When a file was last written, in Unix seconds by the storage's clock.

        Raises:
            FileNotFoundError: There is no such file.
        """
        return float(self._uncached_fs.modified(self._full_path(path)).timestamp())

    def list(self, path: str = "") -> list[str]:
        """The names of the files and folders in a folder, sorted; [] if it does not exist."""
        folder = f"{self._root}/{path}".rstrip("/")
        try:
            entries = {
                str(entry).rstrip("/") for entry in self._uncached_fs.ls(folder, detail=False)
            }
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entry.rsplit("/", 1)[-1] for entry in entries if entry != folder)

    def read_bytes(self, path: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: There is no such file.
        """
        with self.open(path) as file:
            return file.read()

    def download(self, path: str, target: Path) -> None:
        """Copy a file to this machine, a piece at a time; makes the folders that it needs.

        Raises:
            FileNotFoundError: There is no such file.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.open(path) as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, _COPIED_BYTES)

    def open(self, path: str, mode: str = "rb") -> IO[bytes]:
        """Open a file. Mode "wb" is not atomic, and makes no folders."""
        return cast(IO[bytes], self._fs.open(self._full_path(path), mode))

    # --- writing ----------------------------------------------------------------------------------

    def make(self, path: str = "") -> None:
        """Make a folder and those above it; object stores have no folders, and get none."""
        if self._protocol in _WITH_FOLDERS:
            self._fs.makedirs(self._full_path(path), exist_ok=True)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a whole file atomically and durably; makes the folders that it needs."""
        if self.is_local:
            with self.writing(path) as file:
                file.write(data)
            return
        self.make(os.path.dirname(path))
        self._fs.pipe_file(self._full_path(path), data)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        """As `write_bytes`, from front to back, for a file that is not to be in memory as a whole.

        If the block raises, what was there before stays, locally and on object stores.
        """
        target = self._full_path(path)
        self.make(os.path.dirname(path))
        if not self.is_local:
            file = cast(IO[bytes], self._fs.open(target, "wb"))
            try:
                yield file
            except BaseException:
                abandon(file)
                raise
            file.close()
            return
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
        raw = _LocalFile(temporary, "wb")
        try:
            with io.BufferedWriter(raw) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if raw.cause is not None and isinstance(error, Exception):
                raise OSError(raw.cause.errno, raw.cause.strerror, target) from error
            raise
        self.sync(os.path.dirname(path))

    def rename(self, old: str, new: str) -> None:
        """Rename a file over another. On an object store this copies."""
        self._fs.mv(self._full_path(old), self._full_path(new))

    def remove(self, path: str) -> None:
        """Remove a file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full_path(path))

    def remove_tree(self, path: str = "") -> None:
        """Remove a file, or a folder with everything in it, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._uncached_fs.rm(self._full_path(path), recursive=True)

    def sync(self, path: str = "") -> None:
        """Call fsync on a local folder, so that names made in it survive a power cut."""
        if not self.is_local:
            return
        descriptor = os.open(self._full_path(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:
            pass  # some network file systems refuse to fsync a folder; they order names themselves
        finally:
            os.close(descriptor)

    def room(self, reason: str) -> str:
        """What to do about a full disk, and how much is free there; "" if that is not the reason.

        Args:
            reason: Why something could not be written, on any rank.
        """
        if not self.is_local or not says_full(reason):
            return ""
        return f"make room there, {free_space(self.url)}"

    def check_writable(self) -> None:
        """Write and remove a small file.

        Raises:
            UserError: Nothing can be written here.
        """
        probe = f".writable-{uuid.uuid4().hex[:8]}"
        try:
            self.write_bytes(probe, b"trireme")
            self.remove(probe)
        except Exception as error:  # each object store library has its own exceptions
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            remedy = self.room(reason) or "give another folder, or the right to write there"
            raise UserError(
                f"the storage {self.url} cannot be written ({reason}): {remedy}"
            ) from error


class _LocalFile(io.FileIO):
    """A file that remembers why it could not be written.

    torch's zip writer raises something that says less when it is closed after that.
    """

    cause: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.cause = self.cause or error
            raise


def abandon(file: IO[bytes]) -> None:
    """Close a file whose writing has failed; an object store discards what it has received."""
    with contextlib.suppress(Exception):
        getattr(file, "discard", lambda: None)()
    with contextlib.suppress(Exception):
        file.close()


def _file_system(protocol: str, url: str) -> tuple[Any, str]:
    """(fsspec's file system, the folder's path in it)"""
    import fsspec

    extra = _EXTRAS.get(protocol)
    options = {"use_listings_cache": False} if extra else {}
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = f"the package fsspec asks for ({error})"
        if extra:
            package = f"pip install 'trireme[{extra}]'"
        raise UserError(
            f"the storage {url} needs a package that is not installed: {package}"
        ) from error
    except ValueError as error:
        raise UserError(
            f"the storage {url} is of an unknown kind ({protocol}://): "
            "use a local path, s3://… or gs://…"
        ) from error
