"""The only description of a layout: how many ways each kind of parallelism splits the workers.

Workers form a mesh with five named dimensions, written from the outside in, so that the one that communicates most is
innermost and lands on the fastest links:

    pp            pipeline stages                  sends per micro-batch, neighbour to neighbour
    dp_replicate  copies of (shards of) the model  all-reduces gradients once per step
    dp_shard      shards of one copy               all-gathers parameters, reduce-scatters gradients, per block
    cp            parts of one sequence            sends keys and values in every attention
    tp            slices of one layer              communicates several times per block, so: within a node

`rank = (((p · dp_replicate + r) · dp_shard + s) · cp + c) · tp + t` for the coordinates (p, r, s, c, t). The ranks that
differ only in c and t compute the same samples; data parallelism is over r and s together.

Parameters do not know of cp: ranks of one sequence hold the same ones and have gradients of different tokens, so for
them they are further data-parallel workers, replicas or shards as the strategy has them (`for_parameters`).

A sixth degree is no factor of the workers: ep, over which a mixture's experts are split, takes its ranks from inside
those data-parallel workers (r, s and c together), neighbours first.

The names are torchtitan's `ParallelDims`; HSDP is dp_replicate > 1 with dp_shard > 1.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from strategies.options import STRATEGIES
from strategies.options import Options as Options  # for traits.py, which imports it from here

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class LayoutError(ValueError):
    """A layout, or a model under a layout, that cannot work: one sentence that says what to write instead."""


def meant(written: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence about a word that is not one of `known`."""
    near = difflib.get_close_matches(written, known, n=5, cutoff=0.5)

    def likeness(word: str) -> float:  # dpp is ddp rather than dp
        return difflib.SequenceMatcher(None, written, word).ratio() + 0.2 * (len(word) == len(written))

    return f"did you mean {max(near, key=likeness)}?" if near else otherwise


def unknown_strategy(name: str) -> str:
    """The sentence about a strategy that there is not."""
    otherwise = f"write one of auto, {', '.join(STRATEGIES)}"
    return f"strategy {name!r} is not known: {meant(name, STRATEGIES, otherwise)}"


NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dimensions of the mesh, outermost first."""
DEGREES = (*NAMES, "ep")
"""What may be written: parallel.pp, …"""
BESIDE_DATA = ("tp", "pp", "cp", "ep")
"""Those that go with data parallelism, in the order in which a combination names them."""

_MESHES = itertools.count()
"""Numbers the meshes of this process. DTensor remembers results by mesh equality, to which names belong, and the next
run's mesh of the same shape has other process groups: so it gets other names."""


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism; the product of all but ep is the number of workers."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in DEGREES:
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise LayoutError(f"parallel.{name} is {degree!r}, but a degree is a whole number of at least 1")
        if not self.allows_experts(self.ep):
            fitting = [n for n in range(1, self.dp_cp + 1) if self.allows_experts(n)]
            raise LayoutError(
                f"parallel.ep is {self.ep}, but experts are split over the {self.dp_cp} data-parallel workers "
                f"(dp_replicate × dp_shard × cp): write {', '.join(map(str, fitting))}"
            )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_cp * self.tp

    @property
    def dp(self) -> int:
        """How many ways the global batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_cp(self) -> int:
        """How many ranks a parameter's gradient is averaged over."""
        return self.dp * self.cp

    def allows_experts(self, ep: int) -> bool:
        """Whether experts can be split `ep` ways: over a part of one copy's shards, or over several whole copies."""
        shards = self.dp_shard * self.cp
        return not self.dp_cp % ep and not (shards % ep and ep % shards)

    def for_parameters(self, sharded: bool) -> ParallelDims:
        """The same ranks as parameters see them: cp as further shards (sharded), or as further replicas."""
        if sharded:
            return replace(self, dp_shard=self.dp_shard * self.cp, cp=1)
        return replace(self, dp_replicate=self.dp_replicate * self.cp, cp=1)

    def for_experts(self) -> ParallelDims:
        """Of for_parameters' answer: what is left of the data-parallel workers to those that hold the same experts."""
        if self.dp_shard % self.ep == 0:
            return replace(self, dp_shard=self.dp_shard // self.ep, ep=1)
        return replace(self, dp_replicate=self.dp // self.ep, dp_shard=1, ep=1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place along each dimension."""
        place = {}
        for name in reversed(NAMES):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch (0 … dp-1) the rank computes; its cp and tp peers and pp stages share it."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def seed_rank(self, rank: int) -> int:
        """Whose random numbers the rank draws: with the same tokens, in tp peers and pp stages, the same."""
        return self.data_rank(rank) * self.cp + self.coordinates(rank)["cp"]

    def peers(self, name: str) -> list[list[int]]:
        """The ranks of every group along one dimension: those that differ in it alone."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            groups.setdefault(tuple(place[other] for other in NAMES if other != name), []).append(rank)
        return list(groups.values())

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """A DeviceMesh of the dimensions longer than 1 (of dp_replicate alone if there is none).

        Collective: every rank calls it, after torch.distributed is initialised with exactly `world_size` ranks.
        """
        import torch.distributed as dist

        if dist.get_world_size() != self.world_size:
            raise LayoutError(f"{self} needs {self.world_size} workers, but there are {dist.get_world_size()}")
        names = [name for name in NAMES if getattr(self, name) > 1] or ["dp_replicate"]
        return named_mesh(device_type, {name: getattr(self, name) for name in names})

    def data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Of `mesh`, the workers that hold the same part of the model: replicate × shard, those longer than 1."""
        return submesh(mesh, *(name for name in ("dp_replicate", "dp_shard") if getattr(self, name) > 1))

    def data_group(self, mesh: DeviceMesh) -> ProcessGroup | None:
        """The ranks that hold the same part of the model and differ in their data; None if this rank is alone.

        Collective over all ranks."""
        import torch.distributed as dist

        names = [name for name in ("dp_replicate", "dp_shard") if getattr(self, name) > 1]
        if not names:
            return None
        if self.dp == self.world_size:
            return dist.group.WORLD
        if len(names) == 1:
            return submesh(mesh, names[0]).get_group()
        return own_group(
            [[(p * self.dp + d) * self.tp + t for d in range(self.dp)] for p in range(self.pp) for t in range(self.tp)]
        )

    def __str__(self) -> str:
        sides = [f"{name} {getattr(self, name)}" for name in NAMES if getattr(self, name) > 1]
        inside = f", ep {self.ep}" if self.ep > 1 else ""
        return (" × ".join(sides) or "1 worker") + inside


def named_mesh(device_type: str, sides: dict[str, int]) -> DeviceMesh:
    """A mesh of all ranks: name → size, outermost first. Collective over them."""
    from torch.distributed.device_mesh import init_device_mesh

    number = next(_MESHES)
    marked = tuple(f"{name}.{number}" if number else name for name in sides)
    return init_device_mesh(device_type, tuple(sides.values()), mesh_dim_names=marked)


def submesh(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Of a mesh that named_mesh has made, these dimensions."""
    written = {name.partition(".")[0]: name for name in mesh.mesh_dim_names or ()}
    return mesh[tuple(written[name] for name in names)]


def own_group(every: list[list[int]], **how: Any) -> ProcessGroup | None:
    """Makes a process group of each list of ranks; the one that this rank is in, the last if in several. how: see
    torch.distributed.new_group.

    Collective over all ranks, which pass the same lists. (A group that a rank is not in costs it microseconds: nobody
    waits. `use_local_synchronization` would name groups by how many the rank is in already, which stages differ in.)"""
    import torch.distributed as dist

    found = None
    for ranks in every:
        group = dist.new_group(ranks, **how)
        found = group if dist.get_rank() in ranks else found
    return found


@dataclass(frozen=True)
class Layout:
    """A strategy's name and the degrees it runs with."""

    name: str
    dims: ParallelDims = field(default_factory=ParallelDims)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a combination, data parallelism first."""
        return tuple(self.name.split("+"))

    def __str__(self) -> str:
        return f"{self.name} ({self.dims})"


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises LayoutError unless `value` is one of `allowed`; key: how the configuration writes it."""
    if value not in allowed:
        raise LayoutError(f"{key} is {value!r}: {meant(value, allowed, 'write ' + ', '.join(allowed))}")
