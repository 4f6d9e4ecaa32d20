"""`trireme parity`: its matrix of rows, its table, and what it takes from an experiment."""

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from app.config import Config
from app.config.io import load_config
from app.errors import UserError
from experiments.parity import curves, matrix
from experiments.parity import experiment as parity
from experiments.parity.curves import Curve, Difference, Trial
from experiments.parity.experiment import table
from experiments.parity.matrix import EVERYTHING, Result, run_matrix
from experiments.parity.rows import ROWS, SINGLE, THREE_DIMENSIONS, Row
from strategies.parallelize import LayoutError, Options
from tests.pool import run_distributed
from tests.running import invoke
from tests.strategies.models import CPU, DDP, FSDP, TENSOR, gpt_trial, language_batch, language_loss

GOOD = Result(DDP, "plain", difference=Difference(1e-7, 1e-6, 1e-6), seconds=1.0)
FAR = Result(FSDP, "plain", difference=Difference(1e-3, 1e-6, 1e-6), seconds=1.0)
FAILED = Result(FSDP, "plain", error="ValueError: planted")
REFUSED = Result(TENSOR, "plain", refused="parallel.tp is 2, which does not divide 3 heads")


@pytest.fixture
def experiment(text: str) -> list[str]:
    """Arguments of a small language model."""
    model = "sequence_length: 8, d_model: 16, n_layers: 1, n_heads: 2"
    return [
        "task=language_modelling",
        f"task_args={{data: {text}, {model}}}",
        "train.global_batch_size=4",
    ]


