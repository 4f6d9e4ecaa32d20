"""The matrix runner itself, on two rows: it measures, compares, resumes, tells who differs, and goes on."""

from __future__ import annotations

from test_strategies_models import gpt_trial

from strategies.matrix import VARIANTS, Result, run, table
from strategies.parity import Difference, Trial
from strategies.rows import Row


def make() -> Trial:
    return gpt_trial(tied=True, steps=2)


def test_the_matrix_measures_rows_and_checkpoints() -> None:
    rows = [Row("fsdp", 2)]
    results = run(make, rows, checkpoints=True)
    trained = [result for result in results if result.after is None]
    resumed = [result for result in results if result.after is not None]
    assert [(r.row, r.variant) for r in trained] == [(row, variant) for row in rows for variant in VARIANTS]
    assert len(resumed) == 4 and len({(str(r.row), str(r.after)) for r in resumed}) == 4
    assert all(result.passed for result in results), table(results)
    assert len(table(results).splitlines()) == 1 + 2 + 2 and "DIFFERS" not in table(results)


def test_a_row_that_cannot_run_says_why_and_the_others_go_on() -> None:
    results = run(make, [Row("dp", 1), Row("pipeline", 1)])
    assert [result.passed for result in results] == [True, True, False, False]
    assert "pipeline" in results[-1].error and "DIFFERS" in table(results)


def test_a_difference_is_seen() -> None:
    far = Result(Row("ddp", 2), "plain", Difference(1e-3, 0.0, 0.0), 1.0)
    assert not far.passed and "DIFFERS" in table([far])
    nan = Result(Row("ddp", 2), "plain", Difference(float("nan"), 0.0, 0.0), 1.0)
    assert not nan.passed
