"""Loading a checkpoint into a state of any layout, after seeing that it is of the same model and whole."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from app.checkpoint.commit import Commit, Verify, latest_good, verify
from app.checkpoint.files import Reader
from app.checkpoint.ranks import describe
from app.checkpoint.saver import own_name
from app.checkpoint.staging import flatten
from app.errors import UserError

_ADVICE = "use another run.name (or checkpoint.load)"


def load(commit: Commit, state: dict[str, Any], *, group: dist.ProcessGroup | None = None) -> None:
    """Fill `state` from a checkpoint in place, whatever layout either has.

    state: nested dict of tensors, DTensors and numbers, as for Checkpointer.save. Only the top-level keys that it
        has are looked at ({"model": …} loads weights alone). Numbers that the checkpoint lacks stay as they are.
    group: the ranks that call this, all of them; default: all.
    Raises UserError, the same on every rank and before any tensor is changed, if the checkpoint is of another
    model or optimizer; and UserError naming the file if a file is damaged.
    """
    distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if distributed else (0, 1)
    problem, metadata = _look(commit, state, rank, size)
    seen = _gather((problem, set(flatten(state))), group, distributed)
    problem = next((p for p, _ in seen if p), None)
    if problem is None and metadata is not None:
        problem = _unexpected(commit, metadata, set().union(*(names for _, names in seen)))
    if problem:
        raise UserError(problem)
    try:
        dcp.load(
            state,
            storage_reader=Reader(commit.storage),
            planner=DefaultLoadPlanner(allow_partial_load=True),
            process_group=group,
            no_dist=not distributed,
        )
    except CheckpointException as error:
        mine = verify(commit, rank, size)
        faults = [fault for part in _gather(mine, group, distributed) for fault in part]
        failed, (cause, _) = min(error.failures.items())
        unread = f"the checkpoint {commit.path} could not be read (rank {failed}: {describe(cause)})"
        raise UserError(_damaged(faults[0]) if faults else unread) from error


def _look(commit: Commit, state: dict[str, Any], rank: int, size: int) -> tuple[str | None, Metadata | None]:
    """What this rank finds wrong before reading any tensor, in one sentence; and the checkpoint's metadata."""
    table = replace(commit, files={name: file for name, file in commit.files.items() if name == ".metadata"})
    faults = verify(commit, rank, size, by="size") or verify(table)  # before unpickling: it must be what we wrote
    if faults:
        return _damaged(faults[0]), None
    metadata = Reader(commit.storage).read_metadata()
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


def _gather(mine: Any, group: dist.ProcessGroup | None, distributed: bool) -> list[Any]:
    if not distributed:
        return [mine]
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def _damaged(fault: str) -> str:
    return f"the checkpoint is damaged: {fault}; remove its folder to use the one before"


def load_per_rank(commit: Commit, rank: int) -> Any:
    """What this rank gave to save() as `per_rank`; None if it gave nothing (or there were fewer ranks)."""
    name = own_name(rank)
    if name not in commit.files:
        return None
    return torch.load(io.BytesIO(commit.storage.read_bytes(name)), map_location="cpu", weights_only=True)


def latest_good_together(
    folder: str, *, by: Verify = "sha256", group: dist.ProcessGroup | None = None
) -> tuple[Commit | None, list[str]]:
    """`latest_good`, called by all ranks: they share the reading of the files, and all get the same answer."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        return latest_good(folder, by=by)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return latest_good(folder, by=by, rank=rank, world_size=size, gather=lambda mine: _gather(mine, group, True))