@pytest.mark.slow
def test_a_row_trains_as_the_experiment_says(
    experiment: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits it stays within the drift of one device, here over three orders of a batch."""
    monkeypatch.setattr(matrix, "ORDERS", range(3))
    monkeypatch.setattr(matrix, "MARGIN", 4.0)
    monkeypatch.delitem(matrix.VARIANTS, "plain")
    config = load_config([], [*experiment, "train.precision=bf16", "train.clip_norm=0.25"])
    assert parity.make_trial(parity.to_dict(config), 2).clip == 0.25
    results = parity.measure(config, steps=2, rows=[FSDP], checkpoints=False)
    (result,) = results
    assert (result.variant, result.verdict) == (EVERYTHING, "ok")
    assert result.difference and result.bound
    assert result.difference.loss <= result.bound.loss < 0.1, table(results)
    assert result.difference.norm > 1e-6, "it ran in 32 bits"
    with pytest.raises(UserError, match="steps is 1: write at least 2"):
        parity.measure(config, steps=1, rows=[], checkpoints=True)


def crashing() -> Trial:
    """A trial whose second rank raises while the first one waits for it."""

    def planted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if os.environ["LOCAL_RANK"] == "1":
            raise ValueError("planted")
        return language_loss(model, batch)

    return dataclasses.replace(gpt_trial(steps=2), loss=planted)


@pytest.mark.slow
def test_a_row_that_raises_has_failed_and_the_next_ones_run() -> None:
    results = run_matrix(crashing, [DDP, Row("dp", 1)], variants=["plain"])
    assert [result.verdict for result in results] == ["FAILED", "ok"]
    assert "planted" in results[0].error and "FAILED: ValueError: planted" in table(results)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_each_row_is_told_when_it_begins_and_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    """And not only in the table at the end, for which a large model takes an hour."""
    lines: list[str] = []
    curve = Curve([1.0], [1.0], {"w": torch.ones(1)})

    def run_row(self: matrix.Runner, runs: Sequence[matrix.RowRun]) -> list[Result]:
        if runs[0].row == TENSOR:
            return [Result(TENSOR, run.variant, refused="it cannot") for run in runs]
        return [Result(run.row, run.variant, seconds=2.0, curve=curve) for run in runs]

    monkeypatch.setattr(matrix.Runner, "_run_row", run_row)
    results = run_matrix(
        partial(gpt_trial, steps=2),
        [DDP, TENSOR],
        variants=["plain"],
        checkpoints=checkpoints,
        progress=matrix.Progress(begins=lines.append, ends=lines.append),
    )
    assert [result.verdict for result in results if not result.after] == ["ok", "REFUSED"]
    # One device too saves a checkpoint, and continues those of others.
    count = 3 if checkpoints else 2
    expected = ["single (1 worker)"]
    for number, (row, outcome) in enumerate(((DDP, "ok (2 s)"), (TENSOR, "REFUSED (0 s)")), 1):
        expected += [f"{row}, row {number} of {count}"]
        expected += [f"{row}, row {number} of {count}: {outcome}"]
    assert lines[: len(expected)] == expected
    if checkpoints:
        assert lines[-1] == f"{SINGLE}, row 2 of 2 after 2 others: ok (4 s)"
    else:
        assert lines == expected


def test_a_trial_that_a_layout_cannot_train_is_one_sentence() -> None:
    batch = (torch.zeros(3, 8).long(),) * 2
    few = dataclasses.replace(gpt_trial(steps=2), batch=lambda step: batch, micro_batches=2)
    message = r"a batch of 3 is not enough for 2 .* 2 micro-batches .*global_batch_size=4"
    with pytest.raises(LayoutError, match=message):
        curves.parallelize_trial(few, DDP.layout, Options(), CPU)
    trial = dataclasses.replace(gpt_trial(), heads=2)
    message = r"parallel.tp is 4, which does not divide the model's 2 heads: write 1, 2"
    with pytest.raises(LayoutError, match=message):
        curves.parallelize_trial(trial, Row("tensor", 4).layout, Options(), CPU)


def test_a_batch_is_divided_with_all_that_belongs_to_its_samples() -> None:
    """Texts are, wherever they stand; what belongs to no sample is in every part."""
    samples = [
        {"name": f"file {i}", "x": torch.full((2,), i), "of": {"path": f"/{i}"}} for i in range(5)
    ]
    batch = {**default_collate(samples), "temperature": 0.5, "scale": torch.tensor(2.0)}
    part = curves.take_samples(batch, torch.tensor([3, 1]))
    assert part["name"] == ["file 3", "file 1"]
    assert part["of"] == {"path": ["/3", "/1"]}
    assert part["x"].tolist() == [[3, 3], [1, 1]]
    assert (part["temperature"], part["scale"]) == (0.5, 2.0)


def test_batches_with_texts_train_alike_in_parts_and_in_another_order() -> None:
    def named_batch(step: int) -> dict[str, Any]:
        tokens = language_batch(step)
        return {"names": [f"text {i}" for i in range(len(tokens[0]))], "tokens": tokens}

    def named_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        assert len(batch["names"]) == len(batch["tokens"][0])
        return language_loss(model, batch["tokens"])

    trial = dataclasses.replace(gpt_trial(steps=2), batch=named_batch, loss=named_loss)
    whole = curves.train(trial, SINGLE.layout, Options(), CPU)
    for other in (dataclasses.replace(trial, micro_batches=3), matrix.reordered(trial, seed=1)):
        curve = curves.train(other, SINGLE.layout, Options(), CPU)
        assert curve.losses == pytest.approx(whole.losses, rel=1e-4)


def test_an_error_of_several_lines_is_told_by_its_first() -> None:
    line = "torch.utils.checkpoint.CheckpointError: values differ."
    trace = f"Traceback (most recent call last):\n  File x\n{line}\nTip: see\nworkaround examples."
    assert matrix.error_line(trace) == line
    assert matrix.error_line("process 1 terminated with signal SIGSEGV") == (
        "process 1 terminated with signal SIGSEGV"
    )


def curve_of(rank: int, overrides: list[str], row: Row, micro_batches: int) -> Curve:
    """The curve of an experiment under a row, as `trireme parity` trains it."""
    values = parity.to_dict(load_config([], overrides))
    trial = dataclasses.replace(parity.make_trial(values, 3), micro_batches=micro_batches)
    return curves.train(trial, row.layout, Options(find_unused_parameters=True), CPU)


@pytest.mark.alone
@pytest.mark.parametrize(
    "words",
    [
        ["task=tests.app.training.test_batch_gather:Coupled", "task_args={kind: info_nce}"],
        ["task=tests.tasks:Gan"],
    ],
    ids=["a loss that gathers", "a step with two updates"],
)
def test_what_a_task_does_beside_its_loss_is_compared(words: list[str]) -> None:
    overrides = [*words, "train.global_batch_size=8", "optimizer.lr=0.01"]
    one_device = curve_of(0, overrides, SINGLE, micro_batches=1)
    loss_alone = dataclasses.replace(
        parity.make_trial(parity.to_dict(load_config([], overrides)), 3),
        task=None,
        training_step=None,
        task_optimizer=None,
        micro_batches=2,
    )
    other = curves.train(loss_alone, SINGLE.layout, Options(), CPU)
    assert not curves.difference(one_device, other).within(1e-3)
    for row in (DDP, FSDP):
        curve = run_distributed(curve_of, 2, overrides, row, 2)[0]
        assert curves.difference(one_device, curve).within(1e-5), row


def test_a_row_that_training_would_refuse_is_refused() -> None:
    """With the sentence that `trireme train` ends with, and without a worker's exception."""
    contrastive = load_config(
        [], ["task=tests.app.training.test_batch_gather:Coupled", "task_args={kind: info_nce}"]
    )
    updates = load_config([], ["task=tests.app.run.test_first_step:Updates"])
    rows = [Row("pipeline", 2, degrees={"pp": 2})]
    (trial,) = trials_of(contrastive)
    with pytest.raises(LayoutError, match=r"the task calls self.gather, but a pipeline has one"):
        curves.parallelize_trial(trial, rows[0].layout, Options(), CPU)
    (trial,) = trials_of(updates)
    with pytest.raises(LayoutError, match=r"training_step of its own, but the stages of a pipe"):
        curves.parallelize_trial(trial, rows[0].layout, Options(), CPU)
    with pytest.raises(LayoutError, match=r"takes a gradient inside of forward or of the loss"):
        curves.parallelize_trial(trial, FSDP.layout, Options(), CPU)


def trials_of(config: Config) -> list[Trial]:
    """The trials that `trireme parity` makes of an experiment."""
    trials: list[Trial] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "run_matrix", lambda make, *_, **__: trials.append(make()))
        parity.measure(config, steps=2, rows=[], checkpoints=False)
    return trials


