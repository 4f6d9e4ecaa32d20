"""Which tensors a rank writes, and a copy of them that training cannot change any more.

DCP's planner divides the writing evenly among the ranks that hold the same tensor. It is asked before anything is
copied, so that with eight data-parallel GPUs in a machine each copies an eighth into host memory. It is asked again
only when the state's layout changes on any rank, since its answer costs collectives of objects.

torch's own stagers keep their buffers by the identity of the source's storage, so a state made afresh for each save
never uses one twice. Here they belong to names, and are pinned where the source is on a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.tensor import DTensor

from app.checkpoint.ranks import NotFinite, Ranks


class Staged(DefaultSavePlanner):
    """A rank's part of one save; nothing in it is shared with training.

    plan: what is written; table: DCP's metadata of the whole, on rank 0; data: copies by name.
    """

    def __init__(self, plan: SavePlan, table: Metadata | None, data: dict[str, Any]) -> None:
        super().__init__()
        self.plan, self.table, self.data = plan, table, data

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What DCP's writer is to write."""
        return self.data[index.fqn]


def flatten(state: dict[str, Any]) -> dict[str, Any]:
    """Every leaf by its name in a checkpoint: the keys on the way to it, joined by dots."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.state_dict


class Stager:
    """Copies states into host memory, into the same buffers every time. One copy at a time is alive."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layout: list[tuple[Any, ...]] | None = None
        self._plan = SavePlan([])
        self._table: Metadata | None = None
        self._buffers: dict[str, torch.Tensor] = {}

    def stage(self, state: dict[str, Any], finite: bool = True) -> Staged:
        """This rank's part of `state`; the copy is whole when this returns. A collective call.

        Raises RankFailed, and NotFinite if the state of any rank is not `finite`.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=self._ranks.rank == 0)
        flat = planner.state_dict
        layout = [_describe(name, value) for name, value in flat.items()]
        changed, not_finite = self._ranks.any(layout != self._layout, not finite)
        if not_finite:
            raise NotFinite("a number of the state is not finite")
        if changed:
            self._layout = None
            self._plan = self._ranks.reduce_scatter(
                planner.create_local_plan, lambda plans: self._divide(planner, plans)
            )
            self._layout = layout
        with torch.no_grad():
            data = {item.index.fqn: self._copy(item.index.fqn, item.type, flat) for item in self._plan.items}
        tensors = [value for name in data if isinstance(value := flat[name], torch.Tensor)]
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # copies from a GPU are only queued
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in data}
        return Staged(self._plan, self._table, data)

    def _divide(self, planner: DefaultSavePlanner, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: what each rank writes, and into which file."""
        divided, self._table = planner.create_global_plan(plans)
        return FileSystemWriter("").prepare_global_plan(divided)

    def _copy(self, name: str, kind: WriteItemType, flat: dict[str, Any]) -> Any:
        if kind == WriteItemType.BYTE_IO:
            return copy.deepcopy(flat[name])
        source = flat[name].detach()
        source = source.to_local() if isinstance(source, DTensor) else source
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(source, non_blocking=source.is_cuda)

    def close(self) -> None:
        self._buffers.clear()


def _describe(name: str, value: Any) -> tuple[Any, ...]:
    """What the plan depends on."""
    if isinstance(value, DTensor):
        return name, value.shape, value.dtype, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return name, value.shape, value.dtype
    return (name,)
