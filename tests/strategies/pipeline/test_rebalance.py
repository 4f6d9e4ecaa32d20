"""Cutting a pipeline again by measured times: when another cut is worth it, when it is tried, what remembers it."""

from __future__ import annotations

import pytest

from strategies.pipeline.partition import BetterPartition, Measured, better_partition
from strategies.pipeline.simulate import Span

CALLS = [("entry", False), ("0", True), ("1", True), ("2", True), ("3", True), ("head", False)]


def measured(
    sizes: tuple[int, ...], blocks: list[float], *, entry: float = 0.0, head: float = 0.0, every: float = 0.0
) -> list[Measured]:
    """What workers find, one for each part, if these are the seconds of forward; backward takes twice as long."""
    workers, start = [], 0
    for part, size in enumerate(sizes):
        calls = {str(i): [blocks[i]] for i in range(start, start + size)}
        calls |= {"entry": [entry]} if part == 0 else {}
        calls |= {"head": [head]} if part == len(sizes) - 1 else {}
        inside, start = sum(seconds for (seconds,) in calls.values()), start + size
        spans = [Span(part, "F", 0, 0, 1.0, 1.0 + inside + every), Span(part, "B", 0, 0, 2.0, 2.0 + 2 * inside)]
        worker = Measured()
        worker.add(spans, [part], calls)
        workers.append(worker)
    return workers


def asked(workers: list[Measured], sizes: tuple[int, ...]) -> BetterPartition | None:
    part_of = {str(i): next(p for p in range(len(sizes)) if i < sum(sizes[: p + 1])) for i in range(4)}
    part_of |= {"entry": 0, "head": len(sizes) - 1}
    return better_partition(workers, sizes, CALLS, part_of, list(range(len(sizes))))


@pytest.mark.parametrize(
    ("blocks", "more", "sizes", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], {}, (2, 2), None),
        ([4.0, 1.0, 1.0, 1.0], {}, (2, 2), (1, 3)),
        ([1.0, 4.0, 1.0, 1.0], {}, (2, 2), None),  # as unlike, but (1, 3) would be worse: blocks are timed one by one
        ([1.0, 1.0, 1.0, 1.0], {"head": 2.0}, (2, 2), (3, 1)),
        ([1.0, 1.0, 1.0, 1.0], {"entry": 2.0}, (2, 2), (1, 3)),
        ([0.04, 1.0, 0.02, 0.98], {}, (3, 1), None),  # (2, 2) is better by 2 %
        ([1.0, 1.0, 1.0, 1.0], {"every": 300.0}, (1, 3), None),  # what no cut moves is most of it
    ],
)
def test_another_cut_only_if_the_slowest_stage_gains_5_percent(
    blocks: list[float], more: dict[str, float], sizes: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    found = asked(measured(sizes, blocks, **more), sizes)
    assert (found and found.sizes) == expected


def test_one_slow_moment_one_slow_copy_and_half_a_measurement_do_not_decide() -> None:
    even = measured((2, 2), [1.0] * 4)
    even[0].calls["0"] += [1.0, 1.0, 90.0]
    even[0].ops[0, "F"] += [2.0, 2.0, 91.0]
    even[0].ops[0, "B"] += [4.0, 4.0, 4.0]
    assert asked(even, (2, 2)) is None
    assert asked(measured((2, 2), [4.0, 1.0, 1.0, 1.0])[:1], (2, 2)) is None
    copies = [*measured((2, 2), [4.0, 1.0, 1.0, 1.0]), *measured((2, 2), [4.2, 1.0, 1.0, 1.0])]
    found = asked(copies, (2, 2))
    assert found is not None and found.sizes == (1, 3)
    assert found.seconds_before == pytest.approx(3 * 5.1), "their mean"


def test_with_several_chunks_the_stage_counts_and_not_the_chunk() -> None:
    calls = [(str(i), True) for i in range(8)]
    worker = Measured()
    for part, names in enumerate(("01", "23", "45", "67")):
        seconds = {name: [3.0 if name == "1" else 1.0] for name in names}
        worker.add([Span(0, "F", 0, 0, 0.0, sum(s for (s,) in seconds.values()))], [part], seconds)
    part_of = {str(i): i // 2 for i in range(8)}
    assert better_partition([worker], (2, 2, 2, 2), calls, part_of, [0, 1, 0, 1]) is None, "else 6 on stage 1"
    alone = better_partition([worker], (2, 2, 2, 2), calls, part_of, [0, 1, 2, 3])
    assert alone is not None and (alone.sizes, alone.seconds_before, alone.seconds) == ((1, 1, 3, 3), 4.0, 3.0)
