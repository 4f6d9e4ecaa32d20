"""What torch.distributed.checkpoint (DCP) writes: a copy of each rank's part, into a `Storage`.

restricted.py has the reading.

**Staging.** DCP's planner divides the writing evenly among the ranks that have the same tensor. It
is asked before anything is copied: with eight data-parallel GPUs in a machine, each copies an
eighth into host memory. It is asked again only if the layout of the state has changed on any rank,
because its answer costs collectives of objects. torch's own stagers find their buffers by the
identity of the source's storage, so that they never use one twice if the state is made anew for
each save; here buffers belong to names (host_buffer.py).

**Hashing.** Files are hashed while they are written. This saves reading them again, which would be
a download from an object store, and it hashes what was meant to be written. Local files are made
durable when they are closed; the `sync_files` of DCP would fall back to a sync() of the whole
machine on an object store.
"""

import contextlib
import copy
import hashlib
import io
import os
import warnings
from collections.abc import Generator, Sequence
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
from app.storage.storage import Storage, abandon

_BUFFER_BYTES = 1 << 20
_Path = str | os.PathLike[str]

# A run in one process is intended. A filter around each call would not be safe in a thread.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)

# --- copying --------------------------------------------------------------------------------------


class StagedState(DefaultSavePlanner):
    """A rank's part of one save, which training cannot change.

    Args:
        plan: What the rank writes.
        metadata: DCP's metadata of the whole checkpoint, on rank 0.
        values: Copies by name; a GPU may still be making them.
        gpu_events: The events before and after the copies of each GPU.
    """

    def __init__(
        self,
        *,
        plan: SavePlan,
        metadata: Metadata | None,
        values: dict[str, Any],
        gpu_events: list[tuple[torch.cuda.Event, torch.cuda.Event]],
    ) -> None:
        super().__init__()
        self.plan = plan
        self.checkpoint_metadata = metadata
        self.values = values
        self.gpu_events = gpu_events

    def wait(self) -> float:
        """Wait until the copies are complete; the seconds that they have taken on the GPUs."""
        for _, end in self.gpu_events:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.gpu_events) / 1e3

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value that DCP's writer is to write."""
        return self.values[index.fqn]


