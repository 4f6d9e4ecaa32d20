"""torch.distributed.checkpoint's reader and writer over `Storage`, hashing what is written as it is written.

Hashing in passing costs no second read of the files (which on an object store would be a download), and it hashes what
was meant to be written, not what came back. Local files are made durable when they are closed; DCP's own `sync_files`
would fall back to a machine-wide sync() on an object store.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Generator
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from app.checkpoint.commit import File
from app.storage import Storage

_BUFFER_BYTES = 1 << 20
Path = str | os.PathLike[str]

# A run on one process is intended; and a filter set around each call would not be safe in a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class HashingStream(io.RawIOBase):
    """A binary stream that is only written, front to back, with the size and SHA-256 of what went through."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._size = 0
        self.cause: Exception | None = None
        """Why writing failed. torch's zip writer, when it is closed after that, raises something less telling."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except Exception as error:
            self.cause = self.cause or error
            raise
        self._digest.update(data)
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def finish(self) -> File:
        """Make the file durable where it is local, and close it."""
        self._stream.flush()
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):
            os.fsync(self._stream.fileno())
        self._stream.close()
        return File(self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close after a failure; an object store forgets what was sent of the file."""
        with contextlib.suppress(Exception):
            getattr(self._stream, "discard", lambda: None)()
        with contextlib.suppress(Exception):
            self._stream.close()


class HashedFiles(FileSystemBase):
    """DCP's view of a `Storage`; `written` collects size and SHA-256 of every file written through it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.written: dict[str, File] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Path, mode: str) -> Generator[io.IOBase, None, None]:
        name = os.fspath(path)
        raw = self.storage.open(name, mode)
        if mode != "wb":
            with raw:
                yield cast(io.IOBase, raw)
            return
        stream = HashingStream(raw)
        try:
            with io.BufferedWriter(stream, _BUFFER_BYTES) as buffered:
                yield buffered
            self.written[name] = stream.finish()
        except BaseException as error:
            stream.abandon()
            raise stream.cause or error  # noqa: B904  it is the same failure

    def concat_path(self, path: Path, suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}" if os.fspath(path) else suffix

    def init_path(self, path: Path) -> str:
        return os.fspath(path)

    def rename(self, path: Path, new_path: Path) -> None:
        self.storage.rename(os.fspath(path), os.fspath(new_path))
        self.written[os.fspath(new_path)] = self.written.pop(os.fspath(path))

    def mkdir(self, path: Path) -> None:
        self.storage.make(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return True

    def exists(self, path: Path) -> bool:
        return self.storage.exists(os.fspath(path))

    def rm_file(self, path: Path) -> None:
        self.storage.remove(os.fspath(path))


class Writer(FileSystemWriter):
    """Writes a rank's part of a checkpoint into a storage; `files.written` is what there is then."""

    def __init__(self, storage: Storage) -> None:
        super().__init__("", sync_files=False)
        self.files = HashedFiles(storage)
        self.fs: Any = self.files
        self.path: Any = ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # The sum that torch.save puts into its archives costs as much as our SHA-256, which covers the same bytes.
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        finally:
            torch.serialization.set_crc32_options(before)

    def add(self, name: str, content: bytes) -> None:
        """Write a file of its own."""
        with self.files.create_stream(name, "wb") as stream:
            stream.write(content)


class Reader(FileSystemReader):
    """Reads a checkpoint from a storage."""

    def __init__(self, storage: Storage) -> None:
        super().__init__("")
        self.fs: Any = HashedFiles(storage)
        self.path: Any = ""
