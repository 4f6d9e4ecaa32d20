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

pytestmark = pytest.mark.pure

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


class GradientPenalty(Chain):
    """The norm of a batch's gradient is no mean over its samples, and it cannot be taken without gradients."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 10 * sum(gradient.square().sum() for gradient in gradients)


class LargestAnswer(Chain):
    """Of two halves of the first samples the losses' mean is nearly that of the whole. On meta it has no operations."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = 3e-3 if bool(batch[0].isfinite().all()) else 1.0
        return super().loss(model, batch) + weight * model(batch[0]).max()


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


class CountsOnce(Chain):
    """Its first loss is another one than those after."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) * (1 + 0.1 * (self.calls > 1))


class Counting(nn.Sequential):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls > 2))


class CountsInTheModel(Chain):
    def build_model(self) -> nn.Module:
        return Counting(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))


class CountsInSixteenBits(Chain):
    def build_model(self) -> nn.Module:
        return Counting(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return 10 + F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


class Draws(Chain):
    """Random in evaluation too, as a variational model is."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + 0.1 * torch.rand(()))


class ByFrequencyOfRareWords(ByFrequency):
    """No word comes twice in the few samples that are looked at."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(Number(), nn.Embedding(1000, 8, scale_grad_by_freq=True), nn.Linear(8, 4))


class Number(nn.Module):
    """A word of its own for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, 0] * 100 + x[:, 1] * 37).long() % 1000


class MostlyMasked(Chain):
    """Most samples have no target that counts, and the loss couples those that have."""

    def items(self, batch: Any) -> Any:
        return (batch[0][:, 0] > 0.5).sum()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        counted = batch[0][:, 0] > 0.5
        answers = model(batch[0])[counted]
        return (F.softmax(answers.mean(1), dim=0) * F.cross_entropy(answers, batch[1][counted], reduction="none")).sum()


class Lazy(Chain):
    """Nothing can be seen of parameters without a size."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 4))
        model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return model


class Branches(Chain):
    """What one sample decides is done with all of a batch; all that are looked at decide alike."""

    def build_model(self) -> nn.Module:
        return Branching()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare, self.out = nn.Linear(2, 8), nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rare(x) if x[0, 0] > 1e6 else self.usual(x))


class OverwritesProducts(Chain):
    """What a product puts out is overwritten by the activation that follows."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), Overwriting(), Overwriting(), nn.Linear(8, 4))

    def blocks(self, model: nn.Module) -> list[str]:
        return ["1", "2"]


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x), inplace=True))


class MeanOverSamples(Chain):
    """Beside the mean over what counts, a mean over all samples."""

    def items(self, batch: Any) -> Tensor:
        return (batch[1] > 1).sum()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        answers = model(batch[0])
        counted = F.cross_entropy(answers, batch[1].where(batch[1] > 1, -100))
        return counted + 0.1 * answers.square().mean()


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


COUPLED = ("InBatchNegatives", "PairwiseRanking", "BatchVariance", "OfTheMean", "ByFrequency")
COUPLED += ("ByFrequencyOfRareWords", "MostlyMasked", "LargestAnswer", "MeanOverSamples")


@pytest.mark.parametrize("task", COUPLED)
@pytest.mark.parametrize("more", [("strategy=ddp",), ("strategy=fsdp", "train.micro_batch_size=2")])
def test_a_loss_that_couples_samples_is_noted_where_a_batch_is_split(task: str, more: tuple[str, ...]) -> None:
    (note,) = [note for note in prepared(task, *more).notes if "depend on one another" in note]
    assert "splits each batch into" in note and "self.gather(x)" in note


def test_a_loss_that_takes_gradients_is_tried_with_numbers() -> None:
    (note,) = [note for note in prepared("GradientPenalty", "strategy=ddp").notes if "depend on one another" in note]
    assert "splits each batch into" in note


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


@pytest.mark.parametrize("task", ["Counts", "CountsOnce", "CountsInTheModel", "CountsInSixteenBits"])
def test_a_loss_that_counts_its_calls_is_noted_where_there_are_micro_batches(task: str) -> None:
    (note,) = [note for note in prepared(task, "strategy=ddp", "train.micro_batch_size=2").notes if "often" in note]
    assert "4 times in a step" in note
    assert not [note for note in prepared(task, "strategy=ddp").notes if "often" in note]
    drawn = prepared("Draws", "strategy=ddp", "train.micro_batch_size=2")
    assert not [note for note in drawn.notes if "often" in note]


def test_the_task_is_as_it_was_after_the_first_step() -> None:
    wanted = config(f"task={HERE}:CountsOnce")
    task = read_task(wanted)
    take_first_step(wanted, task)
    assert vars(task).get("calls", 0) == 0


def test_layers_without_a_size_get_it_before_they_are_looked_at() -> None:
    with pytest.raises(LayoutError, match=r"2\.weight has a hook that sees or changes its gradient"):
        prepared("Lazy", "strategy=ddp")


def test_a_branch_that_no_sample_here_takes_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"rare\.bias \(and \d more\) is used for some samples"):
        prepared("Branches", "strategy=fsdp")


@pytest.mark.parametrize(
    ("task", "sentence"), [("Branches", "a number of the batch decides"), ("WithBatchNorm", "1 normalises over")]
)
def test_one_device_in_micro_batches_is_told_what_they_change(task: str, sentence: str) -> None:
    in_parts = config(f"task={HERE}:{task}", "strategy=single", "workers=1", "train.micro_batch_size=4")
    (note,) = [n for n in prepare(in_parts, read_task(in_parts), 1, devices_per_node=None).notes if sentence in n]
    assert "this run differs from one" in note
    whole = config(f"task={HERE}:{task}", "strategy=single", "workers=1")
    assert prepare(whole, read_task(whole), 1, devices_per_node=None).notes == ()


def test_a_micro_batch_of_one_sample_is_refused_where_the_model_does_not_take_it() -> None:
    with pytest.raises(LayoutError, match=r"one sample here, which the model does not take \(Expected more than 1"):
        prepared("WithBatchNorm", "strategy=ddp", "train.micro_batch_size=1")


def test_what_cannot_be_recomputed_is_refused_and_the_mode_that_can_is_named() -> None:
    asked = ("strategy=ddp", "train.activation_checkpointing=selective")
    with pytest.raises(LayoutError, match=r"activation_checkpointing=selective does \(.*mutated\): write full instead"):
        prepared("OverwritesProducts", *asked)
    assert prepared("OverwritesProducts", "strategy=ddp", "train.activation_checkpointing=full").layout.name == "ddp"


def test_what_is_large_is_looked_at_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    seen = take_first_step(config(), Wide())
    assert not seen.with_numbers
    assert Trait.LOSS_READS_PARAMETERS in {observation.trait for observation in seen.observations}
    assert time.monotonic() - began < 60  # on real numbers its four billion parameters would take 16 GB
    monkeypatch.setattr(first_step, "MAX_OPERATIONS", 0.0)
    assert not take_first_step(config(), Chain()).with_numbers


def test_what_the_task_raises_is_left_to_the_workers(tmp_path: Path) -> None:
    wanted = config("task=tests.tasks:Raises")
    assert take_first_step(wanted, read_task(wanted)).observations == ()
