"""torch.distributed.checkpoint's reader and writer over `Storage`, hashing what is written as it is written.

Hashing in passing costs no second read of the files (which on an object store would be a download), and it
hashes what was meant to be written, not what came back. DCP's own writer falls back to a machine-wide sync()
where a stream has no descriptor; here a local file is fsynced when it is closed, and an object store's is not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import sys
import warnings
from collections.abc import Generator
from dataclasses import replace
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    FileSystemReader,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from app.checkpoint.commit import File
from app.checkpoint.staging import StagedPlanner
from app.checkpoint.unchanged import Unchanged
from app.storage import Storage

BYTE_IO = WriteItemType.BYTE_IO
_HEAD_BYTES = 4096
_GATHER_BYTES = 256 << 10
_OLD_TYPES = (  # those that torch's older format can hold; it writes others (float8, uint16) but cannot read them
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)

# A run on one process is no mistake; and a filter set around each call would not be safe in a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class HashingStream(io.RawIOBase):
    """A binary stream that is only written, front to back, with the size and SHA-256 of what went through.

    What is small is gathered first: each call that writes or hashes lets go of the interpreter, for which training's
    thread waits, and so must be waited for again.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._gathered = bytearray()
        self._digest = hashlib.sha256()
        self._size = 0
        self.cause: Exception | None = None
        """Why writing failed. torch's zip writer, when it is closed after that, raises something less telling."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(self._gathered) + view.nbytes > _GATHER_BYTES:
            self._pass_on(self._gathered)
            self._gathered = bytearray()
        if view.nbytes > _GATHER_BYTES:
            self._pass_on(view)
        else:
            self._gathered += view
        self._size += view.nbytes
        return view.nbytes

    def _pass_on(self, data: bytearray | memoryview) -> None:
        try:
            self._stream.write(data)
        except Exception as error:
            self.cause = self.cause or error
            raise
        self._digest.update(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._stream.closed:
            self._pass_on(self._gathered)
            self._gathered = bytearray()
            self._stream.flush()

    def close(self) -> None:
        """Make the file durable where that is a thing, and close it."""
        if not self._stream.closed:
            self.flush()
            with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(self._stream.fileno())
            self._stream.close()
        super().close()

    def abandon(self) -> None:
        """Close after a failure; an object store forgets what was sent of the file."""
        self._gathered = bytearray()
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


class Writer:
    """Writes one file per rank into a storage, and another of what has not changed; `written` says what there is.

    unchanged: what is known from earlier saves; still: names of tensors that are as they were in the last one.
    """

    def __init__(
        self, storage: Storage, unchanged: Unchanged | None = None, still: frozenset[str] = frozenset()
    ) -> None:
        self.fs = HashedFiles(storage)
        self.unchanged, self.still = unchanged, still

    @property
    def written(self) -> dict[str, File]:
        return self.fs.written

    def write(self, rank: int, items: list[WriteItem], planner: StagedPlanner) -> list[WriteResult]:
        """Write a rank's files; what `Table` is to be told of them."""
        still = [] if self.unchanged is None else [i for i in items if i.index.fqn in self.still and i.type != BYTE_IO]
        moving = [item for item in items if not any(item is other for other in still)] if still else items
        results = self._write_items(f"__{rank}_0.distcp", moving, planner)
        return [*results, *self._write_still(f"__{rank}_1.distcp", still, planner)] if still else results

    def _write_items(self, name: str, items: list[WriteItem], planner: StagedPlanner) -> list[WriteResult]:
        """As DCP's own writer does, what is no tensor first."""
        results = []
        with self.fs.create_stream(name, "wb") as stream:
            for item in sorted(items, key=lambda item: item.type != BYTE_IO):
                begin, data = stream.tell(), planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    write_tensor(stream, data, planner.bits[item.index.fqn])
                size = stream.tell() - begin
                results.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
        return results

    def add(self, name: str, content: bytes) -> None:
        """Write a file of its own."""
        with self.fs.create_stream(name, "wb") as stream:
            stream.write(content)

    def _write_still(self, name: str, still: list[WriteItem], planner: StagedPlanner) -> list[WriteResult]:
        assert self.unchanged is not None
        pieces = frozenset((item.index.fqn, item.index.offset) for item in still)
        if linked := self.unchanged.link(self.fs.storage, name, pieces):
            self.written[name] = linked.file
            return linked.results
        results = self._write_items(name, still, planner)
        self.unchanged.wrote(self.fs.storage, name, self.written[name], pieces, results)
        return results


class Table:
    """DCP's table of what is where in a checkpoint's files: the same in every save of a layout, as long as what is no
    tensor keeps its length."""

    NAME = ".metadata"

    def __init__(self) -> None:
        self._of: tuple[Metadata, list[list[WriteResult]]] | None = None
        self._content = b""

    def content(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        """As DCP's own writer would write it; results: of each rank."""
        if self._of is None or self._of[0] is not metadata or self._of[1] != results:
            where = {result.index: result.storage_data for each in results for result in each}
            whole = replace(metadata, storage_data=where, storage_meta=StorageMeta(""), version=CURRENT_DCP_VERSION)
            self._of, self._content = (metadata, results), pickle.dumps(whole)
        return self._content


class _Head(io.RawIOBase):
    """A stream that keeps the beginning of what is written to it."""

    def __init__(self) -> None:
        self.kept, self.size = b"", 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.kept += view[: max(0, _HEAD_BYTES - len(self.kept))]
        self.size += view.nbytes
        return view.nbytes


@functools.lru_cache(4096)
def _head(shape: torch.Size, dtype: torch.dtype) -> bytes | None:
    """What torch.save, in its format from before zip archives, writes in front of a tensor's bits; None: it cannot."""
    if dtype not in _OLD_TYPES or sys.byteorder != "little":
        return None
    head = _Head()
    empty = torch.empty(shape, dtype=dtype)  # pages that are only read take no memory
    torch.save(empty, cast(IO[bytes], head), _use_new_zipfile_serialization=False)
    size = head.size - empty.nbytes
    return head.kept[:size] if 0 < size <= len(head.kept) else None


def write_tensor(stream: io.IOBase, tensor: torch.Tensor, bits: memoryview) -> None:
    """Write a contiguous CPU tensor, whose bytes are `bits`, for torch.load. In the older of torch's two formats all
    but the bits is the same for all tensors of a shape and type; an archive takes several times as long, and its
    CRC-32 as long again as our SHA-256."""
    head = _head(tensor.shape, tensor.dtype)
    if head is None:
        torch.save(tensor, cast(IO[bytes], stream))
        return
    stream.write(head)
    stream.write(bits)


class Reader(FileSystemReader):
    """Reads a checkpoint from a storage."""

    def __init__(self, storage: Storage) -> None:
        super().__init__("")
        self.fs: Any = HashedFiles(storage)
        self.path: Any = ""