CANNOT = Row("pipeline", 1)
FEW = [row for row in ROWS if row.workers <= 2]
"""Rows whose checkpoints are all paired; for every row that takes more than half an hour.

See experiments/benchmarks/PARITY.md.
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("rows", "variants"), [([*ROWS, *THREE_DIMENSIONS], None), ([*FEW, CANNOT], ["plain"])]
)
def test_the_whole_matrix(rows: list[Row], variants: list[str] | None) -> None:
    """Every row in every variant over 20 steps, also with three-dimensional layouts.

    And all ordered pairs of checkpoints with one and two workers, over 10 and 10 steps, but for a
    row that cannot run.
    """
    make_trial = partial(gpt_trial, tied=True)
    results = run_matrix(make_trial, rows, variants=variants, checkpoints=bool(variants))
    assert all(result.passed == (result.row != CANNOT) for result in results), table(results)
    continued = [result for result in results if result.after and result.passed]
    pairs = {(str(result.row), str(result.after)) for result in continued}
    assert len(pairs) == ((len(FEW) + 1) ** 2 if variants else 0), "one device counts too"
    refused = table(results).count("REFUSED: strategy pipeline needs at least 2 stages")
    assert refused == (2 if variants else 0)


CODES = [
    (GOOD, 0, "1.0e-07"),
    (REFUSED, 0, "REFUSED: parallel.tp is 2, which does not divide 3 heads"),
    (FAR, 1, "1 of 2 rows differ from one device, the first fsdp (dp_shard 2)"),
    (FAILED, 1, "1 of 2 rows failed, the first fsdp (dp_shard 2)"),
]


@pytest.mark.parametrize(
    ("second_result", "code", "words"),
    [*CODES, (None, 1, "every row was refused, the first because parallel.tp is 2")],
)
def test_the_exit_code_tells_whether_all_rows_agree(
    second_result: Result | None,
    code: int,
    words: str,
    experiment: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = [GOOD, second_result] if second_result else [REFUSED]
    monkeypatch.setattr(parity, "measure", lambda config, **options: results)
    ended = invoke("parity", *experiment, code=code)
    assert words in ended.output and "Traceback" not in ended.output


def test_a_difference_is_seen_in_losses_norms_and_weights() -> None:
    reference = Curve([1.0, 2.0], [3.0, 4.0], {"w": torch.ones(2)})
    changes: list[dict[str, Any]] = [
        {"losses": losses} for losses in ([1.0, 2.002], [1.0, float("nan")], [1.0])
    ]
    changes += [
        {"norms": [3.003, 4.0]},
        {"weights": {}},
        {"weights": {"w": torch.full((2,), 1.001)}},
    ]
    for changed in ({"losses": [1.000001, 2.0]}, *changes):
        difference = curves.difference(reference, dataclasses.replace(reference, **changed))
        result = Result(DDP, "plain", difference=difference, seconds=1.0)
        differs = changed in changes
        assert (result.verdict == "DIFFERS") == differs, changed
        assert ("DIFFERS" in table([result])) == differs, changed


def test_rows_are_chosen_by_name_and_workers() -> None:
    assert {row.workers for row in parity.choose_rows("fsdp,ddp", "4")} == {4}
    assert [row.name for row in parity.choose_rows("deepspeed", None)] == ["deepspeed"]
    with pytest.raises(UserError, match="there is no row 'fspd'"):
        parity.choose_rows("fspd", None)
    with pytest.raises(UserError, match="no row with 3 workers: write some of 2, 4"):
        parity.choose_rows("ddp", "3")


def test_the_table_has_the_worst_checkpoint_of_a_row_and_all_that_differ() -> None:
    pairs = [(DDP, DDP, 0.0), (DDP, FSDP, 3e-7), (FSDP, DDP, 2e-3), (FSDP, FSDP, 2e-4)]
    results = [
        Result(row, EVERYTHING, difference=Difference(loss, 0, 0), seconds=1, after=after)
        for row, after, loss in pairs
    ]
    lines = [line.split("after", 1)[1].split() for line in table(results).splitlines()[1:]]
    assert lines[0][:6] == ["2", "others,", "worst:", "fsdp", "(dp_shard", "2)"]
    assert lines[0][6] == "3.0e-07"
    assert lines[1][3] == "ddp"
    assert "DIFFERS" in lines[1]
    assert lines[2][0] == "fsdp"
    assert "DIFFERS" in lines[2]
