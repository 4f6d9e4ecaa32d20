"""What the first step of a task shows before a worker starts: refusals, notes and its cost."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from app.errors import UserError
from app.run import first_step
from app.run.first_step import take_first_step
from app.run.prepare import Prepared, prepare, read_task
from app.run.resolve import resolve
from strategies.layout import LayoutError, choose
from strategies.options import Options
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
        own_rows = torch.arange(len(vectors), device=vectors.device)
        return F.cross_entropy(vectors @ vectors.mT / 0.1, own_rows)


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
    """The norm of a batch's gradient is not a mean over its samples, and needs gradients."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 10 * sum(gradient.square().sum() for gradient in gradients)


class LargestAnswer(Chain):
    """A loss whose mean over two halves of the first samples is nearly that over all.

    The meta device cannot run it.
    """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = 3e-3 if bool(batch[0].isfinite().all()) else 1.0
        return super().loss(model, batch) + weight * model(batch[0]).max()


class LargestOfFew(Chain):
    """The largest of few different answers, which two halves of a batch are likely to share."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        kinds = torch.eye(2)[batch[1] % 2]
        return super().loss(model, batch) + 0.1 * model(kinds).max()


class OfTheMean(Chain):
    """A function of the mean that is not linear."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch).square()


class ByFrequency(Chain):
    """A mean whose gradient is not one: the embedding divides it by a word's count in the batch."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            FirstWord(), nn.Embedding(4, 8, scale_grad_by_freq=True), nn.Linear(8, 4)
        )


class FirstWord(nn.Module):
    """Gives every sample the same word."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0].new_zeros(len(x), dtype=torch.long)


class Counts(Chain):
    """A loss that grows with its calls."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) * (1 + 0.1 * self.calls)


class WithBatchNorm(Chain):
    """Its statistics couple samples too, for which there is another note."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


class NormalisesHalves(WithBatchNorm):
    """Takes three samples at least, because each half of a batch needs two for its statistics."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = torch.cat([model(half) for half in inputs.chunk(2)])
        return F.cross_entropy(outputs, targets)


class CountsOnce(Chain):
    """Its first loss differs from all later ones."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) * (1 + 0.1 * (self.calls > 1))


class Counting(nn.Sequential):
    """A model whose outputs change after two calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls > 2))


class CountsInTheModel(Chain):
    """Its model counts its calls."""

    def build_model(self) -> nn.Module:
        return Counting(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))


class CountsInSixteenBits(Chain):
    """Its model counts its calls, and has 16 bits."""

    def build_model(self) -> nn.Module:
        return Counting(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return 10 + F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


class Draws(Chain):
    """Random in evaluation too, as a variational model is."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + 0.1 * torch.rand(()))


class ByFrequencyOfRareWords(ByFrequency):
    """No word comes twice in the few samples that are examined."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            Number(), nn.Embedding(1000, 8, scale_grad_by_freq=True), nn.Linear(8, 4)
        )


class Number(nn.Module):
    """Gives each sample another word."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, 0] * 100 + x[:, 1] * 37).long() % 1000


class MostlyMasked(Chain):
    """Most samples have no target that counts, and the loss couples those that have."""

    def items(self, batch: Any) -> Any:
        return (batch[0][:, 0] > 0.5).sum()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        counts = batch[0][:, 0] > 0.5
        answers = model(batch[0])[counts]
        losses = F.cross_entropy(answers, batch[1][counts], reduction="none")
        return (F.softmax(answers.mean(1), dim=0) * losses).sum()


class Lazy(Chain):
    """A model with a lazy layer, whose parameters have no size before the first call."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 4))
        model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return model


class Branches(Chain):
    """One sample decides the branch of the whole batch; all examined samples decide alike."""

    def build_model(self) -> nn.Module:
        return Branching()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.Linear(2, 8)
        self.rare = nn.Linear(2, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rare(x) if x[0, 0] > 1e6 else self.usual(x))


class OverwritesProducts(Chain):
    """The output of a product is overwritten by the activation that follows."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), Overwriting(), Overwriting(), nn.Linear(8, 4))

    def blocks(self, model: nn.Module) -> list[str]:
        return ["1", "2"]


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x), inplace=True))


