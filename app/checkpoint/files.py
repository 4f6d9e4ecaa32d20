"""torch.distributed.checkpoint's reader and writer over `Storage`, hashing what is written as it is written.

Hashing in passing costs no second read of the files (which on an object store would be a download), and it
hashes what was meant to be written, not what came back. DCP's own writer falls back to a machine-wide sync()
where a stream has no descriptor; here a local file is fsynced when it is closed, and an object store's is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import queue
import warnings
from collections.abc import Generator
from dataclasses import replace
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from app.checkpoint.commit import File
from app.checkpoint.errors import Unexchangeable, said
from app.checkpoint.unchanged import Unchanged
from app.storage import Storage

BYTE_IO = WriteItemType.BYTE_IO

# A run on one process is no mistake; and a filter set around each call would not be safe in a thread.
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
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except Exception as error:
            self.cause = self.cause or error
            raise
        self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def close(self) -> None:
        """Make the file durable where that is a thing, and close it."""
        if not self._stream.closed:
            self._stream.flush()
            with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(self._stream.fileno())
            self._stream.close()
        super().close()

    def abandon(self) -> None:
        """Close after a failure; an object store forgets what was sent of the file."""
        stream: Any = self._stream
        with contextlib.suppress(Exception):
            if hasattr(stream, "discard"):
                stream.discard()
                stream.closed = True  # or fsspec would send it after all when the object goes
            else:
                stream.close()
        super().close()

    def file(self) -> File:
        return File(self._size, self._digest.hexdigest())


class HashedFiles(FileSystemBase):
    """DCP's view of a `Storage`; `written` collects size and SHA-256 of every file written through it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.written: dict[str, File] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        name = os.fspath(path)
        raw = self.storage.open(name, mode)
        if mode != "wb":
            with raw:
                yield cast(io.IOBase, raw)
            return
        stream = HashingStream(raw)
        try:
            yield stream
            stream.close()
        except BaseException as error:
            stream.abandon()
            raise stream.cause or error  # noqa: B904  it is the same failure
        self.written[name] = stream.file()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}" if os.fspath(path) else suffix

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.storage.rename(os.fspath(path), os.fspath(new_path))
        self.written[os.fspath(new_path)] = self.written.pop(os.fspath(path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self.storage.make(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self.storage.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.storage.remove(os.fspath(path))


class Writer(FileSystemWriter):
    """Writes one file per rank into a storage, and another of what has not changed; `written` says what there is.

    unchanged: what is known from earlier saves; still: names of tensors that are as they were in the last one.
    """

    def __init__(
        self, storage: Storage, unchanged: Unchanged | None = None, still: frozenset[str] = frozenset()
    ) -> None:
        super().__init__("", sync_files=False)  # HashingStream syncs each file, and can where there is no descriptor
        self.fs: Any = HashedFiles(storage)
        self.path: Any = ""
        self.unchanged, self.still = unchanged, still

    @property
    def written(self) -> dict[str, File]:
        return self.fs.written

    # DCP exchanges outcomes by pickling; not every library's exception survives that, and a rank that cannot
    # send its outcome would leave the others waiting.

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with _exchangeable():
            return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _exchangeable():
            still = [item for item in plan.items if item.index.fqn in self.still and item.type != BYTE_IO]
            if self.unchanged is None or not still:
                return super().write_data(plan, planner)
            moving = [item for item in plan.items if not any(item is other for other in still)]
            results = super().write_data(replace(plan, items=moving), planner).value()
            both: Future[list[WriteResult]] = Future()
            both.set_result([*results, *self._write_still(plan, planner, still)])
            return both

    def _write_still(self, plan: SavePlan, planner: SavePlanner, still: list[WriteItem]) -> list[WriteResult]:
        assert self.unchanged is not None
        name = f"{plan.storage_data.prefix}1.distcp"
        pieces = frozenset((item.index.fqn, item.index.offset) for item in still)
        if linked := self.unchanged.link(self.fs.storage, name, pieces):
            self.written[name] = linked.file
            return linked.results
        files: queue.Queue[Any] = queue.Queue()
        files.put((self.fs.concat_path(self.path, name), name, still))
        results = self._write_data(planner, files).value()
        self.unchanged.wrote(self.fs.storage, name, self.written[name], pieces, results)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with _exchangeable():
            super().finish(metadata, results)


@contextlib.contextmanager
def _exchangeable() -> Generator[None, None, None]:
    try:
        yield
    except BaseException as error:
        raise Unexchangeable(said(error)) from None


class Reader(FileSystemReader):
    """Reads a checkpoint from a storage."""

    def __init__(self, storage: Storage) -> None:
        super().__init__("")
        self.fs: Any = HashedFiles(storage)
        self.path: Any = ""
