"""Where the time of early steps goes: what is measured, when, and what a pipeline's parts take."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.training.events import StepPartsMeasured
from strategies.pipeline.schedules import make_schedule
from strategies.pipeline.simulate import Span, Times, seconds_by_block, simulate
from tests.app.kit import training_of
from tests.chain import config
from tests.pool import run_distributed

SLEEP = 0.02
"""Seconds of each micro-batch, beside what the small model takes."""


def measured(
    rank: int, folder: Path, strategy: str, steps: int, words: tuple[str, ...] = (), world: int = 2
) -> list[StepPartsMeasured]:
    """What a rank tells of a training's early steps."""
    run_config = config(f"train.steps={steps}", f"task_args.step_seconds={SLEEP}", *words)
    training, events = training_of(run_config, folder, rank, world, strategy, measures_parts=True)
    training.run()
    training.close()
    assert training.step_meter is None or steps < 20
    return [event for event in events if isinstance(event, StepPartsMeasured)]


@pytest.mark.pure
def test_one_device_computes_and_waits_for_nobody(tmp_path: Path) -> None:
    (event,) = measured(0, tmp_path, "single", 22, world=1)
    assert event.step == 20 and event.blocks is None
    assert event.parts.communication == event.parts.bubble == 0.0
    assert event.parts.computing > SLEEP and 0 <= event.parts.data < event.parts.computing


@pytest.mark.pure
def test_too_short_a_run_is_not_measured(tmp_path: Path) -> None:
    assert measured(0, tmp_path, "single", 19, world=1) == []


@pytest.mark.pure
def test_steps_that_a_person_profiles_are_not_measured(tmp_path: Path) -> None:
    (event,) = measured(0, tmp_path, "single", 30, ("profile.steps=[8,10]",), world=1)
    assert event.step == 26


def of_ranks(rank: int, folder: Path) -> list[list[StepPartsMeasured]]:
    return [
        measured(rank, folder / "ddp", "ddp", 21),
        measured(
            rank,
            folder / "pipeline",
            "pipeline",
            21,
            ("parallel.pp=2", "train.micro_batch_size=4", "parallel.stages=[3,1]"),
        ),
    ]


@pytest.mark.alone
def test_ranks_agree_on_the_parts_and_a_pipelines_stages_are_timed(tmp_path: Path) -> None:
    first, second = run_distributed(of_ranks, 2, tmp_path)
    assert second == [[], []], "rank 0 speaks for all"
    (data_parallel,), (pipeline,) = first
    assert data_parallel.parts.communication > 0 and data_parallel.parts.bubble == 0.0
    assert data_parallel.parts.step > SLEEP
    assert pipeline.parts.bubble > 0
    assert data_parallel.blocks is None and pipeline.blocks is not None
    assert len(pipeline.blocks.blocks) == 4 and min(pipeline.blocks.blocks) > 0
    assert pipeline.blocks.before > 0 and pipeline.blocks.after > SLEEP


@pytest.mark.pure
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_a_parts_seconds_go_to_its_blocks_and_to_what_is_around_them(name: str) -> None:
    chunks = 1 if name == "1f1b" else 2
    parts = 2 * chunks
    micro_batches = 4
    schedule = make_schedule(name, stages=2, micro_batches=micro_batches, chunks=chunks)
    seconds = [1.0 + part for part in range(parts)]
    computing = simulate(schedule, Times(forward=seconds, backward=seconds, weight=seconds))
    spans = [*computing, Span(stage=0, kind="RECV", micro_batch=0, chunk=0, start=0.0, end=9.0)]
    # Of each forward, a quarter is in the part's first block and half in its second.
    for forward in (span for span in computing if span.kind == "F"):
        part = schedule.placement.part_at(forward.stage, forward.chunk)
        quarter = forward.seconds / 4
        middle = forward.start + quarter
        end = middle + 2 * quarter
        first = replace(forward, kind="BLOCK", block=f"blocks.{2 * part}", end=middle)
        second = replace(first, block=f"blocks.{2 * part + 1}", start=middle, end=end)
        spans += [first, second]
    of_stages = [[span for span in spans if span.stage == stage] for stage in (0, 1)]
    by_rank = [of_stages[0], of_stages[0], of_stages[1], of_stages[1]]
    measured = seconds_by_block(by_rank, name, chunks)
    of_parts = [3 * micro_batches * value for value in seconds]
    assert measured.of_parts([2] * parts) == pytest.approx(of_parts)
    assert measured.before == pytest.approx(of_parts[0] / 4)
    assert measured.after == pytest.approx(of_parts[-1] / 4)
    blocks = list(measured.blocks)
    assert blocks[1::2] == pytest.approx([2 * value for value in blocks[::2]])
