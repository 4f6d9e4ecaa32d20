"""A run whose batch grows is resumed to the bit, forked at its samples, and shows how it grows."""

from pathlib import Path

import pytest

from app.results.compare import curve_of
from app.run.look import look
from app.storage.storage import Storage
from tests.app.training.test_batch_growth_auto import AUTO, shorten
from tests.running import POINTS, curve, invoke, mlflow_run, same_bits, weights

pytestmark = pytest.mark.usefixtures("own_cache")
GROWING = [
    *POINTS,
    "train.batch_schedule=[[0,8],[24,16],[60,32]]",
    "train.micro_batch_size=8",
    "optimizer.lr_scaling=linear",
    "optimizer.lr_batch_size=8",
    "train.log_every=1",
    "train.noise_scale_every=2",
    "launcher=local",
    "strategy=single",
]


def test_a_run_goes_on_to_the_bit_before_and_after_a_step_up(tmp_path: Path) -> None:
    storage = f"run.storage={tmp_path}"
    words = ["train.steps=9", "checkpoint.every_steps=4", "checkpoint.keep_last=3"]
    invoke("train", *GROWING, storage, "run.name=uninterrupted", *words)
    batches = curve(tmp_path, "uninterrupted", "train/global_batch_size")
    assert list(batches.values()) == [8, 8, 8, 16, 16, 16, 32, 32, 32]
    assert mlflow_run(tmp_path, "uninterrupted").data.params["train.batch_schedule"]
    for steps in (3, 5, 9):  # the last step before a step up, one after it, and the last
        invoke("train", *GROWING, storage, "run.name=parts", f"train.steps={steps}")
    assert same_bits(weights(tmp_path / "parts"), weights(tmp_path / "uninterrupted"))
    for metric in ("train/loss", "train/lr", "train/samples_seen"):
        assert curve(tmp_path, "parts", metric) == curve(tmp_path, "uninterrupted", metric)

    uninterrupted = tmp_path / "uninterrupted"
    invoke("fork", uninterrupted, "--at", "4", "train.global_batch_size=24", "run.name=flat")
    rates = curve(tmp_path, "flat", "train/lr")
    assert rates[9] == pytest.approx(3e-3), "a batch that is given ends the schedule"
    curves = [
        curve_of(Storage(tmp_path / name), "train/loss") for name in ("uninterrupted", "flat")
    ]
    assert [list(each.samples[-5:]) for each in curves] == [
        [56.0, 72.0, 104.0, 136.0, 168.0],
        [64.0, 88.0, 112.0, 136.0, 160.0],
    ]


def test_a_run_that_decides_on_its_batch_shows_it_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    words = [*AUTO, "tracking.log_model=false", "launcher=local", "strategy=single"]
    result = invoke("train", *words, f"run.storage={tmp_path}", "run.name=auto")
    decisions = mlflow_run(tmp_path, "auto").data.metrics
    assert decisions.keys() >= {"batch/difference", "batch/error", "batch/loss_same"}
    batches = curve(tmp_path, "auto", "train/global_batch_size")
    assert set(batches.values()) > {8}
    doubled = curve(tmp_path, "auto", "batch/loss_doubled")
    assert doubled.keys() == curve(tmp_path, "auto", "batch/loss_same").keys()
    assert "8 → 16, loss difference" in result.output
    assert "batch     8 → 16 at 80 samples" in result.output
    shown = look(Storage(tmp_path / "auto"))
    assert shown.step == shown.steps == max(batches) < 100
    again = invoke("train", *words, f"run.storage={tmp_path}", "run.name=auto")
    assert "has finished already" in again.output
