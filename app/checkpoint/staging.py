"""A copy of the training state that training cannot change any more.

torch's own stagers were read (torch 2.13): `DefaultStager` caches by the identity of the source's storage, so a
state made afresh for each save is never reused, and a view copies the whole storage behind it;
`BlockingAsyncStager` without its cache may hand back CPU tensors as they are. Here buffers belong to names,
are reused as long as shape and type stay, and are pinned where the source is on a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
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
        self._bits: dict[str, memoryview] = {}
        self._outlines: dict[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def stage(self, state: dict[str, Any], wanted: Container[str] | None = None) -> StagedPlanner:
        """A planner for DCP that holds a copy of `state`; it is whole when this returns.

        wanted: names of the tensors whose data is copied; of others only the outline is kept. None: all.
        Raises ValueError for a name that depends on how the model was wrapped, since another layout could not
        read it.
        """
        data: dict[str, torch.Tensor] = {}
        self._devices.clear()
        with torch.no_grad():
            copied = self._copy(state, (), wanted, data)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()  # copies from a GPU are only queued
        for name in self._buffers.keys() - data.keys():
            del self._buffers[name], self._bits[name]
        return StagedPlanner(copied, data, self._bits)

    def _copy(self, value: Any, path: tuple[str, ...], wanted: Container[str] | None, data: dict[str, Any]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(child, (*path, str(key)), wanted, data) for key, child in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(child, (*path, str(i)), wanted, data) for i, child in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        name = ".".join(path)
        wrapper = next((w for w in _WRAPPERS if w in name), None)
        if wrapper:
            raise ValueError(f"the name {name} holds {wrapper!r}: save the plain names (Parallel.model_state)")
        if wanted is None or name in wanted:
            data[name] = self._fill(name, value.to_local() if isinstance(value, DTensor) else value)
        return self._outline(name, value)

    def _fill(self, name: str, source: torch.Tensor) -> torch.Tensor:
        source = source.detach()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
            self._buffers[name] = buffer
            self._bits[name] = _bits(buffer)
        if source.is_cuda:
            self._devices.add(source.device)
        return buffer.copy_(source, non_blocking=source.is_cuda)

    def _outline(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A tensor without data, laid out like `value`: what DCP plans with.

        A DTensor cannot simply get the CPU buffer as its data: `from_local` would move that to the mesh's device.
        """
        old = self._outlines.get(name)
        if old is not None and old.shape == value.shape and old.dtype == value.dtype and _same_spec(old, value):
            return old
        if isinstance(value, DTensor):
            local = torch.empty_like(value.to_local(), device="meta")
            self._outlines[name] = DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        else:
            self._outlines[name] = torch.empty_like(value, device="meta")
        return self._outlines[name]

    def close(self) -> None:
        self._buffers.clear()
        self._bits.clear()
        self._outlines.clear()


def _bits(buffer: torch.Tensor) -> memoryview:
    return buffer.reshape(-1).view(torch.uint8).numpy().data if buffer.numel() else memoryview(b"")


def _same_spec(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.device_mesh is other.device_mesh and one.placements == other.placements
    return not isinstance(one, DTensor) and not isinstance(other, DTensor)


class StagedPlanner(DefaultSavePlanner):
    """Plans with outlines, and finds the data in the staged copies."""

    def __init__(self, state: dict[str, Any], data: dict[str, torch.Tensor], bits: dict[str, memoryview]) -> None:
        super().__init__()
        self.staged = state
        """The nested state: outlines of tensors, and copies of everything else."""
        self.data = data
        """The copies, by name."""
        self.bits = bits
        """The same, as bytes."""
        self._values: dict[str, Any] | None = None

    def set_up(self, is_coordinator: bool = False) -> None:
        """Before it is asked for a plan; data can be had without."""
        self.set_up_planner(self.staged, is_coordinator=is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if self._has(item)])
        return self.plan

    def _has(self, item: WriteItem) -> bool:
        return item.type == WriteItemType.BYTE_IO or item.index.fqn in self.data

    def lookup_object(self, index: MetadataIndex) -> Any:
        data = self.data.get(index.fqn)
        if data is not None:
            return data
        if self._values is None:
            self._values = dict(leaves(self.staged))
        return self._values[index.fqn]
