"""Reading a checkpoint: into a state of any layout, after seeing that it is of the same model and whole; or its model's
tensors as plain files for others, a file's tensors in memory at a time."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from app.checkpoint.commit import FROZEN, Commit, frozen_part, verify, verify_together
from app.checkpoint.dcp import flatten
from app.checkpoint.ranks import Ranks, describe
from app.checkpoint.restricted import Planner, Reader
from app.errors import UserError

_ADVICE = "use another run.name (or checkpoint.load)"
_PART, _AVERAGE = "model.", "ema."


def load(commit: Commit, state: dict[str, Any]) -> None:
    """Fill `state` from a checkpoint in place, whatever layout either has. A collective call where torch.distributed is
    initialised.

    state: nested dict of tensors, DTensors and numbers, as for Checkpointer.save. Only the top-level keys that it
        has are looked at ({"model": …} loads weights alone). Numbers that the checkpoint lacks stay as they are.
    Raises UserError, the same on every rank and before any tensor is changed, if the checkpoint is of another
    model or optimizer; and UserError naming the file if a file is damaged.
    """
    frozen = frozen_part(commit)
    if frozen is not None:
        if "model" in state:
            there = Weights(frozen).tensors
            load(frozen, {"model": {name: value for name, value in state["model"].items() if name in there}})
            state = {**state, "model": {name: value for name, value in state["model"].items() if name not in there}}
        commit = replace(commit, meta={**commit.meta, FROZEN: False})
    ranks = Ranks()
    problem, metadata = _look(commit, state, ranks)
    seen = ranks.all((problem, set(flatten(state))))
    problem = next((p for p, _ in seen if p), None)
    if problem is None and metadata is not None:
        problem = _unexpected(commit, metadata, set().union(*(names for _, names in seen)))
    if problem:
        raise UserError(problem)
    reader, planner = Reader(commit.storage), Planner(allow_partial_load=True)
    try:
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=not ranks.distributed)
    except CheckpointException as error:
        faults = verify_together(commit, ranks)
        failed, (cause, _) = min(error.failures.items())
        unread = f"the checkpoint {commit.path} could not be read (rank {failed}: {describe(cause)})"
        raise UserError(_damaged(faults[0]) if faults else unread) from error


def _look(commit: Commit, state: dict[str, Any], ranks: Ranks) -> tuple[str | None, Metadata | None]:
    """What this rank finds wrong before reading any tensor, in one sentence; and the checkpoint's metadata."""
    table = replace(commit, files={name: file for name, file in commit.files.items() if name == ".metadata"})
    # Before unpickling: it must be what we wrote.
    faults = verify(commit, ranks.rank, ranks.size, by="size") or verify(table)
    if faults:
        return _damaged(faults[0]), None
    try:
        metadata = Reader(commit.storage).read_metadata()
    except UserError as error:
        return str(error), None
    for name, value in flatten(state).items():
        there = metadata.state_dict_metadata.get(name)
        shape = _shape(there)
        if isinstance(value, torch.Tensor):
            here = tuple(value.shape)
            if there is None or shape != here:
                what = "is not in it" if there is None else f"is {_words(shape)} there and {_words(here)} here"
                return _other(commit, name, what), metadata
        elif shape is not None:
            return _other(commit, name, f"is {_words(shape)} there and {type(value).__name__} here"), metadata
    return None, metadata


def _unexpected(commit: Commit, metadata: Metadata, names: set[str]) -> str | None:
    """A tensor of the checkpoint that no rank has asked for, in the parts that were asked for."""
    parts = {name.split(".")[0] for name in names}
    for name, there in metadata.state_dict_metadata.items():
        if _shape(there) is not None and name.split(".")[0] in parts and name not in names:
            return _other(commit, name, f"is {_words(_shape(there))} there and does not exist here")
    return None


def _shape(there: object) -> tuple[int, ...] | None:
    return tuple(there.size) if isinstance(there, TensorStorageMetadata) else None


def _words(shape: tuple[int, ...] | None) -> str:
    return "not a tensor" if shape is None else "a single number" if shape == () else str(shape)


def _other(commit: Commit, name: str, what: str) -> str:
    part, _, rest = name.partition(".")
    kind, shown = ("model", rest) if part == "model" else (part, name)
    return f"the checkpoint {commit.path} is of another {kind}: {shown} {what}; {_ADVICE}"


def _damaged(fault: str) -> str:
    return f"the checkpoint is damaged: {fault}; remove its folder to use the one before"


# --- plain files


class Weights:
    """The model's tensors of a checkpoint, read one at a time; names without the leading `model.`. Of weights that have
    a moving average, that.

    Raises UserError: the checkpoint is damaged (its sizes are looked at) or holds no model.
    """

    def __init__(self, commit: Commit) -> None:
        faults = verify(commit, by="size")
        if faults:
            raise UserError(f"the checkpoint is damaged: {faults[0]}; export another")
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self._where: dict[str, tuple[Reader, Metadata, str]] = {}
        for part in filter(None, (commit, frozen_part(commit))):
            reader = Reader(part.storage)
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, True)
            held = metadata.state_dict_metadata
            for key, entry in held.items():
                if key.startswith(_PART) and isinstance(entry, TensorStorageMetadata):
                    name = key.removeprefix(_PART)
                    self.tensors[name] = entry
                    self._where[name] = reader, metadata, _AVERAGE + name if _AVERAGE + name in held else key
        if not self.tensors:
            raise UserError(f"the checkpoint {commit.path} holds no model: give one that trireme has saved")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry.size) for name, entry in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in host memory."""
        entry = self.tensors[name]
        reader, metadata, key = self._where[name]
        state: dict[str, Any] = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        planner = Planner(flatten_state_dict=False)
        planner.set_up_planner(state, metadata, True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        return state[key]


def export(
    commit: Commit,
    *,
    to: Literal["safetensors", "torch"],
    out: Path,
    max_file_bytes: int = 5_000_000_000,
    leave_out: Collection[str] = (),
) -> list[Path]:
    """Write the checkpoint's model tensors into the folder `out`; return the files, the index (if any) last. What was
    written before a failure is left there.

    "safetensors": `model.safetensors`, or beyond `max_file_bytes` what Hugging Face reads: shards
    `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`. A tensor larger than that gets a file of its
    own. "torch": `model.pt`, what `torch.load(..., weights_only=True)` reads; the whole model is in memory for it.
    leave_out: names of tensors that are not wanted, such as second names of a tied one.
    Raises UserError as `Weights` does.
    """
    weights = Weights(commit)
    names = [name for name in weights.tensors if name not in leave_out]
    out.mkdir(parents=True, exist_ok=True)
    if to == "torch":
        torch.save({name: weights.read(name) for name in names}, out / "model.pt")
        return [out / "model.pt"]
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    sizes = {
        name: weights.tensors[name].size.numel() * weights.tensors[name].properties.dtype.itemsize for name in names
    }
    shards = _divide(sizes, max_file_bytes)
    files = [out / f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [out / "model.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        try:
            save_file({name: weights.read(name) for name in shard}, file, metadata={"format": "pt"})
        except (SafetensorError, KeyError, ValueError) as error:  # a number type that it does not know
            raise UserError(f"safetensors cannot hold these weights ({error}): export to torch instead") from error
    if len(shards) > 1:
        where = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        files.append(out / "model.safetensors.index.json")
        files[-1].write_text(json.dumps(index, indent=2))
    return files


def _divide(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """The tensors' names in order, in runs of at most `limit` bytes (or one tensor)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
