"""Reading a checkpoint without running code that it contains.

The metadata of a checkpoint is a pickle, and so is everything in it that is not a tensor. Both are
read by unpicklers that know only data. Whoever may write to the storage can change the numbers of a
run, but cannot take over the machine of a person who reads them.
"""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from app.checkpoint.commit import METADATA
from app.checkpoint.dcp import HashedFiles
from app.errors import UserError
from app.storage.storage import Storage

ALLOWED = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""What `.metadata` may name, by module, besides torch's number types and layouts."""


class Reader(FileSystemReader):
    """Reads a checkpoint.

    Args:
        storage: Its folder.
        pickled: The content of `.metadata`, if another rank has read it; None reads it when asked.
    """

    def __init__(self, storage: Storage, pickled: bytes | None = None) -> None:
        super().__init__("")
        self.fs: Any = HashedFiles(storage)
        self.path: Any = ""
        self._pickled = pickled
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata, which is read once.

        Raises:
            UserError: `.metadata` contains anything but data, or is not metadata.
        """
        if self._metadata is None:
            if self._pickled is None:
                self._pickled = self.fs.storage.read_bytes(METADATA)
            self._metadata = self._unpickle(self._pickled)
            self._pickled = None
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def _unpickle(self, pickled: bytes) -> Metadata:
        try:
            metadata = MetadataUnpickler(io.BytesIO(pickled)).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("its .metadata is no table")
        except Exception as error:  # a damaged pickle may raise anything
            raise UserError(
                f"the checkpoint {self.fs.storage} is not read: {error}; use one that you trust"
            ) from error
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Reads a pickle that names nothing but what `ALLOWED` lists."""

    def find_class(self, module: str, name: str) -> Any:
        is_torch_type = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout
        )
        if is_torch_type or name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"its .metadata names {module}.{name}, which is no part of a checkpoint's table"
        )


class Planner(DefaultLoadPlanner):
    """Reads numbers and texts with torch's restricted unpickler; DCP's planner would run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises if the value is more than data
        value.seek(0)
        super().load_bytes(read_item, value)
