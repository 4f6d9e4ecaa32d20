"""Schedules, cuts and simulated times: pure functions, no processes."""

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

make = schedules.make_schedule.__wrapped__
"""Without its cache, which `make mutants` would find filled by schedules that have no mutation."""


def alive(schedule: Schedule, stage: int) -> int:
    """The most activations (of one micro-batch and chunk) that the stage holds at once: F's as soon as it is done."""
    release = "W" if schedule.splits_backward else "B"
    return max(itertools.accumulate((op.kind == "F") - (op.kind == release) for op in schedule.ops[stage]))


def every(name: str) -> Iterator[Schedule]:
    for stages, micro_batches, chunks in itertools.product((2, 3, 4, 7, 8), (2, 3, 4, 5, 7, 8, 11, 12, 16), (1, 2, 3)):
        with contextlib.suppress(LayoutError):
            if name != "zbv" or chunks == 2:
                yield make(name, stages=stages, micro_batches=micro_batches, chunks=chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_does_everything_once_without_a_deadlock_and_holds_what_the_formula_says(name: str) -> None:
    kinds = "FBW" if name in SPLIT else "FB"
    for schedule in every(name):
        stages, micro_batches, chunks = schedule.stages, schedule.micro_batches, schedule.chunks
        this, wanted = str(schedule), Counter(itertools.product(kinds, range(micro_batches), range(chunks)))
        assert len(schedule.ops) == stages
        placed = Placement.of(name, stages, 1 if name in FOLDED else chunks)  # they have two, whatever is written
        owners = {part: stage for stage in range(stages) for part in placed.parts_of(stage)}
        assert placed == schedule.placement and owners == {
            part: placed.stage_of(part) for part in range(stages * chunks)
        }
        simulate(schedule, Times.equal(1.0))
        rough = random.Random(stages)
        forward, backward, weight = ([rough.uniform(0.5, 2) for _ in range(placed.parts)] for _ in range(3))
        uneven = Times(forward=forward, backward=backward, weight=weight, transfer=0.3)
        spans = simulate(schedule, uneven)  # not even with uneven stages and slow links
        for stage in range(stages):
            own = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start)
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own)), "a stage does one thing at a time"
            assert Counter((op.kind, op.micro_batch, op.chunk) for op in schedule.ops[stage]) == wanted, this
            formula = activations_by_formula(
                name, stages=stages, micro_batches=micro_batches, chunks=chunks, stage=stage
            )
            assert alive(schedule, stage) == formula, this


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_are_what_the_papers_say(name: str) -> None:
    for stages, micro_batches in ((2, 8), (4, 16), (8, 32)):
        chunks = 2 if name in ("interleaved_1f1b", "zbv") else 1
        schedule = make(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
        found = bubble(simulate(schedule, Times.equal(1 / chunks)))
        formula = bubble_by_formula(
            name, stages=stages, micro_batches=micro_batches, chunks=chunks, times=Times.equal(1.0)
        )
        assert formula - 1e-9 <= found <= (1.5 if name == "zbv" else 1) * formula + 1e-9


def test_each_is_drawn_as_in_its_paper() -> None:
    drawn = {
        ("gpipe", 2, 1): "F0 F1 B0 B1 | F0 F1 B0 B1",
        ("1f1b", 3, 1): "F0 F1 B0 F2 B1 B2 | F0 B0 F1 B1 F2 B2",
        ("interleaved_1f1b", 2, 2): "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1 | F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
        ("zb_h1", 3, 1): "F0 F1 B0 W0 F2 B1 W1 B2 W2 | F0 B0 F1 B1 W0 F2 B2 W1 W2",
        ("zb_h2", 4, 1): "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 | F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    }
    for (name, micro_batches, chunks), lists in drawn.items():
        schedule = make(name, stages=2, micro_batches=micro_batches, chunks=chunks)
        assert str(schedule).splitlines() == lists.split(" | ")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_the_readme_shows_schedules_as_they_are_drawn(name: str) -> None:
    drawn = drawing(make(name, stages=3, micro_batches=4))
    readme = Path(schedules.__file__).with_name("README.md").read_text()
    block = next(block for block in readme.split("\n\n") if f"{name}: " in block)
    lines = [line for line in block.splitlines() if line.startswith("stage")]
    assert "\n".join(lines) == drawn


def test_two_chunks_are_drawn_apart() -> None:
    drawn = drawing(make("zbv", stages=2, micro_batches=2)).splitlines()
    assert drawn[0].split()[2:] == ["F0", "F1", "·", "F0'", "B0'", "W0'", "F1'", "B1'", "W1'", "B0", "W0", "B1", "W1"]


def test_a_deadlock_is_seen() -> None:
    # each stage begins with the other's result
    ops = ((Op("B", 0), Op("F", 0)), (Op("F", 0), Op("B", 0)))
    crossed = Schedule(name="crossed", stages=2, micro_batches=1, chunks=1, ops=ops)
    with pytest.raises(LayoutError, match="crossed deadlocks: stage 0 at B0, stage 1 at F0"):
        simulate(crossed, Times.equal(1.0))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)])
def test_a_step_that_ran_as_simulated_has_the_simulated_bubble(name: str, chunks: int) -> None:
    spans = simulate(make(name, stages=2, micro_batches=8, chunks=chunks), Times.equal(0.01))
    ranks = [[span for span in spans if span.stage == stage] for stage in (0, 1)]
    found = pipeline_metrics(ranks, name, chunks)
    assert abs(found["pipeline/bubble"] - bubble(spans)) < 1e-9
    assert abs(found["pipeline/bubble_by_simulation"] - bubble(spans)) < 1e-9
    assert abs(found["pipeline/stage_1/compute_seconds"] - 8 * chunks * 0.03) < 1e-9


def test_a_trace_names_a_micro_batch_where_there_is_one() -> None:
    forward = Span(stage=0, kind="F", micro_batch=0, chunk=0, start=0.0, end=1.0)
    reduction = Span(stage=0, kind="REDUCE", micro_batch=-1, chunk=0, start=1.0, end=2.0)
    events = chrome_trace([forward, reduction])["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["F0", "REDUCE"]


# --- cuts -------------------------------------------------------------------------------------------------------


def _most(costs: list[float], sizes: Sequence[int]) -> float:
    """What the most costly piece costs."""
    return max(sum(costs[end - size : end]) for size, end in zip(sizes, itertools.accumulate(sizes)))


def test_no_cut_is_better_than_the_one_found() -> None:
    draw = random.Random(3)
    for _ in range(40):
        count, first, last = draw.randint(1, 9), draw.uniform(0, 4), draw.uniform(0, 4)
        parts, costs = draw.randint(1, count), [draw.uniform(0.1, 5) for _ in range(count)]
        cut = partition.balanced_partition(costs, parts, first, last)
        costs[0] += first
        costs[-1] += last
        bounds = itertools.combinations(range(1, count), parts - 1)
        others = [[b - a for a, b in itertools.pairwise((0, *each, count))] for each in bounds]
        assert _most(costs, cut) <= min(_most(costs, other) for other in others) + 1e-9


def test_of_equally_good_cuts_the_even_one() -> None:
    assert partition.balanced_partition([1.0] * 8, 4) == (2, 2, 2, 2)
    assert sorted(partition.balanced_partition([1.0] * 5, 4)) == [1, 1, 1, 2]
    assert partition.balanced_partition([1.0] * 4, 2, first=0.0, last=2.0) == (3, 1), "the head counts"
