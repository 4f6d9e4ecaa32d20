"""The only description of a layout: how many ways each kind of parallelism splits the workers.

Workers form a mesh with five named dimensions. They are written from the outside in, so that the
one that communicates most is innermost and lands on the fastest links:

    pp            pipeline stages                  sends to a neighbour, per micro-batch
    dp_replicate  copies of (shards of) the model  all-reduces gradients, once per step
    dp_shard      shards of one copy               all-gathers parameters and reduce-scatters
                                                   gradients, per block
    cp            parts of one sequence            sends keys and values in every attention
    tp            slices of one layer              communicates several times per block, and so
                                                   stays within a node

The rank at the coordinates (p, r, s, c, t) is

    (((p · dp_replicate + r) · dp_shard + s) · cp + c) · tp + t

Ranks that differ only in c and t compute the same samples. Data parallelism is over r and s
together.

Ranks that differ only in c have the same parameters, and gradients of different tokens. As far as
parameters are concerned, these ranks are further data-parallel workers: replicas or shards,
depending on the strategy (`for_parameters`).

A sixth degree, ep, over which a mixture's experts are split, is not a factor of the number of
workers: its ranks are taken from those data-parallel workers (r, s and c together), neighbours
first.

The names are those of torchtitan's `ParallelDims`; HSDP is dp_replicate > 1 with dp_shard > 1.
"""

from __future__ import annotations

import datetime
import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from strategies.options import OTHER_NAMES, STRATEGIES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Degree = Literal["dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"]

