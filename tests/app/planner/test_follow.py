"""A plan beside a measured step: which part was wrong, what later plans learn, when a run moves."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.config.layout_requirement import Requirement
from app.planner import output
from app.planner.auto import alternatives, choose_layout
from app.planner.corrections import (
    Comparison,
    correction_for,
    drop_corrections,
    factors_of,
    keep_correction,
    multiplied,
    planned_parts,
)
from app.planner.estimate import Estimate
from app.planner.follow import (
    MOST_MOVES,
    History,
    expected_layouts,
    layout_name,
    next_layout,
    rebalanced_stages,
)
from app.planner.machine import MachineOptions, cpus, find_machine
from app.planner.plan import Plan, make_plan
from app.planner.read import Reader
from app.training.events import StepParts
from strategies.pipeline.simulate import BlockSeconds
from tests.app.planner.conftest import gpus, plan_of
from tests.running import invoke

WORDS = ["strategy=auto", "train.global_batch_size=32"]


def plan(reader: Reader, *words: str, workers: int = 4) -> Plan:
    """Plans the small GPT on CPUs of this machine."""
    return plan_of(
        reader, cpus(workers), *WORDS, *words, fixed_keys=("train.precision", "parallel.offload")
    )


@functools.cache
def plan_without_corrections(reader: Reader) -> Plan:
    """The plan on four workers where nothing has been measured, once for all tests."""
    return plan(reader)


def compared(planned: StepParts, measured: StepParts) -> Comparison:
    return Comparison(planned=planned, measured=measured, speed_range=(0.8, 1.25))


# --- by part --------------------------------------------------------------------------------------


def test_the_parts_of_a_plan_add_up_to_its_step(small: Reader) -> None:
    rows = [*plan_without_corrections(small).rows, *plan_of(small, gpus(2), *WORDS).rows]
    for row in rows:
        assert planned_parts(row.seconds).step == pytest.approx(row.step_seconds)
    with_bubble = [row for row in rows if row.candidate.dims.pp > 1]
    assert all(planned_parts(row.seconds).bubble == row.seconds["bubble"] for row in with_bubble)
    assert with_bubble


@pytest.mark.parametrize(
    ("measured", "is_inside", "wrong"),
    [
        (StepParts(computing=1.05, communication=0.1, data=0.0), True, None),
        (StepParts(computing=1.0, communication=0.9, data=0.1), False, "communication"),
        (StepParts(computing=1.1, communication=0.1, data=2.0), False, "data"),
        (StepParts(computing=0.4, communication=0.2), False, "computing"),
        (StepParts(computing=1.0, communication=0.0, bubble=0.9), False, "bubble"),
    ],
)
def test_a_comparison_names_the_part_that_was_wrong(
    measured: StepParts, is_inside: bool, wrong: str | None
) -> None:
    comparison = compared(StepParts(computing=1.0, communication=0.1), measured)
    assert comparison.is_inside == is_inside
    if wrong is not None:
        assert comparison.wrong_part == wrong
    assert comparison.metrics()["plan/data_seconds_measured"] == measured.data


def test_the_sentence_has_the_range_and_both_figures() -> None:
    comparison = compared(
        StepParts(computing=1.0, communication=0.1), StepParts(computing=1.0, communication=1.5)
    )
    assert comparison.sentence == (
        "a step takes 2.5 s, outside of the planned 0.88 to 1.38 s; the plan was wrong mostly "
        "about communication that nothing hides: 0.1 s planned, 1.5 s measured"
    )


def test_factors_turn_the_plan_into_what_was_measured(small: Reader) -> None:
    row = plan(small, "parallel.pp=2").rows[0]
    planned = planned_parts(row.seconds)
    measured = StepParts(
        computing=2 * planned.computing,
        communication=3 * planned.communication,
        bubble=planned.bubble,
        data=0.5,
    )
    factors = factors_of(planned, measured)
    corrected = multiplied(row.seconds, factors, data_seconds=0.5)
    assert sum(corrected.values()) == pytest.approx(measured.step)
    nothing_sent = replace(planned, communication=0.0)
    assert "communication" not in factors_of(nothing_sent, measured), "0 cannot be multiplied"


# --- what later plans learn -----------------------------------------------------------------------


def test_a_correction_is_for_models_of_similar_size_and_makes_the_next_plan_right(
    small: Reader, tiny: Reader
) -> None:
    before = plan_without_corrections(small)
    row = before.rows[0]
    planned = planned_parts(row.seconds)
    comparison = compared(planned, replace(planned, computing=3 * planned.computing))
    keep_correction(
        "cpu", comparison, None, parameters=small.parameters, precision="fp32", run="gpt"
    )
    after = plan(small)
    same = next(other for other in after.rows if other.candidate == row.candidate)
    assert same.step_seconds == pytest.approx(comparison.measured.step)
    other = make_plan(before.config, tiny.task, cpus(4), reader=tiny)
    assert other.estimator.correction("fp32") is None, f"{tiny.parameters} parameters are not like"
    assert after.estimator.correction("bf16") is None

    # What is measured of a corrected plan is kept on top of the correction.
    again = compared(planned_parts(same.seconds), planned)
    keep_correction(
        "cpu",
        again,
        after.estimator.correction("fp32"),
        parameters=small.parameters,
        precision="fp32",
        run="gpt-2",
    )
    third = plan(small)
    assert third.rows[0].step_seconds == pytest.approx(row.step_seconds)
    kept = third.machine.device.corrections
    assert [correction["run"] for correction in kept] == ["gpt-2"], "one for each kind of model"


def test_a_correction_is_named_in_the_plan_and_can_be_dropped(small: Reader) -> None:
    planned = StepParts(computing=1.0, communication=0.1)
    comparison = compared(planned, StepParts(computing=2.5, communication=0.05))
    keep_correction(
        "cpu", comparison, None, parameters=small.parameters, precision="fp32", run="gpt"
    )
    corrected = plan(small)
    sentence = "what run gpt measured here on "
    assert sentence in output.text(corrected)
    assert "computing × 2.5, communication × 0.5" in output.text(corrected)
    assert sentence in output.as_json(corrected, 1)["machine"]["corrected"]
    assert "dropped what gpt measured" in invoke("calibrate", "--drop-corrections").output
    assert plan(small).estimator.correction("fp32") is None
    assert output.as_json(plan(small), 1)["machine"]["corrected"] is None
    assert "there are no corrections" in invoke("calibrate", "--drop-corrections").output


def test_gpus_that_are_not_here_are_planned_without_what_was_measured_here() -> None:
    planned = StepParts(computing=1.0)
    comparison = compared(planned, StepParts(computing=2.0))
    for name in ("h100-80gb", "cpu"):
        keep_correction(name, comparison, None, parameters=10**9, precision="bf16", run="x")
    elsewhere = find_machine(MachineOptions(gpus=8, gpu="h100-80gb"), "auto")
    assert not elsewhere.device.corrections
    here = find_machine(MachineOptions(gpus=2, gpu="cpu"), "auto")
    assert here.device.corrections and not here.device.measured
    assert len(drop_corrections(["h100-80gb", "cpu"])) == 2


def test_the_newest_correction_counts() -> None:
    planned = StepParts(computing=1.0)
    kept = [
        keep_correction(
            "cpu",
            compared(planned, StepParts(computing=factor)),
            None,
            parameters=parameters,
            precision="fp32",
            run=f"{factor}",
        )
        for parameters, factor in ((10, 2.0), (39, 4.0))
    ]
    assert correction_for(kept, 20, "fp32") == kept[1]
    assert correction_for(kept, 3, "fp32") == kept[0]
    assert correction_for(kept, 1000, "fp32") is None


# --- when a run moves -----------------------------------------------------------------------------


def layouts(small: Reader, *seconds: float) -> list[Estimate]:
    """Layouts that are expected to take so many seconds."""
    rows: dict[str, Estimate] = {}
    for row in plan_without_corrections(small).rows:
        if row.verdict == "fits":
            rows.setdefault(layout_name(row), row)
    return [
        replace(row, seconds={"compute": value})
        for row, value in zip(rows.values(), seconds, strict=False)
    ]


@pytest.mark.parametrize(
    ("expected", "steps_left", "moving", "moves"),
    [
        (0.5, 100, 10.0, True),  # 100 s to stay, 60 s to move
        (0.5, 100, 45.0, False),  # 95 s to move: 5 % less
        (0.5, 20, 10.0, False),  # as long as it would take to stay
        (0.92, 10**6, 10.0, False),  # 8 % faster, however long the run
        (0.9, 10**6, 10.0, True),
        (1.5, 10**6, 0.0, False),
        (0.5, 0, 0.0, True),  # nothing left, nothing lost: the supervisor has ended by then
    ],
)
def test_a_run_moves_for_a_tenth_with_the_restart(
    small: Reader, expected: float, steps_left: int, moving: float, moves: bool
) -> None:
    present, other = layouts(small, 1.0, expected)
    chosen = next_layout(
        [other],
        History(path=[layout_name(present)]),
        present_seconds=1.0,
        steps_left=steps_left,
        moving_seconds=moving,
    )
    assert (chosen is not None) == moves


def test_a_layout_that_was_refused_or_was_left_twice_is_not_taken(small: Reader) -> None:
    present, other, third = layouts(small, 1.0, 0.5, 0.4)
    names = [layout_name(row) for row in (present, other, third)]
    assert len(set(names)) == 3

    def choice(history: History) -> Estimate | None:
        return next_layout(
            [other, third], history, present_seconds=1.0, steps_left=1000, moving_seconds=1.0
        )

    assert choice(History(path=names[:1])) is third
    assert choice(History(path=names[:1], refused=[names[2]])) is other
    assert choice(History(path=[names[0], names[1], names[0]])) is None, "it has returned"
    assert choice(History(path=["a", "b", "c", names[0]])) is None, "three moves were made"
    two_moves = ["a", names[1], names[0]]
    assert choice(History(path=two_moves)) is None, "two layouts were tried"
    assert choice(History(path=two_moves, seconds={names[1]: 0.5})) is other


@pytest.mark.parametrize("seed", range(30))
def test_moves_end_and_no_layout_is_measured_twice_however_wrong_the_plan(
    small: Reader, seed: int
) -> None:
    """A run whose every layout takes another time than any plan or measurement says."""
    generator = random.Random(seed)
    full_plan = plan_without_corrections(small)
    possible = alternatives(full_plan, full_plan.rows[0])
    truth = {layout_name(row): 10 ** generator.uniform(-2, 2) for row in possible}
    present = possible[0]
    history = History(path=[layout_name(present)])
    measurements = 0
    for _ in range(20):
        name = layout_name(present)
        if name in history.seconds:
            break  # which is not measured again, so that nothing is decided
        measurements += 1
        history.seconds[name] = truth[name]
        planned = planned_parts(present.seconds)
        share = generator.random()
        measured = StepParts(computing=truth[name] * share, communication=truth[name] * (1 - share))
        comparison = compared(planned, measured)
        chosen = next_layout(
            expected_layouts(full_plan, present, comparison, history),
            history,
            present_seconds=truth[name],
            steps_left=10**6,
            moving_seconds=1.0,
        )
        if chosen is None:
            break
        history.path.append(layout_name(chosen))
        present = next(row for row in possible if row.candidate == chosen.candidate)
    assert measurements <= MOST_MOVES + 1 and len(history.path) <= MOST_MOVES + 1
    assert len(history.seconds) == measurements
    ended_with = truth[history.path[-1]]
    fastest = min(history.seconds.values())
    assert ended_with <= 1.11 * fastest, "it returns to what was measured faster"


def test_alternatives_change_the_configuration_no_more_than_what_was_chosen(small: Reader) -> None:
    full_plan = plan_without_corrections(small)
    chosen = next(row for row in full_plan.rows if row.candidate.checkpointing == "none")
    rows = alternatives(full_plan, chosen)
    assert rows and all(row.candidate.dims.pp == 1 for row in rows)
    assert all(row.candidate.checkpointing == "none" for row in rows)


def test_auto_takes_the_layout_that_a_start_before_has_moved_to(
    small: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.planner.plan.reader_of", lambda *_, **__: small)
    full_plan = plan_without_corrections(small)
    other = alternatives(full_plan, full_plan.rows[0])[-1]
    assert other.candidate.key != full_plan.rows[0].candidate.key
    required = Requirement(key=other.candidate.key)
    choice = choose_layout(full_plan.config, small.task, 4, cpus(4), requirement=required)
    assert choice.prediction is not None and choice.prediction.candidate == other.candidate
    assert choice.values["train.micro_batch_size"] == other.candidate.micro_batch
    free = choose_layout(full_plan.config, small.task, 4, cpus(4))
    gone = Requirement(key="a layout of other workers")
    without = choose_layout(full_plan.config, small.task, 4, cpus(4), requirement=gone)
    assert without.layout == free.layout


# --- stages ---------------------------------------------------------------------------------------


def test_stages_are_cut_again_by_their_measured_times(small: Reader) -> None:
    words = ("parallel.pp=2", "parallel.tp=1")
    full_plan = plan(small, *words, workers=2)
    present = next(
        row for row in full_plan.rows if row.candidate.dims.pp == 2 and row.candidate.chunks == 1
    )
    assert present.stages is not None and sum(present.stages) == 4
    planned = planned_parts(present.seconds)
    comparison = compared(planned, planned)
    second = planned.step / 40

    def cut(blocks: Sequence[float], after: float) -> Estimate | None:
        measured = BlockSeconds(before=0.0, blocks=tuple(blocks), after=after)
        return rebalanced_stages(full_plan, present, comparison, measured)

    # The same two stages take equally long in each case, for another reason.
    slow_head = cut([second] * 4, 3 * second)
    slow_last_block = cut([second] * 3 + [4 * second], 0.0)
    slow_third_block = cut([second, second, 4 * second, second], 0.0)
    assert slow_head is not None and slow_head.stages == (3, 1)
    assert slow_last_block is not None and slow_last_block.stages == (3, 1)
    assert slow_third_block is None, "the slow block would be beside two others"
    assert layout_name(slow_head) != layout_name(present)
    assert slow_head.step_seconds < planned.step
    slow_first = cut([3 * second] + [second] * 3, 0.0)
    assert slow_first is not None and slow_first.stages == (1, 3)
    stages_as_planned = [second / size for size in present.stages for _ in range(size)]
    even = BlockSeconds(before=0.0, blocks=tuple(stages_as_planned), after=0.0)
    assert rebalanced_stages(full_plan, present, comparison, even) is None
    assert rebalanced_stages(full_plan, replace(present, stages=None), comparison, even) is None
