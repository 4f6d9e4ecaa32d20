"""Schedules, partitions of blocks, and simulated times: pure functions, without processes."""

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from strategies.layout import LayoutError
from strategies.pipeline import partition, schedules
from strategies.pipeline.schedules import FOLDED, SCHEDULES, SPLIT, Op, Placement, Schedule
from strategies.pipeline.simulate import (
    Span,
    Times,
    activations_by_formula,
    bubble,
    bubble_by_formula,
    chrome_trace,
    drawing,
    pipeline_metrics,
    simulate,
)

pytestmark = pytest.mark.pure

make_schedule = schedules.make_schedule.__wrapped__
"""Without its cache. `make mutants` would find schedules there that have no mutation."""
STAGES = (2, 3, 4, 7, 8)
MICRO_BATCHES = (2, 3, 4, 5, 7, 8, 11, 12, 16)
CHUNKS = (1, 2, 3)


def schedules_of(name: str) -> Iterator[Schedule]:
    """The schedule with every number of stages, micro-batches and chunks that it can have."""
    for stages, micro_batches, chunks in itertools.product(STAGES, MICRO_BATCHES, CHUNKS):
        with contextlib.suppress(LayoutError):
            if name != "zbv" or chunks == 2:
                yield make_schedule(name, stages=stages, micro_batches=micro_batches, chunks=chunks)


