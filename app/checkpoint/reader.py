"""Reading a checkpoint: into the state of any layout, or as plain files for other programs.

Before a state is filled, the checkpoint is checked: it must be whole, and of the same model. As
plain files it has the tensors of the model; only those of one file are in memory at a time.
"""

import errno
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from app.checkpoint.commit import (
    FROZEN,
    METADATA,
    Commit,
    find_together,
    frozen_part,
    verify,
    verify_together,
)
from app.checkpoint.dcp import flatten
from app.checkpoint.ranks import RankFailed, Ranks, describe
from app.checkpoint.restricted import Planner, Reader
from app.checkpoint.table import Table, divide
from app.errors import UserError, says_full
from app.storage.storage import Storage

_ADVICE = "use another run.name (or checkpoint.load)"
_MODEL_PREFIX = "model."
_AVERAGE_PREFIX = "ema."


def load(commit: Commit, state: dict[str, Any]) -> None:
    """Fill a state from a checkpoint in place, whatever the layout of either.

    A collective call with torch.distributed.

    Args:
        commit: The checkpoint.
        state: Nested dict of tensors, DTensors and numbers, as for Checkpointer.save. Only the
            top-level keys that it has are read: {"model": …} loads the weights. Numbers that the
            checkpoint lacks stay as they are.

    Raises:
        UserError: The checkpoint is of another model or optimizer, and no tensor was changed; or a
            file is damaged. The same on every rank.
    """
    ranks = Ranks()
    if commit.meta.get(FROZEN):
        if "model" in state:
            frozen = find_together(lambda: frozen_part(commit), ranks)
            assert frozen is not None
            state = {**state, "model": _load_frozen(frozen, state["model"], ranks)}
        commit = replace(commit, meta={**commit.meta, FROZEN: False})
    reader, missing = _open(commit, state, ranks)
    _require_fit(commit, reader.read_metadata(), state, ranks, missing=missing)
    problem = ""
    try:
        # Each rank plans its own reading from its own part of the table.
        planner = Planner(allow_partial_load=True)
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        problem = f"rank {ranks.rank}: {describe(cause)}"
    problem, _ = ranks.first_of([problem] if problem else [])
    if problem:
        fault = verify_together(commit, ranks)
        if fault:
            raise UserError(_damaged(fault))
        raise UserError(f"the checkpoint {commit.path} could not be read ({problem})")


