"""What the first step of a task shows before a worker starts: the sentence, the note, and what it may cost."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.run import first_step
from app.run.first_step import take_first_step
from app.run.prepare import Prepared, prepare, read_task
from strategies.layout import LayoutError
from strategies.traits import Trait
from tests.chain import Chain, config

HERE = "tests.app.run.test_first_step"
PIPELINE = ("strategy=pipeline", "parallel.pp=2")


class Penalised(Chain):
    """A penalty on every weight, written into the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


class LooksAtNumbers(Penalised):
    """Code that the meta device cannot run."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        scale = 2.0 if float(batch[0].max()) > 0 else 1.0
        return scale * super().loss(model, batch)


class InBatchNegatives(Chain):
    """Every sample is in every other sample's loss."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        vectors = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(vectors @ vectors.mT / 0.1, torch.arange(len(vectors), device=vectors.device))


class PairwiseRanking(Chain):
    """A loss of pairs of samples."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])[:, 0]
        differences = scores[:, None] - scores[None, :]
        return F.softplus(-differences * (batch[1][:, None] > batch[1][None, :])).mean()


class BatchVariance(Chain):
    """A loss that asks the outputs of a batch to differ (VICReg, Barlow Twins)."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.relu(1 - model(batch[0]).std(0)).mean()


class OfTheMean(Chain):
    """A function of the mean that is not linear."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch).square()


class ByFrequency(Chain):
    """The loss is a mean, and its gradient is not: an embedding divides it by how often a word is in the batch."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(FirstWord(), nn.Embedding(4, 8, scale_grad_by_freq=True), nn.Linear(8, 4))


class FirstWord(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0].new_zeros(len(x), dtype=torch.long)


class Counts(Chain):
    """A loss that grows with its calls."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) * (1 + 0.1 * self.calls)


class WithBatchNorm(Chain):
    """Its statistics couple samples too, which a note of its own says."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


class Wide(Penalised):
    """Too many operations for real numbers, and of a size that would show if it were run."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 20_000), nn.ReLU(), nn.Linear(20_000, 200_000), nn.Linear(200_000, 4))


def prepared(task: str, *more: str) -> Prepared:
    wanted = config(f"task={HERE}:{task}", *more)
    return prepare(wanted, read_task(wanted), 2, devices_per_node=2)


@pytest.mark.parametrize("task", ["Penalised", "LooksAtNumbers"])
def test_a_loss_that_reads_parameters_is_refused_by_name_before_a_worker_starts(task: str) -> None:
    with pytest.raises(LayoutError, match=r"the loss reads entry\.weight \(and \d+ more\).*write strategy=ddp"):
        prepared(task, *PIPELINE)
    assert prepared(task, "strategy=ddp").layout.name == "ddp"


def test_auto_takes_a_layout_that_keeps_what_the_model_does() -> None:
    assert prepared("Penalised", "strategy=auto").layout.name == "ddp"


@pytest.mark.parametrize("task", ["InBatchNegatives", "PairwiseRanking", "BatchVariance", "OfTheMean", "ByFrequency"])
@pytest.mark.parametrize("more", [("strategy=ddp",), ("strategy=fsdp", "train.micro_batch_size=2")])
def test_a_loss_that_couples_samples_is_noted_where_a_batch_is_split(task: str, more: tuple[str, ...]) -> None:
    (note,) = [note for note in prepared(task, *more).notes if "depend on one another" in note]
    assert "splits each batch into" in note and "self.gather(x)" in note


class InSixteenBits(Chain):
    """Its rounding is not a loss that couples samples."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def test_a_loss_that_is_a_mean_is_not_noted() -> None:
    assert not [note for note in prepared("InSixteenBits", "strategy=ddp").notes if "depend on" in note]
    assert not [note for note in prepared("Penalised", "strategy=ddp").notes if "depend on" in note]
    assert not [note for note in prepared("WithBatchNorm", "strategy=ddp").notes if "depend on" in note]


def test_a_loss_that_counts_its_calls_is_noted_where_there_are_micro_batches() -> None:
    (note,) = [note for note in prepared("Counts", "strategy=ddp", "train.micro_batch_size=2").notes if "often" in note]
    assert "4 times in a step" in note
    assert not [note for note in prepared("Counts", "strategy=ddp").notes if "often" in note]


def test_a_micro_batch_of_one_sample_is_refused_where_the_model_does_not_take_it() -> None:
    with pytest.raises(LayoutError, match=r"one sample here, which the model does not take \(Expected more than 1"):
        prepared("WithBatchNorm", "strategy=ddp", "train.micro_batch_size=1")


def test_what_is_large_is_looked_at_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    seen = take_first_step(config(), Wide())
    assert not seen.with_numbers
    assert Trait.LOSS_READS_PARAMETERS in {observation.trait for observation in seen.observations}
    assert time.monotonic() - began < 60  # on real numbers its four billion parameters would take 16 GB
    monkeypatch.setattr(first_step, "OPERATIONS", 0.0)
    assert not take_first_step(config(), Chain()).with_numbers


def test_what_the_task_raises_is_left_to_the_workers(tmp_path: Path) -> None:
    wanted = config("task=tests.tasks:Raises")
    assert take_first_step(wanted, read_task(wanted)).observations == ()