class TakesGradients(OverwritesProducts):
    """Blocks in which torch.func takes a gradient, where torch allows no hooks of saved tensors."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), WithGradient(), WithGradient(), nn.Linear(8, 4))


class WithGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda y: y.sin().sum())(x)


class OverwritesParts(OverwritesProducts):
    """Parts of a product are overwritten of which torch does not know that they are parts."""

    def build_model(self) -> nn.Module:
        gates = [Gate(), Gate()]
        return nn.Sequential(nn.Linear(2, 8), *gates, nn.Linear(8, 4))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = torch.unsafe_split(self.up(x), 8, dim=-1)
        return x + gate.sigmoid_() * value


class MeanOverSamples(Chain):
    """The mean over what counts, plus a mean over all samples."""

    def items(self, batch: Any) -> Tensor:
        return (batch[1] > 1).sum()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        answers = model(batch[0])
        mean_over_counted = F.cross_entropy(answers, batch[1].where(batch[1] > 1, -100))
        return mean_over_counted + 0.1 * answers.square().mean()


class Wide(Penalised):
    """Too large to run with real numbers; it would be noticed if it were."""

    def build_model(self) -> nn.Module:
        wide = nn.Linear(20_000, 200_000)
        return nn.Sequential(nn.Linear(2, 20_000), nn.ReLU(), wide, nn.Linear(200_000, 4))


def prepared(task: str, *overrides: str) -> Prepared:
    """The run of a task of this file, prepared for two workers."""
    run_config = config(f"task={HERE}:{task}", *overrides)
    return prepare(run_config, read_task(run_config), 2, devices_per_node=2)


def notes_with(words: str, run: Prepared) -> list[str]:
    """The notes of a prepared run that contain these words."""
    return [note for note in run.notes if words in note]


@pytest.mark.parametrize("task", ["Penalised", "LooksAtNumbers"])
def test_a_loss_that_reads_parameters_is_refused_by_name_before_a_worker_starts(task: str) -> None:
    message = r"the loss reads entry\.weight \(and \d+ more\).*write strategy=ddp"
    with pytest.raises(LayoutError, match=message):
        prepared(task, *PIPELINE)
    assert prepared(task, "strategy=ddp").layout.name == "ddp"


def test_auto_takes_a_layout_that_keeps_what_the_model_does() -> None:
    assert prepared("Penalised", "strategy=auto").layout.name == "ddp"


COUPLED = ("InBatchNegatives", "PairwiseRanking", "BatchVariance", "OfTheMean", "ByFrequency")
COUPLED += ("LargestOfFew",)
COUPLED += ("ByFrequencyOfRareWords", "MostlyMasked", "LargestAnswer", "MeanOverSamples")


@pytest.mark.parametrize(
    ("task", "overrides"),
    [
        *((task, ("strategy=ddp",)) for task in COUPLED),
        *(
            pytest.param(
                task,
                ("strategy=fsdp", "train.micro_batch_size=2"),
                marks=[pytest.mark.slow] * (task != COUPLED[0]),
            )
            for task in COUPLED
        ),
    ],
)
def test_a_loss_that_couples_samples_is_noted_where_a_batch_is_split(
    task: str, overrides: tuple[str, ...]
) -> None:
    (note,) = notes_with("depend on one another", prepared(task, *overrides))
    assert "splits each batch into" in note and "self.gather(x)" in note


class RecomputesViews(nn.Module):
    """A block that counts its calls and computes with views, in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(2, 4)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.inp(x), use_reentrant=True)

    def block(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.out(x.t().t())


class WithReentrantCheckpoint(Chain):
    def build_model(self) -> nn.Module:
        return RecomputesViews()


class HookedGradientPenalty(Chain):
    """The loss takes the gradient of its inputs, and a hook masks one of a parameter's."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        weight: Any = model[2].weight
        weight.register_hook(lambda gradient: gradient * torch.ones(8).cumsum(0).lt(4))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        outputs = model(inputs)
        (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.cross_entropy(outputs, batch[1]) + gradient.square().sum(1).mean()


def test_a_gradient_of_a_hooked_model_is_tried_with_numbers() -> None:
    first = take_first_step(config(), HookedGradientPenalty())
    assert first.with_numbers
    assert Trait.GRADIENT_IN_LOSS in {observation.trait for observation in first.observations}


def test_a_reentrant_checkpoint_is_tried_with_numbers() -> None:
    first = take_first_step(config(), WithReentrantCheckpoint())
    assert first.with_numbers
    assert Trait.CHANGES_BUFFERS in {observation.trait for observation in first.observations}


def test_a_loss_that_takes_gradients_is_tried_with_numbers() -> None:
    run = prepared("GradientPenalty", "strategy=ddp")
    (note,) = notes_with("depend on one another", run)
    assert "splits each batch into" in note


class Updates(Chain):
    """A step with two updates, of which one is not with `loss`, and comes in every third step."""

    steps = 0

    def penalised(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 10 * sum(gradient.square().sum() for gradient in gradients)

    def training_step(self, update: Any) -> None:
        self.steps += 1
        update(self.loss)
        if self.steps % 3 == 0:
            update(self.penalised)


class UpdatesWithoutMean(Chain):
    """A step whose loss, which is not `loss`, is one number for each sample."""

    def training_step(self, update: Any) -> None:
        update(self.of_samples)

    def of_samples(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_every_loss_of_a_training_step_is_tried() -> None:
    message = "takes a gradient inside of forward or of the loss .* write strategy=ddp"
    with pytest.raises(LayoutError, match=message):
        prepared("Updates", "strategy=fsdp")
    (note,) = notes_with("depend on one another", prepared("Updates", "strategy=ddp"))
    assert "splits each batch into" in note
    with pytest.raises(UserError, match=r"task's of_samples has shape \(4,\), but it must be one"):
        prepared("UpdatesWithoutMean")


def test_a_pipeline_says_first_that_it_takes_no_training_step() -> None:
    with pytest.raises(UserError, match="training_step of its own, but the stages"):
        prepared("Updates", *PIPELINE)


@pytest.mark.parametrize(
    ("task", "keeps_pipelines"),
    [
        (f"{HERE}:Updates", False),
        ("tests.app.training.test_batch_gather:Coupled", False),
        ("tests.chain:Chain", True),
    ],
)
def test_auto_takes_no_layout_that_cannot_take_the_tasks_steps(
    task: str, keeps_pipelines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def asking(*args: Any, is_kept: Any, **kwargs: Any) -> Any:
        layouts = [choose("ddp", 2), choose("pipeline", 2, pp=2)]
        asked.append([is_kept(layout, Options()) for layout in layouts])
        return resolve(*args, is_kept=is_kept, **kwargs)

    monkeypatch.setattr("app.run.prepare.resolve", asking)
    args = "task_args={kind: info_nce}" if "Coupled" in task else "task_args={}"
    run_config = config(f"task={task}", args, "strategy=ddp", "train.eval_batch_size=4")
    prepare(run_config, read_task(run_config), 2, devices_per_node=2)
    assert asked == [[True, keeps_pipelines]]


class InSixteenBits(Chain):
    """Its rounding must not be taken for a loss that couples samples."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def test_a_loss_that_is_a_mean_is_not_noted() -> None:
    for task in ("InSixteenBits", "Penalised", "WithBatchNorm"):
        assert not notes_with("depend on", prepared(task, "strategy=ddp")), task


@pytest.mark.parametrize(
    "task",
    [
        "CountsOnce",
        "CountsInTheModel",
        *(pytest.param(task, marks=pytest.mark.slow) for task in ("Counts", "CountsInSixteenBits")),
    ],
)
def test_a_loss_that_counts_its_calls_is_noted_where_there_are_micro_batches(task: str) -> None:
    (note,) = notes_with("often", prepared(task, "strategy=ddp", "train.micro_batch_size=2"))
    assert "4 times in a step" in note
    assert not notes_with("often", prepared(task, "strategy=ddp"))
    random_loss = prepared("Draws", "strategy=ddp", "train.micro_batch_size=2")
    assert not notes_with("often", random_loss)


def test_the_task_is_as_it_was_after_the_first_step() -> None:
    run_config = config(f"task={HERE}:CountsOnce")
    task = read_task(run_config)
    take_first_step(run_config, task)
    assert vars(task).get("calls", 0) == 0


def test_lazy_layers_get_their_size_before_they_are_examined() -> None:
    message = r"2\.weight has a hook that sees or changes its gradient"
    with pytest.raises(LayoutError, match=message):
        prepared("Lazy", "strategy=ddp")


def test_a_branch_that_no_examined_sample_takes_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"rare\.bias \(and \d more\) is used for some samples"):
        prepared("Branches", "strategy=fsdp")


