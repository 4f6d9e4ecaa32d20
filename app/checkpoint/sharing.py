"""Who writes what: every shard once, by one of the ranks that have it, evenly by size.

DCP decides this too, but after each rank has staged everything. Deciding first means that a replica copies only
its own share into host memory: with eight data-parallel GPUs in a machine, an eighth of the copying, and one
state's memory instead of eight. It is decided once, and again only when the state's layout changes on any rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from app.checkpoint.errors import Unsound
from app.checkpoint.exchange import Ranks
from app.checkpoint.staging import StagedPlanner, leaves

Piece = tuple[str, tuple[int, ...]]
"""A shard, by its tensor's name and its offset in the whole."""


@dataclass(frozen=True)
class Plan:
    """What this rank writes, in DCP's words; it holds for every save of the same layout."""

    items: list[WriteItem]
    metadata: Metadata | None
    """Of the whole, on rank 0."""


class Share:
    """This rank's share of the writing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._plan: Plan | None = None
        self._layout: list[tuple[Any, ...]] = []
        self._mine: frozenset[str] | None = None

    def of(self, state: dict[str, Any], finite: bool = True) -> frozenset[str] | None:
        """Names of the tensors of which this rank is to write its shard; None: all.

        A collective call. Raises RankFailed, and Unsound if the state of any rank is not `finite`.
        """
        layout = [_describe(name, value) for name, value in leaves(state)]
        changed, unsound = self._ranks.any(self._plan is None or layout != self._layout, not finite)
        if unsound:
            raise Unsound("a number of the state is not finite")
        if not changed:
            return self._mine
        self._layout, self._mine, self._plan = [], None, None
        if self._ranks.distributed:
            mine = divide(self._ranks.all(lambda: _offer(state)))[self._ranks.rank]
            self._mine = frozenset(name for name, _ in mine)  # a rank holds one shard of a tensor
        self._layout = layout
        return self._mine

    def plan(self, planner: StagedPlanner) -> Plan:
        """The plan for what `of` was last asked about. A collective call if there is none yet. Raises RankFailed."""
        if self._plan is None:

            def mine() -> SavePlan:
                planner.set_up(self._ranks.rank == 0)
                return planner.create_local_plan()

            def whole(plans: list[SavePlan]) -> list[list[WriteItem]]:
                return [plan.items for plan in planner.create_global_plan(plans)[0]]

            items = self._ranks.reduce(mine, whole)[self._ranks.rank]
            self._plan = Plan(items, planner.metadata if self._ranks.rank == 0 else None)
        return self._plan


def _describe(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, DTensor):
        return name, value.shape, value.dtype, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return name, value.shape, value.dtype
    return (name,)


def _offer(state: dict[str, Any]) -> list[tuple[Piece, int]]:
    """What this rank could write, with sizes in bytes."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    items = planner.create_local_plan().items
    return [
        ((i.index.fqn, tuple(i.index.offset)), i.tensor_storage_size() or 0)
        for i in items
        if i.index.offset is not None  # a number: every rank has it at hand
    ]


def divide(offers: list[list[tuple[Piece, int]]]) -> list[frozenset[Piece]]:
    """Each piece to the rank with the least so far among those that offer it, the largest pieces first."""
    owners: dict[Piece, list[int]] = {}
    sizes: dict[Piece, int] = {}
    for rank, offer in enumerate(offers):
        for one, size in offer:
            owners.setdefault(one, []).append(rank)
            sizes[one] = size
    loads = [0] * len(offers)
    shares: list[set[Piece]] = [set() for _ in offers]
    for one in sorted(owners, key=lambda p: (-sizes[p], *p)):
        rank = min(owners[one], key=lambda r: (loads[r], r))
        loads[rank] += sizes[one] + 1
        shares[rank].add(one)
    return [frozenset(share) for share in shares]
