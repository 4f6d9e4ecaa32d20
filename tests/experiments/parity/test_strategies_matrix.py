"""The matrix runner itself, on a few rows: it measures, compares, resumes, tells who differs and why, and goes on."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from experiments.parity import curves
from experiments.parity.curves import Difference, Trial
from experiments.parity.experiment import table
from experiments.parity.matrix import EVERYTHING, Result, run
from experiments.parity.rows import ROWS, THREE, Row
from strategies.parallelize import LayoutError, Options
from tests.strategies.models import gpt_trial, seeded


def make() -> Trial:
    return gpt_trial(tied=True, steps=4)


def test_the_matrix_measures_rows_and_checkpoints_and_goes_on_without_those_that_cannot_run() -> None:
    rows = [Row("fsdp", 2), Row("pipeline", 1)]
    results = run(make, rows, variants=[EVERYTHING, "bf16"], checkpoints=True)
    trained = [result for result in results if result.after is None]
    resumed = [result for result in results if result.after is not None and result.found]
    assert [(str(r.row), r.variant) for r in trained] == [(str(r), v) for r in rows for v in (EVERYTHING, "bf16")]
    assert [r.verdict for r in trained] == 2 * ["ok"] + 2 * ["REFUSED"], table(results)
    assert len({(str(r.row), str(r.after)) for r in resumed}) == 4 and all(r.passed for r in resumed)
    narrow = next(result for result in trained if result.variant == "bf16")
    assert narrow.found and 1e-6 < narrow.found.loss <= narrow.bound.loss < 0.1, "within one device's own drift"
    text = table(results)
    assert "DIFFERS" not in text and text.count("REFUSED: strategy pipeline needs at least 2 stages") == 3
    assert text.count("after 2 others, worst: ") == 2


class Crashes(torch.nn.Module):
    """On the worker that holds no first row: one rank raises while the other waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ["LOCAL_RANK"] == "1":
            raise ValueError("planted")
        return self.layer(x)


def crashing() -> Trial:
    return Trial(seeded(Crashes), lambda model, x: model(x).square().mean(), lambda step: torch.ones(4, 2), steps=2)


def test_a_row_that_raises_has_failed_and_the_next_ones_run() -> None:
    results = run(crashing, [Row("ddp", 2), Row("dp", 1)], variants=["plain"])
    assert [result.verdict for result in results] == ["FAILED", "ok"]
    assert "planted" in results[0].error and "FAILED: ValueError: planted" in table(results)


def test_a_batch_that_is_too_small_is_one_sentence() -> None:
    few = dataclasses.replace(gpt_trial(steps=2), batch=lambda step: (torch.zeros(3, 8).long(),) * 2, micro_batches=2)
    with pytest.raises(LayoutError, match=r"a batch of 3 is not enough for 2 .* 2 micro-batches .*global_batch_size=4"):
        curves.begin(few, Row("ddp", 2).layout, Options(), torch.device("cpu"))


def test_heads_that_a_degree_does_not_divide_are_said_before_anything_is_built() -> None:
    trial = dataclasses.replace(gpt_trial(), heads=2)
    with pytest.raises(LayoutError, match=r"parallel.tp is 4, which does not divide the model's 2 heads: write 1, 2"):
        curves.begin(trial, Row("tensor", 4).layout, Options(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Difference(1e-6, 1e-6, 1e-6), "ok"),
        (Difference(1e-3, 0.0, 0.0), "DIFFERS"),
        (Difference(0.0, 1e-3, 0.0), "DIFFERS"),
        (Difference(0.0, 0.0, 1e-3), "DIFFERS"),
        (Difference(float("nan"), 0.0, 0.0), "DIFFERS"),
    ],
)
def test_a_difference_is_seen_in_losses_norms_and_weights(found: Difference, verdict: str) -> None:
    result = Result(Row("ddp", 2), "plain", found, 1.0)
    assert result.verdict == verdict and ("DIFFERS" in table([result])) == (verdict == "DIFFERS")


def test_the_table_has_the_worst_checkpoint_of_a_row_and_all_that_differ() -> None:
    one, two = Row("ddp", 2), Row("fsdp", 2)
    pairs = [(one, one, 0.0), (one, two, 3e-7), (two, one, 2e-3), (two, two, 2e-4)]
    results = [Result(row, EVERYTHING, Difference(loss, 0, 0), 1, after) for row, after, loss in pairs]
    shown = [line.split("after", 1)[1].split() for line in table(results).splitlines()[1:]]
    assert shown[0][:6] == ["2", "others,", "worst:", "fsdp", "(dp_shard", "2)"] and shown[0][6] == "3.0e-07"
    assert shown[1][3] == "ddp" and "DIFFERS" in shown[1] and shown[2][0] == "fsdp" and "DIFFERS" in shown[2]


@pytest.mark.slow
def test_the_whole_matrix() -> None:
    """Every row in every variant, three sides of the grid at once too, over 20 steps."""
    results = run(twenty, [*ROWS, *THREE])
    assert all(result.passed for result in results), table(results)


@pytest.mark.slow
def test_every_checkpoint_under_every_row() -> None:
    """All ordered pairs, 10 steps and 10."""
    results = run(twenty, ROWS, variants=["plain"], checkpoints=True)
    assert all(result.passed for result in results), table(results)


def twenty() -> Trial:
    return gpt_trial(tied=True)
