"""A checkpoint's model as plain files.

"safetensors": `model.safetensors`, or beyond `max_file_bytes` what Hugging Face reads: shards
`model-00001-of-0000N.safetensors` and `model.safetensors.index.json`. The format is a header (its length as
eight little-endian bytes, then JSON of dtype, shape and offsets by name) and the tensors' bytes
(https://huggingface.co/docs/safetensors); it is written here, one tensor in memory at a time, because the library wants
a shard whole in memory.

"torch": `model.pt`, what `torch.load(..., weights_only=True)` reads; the whole model is in memory while it is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch
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
    """Write the checkpoint's model tensors into the folder `out`; return the files, the index (if any) last. What was
    written before a failure is left there.

    max_file_bytes: of a safetensors file; a tensor larger than it gets a file of its own. leave_out: names of tensors
    that are not wanted, such as second names of a tied one.
    Raises UserError if the checkpoint is damaged (its sizes are looked at) or holds no model, or if `to` is unknown.
    """
    source = _Source(commit)
    for name in leave_out:
        source.tensors.pop(name, None)
    out.mkdir(parents=True, exist_ok=True)
    if to == "torch":
        torch.save({name: source.read(name) for name in source.tensors}, out / "model.pt")
        return [out / "model.pt"]
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
    shards = _divide(source, limit)
    width = len(shards)
    files = [f"model-{i:05d}-of-{width:05d}.safetensors" for i in range(1, width + 1)]
    if width == 1:
        files = ["model.safetensors"]
    headers = [_header(source, shard) for shard in shards]  # before anything is written
    for file, shard, header in zip(files, shards, headers, strict=True):
        with open(out / file, "wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            for name in shard:
                stream.write(_raw(source.read(name)))
    if width > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(source.bytes_of(name) for name in source.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        files.append("model.safetensors.index.json")
        (out / files[-1]).write_text(json.dumps(index, indent=2))
    return [out / file for file in files]


def _divide(source: _Source, limit: int) -> list[list[str]]:
    """The tensors' names in order, in runs of at most `limit` bytes (or one tensor)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in source.tensors:
        if shards[-1] and filled + source.bytes_of(name) > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += source.bytes_of(name)
    return shards


def _header(source: _Source, names: list[str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        entry = source.tensors[name]
        if entry.properties.dtype not in _TYPES:
            kind = str(entry.properties.dtype).removeprefix("torch.")
            raise UserError(f"{name} is of type {kind}, which safetensors cannot hold: export to torch instead")
        offsets = [offset, offset := offset + source.bytes_of(name)]
        header[name] = {"dtype": _TYPES[entry.properties.dtype], "shape": list(entry.size), "data_offsets": offsets}
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)  # the data starts aligned


def _raw(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, without a copy. Every system we run on is little-endian, as both formats are."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
