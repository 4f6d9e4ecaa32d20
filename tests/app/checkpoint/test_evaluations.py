"""Results that come after a checkpoint was committed: kept, and what they keep of checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from app.checkpoint import Commit
from app.checkpoint.evaluations import (
    FILE,
    PLAN,
    Evaluation,
    Evaluations,
    Plan,
    all_metrics,
    read,
    waiting,
    write,
)
from app.checkpoint.retention import Retention, prune
from app.errors import UserError
from app.storage.storage import Storage
from tests.app.checkpoint.kit import save, steps

pytestmark = pytest.mark.pure


def commit(step: int, *, sequence: int = 0, planned: bool = True) -> Commit:
    """A checkpoint that waits for its evaluation, or one that is not evaluated."""
    plan = {PLAN: Plan(batch_size=8, shares=2).to_meta()} if planned else {}
    sequence = sequence or step
    return Commit(step=step, path=f"/{sequence}", meta=plan, files={}, sequence=sequence)


def results(**losses: float) -> Evaluations:
    """Results by step, such as s10=0.5."""
    return Evaluations(
        tuple(
            Evaluation(step=int(step[1:]), time=1.0, metrics={"loss": loss})
            for step, loss in losses.items()
        )
    )


@pytest.mark.parametrize(
    ("losses", "mode", "kept"),
    [
        ({}, "min", [10, 20, 30, 35, 40]),  # all wait, but for that of step 35, the last but one
        ({"s10": 3.0}, "min", [10, 20, 30, 35, 40]),  # the only one, and so the best
        ({"s10": 3.0, "s20": 2.0}, "min", [20, 30, 35, 40]),
        ({"s10": 3.0, "s20": 2.0}, "max", [10, 30, 35, 40]),
        ({"s10": 3.0, "s20": 2.0, "s30": 1.0}, "min", [30, 35, 40]),
        ({"s10": 1.0, "s20": 2.0, "s30": 3.0, "s40": 4.0}, "min", [10, 35, 40]),
        ({"s10": math.nan, "s20": 9.0, "s30": math.inf, "s40": math.nan}, "min", [20, 35, 40]),
    ],
)
def test_waiting_checkpoints_stay_and_late_results_decide_which_is_best(
    losses: dict[str, float], mode: Any, kept: list[int]
) -> None:
    commits = [commit(10), commit(20), commit(30), commit(35, planned=False), commit(40)]
    commits.reverse()
    retention = Retention(keep_last=2, mode=mode, keeps_waiting=True)
    removed = {each.step for each in retention.outdated(commits, results(**losses))}
    assert sorted({10, 20, 30, 35, 40} - removed) == kept


def test_without_evaluation_beside_training_nothing_waits_and_results_still_count() -> None:
    commits = [commit(30), commit(20), commit(10)]
    retention = Retention(keep_last=1)
    assert [each.step for each in retention.outdated(commits, Evaluations())] == [10, 20]
    kept_best = retention.outdated(commits, results(s10=0.5, s20=0.7))
    assert [each.step for each in kept_best] == [20]


def test_each_step_waits_once_in_the_order_of_steps() -> None:
    """A step that was saved again, after a damaged checkpoint, waits with its newest checkpoint."""
    commits = [
        commit(30, sequence=3),
        commit(10, sequence=1),
        commit(20, sequence=2),
        commit(20, sequence=4),
        commit(25, sequence=5, planned=False),
    ]
    assert [each.path for each in waiting(commits, Evaluations())] == ["/1", "/4", "/3"]
    assert [each.path for each in waiting(commits, results(s20=1.0))] == ["/1", "/3"]


def test_results_are_read_as_they_were_written_and_a_step_keeps_its_first(tmp_path: Path) -> None:
    assert read(str(tmp_path)) == Evaluations()
    late = Evaluation(step=20, time=3.0, metrics={"loss": 0.5, "odd": math.inf}, stops=True)
    early = Evaluation(step=10, time=4.0, metrics={"loss": 0.7})
    again = Evaluation(step=20, time=5.0, metrics={"loss": 9.0})
    evaluations = Evaluations().with_result(late).with_result(early).with_result(again)
    write(str(tmp_path), evaluations)
    assert read(str(tmp_path)) == evaluations == Evaluations((early, late))
    assert all_metrics([{"loss": 2.0}], evaluations) == [
        {"loss": 2.0},
        early.metrics,
        late.metrics,
    ]
    (tmp_path / FILE).write_text(json.dumps({"results": [{"step": 1}]}))
    with pytest.raises(UserError, match=rf"{FILE} is damaged .*: remove it"):
        read(str(tmp_path))


def test_damaged_results_remove_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, keep_last=9)
    storage = Storage(tmp_path)
    commits = [commit(3), commit(2), commit(1)]
    (tmp_path / FILE).write_text("{")
    prune(storage, commits, Retention(keep_last=1))
    assert steps(tmp_path) == [3, 2, 1]
