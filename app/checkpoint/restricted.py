"""Reading a checkpoint runs none of its code: its table is a pickle, and so is what is no tensor in it, and both are
read by unpicklers that know data alone. Whoever may write to the storage can change a run's numbers, but not take over
who reads it."""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from app.checkpoint.dcp import HashedFiles
from app.errors import UserError
from app.storage.storage import Storage

TABLE = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
}  # fmt: skip
"""All that a checkpoint's `.metadata` may name, by module; and the number types of torch."""


class Reader(FileSystemReader):
    """Reads a checkpoint from a storage."""

    def __init__(self, storage: Storage) -> None:
        super().__init__("")
        self.fs: Any = HashedFiles(storage)
        self.path: Any = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises UserError where the table holds anything but data, or is none."""
        with self.fs.create_stream(".metadata", "rb") as file:
            pickled = file.read()
        try:
            metadata = TableUnpickler(io.BytesIO(pickled)).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("its .metadata is no table")
        except Exception as error:  # a damaged pickle raises anything
            raise UserError(f"the checkpoint {self.fs.storage} is not read: {error}; use one that you trust") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if is_type or name in TABLE.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its .metadata names {module}.{name}, which is no part of a checkpoint's table")


class Planner(DefaultLoadPlanner):
    """Reads numbers and texts by torch's restricted unpickler; torch's own planner would run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where there is more
        value.seek(0)
        super().load_bytes(read_item, value)
