"""The global batch as a function of the samples seen, and what a schedule means for a run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import OptimizerConfig, ScheduleConfig
from app.config.batch_schedule import BatchSchedule
from app.config.io import from_dict, load_config, to_dict, to_yaml
from app.errors import UserError
from app.training.optimizer import learning_rate

pytestmark = pytest.mark.pure
ROWS = "train.batch_schedule=[[0,32],[320,64],[1_000,128]]"


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    begin = 0
    rows = []
    for gap in [0, *draw(st.lists(st.integers(1, 60), max_size=4))]:
        begin += gap
        rows.append((begin, draw(st.integers(1, 40))))
    return BatchSchedule(tuple(rows))


def walked(schedule: BatchSchedule, steps: int, start: int) -> list[int]:
    """The samples seen after each of some steps, taken one by one."""
    seen = [start]
    for _ in range(steps):
        seen.append(seen[-1] + schedule.batch_at(seen[-1]))
    return seen


@given(schedules(), st.integers(0, 40), st.integers(0, 200))
def test_samples_and_steps_are_those_of_single_steps(
    schedule: BatchSchedule, steps: int, start: int
) -> None:
    seen = walked(schedule, steps, start)
    assert schedule.samples_after(steps, start=start) == seen[-1]
    assert schedule.steps_until(seen[-1], start=start) == steps
    if steps:
        # One sample less needs the last step too, but for the samples of the step before.
        assert schedule.steps_until(seen[-2] + 1, start=start) == steps


@given(schedules(), st.integers(0, 30), st.integers(0, 30))
def test_a_start_anywhere_takes_the_steps_that_are_left(
    schedule: BatchSchedule, before: int, after: int
) -> None:
    middle = schedule.samples_after(before)
    assert schedule.samples_after(after, start=middle) == schedule.samples_after(before + after)


@given(schedules(), st.integers(0, 60))
def test_the_batches_that_are_left_are_those_of_the_steps_to_come(
    schedule: BatchSchedule, samples: int
) -> None:
    present, *later = schedule.batches_from(samples)
    assert present == schedule.batch_at(samples)
    assert later == [schedule.batch_at(begin) for begin, _ in schedule.rows if begin > samples]


@given(schedules())
def test_workers_that_divide_every_batch_divide_the_common_divisor(schedule: BatchSchedule) -> None:
    for workers in range(1, 41):
        shares_all = all(batch % workers == 0 for batch in schedule.batches)
        assert shares_all == (schedule.common_divisor % workers == 0)


@given(schedules(), st.integers(1, 60), st.integers(0, 20))
def test_the_rates_curve_goes_with_the_samples(
    schedule: BatchSchedule, steps: int, warmup: int
) -> None:
    seen = walked(schedule, steps, 0)
    curve = ScheduleConfig(name="linear", warmup_steps=warmup)

    def rate(step: int, batches: BatchSchedule) -> float:
        on_curve = batches.step_on_curve(step, samples=seen[step], first=warmup, steps=steps)
        return learning_rate(OptimizerConfig(lr=1.0), curve, on_curve, steps=steps)

    rates = [rate(step, schedule) for step in range(steps)]
    falling = rates[warmup:]
    assert falling == sorted(falling, reverse=True)
    if len(falling) > 1:
        assert (falling[0], falling[-1]) == (1.0, 0.0)
        for step in range(warmup, steps):
            share = (seen[step] - seen[warmup]) / (seen[steps - 1] - seen[warmup])
            assert rates[step] == pytest.approx(1 - share)
    constant = [rate(step, BatchSchedule.constant(8)) for step in range(steps)]
    by_step = [
        learning_rate(OptimizerConfig(lr=1.0), curve, step, steps=steps) for step in range(steps)
    ]
    assert constant == by_step, "with one batch nothing changes, to the bit"


def test_a_schedule_is_read_and_decides_the_steps_of_epochs() -> None:
    config = load_config([], [ROWS, "train.epochs=2"])
    assert config.train.batch_schedule == [[0, 32], [320, 64], [1000, 128]]
    assert config.train.global_batch_size == 128, "the largest, which must fit"
    # 10 steps of 32, 11 of 64 (to 1,024), 8 of 128 (to 2,048).
    assert config.train.steps_for(1000) == 10 + 11 + 8
    assert from_dict(to_dict(config)) == config


def test_what_is_written_last_counts_a_batch_or_a_schedule(tmp_path: Path) -> None:
    config = load_config([], [ROWS, "train.global_batch_size=16"])
    assert config.train.batches.largest == 128, "where both are written together, the schedule"
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))

    def batches(*overrides: str) -> BatchSchedule:
        return load_config([file], overrides).train.batches

    assert batches("train.steps=3") == config.train.batches
    assert batches("train.global_batch_size=16") == BatchSchedule.constant(16)
    assert batches("train.batch_schedule=[]") == BatchSchedule.constant(128)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("[[0,32],[9]]", "each row must be two whole numbers"),
        ("[[8,32],[9,64]]", "the first row must begin at 0"),
        ("[[0,32],[9,64],[9,128]]", "each row must begin at more samples"),
        ("[[0,32],[9,0]]", "each batch must be greater than 0"),
        ("[[0,32],[9,big]]", "each row must be two whole numbers"),
        ("32", "train.batch_schedule is 32, but it must be a list of rows, or auto: write for"),
        ("Auto", "train.batch_schedule is 'Auto', but it must be a list of rows, or auto"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(rows: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_config([], [f"train.batch_schedule={rows}"])
