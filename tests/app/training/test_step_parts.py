"""Where the time of early steps goes: what is measured, when, and what a pipeline's parts take."""

from pathlib import Path

import pytest

from app.training.events import StepPartsMeasured
from strategies.pipeline.schedules import make_schedule
from strategies.pipeline.simulate import Span, Times, seconds_by_part, simulate
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
    assert event.step == 20 and event.part_seconds == ()
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
    assert len(pipeline.part_seconds) == 2 and min(pipeline.part_seconds) > 0


@pytest.mark.pure
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_the_seconds_of_parts_are_those_of_the_blocks_in_them(name: str) -> None:
    chunks = 1 if name == "1f1b" else 2
    parts = 2 * chunks
    schedule = make_schedule(name, stages=2, micro_batches=4, chunks=chunks)
    seconds = [1.0 + part for part in range(parts)]
    spans = simulate(schedule, Times(forward=seconds, backward=seconds, weight=seconds))
    waits = [Span(stage=0, kind="RECV", micro_batch=0, chunk=0, start=0.0, end=9.0)]
    of_stages = [[span for span in spans if span.stage == stage] for stage in (0, 1)]
    by_rank = [of_stages[0] + waits, of_stages[0], of_stages[1], of_stages[1]]
    assert seconds_by_part(by_rank, name, chunks) == pytest.approx(
        [12 * value for value in seconds]
    )