MESH_DIMS: tuple[Degree, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dimensions of the mesh, outermost first."""
DEGREES: tuple[Degree, ...] = (*MESH_DIMS, "ep")
"""All degrees that a configuration may have, as parallel.pp and so on."""
MODEL_DEGREES: tuple[Degree, ...] = ("tp", "pp", "cp", "ep")
"""The degrees that go with data parallelism, in the order in which a combination names them."""

_MESH_NUMBERS = itertools.count()
"""Numbers for the meshes of this process.

DTensor caches results by mesh, and meshes of the same shape and names are equal. A second run in
this process has other process groups, so its meshes need other names.
"""


class LayoutError(ValueError):
    """A layout, or a model under a layout, that cannot work.

    Its message is one sentence that says what to write instead.
    """


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a message about an unknown word.

    Args:
        word: What was written.
        known: The words that are valid.
        otherwise: The end if no known word is similar.
    """
    similar = difflib.get_close_matches(word, known, n=5, cutoff=0.5)
    if not similar:
        return otherwise

    def similarity(candidate: str) -> float:
        # The same length counts in addition: dpp means ddp rather than dp.
        has_same_length = len(candidate) == len(word)
        return difflib.SequenceMatcher(None, word, candidate).ratio() + 0.2 * has_same_length

    return f"did you mean {max(similar, key=similarity)}?"


def require_one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Checks a value of the configuration.

    Args:
        key: The configuration key, for the message.
        value: What was written.
        allowed: The valid values.

    Raises:
        LayoutError: It is none of the valid values.
    """
    if value not in allowed:
        hint = did_you_mean(value, allowed, otherwise=f"write {', '.join(allowed)}")
        raise LayoutError(f"{key} is {value!r}: {hint}")


def unknown_strategy(name: str, written: str = "") -> str:
    """The message about a strategy that does not exist.

    Args:
        name: The unknown name.
        written: The combination that it is a part of; "" if it is alone.
    """
    if not name:
        return f"strategy {written!r} has a + without a name beside it: write, say, ddp+tensor"
    if "," in name or " " in name:
        return f"strategy {name!r} names several: write one, or a combination such as ddp+tensor"
    word = name.lower().replace("-", "_")
    for known, others in OTHER_NAMES.items():
        if word in others.split():
            return f"strategy {name!r} is called {known} here: write strategy={known}"
    otherwise = f"write one of auto, {', '.join(STRATEGIES)}"
    return f"strategy {name!r} is not known: {did_you_mean(word, STRATEGIES, otherwise)}"


def checkpoint_every(value: str) -> int | None:
    """Read the mode of activation checkpointing.

    Returns:
        N for "every_N", 1 for "full", None for "none" and "selective".

    Raises:
        LayoutError: There is no such mode.
    """
    if value in ("none", "selective"):
        return None
    if value == "full":
        return 1
    prefix, _, number = value.partition("_")
    if prefix == "every" and number.isdecimal() and int(number) > 0:
        return int(number)
    hint = {"true": "; true is full", "false": "; false is none"}.get(value.lower(), "")
    raise LayoutError(
        f"train.activation_checkpointing is {value!r}: write none, full, selective, or every_2 for "
        f"every second block{hint}"
    )


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degrees of parallelism; the product of all but ep is the number of workers.

    Raises:
        LayoutError: A degree is not a whole number of at least 1, or experts cannot be split ep
            ways.
    """

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
                raise LayoutError(
                    f"parallel.{name} is {degree!r}, but a degree is a whole number of at least 1"
                )
        if not self.allows_experts(self.ep):
            valid = [str(ep) for ep in range(1, self.dp_cp + 1) if self.allows_experts(ep)]
            raise LayoutError(
                f"parallel.ep is {self.ep}, but experts are split over the {self.dp_cp} "
                f"data-parallel workers (dp_replicate × dp_shard × cp): write {', '.join(valid)}"
            )

    @property
    def world_size(self) -> int:
        """The number of workers."""
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
        """Whether experts can be split `ep` ways.

        They are split over a part of one copy's shards, or over several whole copies.
        """
        shards = self.dp_shard * self.cp
        divides_workers = self.dp_cp % ep == 0
        return divides_workers and (shards % ep == 0 or ep % shards == 0)

    def for_parameters(self, sharded: bool) -> ParallelDims:
        """The same ranks as parameters see them, with cp 1.

        Args:
            sharded: Whether the ranks of a sequence are further shards, instead of replicas.
        """
        if sharded:
            return replace(self, dp_shard=self.dp_shard * self.cp, cp=1)
        return replace(self, dp_replicate=self.dp_replicate * self.cp, cp=1)

    def for_experts(self) -> ParallelDims:
        """The data-parallel workers that hold the same experts; called on `for_parameters`."""
        if self.dp_shard % self.ep == 0:
            return replace(self, dp_shard=self.dp_shard // self.ep, ep=1)
        return replace(self, dp_replicate=self.dp // self.ep, dp_shard=1, ep=1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index along each dimension of the mesh."""
        indices: dict[str, int] = {}
        for name in reversed(MESH_DIMS):
            rank, indices[name] = divmod(rank, getattr(self, name))
        return indices

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch (0 … dp-1) the rank computes.

        The ranks of a sequence, tp peers and pp stages compute the same share.
        """
        indices = self.coordinates(rank)
        return indices["dp_replicate"] * self.dp_shard + indices["dp_shard"]

    def seed_rank(self, rank: int) -> int:
        """Which stream of random numbers the rank draws from.

        It depends on the rank's tokens, so tp peers and pp stages draw the same numbers.
        """
        return self.data_rank(rank) * self.cp + self.coordinates(rank)["cp"]

    def peers(self, name: str) -> list[list[int]]:
        """The groups of ranks that differ along one dimension only."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            indices = self.coordinates(rank)
            shared = tuple(indices[other] for other in MESH_DIMS if other != name)
            groups.setdefault(shared, []).append(rank)
        return list(groups.values())

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """A DeviceMesh of the dimensions longer than 1 (of dp_replicate if there is none).

        Collective: every rank calls it, after torch.distributed was initialised with exactly
        `world_size` ranks.

        Raises:
            LayoutError: There is another number of ranks.
        """
        import torch.distributed as dist

        if dist.get_world_size() != self.world_size:
            raise LayoutError(
                f"{self} needs {self.world_size} workers, but there are {dist.get_world_size()}"
            )
        names = [name for name in MESH_DIMS if getattr(self, name) > 1] or ["dp_replicate"]
        return named_mesh(device_type, {name: getattr(self, name) for name in names})

    def data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The workers that hold the same part of the model: replicate × shard, if longer than 1."""
        return submesh(mesh, *self._data_dims())

    def data_group(self, mesh: DeviceMesh) -> ProcessGroup | None:
        """The ranks that hold the same part of the model and differ in their data.

        Collective over all ranks.

        Args:
            mesh: What `build_mesh` has returned.

        Returns:
            None if no other rank holds the same part.
        """
        import torch.distributed as dist

        names = self._data_dims()
        if not names:
            return None
        if self.dp == self.world_size:
            return dist.group.WORLD
        if len(names) == 1:
            return submesh(mesh, names[0]).get_group()
        groups = []
        for stage in range(self.pp):
            for tp_index in range(self.tp):
                ranks = [(stage * self.dp + d) * self.tp + tp_index for d in range(self.dp)]
                groups.append(ranks)
        return group_of_this_rank(groups)

    def _data_dims(self) -> list[str]:
        return [name for name in ("dp_replicate", "dp_shard") if getattr(self, name) > 1]

    def __str__(self) -> str:
        factors = [f"{name} {getattr(self, name)}" for name in MESH_DIMS if getattr(self, name) > 1]
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return (" × ".join(factors) or "1 worker") + experts


def named_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """A mesh of all ranks; collective over them.

    Args:
        device_type: cpu or cuda.
        sizes: The name of each dimension → its size, outermost first.
    """
    from torch.distributed.device_mesh import init_device_mesh

    number = next(_MESH_NUMBERS)
    names = tuple(f"{name}.{number}" if number else name for name in sizes)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names)


def submesh(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """The named dimensions of a mesh that `named_mesh` has made."""
    numbered = {name.partition(".")[0]: name for name in mesh.mesh_dim_names or ()}
    return mesh[tuple(numbered[name] for name in names)]


def group_of_this_rank(
    groups: Sequence[Sequence[int]],
    *,
    backend: str | None = None,
    pg_options: Any | None = None,
    timeout: datetime.timedelta | None = None,
) -> ProcessGroup | None:
    """Makes process groups and returns the one that this rank is in.

    Collective over all ranks, which pass the same lists. (Making a group costs microseconds for a
    rank that is not in it, since nobody waits. `use_local_synchronization` would name groups by how
    many the rank is already in, which differs between stages.)

    Args:
        groups: The ranks of each group.
        backend: As for torch.distributed.new_group, like the other options.
        pg_options: The backend's own options.
        timeout: After which a collective fails.

    Returns:
        The last one if the rank is in several, None if it is in none.
    """
    import torch.distributed as dist

    group_of_rank = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=pg_options)
        if dist.get_rank() in ranks:
            group_of_rank = group
    return group_of_rank


@dataclass(frozen=True)
class Layout:
    """A strategy's name, and the degrees that it runs with."""

    name: str
    dims: ParallelDims = field(default_factory=ParallelDims)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names in a combination, the data-parallel one first."""
        return tuple(self.name.split("+"))

    def __str__(self) -> str:
        return f"{self.name} ({self.dims})"
