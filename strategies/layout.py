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

From a name and a few degrees to a layout: pure functions that answer in the first second, before any process.

A name fixes which degrees are its own to choose; the rest are 1 unless written. If exactly one of its own is left
open it is the number of workers divided by the others. Names combine with a plus: `fsdp+tensor`, `ddp+tensor`,
`hsdp+tensor`; that is the same as writing the first name and `parallel.tp`.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
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


OWN: dict[str, tuple[str, ...]] = {
    "single": (),
    "dp": (),
    "model_parallel": (),
    "ddp": ("dp_replicate",),
    "ddp_model_parallel": ("dp_replicate",),
    "zero1": ("dp_shard",),
    "zero2": ("dp_shard",),
    "zero3": ("dp_shard",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "tensor": ("tp",),
    "pipeline": ("pp",),
    "deepspeed": ("dp_shard",),
}
"""Every name a user may write, and the degrees it is free to choose."""

ONE_PROCESS = ("single", "dp", "model_parallel")
SHARDED = ("zero1", "zero2", "zero3", "fsdp", "hsdp")
MANY_DEVICES = ("dp", "model_parallel", "ddp_model_parallel")
"""Names under which one worker uses several devices."""


@dataclass(frozen=True)
class Layout:
    """A strategy's name and the degrees it runs with."""

    name: str
    dims: ParallelDims = field(default_factory=ParallelDims)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a combination: ("fsdp", "tensor") for fsdp+tensor."""
        return tuple(self.name.split("+"))

    def __str__(self) -> str:
        return f"{self.name} ({self.dims})"


def choose(
    name: str,
    world_size: int,
    *,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    devices_per_node: int | None = None,
) -> Layout:
    """The layout that `name` means for `world_size` workers.

    auto is single with one worker, else what the degrees say, else ddp. hsdp shards within a node and replicates
    across nodes when `devices_per_node` is known.

    Raises:
        LayoutError: an unknown name; degrees that do not multiply to the workers, or that the name has no use for.
    """
    if world_size < 1:
        raise LayoutError(f"there are {world_size} workers, but training needs at least 1")
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "pp": pp}
    if name == "auto":
        name = _automatic(world_size, given)
    parts = _parts(name)
    degrees = _degrees("+".join(parts), parts, world_size, given, devices_per_node)
    dims = ParallelDims(**degrees)
    if dims.tp > 1 and "tensor" not in parts:
        parts = [*([] if parts == ["single"] else parts), "tensor"]
    if dims.pp > 1 and "pipeline" not in parts:
        parts.append("pipeline")
    parts.sort(key=lambda part: ("tensor", "pipeline").index(part) + 1 if part in ("tensor", "pipeline") else 0)
    return Layout("+".join(parts), dims)


def _automatic(world_size: int, given: dict[str, int | None]) -> str:
    def more(side: str) -> bool:
        return (given[side] or 1) > 1

    others = (given["tp"] or 1) * (given["pp"] or 1)
    if more("dp_shard"):
        shards = (given["dp_shard"] or 1) * others
        return "hsdp" if more("dp_replicate") or (given["dp_replicate"] is None and world_size > shards) else "fsdp"
    if more("dp_replicate") or (others > 1 and world_size > others):
        return "ddp"
    if more("tp"):
        return "tensor"
    return "pipeline" if more("pp") else "single" if world_size == 1 else "ddp"


def _parts(name: str) -> list[str]:
    """The single names of a combination; tensor and pipeline last, "zero3" and "fsdp" as they were written."""
    parts = [part.strip() for part in name.replace("×", "+").split("+")]
    for part in parts:
        if part not in OWN:
            near = difflib.get_close_matches(part, OWN, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"write one of auto, {', '.join(OWN)}"
            raise LayoutError(f"strategy {part!r} is not known: {hint}")
    data = [part for part in parts if part not in ("tensor", "pipeline")]
    alone = [part for part in data if part in (*ONE_PROCESS, "ddp_model_parallel", "deepspeed")]
    if len(set(parts)) != len(parts) or len(data) > 1 or (alone and len(parts) > 1):
        raise LayoutError(
            f"strategy {name!r} does not combine: write one of ddp, zero1, zero2, fsdp and hsdp, then +tensor or "
            "+pipeline or both"
        )
    return data + [part for part in ("tensor", "pipeline") if part in parts]


def _degrees(
    name: str, parts: list[str], world_size: int, given: dict[str, int | None], devices_per_node: int | None
) -> dict[str, int]:
    own = {side for part in parts for side in OWN[part]}
    foreign = {"dp_replicate", "dp_shard"} - own if "dp_replicate" in own and "dp_shard" not in own else set()
    if set(parts) & {*ONE_PROCESS, "ddp_model_parallel", "deepspeed"}:
        foreign = set(given) - own
    for side in sorted(foreign):
        if (given[side] or 1) > 1:
            raise LayoutError(
                f"strategy {name} has no use for parallel.{side}={given[side]}: "
                + ("write strategy=hsdp" if side == "dp_shard" and "ddp" in parts else "leave it out")
            )
    degrees = {side: value for side, value in given.items() if value is not None}
    ParallelDims(**degrees)  # each a whole number of at least 1
    degrees |= {side: 1 for side in given if side not in own and side not in degrees}
    open_sides = [side for side in given if side not in degrees]
    rest = world_size // math.prod(degrees.values())
    if open_sides == ["dp_replicate", "dp_shard"] and "hsdp" in parts:
        degrees["dp_shard"] = _shards_per_node(name, rest, devices_per_node, degrees)
        rest, open_sides = rest // degrees["dp_shard"], ["dp_replicate"]
    if len(open_sides) > 1:
        asked = " or ".join(f"parallel.{side}" for side in open_sides)
        raise LayoutError(f"strategy {name} on {world_size} workers leaves more than one degree open: write {asked}")
    if open_sides:
        degrees[open_sides[0]] = max(1, rest)
    if math.prod(degrees.values()) != world_size:
        _refuse(name, parts, world_size, degrees)
    return degrees


def _shards_per_node(name: str, rest: int, devices_per_node: int | None, degrees: dict[str, int]) -> int:
    per_node = (devices_per_node or 0) // degrees["tp"]
    if per_node > 1 and rest % per_node == 0:
        return per_node
    raise LayoutError(
        f"strategy {name} needs parallel.dp_shard (the workers that one copy is sharded over, usually those of a "
        f"node): write a divisor of {rest} greater than 1"
    )


def _refuse(name: str, parts: list[str], world_size: int, degrees: dict[str, int]) -> None:
    if set(parts) & set(ONE_PROCESS):
        kind = "one device: write workers=1, or strategy=ddp" if name == "single" else "one process: write workers=1"
        raise LayoutError(f"there are {world_size} workers, but {name} is {kind}")
    product = math.prod(degrees.values())
    written = " × ".join(f"{side} {degree}" for side, degree in degrees.items() if degree > 1) or "1"
    raise LayoutError(
        f"strategy {name}: {written} = {product}, but there are {world_size} workers: write degrees whose product is "
        f"{world_size}, or workers={product}"
    )