@pytest.mark.parametrize(
    ("task", "sentence"),
    [("Branches", "a value in the batch decides"), ("WithBatchNorm", "1 normalises over")],
)
def test_on_one_device_a_note_says_what_micro_batches_change(task: str, sentence: str) -> None:
    single = (f"task={HERE}:{task}", "strategy=single", "workers=1")
    run_config = config(*single, "train.micro_batch_size=4")
    run = prepare(run_config, read_task(run_config), 1, devices_per_node=None)
    (note,) = notes_with(sentence, run)
    assert "this run differs from one" in note
    full_batch = config(*single)
    assert prepare(full_batch, read_task(full_batch), 1, devices_per_node=None).notes == ()


def test_a_micro_batch_that_is_too_small_for_the_model_is_refused() -> None:
    message = r"one sample here, which the model does not take \(Expected more than 1"
    with pytest.raises(LayoutError, match=message):
        prepared("WithBatchNorm", "strategy=ddp", "train.micro_batch_size=1")
    for size, samples in ((1, "one sample"), (2, "2 samples")):
        with pytest.raises(LayoutError, match=f"{samples} here, which the model does not take"):
            prepared("NormalisesHalves", "strategy=ddp", f"train.micro_batch_size={size}")
    prepared("NormalisesHalves", "strategy=ddp", "train.micro_batch_size=4")