def _load_frozen(frozen: Commit, model: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Load the frozen weights; the others are returned."""
    reader, _ = _open(frozen, {"model": model}, ranks)
    keys = reader.read_metadata().state_dict_metadata
    names = {key.removeprefix(_MODEL_PREFIX) for key in keys if key.startswith(_MODEL_PREFIX)}
    load(frozen, {"model": {name: value for name, value in model.items() if name in names}})
    return {name: value for name, value in model.items() if name not in names}


def _open(commit: Commit, state: dict[str, Any], ranks: Ranks) -> tuple[Reader, str]:
    """A reader with this rank's part of the table, which rank 0 reads for all. Collective.

    Args:
        commit: The checkpoint.
        state: This rank's, which is to be filled.
        ranks: All ranks.

    Returns:
        The reader; and on rank 0, a sentence about a tensor of the checkpoint that no rank has, ""
        if there is none.

    Raises:
        UserError: The checkpoint is damaged; the same on every rank.
    """
    table: Table | None = None
    problem = ""
    if ranks.rank == 0:
        # It is compared in full before it is unpickled: it must be what we have written.
        metadata_file = {name: file for name, file in commit.files.items() if name == METADATA}
        faults = verify(replace(commit, files=metadata_file))
        if faults:
            problem = _damaged(faults[0])
        else:
            try:
                table = Table(Reader(commit.storage).read_metadata())
            except UserError as error:
                problem = str(error)
    problem = ranks.from_first(problem)
    if problem:
        raise UserError(problem)
    try:
        pickled, wanted_names = divide(table, state, ranks)
    except RankFailed as error:
        raise UserError(f"the checkpoint {commit.path} could not be read ({error})") from error
    missing = "" if table is None else _surplus_tensor(commit, table.metadata, wanted_names)
    return Reader(commit.storage, pickled), missing


def _require_fit(
    commit: Commit, metadata: Metadata, state: dict[str, Any], ranks: Ranks, *, missing: str
) -> None:
    """Raise UserError on every rank if the checkpoint is damaged or does not fit some state.

    Args:
        commit: The checkpoint.
        metadata: This rank's part of its table.
        state: This rank's.
        ranks: All ranks.
        missing: On rank 0, a sentence about a tensor that no rank has; "" if there is none.
    """
    leaves = flatten(state)
    faults = verify(commit, ranks.rank, ranks.size, by="size")
    problems = [_damaged(fault) for fault in faults] or _local_problems(commit, metadata, leaves)
    problem, _ = ranks.first_of(problems)
    if not problem:
        problem = ranks.from_first(missing)
    if problem:
        raise UserError(problem)


def _local_problems(commit: Commit, metadata: Metadata, leaves: Mapping[str, Any]) -> list[str]:
    """The first entry of this rank's state that the checkpoint has otherwise, in a sentence."""
    for name, value in leaves.items():
        difference = _difference(metadata.state_dict_metadata.get(name), value)
        if difference:
            return [_other_model(commit, name, difference)]
    return []


def _difference(saved: object, value: object) -> str:
    """How an entry of a checkpoint differs from that of a state; "" if it fits."""
    saved_shape = _shape(saved)
    if not isinstance(value, torch.Tensor):
        if saved_shape is None:
            return ""
        return f"is {_words(saved_shape)} there and {type(value).__name__} here"
    if saved is None:
        return "is not in it"
    shape = tuple(value.shape)
    if saved_shape != shape:
        return f"is {_words(saved_shape)} there and {_words(shape)} here"
    return ""


def _surplus_tensor(commit: Commit, metadata: Metadata, wanted: Collection[str]) -> str:
    """A sentence about a tensor of the checkpoint that no rank has, in the parts that are read.

    "" if there is none.

    Args:
        commit: The checkpoint.
        metadata: Its whole table.
        wanted: The names that any rank has.
    """
    parts = {name.split(".")[0] for name in wanted}
    for name, entry in metadata.state_dict_metadata.items():
        shape = _shape(entry)
        if shape is not None and name.split(".")[0] in parts and name not in wanted:
            difference = f"is {_words(shape)} there and does not exist here"
            return _other_model(commit, name, difference)
    return ""


def _shape(saved: object) -> tuple[int, ...] | None:
    return tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else None


def _words(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "not a tensor"
    return "a single number" if shape == () else str(shape)


def _other_model(commit: Commit, name: str, difference: str) -> str:
    part, _, name_in_part = name.partition(".")
    shown = name_in_part if part == "model" else name
    if part == "reference":
        return (
            f"the checkpoint {commit.path} has the reference of other data: {shown} {difference}; "
            "bring back the data that the run began with, or begin from its weights alone with "
            "another run.name and checkpoint.load"
        )
    return f"the checkpoint {commit.path} is of another {part}: {shown} {difference}; {_ADVICE}"


def _damaged(fault: str) -> str:
    return f"the checkpoint is damaged: {fault}; remove its folder to use the one before"


# --- plain files ----------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Where a tensor is read from."""

    reader: Reader
    metadata: Metadata
    key: str


class Weights:
    """The tensors of the model in a checkpoint, read one at a time.

    If the weights have a moving average, that is read.

    Args:
        commit: The checkpoint; the sizes of its files are compared with its marker.

    Attributes:
        tensors: Shape and type of each tensor by its name in the model.

    Raises:
        UserError: The checkpoint is damaged, or has no model.
    """

    def __init__(self, commit: Commit) -> None:
        faults = verify(commit, by="size")
        if faults:
            raise UserError(f"the checkpoint is damaged: {faults[0]}; export another")
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self._sources: dict[str, _Source] = {}
        self._add(commit)
        frozen = frozen_part(commit)
        if frozen is not None:
            self._add(frozen)
        if not self.tensors:
            raise UserError(
                f"the checkpoint {commit.path} holds no model: give one that trireme has saved"
            )

    def _add(self, commit: Commit) -> None:
        reader = Reader(commit.storage)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        saved = metadata.state_dict_metadata
        for key, entry in saved.items():
            if not key.startswith(_MODEL_PREFIX) or not isinstance(entry, TensorStorageMetadata):
                continue
            name = key.removeprefix(_MODEL_PREFIX)
            average_key = _AVERAGE_PREFIX + name
            self.tensors[name] = entry
            self._sources[name] = _Source(
                reader, metadata, key=average_key if average_key in saved else key
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name."""
        return {name: tuple(entry.size) for name, entry in self.tensors.items()}

    def nbytes(self, name: str) -> int:
        """The size of a tensor in bytes."""
        entry = self.tensors[name]
        return entry.size.numel() * entry.properties.dtype.itemsize

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in host memory."""
        entry = self.tensors[name]
        source = self._sources[name]
        state: dict[str, Any] = {source.key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        planner = Planner(flatten_state_dict=False)
        planner.set_up_planner(state, source.metadata, True)
        source.reader.read_data(planner.create_local_plan(), planner).wait()
        return state[source.key]


def export(
    commit: Commit,
    *,
    to: Literal["safetensors", "torch"],
    out: Path,
    max_file_bytes: int = 5_000_000_000,
    leave_out: Collection[str] = (),
) -> list[Path]:
    """Write the tensors of a checkpoint's model into a folder.

    What was written before a failure stays there.

    Args:
        commit: The checkpoint.
        to: "safetensors" writes `model.safetensors`, or if that would be larger than
            `max_file_bytes`, shards `model-00001-of-0000N.safetensors` and
            `model.safetensors.index.json`, as Hugging Face reads them. "torch" writes `model.pt`
            for `torch.load(..., weights_only=True)`, with the whole model in memory.
        out: The folder.
        max_file_bytes: The largest size of a shard, unless a single tensor is larger.
        leave_out: Names of tensors that are not written, such as the second name of a tied one.

    Returns:
        The files, the index last.

    Raises:
        UserError: The checkpoint is damaged or has no model, or safetensors lacks a number type.
    """
    weights = Weights(commit)
    names = [name for name in weights.tensors if name not in leave_out]
    out.mkdir(parents=True, exist_ok=True)
    if to == "torch":
        path = out / "model.pt"
        with Storage(out).writing(path.name) as file:
            torch.save({name: weights.read(name) for name in names}, file)
        return [path]
    return _export_safetensors(weights, names, out=out, max_file_bytes=max_file_bytes)


def _export_safetensors(
    weights: Weights, names: list[str], *, out: Path, max_file_bytes: int
) -> list[Path]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    sizes = {name: weights.nbytes(name) for name in names}
    shards = _divide(sizes, max_file_bytes)
    count = len(shards)
    files = [out / f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        files = [out / "model.safetensors"]
    file_of_tensor: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        try:
            tensors = {name: weights.read(name) for name in shard}
            save_file(tensors, file, metadata={"format": "pt"})
        except (SafetensorError, KeyError, ValueError) as error:
            if says_full(str(error)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from error
            # It is of an unknown number type.
            raise UserError(
                f"safetensors cannot hold these weights ({error}): export to torch instead"
            ) from error
        for name in shard:
            file_of_tensor[name] = file.name
    if count == 1:
        return files
    index_path = out / "model.safetensors.index.json"
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(file_of_tensor.items())),
    }
    index_path.write_text(json.dumps(index, indent=2))
    return [*files, index_path]


def _divide(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """The tensors' names in order, in shards of at most `limit` bytes or of one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
