"""What torch.distributed.checkpoint is given to write: a copy of each rank's part, and `Storage` (restricted.py reads).

DCP's planner divides the writing evenly among the ranks that hold the same tensor. It is asked before anything is
copied, so that with eight data-parallel GPUs in a machine each copies an eighth into host memory. It is asked again
only when the state's layout changes on any rank, since its answer costs collectives of objects. torch's own stagers
keep their buffers by the identity of the source's storage, so a state made afresh for each save never uses one twice.
Here they belong to names (host_buffer.py).

Files are hashed as they are written: that costs no second read of them (which on an object store would be a download),
and it hashes what was meant to be written, not what came back. Local files are made durable when they are closed; DCP's
own `sync_files` would fall back to a machine-wide sync() on an object store.
"""

import contextlib
import copy
import hashlib
import io
import os
import warnings
from collections.abc import Generator
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from app.checkpoint.commit import File
from app.checkpoint.host_buffer import HostBuffer
from app.checkpoint.ranks import NotFinite, Ranks
from app.storage.storage import Storage

_BUFFER_BYTES = 1 << 20
Path = str | os.PathLike[str]

# A run on one process is intended; and a filter set around each call would not be safe in a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# --- copying


class Staged(DefaultSavePlanner):
    """A rank's part of one save; nothing in it is shared with training.

    plan: what is written; table: DCP's metadata of the whole, on rank 0; data: copies by name, which a GPU may still be
    making; copying: where each GPU's copies begin and end.
    """

    def __init__(
        self, plan: SavePlan, table: Metadata | None, data: dict[str, Any], copying: list[tuple[Any, Any]]
    ) -> None:
        super().__init__()
        self.plan, self.table, self.data, self.copying = plan, table, data, copying

    def wait(self) -> float:
        """Until the copies are whole; the seconds that they have taken of the GPU's time."""
        for _, end in self.copying:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.copying) / 1e3

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What DCP's writer is to write."""
        return self.data[index.fqn]


def flatten(state: dict[str, Any]) -> dict[str, Any]:
    """Every leaf by its name in a checkpoint: the keys on the way to it, joined by dots."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.state_dict


class Stager:
    """Copies states into host memory, into the same memory every time. One copy at a time is alive."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layout: list[tuple[Any, ...]] | None = None
        self._plan = SavePlan([])
        self._table: Metadata | None = None
        self._buffer = HostBuffer()

    def stage(self, state: dict[str, Any], finite: bool = True) -> Staged:
        """This rank's part of `state`; what is computed from now on does not change the copy. A collective call.

        A GPU makes its copies between what it was asked before and after: nothing waits for them here.
        Raises RankFailed, and NotFinite if the state of any rank is not `finite`.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=self._ranks.rank == 0)
        flat = planner.state_dict
        layout = [_describe(name, value) for name, value in flat.items()]
        changed, not_finite = self._ranks.any(layout != self._layout, not finite)
        if not_finite:
            raise NotFinite("a number of the state is not finite")
        if changed:
            self._layout = None
            self._plan = self._ranks.divide(planner.create_local_plan, lambda plans: self._divide(planner, plans))
            self._layout = layout
        kinds = {item.index.fqn: item.type for item in self._plan.items}
        data = {name: copy.deepcopy(flat[name]) for name, kind in kinds.items() if kind == WriteItemType.BYTE_IO}
        sources = {name: _own_part(flat[name]) for name in kinds if name not in data}
        copies, copying = self._copied(sources)
        return Staged(self._plan, self._table, data | copies, copying)

    @torch.no_grad()
    def _copied(self, sources: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[tuple[Any, Any]]]:
        """The copies, and events around those of each GPU."""
        copies = self._buffer.like(sources)
        devices = {source.device for source in sources.values() if source.is_cuda}
        streams = [torch.cuda.current_stream(device) for device in devices]
        started = [stream.record_event(torch.cuda.Event(enable_timing=True)) for stream in streams]
        for name, source in sources.items():
            copies[name].copy_(source, non_blocking=source.is_cuda)
        ended = [stream.record_event(torch.cuda.Event(enable_timing=True)) for stream in streams]
        return copies, list(zip(started, ended, strict=True))

    def _divide(self, planner: DefaultSavePlanner, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: what each rank writes, and into which file."""
        divided, self._table = planner.create_global_plan(plans)
        return FileSystemWriter("").prepare_global_plan(divided)

    @property
    def locked_bytes(self) -> int:
        return self._buffer.locked_bytes

    def close(self) -> None:
        self._buffer.close()


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(name: str, value: Any) -> tuple[Any, ...]:
    """What the plan depends on."""
    if isinstance(value, DTensor):
        return name, value.shape, value.dtype, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return name, value.shape, value.dtype
    return (name,)


# --- files


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
