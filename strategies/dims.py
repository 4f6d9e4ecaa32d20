"""The only description of a layout: how many ways each kind of parallelism splits the workers.

Workers form a grid with four named sides. Written from the outside in, so that the side with the most talkative
neighbours is innermost and lands on the fastest links:

    pp            stages of a pipeline             speaks per micro-batch, neighbour to neighbour
    dp_replicate  copies of (shards of) the model  all-reduces gradients once per step
    dp_shard      shards of one copy               all-gathers parameters, reduce-scatters gradients, per block
    tp            parts of one layer               speaks several times per block, so: within a node

`rank = ((pp · dp_replicate + r) · dp_shard + s) · tp + t` for the coordinates (p, r, s, t). The ranks that differ
only in t compute the same samples; data parallelism is over r and s together.

The names are the field's own (torchtitan's `ParallelDims`); HSDP is simply dp_replicate > 1 with dp_shard > 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class LayoutError(ValueError):
    """A layout, or a model under a layout, that cannot work: one sentence that says what to write instead."""


NAMES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The sides of the grid, outermost first."""


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism; their product is the number of workers."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in NAMES:
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise LayoutError(f"parallel.{name} is {degree!r}, but a degree is a whole number of at least 1")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """How many ways the global batch is split."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place on each side of the grid."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not one of the {self.world_size} workers of {self}")
        place = {}
        for name in reversed(NAMES):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch (0 … dp-1) the rank computes; its tp peers and pp stages share it."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """A DeviceMesh of the sides longer than 1 (of dp_replicate alone if there is none).

        Collective: every rank calls it, after torch.distributed is initialised with exactly `world_size` ranks.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if dist.get_world_size() != self.world_size:
            raise LayoutError(f"{self} needs {self.world_size} workers, but there are {dist.get_world_size()}")
        names = [name for name in NAMES if getattr(self, name) > 1] or ["dp_replicate"]
        return init_device_mesh(device_type, tuple(getattr(self, name) for name in names), mesh_dim_names=tuple(names))

    def data_group(self, mesh: DeviceMesh) -> ProcessGroup | None:
        """The ranks that share this rank's part of the model and differ in their data; None if it is alone."""
        import torch.distributed as dist

        names = tuple(name for name in ("dp_replicate", "dp_shard") if getattr(self, name) > 1)
        if not names:
            return None
        if self.dp == self.world_size:
            return dist.group.WORLD
        return mesh[names]._flatten("dp").get_group() if len(names) > 1 else mesh.get_group(names[0])

    def __str__(self) -> str:
        sides = [f"{name} {getattr(self, name)}" for name in NAMES if getattr(self, name) > 1]
        return " × ".join(sides) or "1 worker"
