"""A checkpoint's model as plain files, one tensor in memory at a time.

"safetensors": `model.safetensors`, or beyond `max_file_bytes` what Hugging Face reads: shards
`model-00001-of-0000N.safetensors` and `model.safetensors.index.json`. The format is a header (its length as
eight little-endian bytes, then JSON of dtype, shape and offsets by name) and the tensors' bytes
(https://huggingface.co/docs/safetensors); it is written here because the library wants a shard whole in memory.

"torch": `model.pt`, what `torch.load(..., weights_only=True)` reads: saved without its data by
`torch.serialization.skip_data`, which leaves room for every tensor; the data is then put there one by one.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from app.checkpoint.commit import Commit, verify
from app.checkpoint.files import Reader
from app.errors import UserError

Format = Literal["safetensors", "torch"]
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PART = "model."


def shapes(commit: Commit) -> dict[str, tuple[int, ...]]:
    """Of the checkpoint's model tensors, by name. Raises UserError as `export` does."""
    return {name: tuple(entry.size) for name, entry in _Source(commit).tensors.items()}


def export(
    commit: Commit, *, to: Format, out: Path, max_file_bytes: int = 5_000_000_000, leave_out: Collection[str] = ()
) -> list[Path]:
    """Write the checkpoint's model tensors into the folder `out`; return the files, the index (if any) last.

    max_file_bytes: of a safetensors file; a tensor larger than it gets a file of its own. leave_out: names of tensors
    that are not wanted, such as second names of a tied one.
    Raises UserError if the checkpoint is damaged (its sizes are looked at) or holds no model, or if `to` is unknown.
    """
    source = _Source(commit)
    for name in leave_out:
        source.tensors.pop(name, None)
    out.mkdir(parents=True, exist_ok=True)
    if to == "torch":
        return [_write_torch(source, out / "model.pt")]
    if to == "safetensors":
        return _write_safetensors(source, out, max_file_bytes)
    raise UserError(f"a checkpoint cannot be exported to {to!r}: use safetensors or torch")


class _Source:
    """The model's tensors of a checkpoint, read one at a time; names without the leading `model.`."""

    def __init__(self, commit: Commit) -> None:
        faults = verify(commit, by="size")
        if faults:
            raise UserError(f"the checkpoint is damaged: {faults[0]}; export another")
        self._reader = Reader(commit.storage)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name[len(_PART) :]: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(_PART) and isinstance(entry, TensorStorageMetadata)
        }
        if not self.tensors:
            raise UserError(f"the checkpoint {commit.path} holds no model: give one that trireme has saved")

    def bytes_of(self, name: str) -> int:
        entry = self.tensors[name]
        return entry.size.numel() * entry.properties.dtype.itemsize

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in host memory."""
        entry = self.tensors[name]
        state: dict[str, Any] = {_PART + name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(state, self._metadata, True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return state[_PART + name]


def _write_safetensors(source: _Source, out: Path, limit: int) -> list[Path]:
    shards = _divide({name: source.bytes_of(name) for name in source.tensors}, limit)
    width = len(shards)
    names = [f"model-{i:05d}-of-{width:05d}.safetensors" for i in range(1, width + 1)]
    if width == 1:
        names = ["model.safetensors"]
    paths = []
    for file_name, shard in zip(names, shards, strict=True):
        paths.append(out / file_name)
        with _appears(paths[-1]) as file:
            _write_shard(source, shard, file)
    if width > 1:
        where = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(source.bytes_of(name) for name in source.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        paths.append(out / "model.safetensors.index.json")
        with _appears(paths[-1]) as file:
            file.write(json.dumps(index, indent=2).encode())
    return paths


def _divide(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into runs of at most `limit` bytes (or one name)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_shard(source: _Source, names: list[str], file: IO[bytes]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        entry = source.tensors[name]
        if entry.properties.dtype not in _TYPES:
            kind = str(entry.properties.dtype).removeprefix("torch.")
            raise UserError(f"{name} is of type {kind}, which safetensors cannot hold: export to torch instead")
        end = offset + source.bytes_of(name)
        header[name] = {
            "dtype": _TYPES[entry.properties.dtype],
            "shape": list(entry.size),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(_raw(source.read(name)))


def _write_torch(source: _Source, path: Path) -> Path:
    with FakeTensorMode():
        empty = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in source.tensors.items()}
    with _appears(path) as file:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(empty, file)
        file.flush()
        with FakeTensorMode():  # reads no data, but where it belongs
            places = torch.load(file.name, weights_only=True)
        sums: dict[int, int] = {}
        for name, place in places.items():
            data = _raw(source.read(name))
            offset = place.untyped_storage()._checkpoint_offset
            file.seek(offset)
            file.write(data)
            sums[offset] = zlib.crc32(data)
        _patch_sums(file, sums)
    return path


def _patch_sums(file: IO[bytes], sums: dict[int, int]) -> None:
    """Put the checksums of the data into the zip archive, by where the data begins; torch does not look at them,
    but unzip does. In a directory entry (46 bytes and three texts) the sum is at 16, in a file's own header
    (30 bytes and two texts) at 14, and after its data behind a signature (APPNOTE.TXT 4.3)."""
    with zipfile.ZipFile(file) as archive:
        entry, records = archive.start_dir, archive.infolist()
    for record in records:
        file.seek(entry)
        head = file.read(46)
        name, extra, comment = struct.unpack_from("<3H", head, 28)
        file.seek(record.header_offset)
        begin = record.header_offset + 30 + sum(struct.unpack_from("<2H", file.read(30), 26))
        places = [entry + 16, record.header_offset + 14]
        if record.flag_bits & 8:
            places.append(begin + record.compress_size + 4)
        for place in places if begin in sums else ():
            file.seek(place)
            file.write(struct.pack("<I", sums[begin]))
        entry += 46 + name + extra + comment


def _raw(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, without a copy. Every system we run on is little-endian, as both formats are."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


@contextmanager
def _appears(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there when it is whole."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
