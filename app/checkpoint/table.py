"""DCP's table of a checkpoint, of which each rank gets the part about its own state.

The table, `.metadata`, lists every shard that any rank has saved, so it grows with the number of
ranks. Rank 0 alone reads it. Each rank says what it needs, and gets the entries of its own names,
with the shards that overlap its own. If several ranks need the same, as replicas do, only the first
asks rank 0. It passes the answer on to two others, which do the same. So rank 0 makes one part
after another, holds one at a time, and sends each once, however many ranks need it.
"""

from __future__ import annotations

import bisect
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from app.checkpoint.ranks import Ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its offsets and its sizes."""
Wish = Mapping[str, Sequence[Box]]
"""The parts of each entry that a rank has, by the entry's name; none for what is not a tensor."""
FAN_OUT = 2
"""To how many ranks a rank hands on its part of the table."""


def wish_of(state: dict[str, Any]) -> Wish:
    """What a rank wants to know of a checkpoint.

    Args:
        state: Nested dict of tensors, DTensors and numbers.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    boxes: dict[str, list[Box]] = {name: [] for name in planner.state_dict}
    for item in planner.create_local_plan().items:
        if item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            boxes[item.index.fqn].append((tuple(chunk.offsets), tuple(chunk.sizes)))
    return boxes


@dataclass(frozen=True)
class _Shards:
    """The shards of a tensor in the order of their first offsets.

    Attributes:
        starts: The first offsets.
        chunks: The shards.
        longest: The largest size in the first dimension.
    """

    starts: Sequence[int]
    chunks: Sequence[ChunkStorageMetadata]
    longest: int

    def overlapping(self, box: Box) -> list[ChunkStorageMetadata]:
        """The shards that have numbers of a part."""
        offsets, sizes = box
        if not offsets:
            return list(self.chunks)  # a single number
        first = bisect.bisect_right(self.starts, offsets[0] - self.longest)
        end = bisect.bisect_left(self.starts, offsets[0] + sizes[0])
        return [chunk for chunk in self.chunks[first:end] if _overlap(chunk, box)]


def _overlap(chunk: ChunkStorageMetadata, box: Box) -> bool:
    return all(
        saved_start < start + size and start < saved_start + saved_size
        for saved_start, saved_size, start, size in zip(
            chunk.offsets, chunk.sizes, *box, strict=True
        )
    )


class Table:
    """A checkpoint's table, on rank 0.

    Args:
        metadata: The table.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self._shards: dict[str, _Shards] = {}

    def part(self, wish: Wish) -> Metadata:
        """The table as far as it is about a rank's state; takes as long as that is large."""
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        for name, boxes in wish.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if entry is None:
                continue
            entries[name] = entry
            if isinstance(entry, TensorStorageMetadata):
                chunks = self._chunks(name, entry, boxes)
                entries[name] = replace(entry, chunks=chunks)
                indices = [MetadataIndex(name, chunk.offsets) for chunk in chunks]
            else:
                indices = [MetadataIndex(name)]
            places |= {index: self.metadata.storage_data[index] for index in indices}
        return replace(
            self.metadata, state_dict_metadata=entries, storage_data=places, planner_data=None
        )

    def _chunks(
        self, name: str, entry: TensorStorageMetadata, boxes: Sequence[Box]
    ) -> list[ChunkStorageMetadata]:
        """The shards of a tensor that overlap these parts of it, each once."""
        if name not in self._shards:
            chunks = sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets)[:1])
            self._shards[name] = _Shards(
                starts=[chunk.offsets[0] if chunk.offsets else 0 for chunk in chunks],
                chunks=chunks,
                longest=max((chunk.sizes[0] for chunk in chunks if chunk.sizes), default=0),
            )
        shards = self._shards[name]
        overlapping = {chunk.offsets: chunk for box in boxes for chunk in shards.overlapping(box)}
        return list(overlapping.values())


class Route(NamedTuple):
    """How a rank gets its part of the table.

    Attributes:
        asks: Whether it says what the ranks want that want the same as it does.
        source: The rank that sends the part; 0 for a rank that asks.
        targets: The ranks that it hands the part on to.
    """

    asks: bool
    source: int
    targets: Sequence[int]


def routes(digests: Sequence[bytes]) -> list[Route]:
    """How each rank gets its part.

    Args:
        digests: By rank, what tells apart what the ranks want.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks_of.setdefault(digest, []).append(rank)
    by_rank: dict[int, Route] = {}
    for ranks in ranks_of.values():
        for place, rank in enumerate(ranks):
            first_target = FAN_OUT * place + 1
            by_rank[rank] = Route(
                asks=place == 0,
                source=ranks[(place - 1) // FAN_OUT] if place else 0,
                targets=ranks[first_target : first_target + FAN_OUT],
            )
    return [by_rank[rank] for rank in range(len(digests))]


def divide(table: Table | None, state: dict[str, Any], ranks: Ranks) -> tuple[bytes, set[str]]:
    """A rank's part of the table, pickled. Collective.

    Args:
        table: The table on rank 0; None on other ranks.
        state: This rank's, about which it wants to know.
        ranks: All ranks.

    Returns:
        The part; and on rank 0, the names that any rank wants.

    Raises:
        RankFailed: Something went wrong on a rank.
    """
    pickled_wish = b""
    asking: list[int] = []

    def tell() -> bytes:
        nonlocal pickled_wish
        pickled_wish = pickle.dumps(wish_of(state))
        return hashlib.sha256(pickled_wish).digest()

    def choose(digests: list[bytes]) -> list[Route]:
        by_rank = routes(digests)
        asking.extend(rank for rank, route in enumerate(by_rank) if route.asks)
        return by_rank

    route = ranks.run_and_divide(tell, choose)
    if table is None:
        if route.asks:
            ranks.send(pickled_wish, to=0)
        part = ranks.receive(route.source)
        _hand_on(part, route, ranks)
        ranks.run_on_first(lambda: None)
        return part, set()
    answers = _Answers(table)
    part = answers.to(pickled_wish)
    _hand_on(part, route, ranks)
    for rank in asking:
        if rank != 0:
            ranks.send(answers.to(ranks.receive(rank)), to=rank)
    ranks.run_on_first(answers.check)
    return part, answers.wanted_names


def _hand_on(part: bytes, route: Route, ranks: Ranks) -> None:
    for target in route.targets:
        ranks.send(part, to=target)


class _Answers:
    """What rank 0 answers to the ranks that ask.

    Args:
        table: The checkpoint's table.

    Attributes:
        wanted_names: The names that any of them wants.
    """

    def __init__(self, table: Table) -> None:
        self.wanted_names: set[str] = set()
        self._table = table
        self._failure: Exception | None = None

    def to(self, pickled_wish: bytes) -> bytes:
        """The part of the table for a wish, pickled; empty if it cannot be cut."""
        try:
            wish: Wish = pickle.loads(pickled_wish)
            self.wanted_names.update(wish)
            return pickle.dumps(self._table.part(wish))
        except Exception as error:  # the ranks that wait must get an answer, whatever it is
            self._failure = self._failure or error
            return b""

    def check(self) -> None:
        """Raises why a part could not be cut, if any could not."""
        if self._failure is not None:
            raise self._failure
