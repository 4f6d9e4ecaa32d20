"""DCP's table of a checkpoint, of which each rank gets the part about its own state.

The table, `.metadata`, lists every shard that any rank has saved, so it grows with the number of
ranks. Rank 0 alone reads it. Each rank tells what it wants, and gets the entries of its own names,
with the shards that overlap its own. Ranks that want the same, as replicas do, tell it once.
"""

from __future__ import annotations

import bisect
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
FEW_PARTS = 4
"""Every rank gets all parts if they are together at most so many times the largest."""


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
    digests: list[bytes] = []
    parts: dict[bytes, bytes] = {}
    wanted_names: set[str] = set()

    def tell() -> bytes:
        nonlocal pickled_wish
        pickled_wish = pickle.dumps(wish_of(state))
        return hashlib.sha256(pickled_wish).digest()

    def choose(told: list[bytes]) -> list[tuple[bytes, bool]]:
        """Of the ranks that want the same, the first is to say what."""
        digests.extend(told)
        first_ranks = {digest: rank for rank, digest in reversed(list(enumerate(told)))}
        return [(digest, first_ranks[digest] == rank) for rank, digest in enumerate(told)]

    def cut(wishes: list[bytes]) -> list[bytes]:
        assert table is not None
        for digest, pickled in zip(digests, wishes, strict=True):
            if pickled:
                wish: Wish = pickle.loads(pickled)
                wanted_names.update(wish)
                parts[digest] = pickle.dumps(table.part(wish))
        sizes = [len(part) for part in parts.values()]
        if sum(sizes) <= FEW_PARTS * max(sizes):
            return [b""] * ranks.size
        return [parts[digest] for digest in digests]

    digest, is_first = ranks.run_and_divide(tell, choose)
    part = ranks.run_and_divide(lambda: pickled_wish if is_first else b"", cut)
    if not part:
        part = ranks.from_first(parts)[digest]
    return part, wanted_names
