"""A copy of the training state that training cannot change any more.

torch's own stagers were read (torch 2.13): `DefaultStager` caches by the identity of the source's storage, so a
state made afresh for each save is never reused, and a view copies the whole storage behind it;
`BlockingAsyncStager` without its cache may hand back CPU tensors as they are. Here buffers belong to names,
are reused as long as shape and type stay, and are pinned where the source is on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def leaves(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name in the checkpoint: the keys on the way to it, joined by dots."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(state, (list, tuple)) and any(isinstance(leaf, torch.Tensor) for _, leaf in _inside(state)):
        for index, value in enumerate(state):
            yield from leaves(value, (*path, str(index)))
    else:
        yield ".".join(path), state


def _inside(sequence: list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    for value in sequence:
        if isinstance(value, (dict, list, tuple)):
            yield from leaves(value)
        else:
            yield "", value


class Stager:
    """Copies states into host memory, into the same buffers every time. One copy at a time is alive."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._shadows: dict[str, DTensor] = {}
        self._devices: set[torch.device] = set()

    def stage(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """A copy of `state`, and by name the local data of its DTensors, which are only described in the copy.

        Returns when every byte has been copied. Raises ValueError for a name that depends on how the model was
        wrapped, since another layout could not read it.
        """
        shards: dict[str, torch.Tensor] = {}
        self._devices.clear()
        with torch.no_grad():
            copied = self._copy(state, (), shards)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()  # copies from a GPU are only queued
        return copied, shards

    def _copy(self, value: Any, path: tuple[str, ...], shards: dict[str, torch.Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(child, (*path, str(key)), shards) for key, child in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(child, (*path, str(i)), shards) for i, child in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        name = ".".join(path)
        wrapper = next((w for w in _WRAPPERS if w in name), None)
        if wrapper:
            raise ValueError(f"the name {name} holds {wrapper!r}: save the plain names (Parallel.model_state)")
        if isinstance(value, DTensor):
            shards[name] = self._fill(name, value.to_local())
            return self._shadow(name, value)
        return self._fill(name, value)

    def _fill(self, name: str, source: torch.Tensor) -> torch.Tensor:
        source = source.detach()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
            self._buffers[name] = buffer
        if source.is_cuda:
            self._devices.add(source.device)
        return buffer.copy_(source, non_blocking=source.is_cuda)

    def _shadow(self, name: str, value: DTensor) -> DTensor:
        """A DTensor without data that is laid out like `value`: what DCP plans with.

        It cannot have the CPU buffer as its data: `from_local` would move that back to the mesh's device.
        """
        old = self._shadows.get(name)
        same = old is not None and old.device_mesh is value.device_mesh and old.placements == value.placements
        if old is not None and same and old.shape == value.shape and old.dtype == value.dtype:
            return old
        local = torch.empty_like(value.to_local(), device="meta")
        self._shadows[name] = DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        return self._shadows[name]

    def close(self) -> None:
        self._buffers.clear()
        self._shadows.clear()


class StagedPlanner(DefaultSavePlanner):
    """Plans with the staged state, and takes a DTensor's data from its staged shard."""

    def __init__(self, shards: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._shards = shards

    def lookup_object(self, index: MetadataIndex) -> Any:
        shard = self._shards.get(index.fqn)
        return super().lookup_object(index) if shard is None else shard
