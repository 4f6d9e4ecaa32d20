"""A rank gets of a checkpoint's table what it needs to read its own state, and no more."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from app.checkpoint.table import FAN_OUT, Box, Table, routes, wish_of

pytestmark = pytest.mark.pure

PROPERTIES = TensorProperties(dtype=torch.float32)


def tiles(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a shape once, cut at random along every dimension."""
    boxes: list[Box] = [((), ())]
    for length in shape:
        inner = sorted(rng.sample(range(1, length), min(3, length - 1)))
        cuts = [0, *inner, length]
        spans = [(start, end - start) for start, end in itertools.pairwise(cuts)]
        boxes = [
            ((*offsets, start), (*sizes, size)) for offsets, sizes in boxes for start, size in spans
        ]
    return boxes


def table_of(shapes: dict[str, list[Box]]) -> Table:
    entries: dict[str, object] = {}
    places: dict[MetadataIndex, str] = {}
    for name, boxes in shapes.items():
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        shape = torch.Size(
            [max(at[axis] + size[axis] for at, size in boxes) for axis in range(len(boxes[0][0]))]
        )
        entries[name] = TensorStorageMetadata(PROPERTIES, shape, chunks)
        for chunk in chunks:
            places[MetadataIndex(name, chunk.offsets)] = f"{name}@{tuple(chunk.offsets)}"
    entries["step"] = BytesStorageMetadata()
    places[MetadataIndex("step")] = "step"
    return Table(Metadata(entries, storage_data=places))  # type: ignore[arg-type]


def numbers(box: Box) -> set[tuple[int, ...]]:
    """The places of all numbers of a box."""
    offsets, sizes = box
    spans = [torch.arange(start, start + size) for start, size in zip(offsets, sizes, strict=True)]
    return {tuple(place) for place in torch.cartesian_prod(*spans).view(-1, len(spans)).tolist()}


def test_a_part_has_the_shards_that_overlap_and_no_others() -> None:
    rng = random.Random(0)
    for _ in range(100):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
        saved = tiles(rng, shape)
        rng.shuffle(saved)
        table = table_of({"w": saved, "other": saved})
        wanted = rng.choice(tiles(rng, shape))
        part = table.part({"w": [wanted], "step": [], "unknown": []})
        assert set(part.state_dict_metadata) == {"w", "step"}
        entry = part.state_dict_metadata["w"]
        assert isinstance(entry, TensorStorageMetadata)
        assert tuple(entry.size) == shape
        parts = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
        assert parts == {box for box in saved if numbers(box) & numbers(wanted)}
        assert set(part.storage_data) == {
            MetadataIndex("step"),
            *(MetadataIndex("w", chunk.offsets) for chunk in entry.chunks),
        }


def test_a_single_number_and_an_empty_tensor_are_found() -> None:
    scalar: Box = ((), ())
    table = table_of({"scalar": [scalar], "empty": [((0,), (0,))]})
    part = table.part({"scalar": [scalar], "empty": [((0,), (0,))]})
    assert set(part.state_dict_metadata) == {"scalar", "empty"}
    assert MetadataIndex("scalar", torch.Size([])) in part.storage_data


def test_a_rank_wants_its_own_names_and_the_whole_of_plain_tensors() -> None:
    state = {"model": {"w": torch.zeros(4, 3), "b": torch.zeros(())}, "step": 3}
    assert wish_of(state) == {
        "model.w": [((0, 0), (4, 3))],
        "model.b": [((), ())],
        "step": [],
    }


@pytest.mark.parametrize("wishes", [1, 8, 3000, 16_384])
def test_rank_0_sends_each_part_once_however_many_ranks_want_it(wishes: int) -> None:
    ranks = 16_384
    digests = [str(rank % wishes).encode() for rank in range(ranks)]
    by_rank = routes(digests)
    asking = [rank for rank, route in enumerate(by_rank) if route.asks]
    assert asking == list(range(wishes)), "the first of those that want the same"
    sources = Counter(target for route in by_rank for target in route.targets)
    assert sources == Counter(dict.fromkeys(range(wishes, ranks), 1)), "each gets one part"
    for rank, route in enumerate(by_rank):
        assert len(route.targets) <= FAN_OUT
        for target in route.targets:
            assert by_rank[target].source == rank and digests[target] == digests[rank]
    hops = [0] * ranks
    for rank, route in enumerate(by_rank):
        hops[rank] = 1 if route.asks else hops[route.source] + 1
    assert max(hops) <= 1 + math.log2(1 + ranks / wishes)