def flatten(state: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a state by their names in a checkpoint: the keys above them, joined by dots."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.state_dict


class Stager:
    """Copies states into host memory, always the same memory. Only the newest copy is valid.

    Args:
        ranks: All ranks, with a group of their own.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layout: list[tuple[object, ...]] | None = None
        self._plan = SavePlan([])
        self._metadata: Metadata | None = None
        self._buffer = HostBuffer()

    def stage(self, state: dict[str, Any], finite: bool = True) -> StagedState:
        """Copy this rank's part of a state. A collective call.

        A GPU makes its copies after the work that it already has and before the work that it gets
        later; nothing waits for them here.

        Args:
            state: Nested dict of tensors, DTensors and numbers.
            finite: Whether all numbers of this rank's state are finite.

        Raises:
            RankFailed: The state cannot be planned on some rank.
            NotFinite: The state of some rank is not finite.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=self._ranks.rank == 0)
        leaves = planner.state_dict
        layout = [_describe(name, value) for name, value in leaves.items()]
        has_changed, is_not_finite = self._ranks.any(layout != self._layout, not finite)
        if is_not_finite:
            raise NotFinite("a number of the state is not finite")
        if has_changed:
            self._layout = None
            self._plan = self._ranks.run_and_divide(
                planner.create_local_plan, lambda plans: self._divide(planner, plans)
            )
            self._layout = layout
        objects: dict[str, Any] = {}
        sources: dict[str, torch.Tensor] = {}
        for item in self._plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                objects[name] = copy.deepcopy(leaves[name])
            else:
                sources[name] = _local_tensor(leaves[name])
        copies, gpu_events = self._copy(sources)
        return StagedState(
            plan=self._plan,
            metadata=self._metadata,
            values=objects | copies,
            gpu_events=gpu_events,
        )

    @torch.no_grad()
    def _copy(
        self, sources: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
        """(the copies by name, the events around those of each GPU)"""
        copies = self._buffer.like(sources)
        devices = {source.device for source in sources.values() if source.is_cuda}
        streams = [torch.cuda.current_stream(device) for device in devices]
        starts = [_record_event(stream) for stream in streams]
        for name, source in sources.items():
            copies[name].copy_(source, non_blocking=source.is_cuda)
        ends = [_record_event(stream) for stream in streams]
        return copies, list(zip(starts, ends, strict=True))

    def _divide(self, planner: DefaultSavePlanner, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: what each rank writes, and into which file."""
        divided, self._metadata = planner.create_global_plan(plans)
        return FileSystemWriter("").prepare_global_plan(divided)

    @property
    def locked_bytes(self) -> int:
        """Bytes of page-locked host memory."""
        return self._buffer.locked_bytes

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    return stream.record_event(torch.cuda.Event(enable_timing=True))


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(name: str, value: object) -> tuple[object, ...]:
    """What the plan depends on."""
    if isinstance(value, DTensor):
        return name, value.shape, value.dtype, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return name, value.shape, value.dtype
    return (name,)


# --- files ----------------------------------------------------------------------------------------


class HashingStream(io.RawIOBase):
    """A stream that is written from front to back, and computes the size and SHA-256 meanwhile.

    Args:
        stream: Receives what is written.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._size = 0
        self.cause: Exception | None = None
        """Why writing has failed; when torch's zip writer is closed after that, it raises something
        that says less."""

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
        """Close the file; a local one is made durable before."""
        self._stream.flush()
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):
            os.fsync(self._stream.fileno())
        self._stream.close()
        return File(self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close after a failure; an object store discards what it has received."""
        abandon(self._stream)


class HashedFiles(FileSystemBase):
    """A `Storage` as DCP sees it, which hashes what is written.

    Args:
        storage: The folder of a checkpoint.

    Attributes:
        written: Size and SHA-256 of every file that was written, by name.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.written: dict[str, File] = {}

    @contextlib.contextmanager
    def create_stream(self, path: _Path, mode: str) -> Generator[io.IOBase, None, None]:
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

    def concat_path(self, path: _Path, suffix: str) -> str:
        folder = os.fspath(path)
        return f"{folder}/{suffix}" if folder else suffix

    def init_path(self, path: _Path) -> str:
        return os.fspath(path)

    def rename(self, path: _Path, new_path: _Path) -> None:
        old_name = os.fspath(path)
        new_name = os.fspath(new_path)
        self.storage.rename(old_name, new_name)
        self.written[new_name] = self.written.pop(old_name)

    def mkdir(self, path: _Path) -> None:
        self.storage.make(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        return True

    def exists(self, path: _Path) -> bool:
        return self.storage.exists(os.fspath(path))

    def rm_file(self, path: _Path) -> None:
        self.storage.remove(os.fspath(path))


class KnownResults:
    """What DCP needs to know of each written shard; it is sent to rank 0 only when it has changed.

    The results of all ranks are as large as DCP's table, and mostly the same as in the previous
    save, because a shard keeps its place in its file. A rank whose results are the same reports
    only that. After a save that has failed, everything is sent again.
    """

    def __init__(self) -> None:
        self._own: list[WriteResult] | None = None
        """This rank's, which rank 0 knows; None if it may not know them."""
        self._by_rank: dict[int, list[WriteResult]] = {}
        """On rank 0: those of all ranks."""

    def news(self, results: list[WriteResult]) -> list[WriteResult] | None:
        """What a rank sends to rank 0 after a save: its results, or None if rank 0 knows them."""
        is_known = results == self._own
        self._own = results
        return None if is_known else results

    def complete(self, news: Sequence[list[WriteResult] | None]) -> list[list[WriteResult]]:
        """On rank 0: the results of all ranks, from what they have sent, by rank."""
        for rank, results in enumerate(news):
            if results is not None:
                self._by_rank[rank] = results
        return [self._by_rank[rank] for rank in range(len(news))]

    def forget(self) -> None:
        """Send everything with the next save."""
        self._own = None


class Writer(FileSystemWriter):
    """Writes a rank's part of a checkpoint into a storage.

    Args:
        storage: The folder of the checkpoint.

    Attributes:
        files: Its `written` has the files.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__("", sync_files=False)
        self.files = HashedFiles(storage)
        self.fs: Any = self.files
        self.path: Any = ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # The CRC-32 of torch.save's archives costs as much as our SHA-256 of the same bytes.
        had_crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        finally:
            torch.serialization.set_crc32_options(had_crc32)