# --- what stages do -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_part_belongs_to_one_stage(name: str) -> None:
    for schedule in schedules_of(name):
        # A folded schedule has two chunks, whatever is written.
        chunks = 1 if name in FOLDED else schedule.chunks
        placement = Placement.of(name, schedule.stages, chunks)
        assert schedule.placement == placement
        stage_by_part = {}
        for stage in range(schedule.stages):
            for part in placement.parts_of(stage):
                stage_by_part[part] = stage
        parts = range(schedule.stages * schedule.chunks)
        assert stage_by_part == {part: placement.stage_of(part) for part in parts}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_does_everything_once(name: str) -> None:
    kinds = "FBW" if name in SPLIT else "FB"
    for schedule in schedules_of(name):
        expected = Counter(
            itertools.product(kinds, range(schedule.micro_batches), range(schedule.chunks))
        )
        assert len(schedule.ops) == schedule.stages
        for ops in schedule.ops:
            done = Counter((op.kind, op.micro_batch, op.chunk) for op in ops)
            assert done == expected, str(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_deadlocks_with_uneven_stages_and_slow_links(name: str) -> None:
    for schedule in schedules_of(name):
        simulate(schedule, Times.equal(1.0))
        generator = random.Random(schedule.stages)
        forward, backward, weight = (
            [generator.uniform(0.5, 2) for _ in range(schedule.placement.parts)] for _ in range(3)
        )
        times = Times(forward=forward, backward=backward, weight=weight, transfer=0.3)
        spans = simulate(schedule, times)
        for stage in range(schedule.stages):
            spans_of_stage = [span for span in spans if span.stage == stage]
            spans_of_stage.sort(key=lambda span: span.start)
            for span, next_span in itertools.pairwise(spans_of_stage):
                assert span.end <= next_span.start + 1e-9, "a stage does two things at a time"


def _most_activations(schedule: Schedule, stage: int) -> int:
    """The most activations that a stage holds at once, each of one micro-batch and chunk."""
    release = "W" if schedule.splits_backward else "B"
    changes = [(op.kind == "F") - (op.kind == release) for op in schedule.ops[stage]]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_holds_as_many_activations_as_the_formula_says(name: str) -> None:
    for schedule in schedules_of(name):
        for stage in range(schedule.stages):
            expected = activations_by_formula(
                name,
                stages=schedule.stages,
                micro_batches=schedule.micro_batches,
                chunks=schedule.chunks,
                stage=stage,
            )
            assert _most_activations(schedule, stage) == expected, str(schedule)


@pytest.mark.parametrize(
    ("name", "micro_batches", "chunks", "ops_by_stage"),
    [
        ("gpipe", 2, 1, ["F0 F1 B0 B1", "F0 F1 B0 B1"]),
        ("1f1b", 3, 1, ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
        (
            "interleaved_1f1b",
            2,
            2,
            ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"],
        ),
        ("zb_h1", 3, 1, ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]),
        (
            "zb_h2",
            4,
            1,
            ["F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3", "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"],
        ),
    ],
)
def test_each_schedule_is_that_of_its_paper(
    name: str, micro_batches: int, chunks: int, ops_by_stage: list[str]
) -> None:
    schedule = make_schedule(name, stages=2, micro_batches=micro_batches, chunks=chunks)
    assert str(schedule).splitlines() == ops_by_stage


def test_a_deadlock_is_refused() -> None:
    # Each stage begins with what needs the other's result.
    ops = ((Op("B", 0), Op("F", 0)), (Op("F", 0), Op("B", 0)))
    crossed = Schedule(name="crossed", stages=2, micro_batches=1, chunks=1, ops=ops)
    with pytest.raises(LayoutError, match="crossed deadlocks: stage 0 at B0, stage 1 at F0"):
        simulate(crossed, Times.equal(1.0))


# --- bubbles and drawings -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_are_those_of_the_papers(name: str) -> None:
    chunks = 2 if name in ("interleaved_1f1b", "zbv") else 1
    tolerance = 1.5 if name == "zbv" else 1.0
    for stages, micro_batches in ((2, 8), (4, 16), (8, 32)):
        schedule = make_schedule(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
        simulated = bubble(simulate(schedule, Times.equal(1 / chunks)))
        formula = bubble_by_formula(
            name,
            stages=stages,
            micro_batches=micro_batches,
            chunks=chunks,
            times=Times.equal(1.0),
        )
        assert formula - 1e-9 <= simulated <= tolerance * formula + 1e-9


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)]
)
def test_a_step_that_ran_as_simulated_has_the_simulated_bubble(name: str, chunks: int) -> None:
    schedule = make_schedule(name, stages=2, micro_batches=8, chunks=chunks)
    spans = simulate(schedule, Times.equal(0.01))
    spans_by_rank = [[span for span in spans if span.stage == stage] for stage in (0, 1)]
    metrics = pipeline_metrics(spans_by_rank, name, chunks)
    expected = pytest.approx(bubble(spans), rel=0, abs=1e-9)
    assert metrics["pipeline/bubble"] == expected
    assert metrics["pipeline/bubble_by_simulation"] == expected
    seconds = 8 * chunks * 0.03
    assert metrics["pipeline/stage_1/compute_seconds"] == pytest.approx(seconds, rel=0, abs=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_the_readme_shows_schedules_as_they_are_drawn(name: str) -> None:
    expected = drawing(make_schedule(name, stages=3, micro_batches=4))
    readme = Path(schedules.__file__).with_name("README.md").read_text()
    paragraph = next(text for text in readme.split("\n\n") if f"{name}: " in text)
    lines = [line for line in paragraph.splitlines() if line.startswith("stage")]
    assert "\n".join(lines) == expected


def test_a_drawing_marks_the_second_chunk() -> None:
    first_line, *_ = drawing(make_schedule("zbv", stages=2, micro_batches=2)).splitlines()
    expected = "F0 F1 · F0' B0' W0' F1' B1' W1' B0 W0 B1 W1"
    assert first_line.split()[2:] == expected.split()


def test_a_trace_names_the_micro_batch_of_a_span_that_has_one() -> None:
    forward = Span(stage=0, kind="F", micro_batch=0, chunk=0, start=0.0, end=1.0)
    reduction = Span(stage=0, kind="REDUCE", micro_batch=-1, chunk=0, start=1.0, end=2.0)
    events = chrome_trace([forward, reduction])["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["F0", "REDUCE"]


# --- partitions of blocks -------------------------------------------------------------------------


def _max_cost(costs: list[float], sizes: Sequence[int]) -> float:
    """The cost of the most expensive part."""
    ends = itertools.accumulate(sizes)
    return max(sum(costs[end - size : end]) for size, end in zip(sizes, ends))


def _all_partitions(blocks: int, parts: int) -> Iterator[list[int]]:
    for inner_bounds in itertools.combinations(range(1, blocks), parts - 1):
        bounds = (0, *inner_bounds, blocks)
        yield [end - start for start, end in itertools.pairwise(bounds)]


def test_no_partition_is_better_than_the_balanced_one() -> None:
    generator = random.Random(3)
    for _ in range(40):
        blocks = generator.randint(1, 9)
        first = generator.uniform(0, 4)
        last = generator.uniform(0, 4)
        parts = generator.randint(1, blocks)
        costs = [generator.uniform(0.1, 5) for _ in range(blocks)]
        sizes = partition.balanced_partition(costs, parts, first, last)
        costs[0] += first
        costs[-1] += last
        least = min(_max_cost(costs, other) for other in _all_partitions(blocks, parts))
        assert _max_cost(costs, sizes) <= least + 1e-9


def test_of_equally_good_partitions_the_even_one_is_chosen() -> None:
    assert partition.balanced_partition([1.0] * 8, 4) == (2, 2, 2, 2)
    assert sorted(partition.balanced_partition([1.0] * 5, 4)) == [1, 1, 1, 2]


def test_the_cost_of_the_head_is_that_of_the_last_part() -> None:
    assert partition.balanced_partition([1.0] * 4, 2, first=0.0, last=2.0) == (3, 1)
