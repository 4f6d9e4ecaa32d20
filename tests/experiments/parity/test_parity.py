"""`trireme parity`: what it takes from an experiment, how it ends, and the certificate it leaves with a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import group
from app.config_io import load_config
from app.errors import UserError
from experiments.parity import experiment as parity
from experiments.parity.curves import Difference
from experiments.parity.matrix import Result
from experiments.parity.rows import Row

GOOD = Result(Row("ddp", 2), "plain", Difference(1e-7, 1e-6, 1e-6), 1.0)
FAR = Result(Row("fsdp", 2), "plain", Difference(1e-3, 1e-6, 1e-6), 1.0)
FAILED = Result(Row("fsdp", 2), "plain", None, 1.0, error="ValueError: planted")
REFUSED = Result(Row("tensor", 2), "plain", None, 1.0, refused="parallel.tp is 2, which does not divide 3 heads")


@pytest.fixture
def experiment(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("a penny saved is a penny earned; " * 60)
    model = "sequence_length: 8, d_model: 16, n_layers: 1, n_heads: 2"
    return [
        "task=language_modelling",
        f"task_args={{data: {tmp_path / 'text.txt'}, {model}}}",
        "train.global_batch_size=4",
    ]


def call(monkeypatch: pytest.MonkeyPatch, results: list[Result], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(parity, "measure", lambda config, **rest: results)
    done = CliRunner().invoke(group, ["parity", *arguments])
    return done.exit_code, done.output


# --- how it ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "code", "words"),
    [
        ([GOOD], 0, "1.0e-07"),
        ([GOOD, REFUSED], 0, "REFUSED: parallel.tp is 2, which does not divide 3 heads"),
        ([GOOD, FAR], 1, "1 of 2 rows differ from one device, the first fsdp (dp_shard 2)"),
        ([GOOD, FAILED], 1, "1 of 2 rows failed, the first fsdp (dp_shard 2)"),
        ([REFUSED], 1, "every row was refused, the first because parallel.tp is 2"),
    ],
)
def test_exit_codes(
    results: list[Result], code: int, words: str, experiment: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, output = call(monkeypatch, results, *experiment)
    assert found == code and words in output and "Traceback" not in output


def test_rows_are_chosen_by_name_and_workers() -> None:
    assert {row.workers for row in parity.chosen("fsdp,ddp", "4")} == {4}
    assert [str(row) for row in parity.chosen("hsdp+tensor", None)] == [
        "hsdp+tensor (dp_replicate 2 × dp_shard 2 × tp 2)"
    ]
    assert [row.name for row in parity.chosen("deepspeed", None)] == ["deepspeed"]
    with pytest.raises(UserError, match="there is no row 'fspd'"):
        parity.chosen("fspd", None)
    with pytest.raises(UserError, match="no row with 3 workers: write some of 2, 4"):
        parity.chosen("ddp", "3")


# --- what is measured -------------------------------------------------------------------------------------------


def test_a_row_trains_as_the_experiment_says(experiment: list[str]) -> None:
    config = load_config([], [*experiment, "train.precision=bf16", "train.clip_norm=0.25"])
    assert parity.make_trial(parity.to_dict(config), 2).clip == 0.25
    results = parity.measure(config, steps=2, rows=[Row("model_parallel", 1)], checkpoints=False)
    assert results and all(result.passed and result.limit and result.variant != "bf16" for result in results)
    with pytest.raises(UserError, match="steps is 1: write at least 2"):
        parity.measure(config, steps=1, rows=[], checkpoints=True)