def test_a_checkpointing_mode_that_fails_is_refused_and_another_named() -> None:
    message = r"activation_checkpointing=selective does \(.*mutated\): write full instead"
    selective = "train.activation_checkpointing=selective"
    with pytest.raises(LayoutError, match=message):
        prepared("OverwritesProducts", "strategy=ddp", selective)
    with pytest.raises(LayoutError, match=r"gradients change, .* write full"):
        prepared("OverwritesParts", "strategy=ddp", selective)
    full = "train.activation_checkpointing=full"
    for task in ("OverwritesProducts", "OverwritesParts"):
        assert prepared(task, "strategy=ddp", full).layout.name == "ddp"


def test_a_model_whose_saved_tensors_cannot_be_moved_is_refused() -> None:
    moving = "train.activation_offloading=true"
    message = r"as train.activation_offloading does \(.*hooks.*\): leave it out"
    for workers, strategy in ((1, "single"), (2, "ddp")):
        run_config = config(f"task={HERE}:TakesGradients", f"strategy={strategy}", moving)
        with pytest.raises(LayoutError, match=message):
            prepare(run_config, read_task(run_config), workers, devices_per_node=2)
    assert prepared("OverwritesProducts", "strategy=ddp", moving).layout.name == "ddp"


def test_a_large_model_is_examined_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    first = take_first_step(config(), Wide())
    assert not first.with_numbers
    assert Trait.LOSS_READS_PARAMETERS in {observation.trait for observation in first.observations}
    # With real numbers, its four billion parameters would take 16 GB.
    assert time.monotonic() - start < 60
    monkeypatch.setattr(first_step, "MAX_OPERATIONS", 0.0)
    assert not take_first_step(config(), Chain()).with_numbers


def test_an_exception_of_the_task_is_left_to_the_workers(tmp_path: Path) -> None:
    run_config = config("task=tests.tasks:Raises")
    assert take_first_step(run_config, read_task(run_config)).observations == ()
