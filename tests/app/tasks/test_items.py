"""Losses that are means over what a task counts: the same under every layout, also where a part counts nothing, and
the speed that is shown of them is true."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.config import Config
from app.config.io import load_config
from app.errors import NonFiniteError, UserError
from app.run.items_remark import items_remark
from app.tasks import load_task
from app.tasks.base import Task
from app.tasks.items import count_items, weighs_items
from app.tasks.language import LanguageModelling
from app.training.events import StepsDone
from tests.app.kit import logged, training_of
from tests.pool import run_distributed

SAMPLES, LENGTH, CLASSES, WIDTH, IGNORED = 200, 6, 11, 8, -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.entry(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Masked(Task):
    """Half of the samples have no label that counts; the others have one to six. The mean is torch's own."""

    def build_model(self) -> nn.Module:
        return Tagger()

    def train_data(self) -> TensorDataset:
        return self._tokens(seed=0)

    @staticmethod
    def _tokens(seed: int) -> TensorDataset:
        source = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 16, (SAMPLES, LENGTH), generator=source)
        labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=source)
        labels[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=source)] = IGNORED
        labels[torch.rand(SAMPLES, generator=source) < 0.5] = IGNORED
        return TensorDataset(tokens, labels)

    def items(self, batch: Any) -> Tensor:
        return (batch[1] != IGNORED).sum()

    def loss(self, model: Any, batch: Any) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Divided(Masked):
    """The mean is by hand: its own division is 0 / 0, and so is its gradient."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        tokens, labels = batch
        counts = labels != IGNORED
        each = F.cross_entropy(model(tokens).flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
        value = (each * counts.flatten()).sum() / counts.sum()
        self.log("part", value)
        return value


class Scaled(Divided):
    """A parameter that only the loss uses, by which it multiplies before it divides; and a root of nothing, whose
    gradient is infinite."""

    class Model(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.3))

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(tokens), self.temperature

    def build_model(self) -> nn.Module:
        return self.Model()

    def loss(self, model: Any, batch: Any) -> Tensor:
        tokens, labels = batch
        logits, temperature = model(tokens)
        counts = (labels != IGNORED).flatten()
        each = F.cross_entropy(logits.flatten(0, 1) * temperature, labels.clamp(min=0).flatten(), reduction="none")
        mean = (each * counts).sum() / counts.sum()
        root_of_nothing = (logits * 0.0).square().sum().sqrt() if not counts.any() else 0.0
        return mean + root_of_nothing


class Inside(Masked):
    """The model computes its loss itself, as many published ones do."""

    class Model(Tagger):
        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
            logits = super().forward(tokens)
            if labels is None:
                return logits
            counts = (labels != IGNORED).flatten()
            each = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
            return (each * counts).sum() / counts.sum()

    def build_model(self) -> nn.Module:
        return self.Model()

    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(*batch)


class Padded(Masked):
    """What counts is said by a mask of its own, as numbers; the losses are squares."""

    def train_data(self) -> TensorDataset:
        tokens, labels = self._tokens(seed=1).tensors
        return TensorDataset(tokens, labels.clamp(min=0).float(), (labels != IGNORED).float())

    def items(self, batch: Any) -> Tensor:
        return batch[2].sum()

    def loss(self, model: Any, batch: Any) -> Tensor:
        tokens, wanted, mask = batch
        return ((model(tokens)[..., 0] - wanted).square() * mask).sum() / mask.sum()


KINDS = [Masked, Divided, Scaled, Inside, Padded]
STEPS = 4


def settings(kind: type[Task], *more: str) -> Config:
    given = ["train.global_batch_size=8", f"train.steps={STEPS}", "train.log_every=1", "optimizer.lr=0.01"]
    return load_config([], [f"task={kind.__module__}:{kind.__qualname__}", "run.name=items", *given, *more])


def curve(rank: int, world: int, kind: type[Task], strategy: str, folder: str, *more: str) -> dict[str, Any]:
    """Losses and gradient norms by step, the task's logged part, and the trained weights."""
    training, events = training_of(settings(kind, *more), folder, rank, world, strategy)
    training.run()
    metrics = [event.values for event in logged(events)]
    names = ("train/loss", "train/grad_norm", "train/part")
    found = {name: [values[name] for values in metrics if name in values] for name in names}
    return {**found, "weights": training.parallel.full_model_state()}


LAYOUTS = [
    ("single", 1, ("train.micro_batch_size=1",)),
    ("single", 1, ("train.micro_batch_size=3",)),
    ("ddp", 2, ()),
    ("ddp", 2, ("train.micro_batch_size=1",)),
    ("fsdp", 2, ("train.micro_batch_size=1",)),
    ("tensor", 2, ("train.micro_batch_size=1",)),
    ("pipeline", 2, ("train.micro_batch_size=1",)),
    ("pipeline", 2, ("train.micro_batch_size=1", "parallel.schedule=zb_h1")),
]


FOUR = [
    ("fsdp+tensor", 4, ("train.micro_batch_size=1", "parallel.dp_shard=2", "parallel.tp=2")),
    ("ddp+pipeline", 4, ("train.micro_batch_size=1", "parallel.dp_replicate=2", "parallel.pp=2")),
    ("fsdp+pipeline", 4, ("train.micro_batch_size=1", "parallel.dp_shard=2", "parallel.pp=2")),
    ("ddp", 2, ("train.micro_batch_size=1", "parallel.find_unused_parameters=true")),
    ("single", 1, ("train.micro_batch_size=1", "train.noise_scale_every=2")),
    ("ddp", 2, ("train.noise_scale_every=2",)),
    ("single", 1, ("train.micro_batch_size=2", "train.compile=true", "train.compile_backend=aot_eager")),
    ("single", 1, ("train.micro_batch_size=2", "train.activation_checkpointing=full")),
]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "strategy", "world", "more"),
    [
        *((KINDS[0], *layout) for layout in LAYOUTS),
        *((kind, *layout) for kind in KINDS[1:] for layout in (LAYOUTS[3], LAYOUTS[6])),
        *(
            pytest.param(kind, *layout, marks=pytest.mark.slow)
            for kind in KINDS[1:]
            for layout in LAYOUTS
            if layout not in (LAYOUTS[3], LAYOUTS[6])
        ),
        *((Scaled, *layout) for layout in FOUR),
    ],
)
def test_parts_weigh_what_they_count_and_those_without_an_item_are_left_out(
    kind: type[Task], strategy: str, world: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    truth = curve(0, 1, kind, "single", str(tmp_path))
    assert len(truth["train/loss"]) == STEPS and all(map(math.isfinite, truth["train/loss"]))
    found = run_distributed(curve, world, world, kind, strategy, str(tmp_path), *more)[0]
    for name in ("train/loss", "train/grad_norm"):
        assert found[name] == pytest.approx(truth[name], rel=2e-5), name
    if kind is Divided and strategy != "pipeline":
        assert found["train/part"] == pytest.approx(truth["train/loss"], rel=2e-5), "what the task logs, too"
    for name, weight in truth["weights"].items():
        assert torch.allclose(found["weights"][name], weight, atol=2e-5), name


# --- what the loss is the mean of -----------------------------------------------------------------------------------


def remark(task: Task, batch: Any = None) -> str | None:
    torch.manual_seed(0)
    model = task.build_model().eval()
    data: Any = task.train_data()
    return items_remark(task, data[:6] if batch is None else batch, lambda part: task.loss(model, part))


def without_items(kind: type[Task], **methods: Any) -> Task:
    """A task of this kind that counts rows."""
    return type("Uncounted", (kind,), {"items": Task.items, **methods})()


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (Masked, "(batch[1] != -100).sum()"),
        (Divided, "(batch[1] != -100).sum()"),
        (Inside, "(batch[1] != -100).sum()"),
        (Padded, "batch[2].sum()"),
    ],
)
def test_a_mean_over_masked_targets_without_items_is_told(kind: type[Task], advice: str) -> None:
    said = remark(without_items(kind))
    assert said is not None and said.endswith(f"return {advice}`") and "not over samples" in said
    assert remark(kind()) is None, "with items all is right"
    fixed = type("Fixed", (kind,), {"items": lambda self, batch: eval(advice, {"batch": batch})})()
    assert remark(fixed) is None and weighs_items(fixed), "and the advice is right"


def test_padding_shifted_labels_and_weights_of_samples_are_told() -> None:
    tokens = torch.tensor([[3, 4, 5, 0, 0], [3, 0, 0, 0, 0], [1, 2, 3, 4, 5], [7, 2, 0, 0, 0]])

    def ignoring(self: Task, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)

    said = remark(without_items(Masked, loss=ignoring), (tokens, tokens))
    assert said is not None and "!= 0).sum()" in said
    labels = torch.where(tokens == 0, IGNORED, tokens)

    def shifted(self: Task, model: Any, batch: Any) -> Tensor:
        logits, wanted = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    said = remark(without_items(Masked, loss=shifted), {"input_ids": tokens, "labels": labels})
    assert said is not None and "(batch['labels'][:, 1:] != -100).sum()" in said

    def weighted(self: Task, model: Any, batch: Any) -> Tensor:
        each = model(batch[0]).square().mean((1, 2))
        return (each * batch[1]).sum() / batch[1].sum()

    said = remark(without_items(Masked, loss=weighted), (tokens, torch.tensor([0.5, 2.0, 1.0, 4.0])))
    assert said is not None and "batch[1].sum()" in said


def test_means_over_samples_are_right_and_items_beside_them_are_told() -> None:
    def over_rows(self: Task, model: Any, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    assert remark(without_items(Masked, loss=over_rows)) is None
    said = remark(type("Beside", (Masked,), {"loss": over_rows})())
    assert said is not None and "`items`" in said and "leave `items` out" in said

    def coupled(self: Task, model: Any, batch: Any) -> Tensor:
        out = model(batch[0]).flatten(1)
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))

    assert remark(without_items(Masked, loss=coupled)) is None, "no mean over anything that is counted"
    calls = []

    def same_lengths(self: Task, model: Any, batch: Any) -> Tensor:
        calls.append(batch)
        return model(batch[0]).square().mean()

    tokens = torch.randint(1, 16, (4, LENGTH))
    remark(without_items(Masked, loss=same_lengths), (tokens, torch.full((4, LENGTH), 7)))
    assert len(calls) <= 6, "only what is counted unevenly is computed"


def test_who_counts_by_itself_is_weighted_by_it_and_a_fixed_length_costs_no_collective() -> None:
    language = load_task("language_modelling", {"data": "python", "d_model": 8, "n_layers": 1, "n_heads": 1})
    assert not weighs_items(language) and weighs_items(Masked()) and not weighs_items(without_items(Masked))
    own = type("Own", (LanguageModelling,), {"items": lambda self, batch: (batch[1] > 0).sum()})
    assert weighs_items(own(data="python", d_model=8, n_layers=1, n_heads=1)), "a subclass's own count is heeded"
    negative = type("Negative", (Masked,), {"items": lambda self, batch: -3})()
    with pytest.raises(UserError, match="at least 0"):
        count_items(negative, (torch.zeros(2, 2),))


# --- what is shown --------------------------------------------------------------------------------------------------


class Tokens(Divided):
    unit = "tokens"


def shown(rank: int, world: int, strategy: str, folder: str, *more: str) -> tuple[list[float], list[float], Any]:
    """Tokens of each step as the speed has them, as the data has them, and the summary."""
    training, events = training_of(settings(Tokens, "train.steps=6", *more), folder, rank, world, strategy)
    summary = training.run()
    metrics = [event.values for event in logged(events, "train/tokens_per_second")]
    rates = [m["train/tokens_per_second"] / m["train/samples_per_second"] * 8 for m in metrics]
    return rates, [m["train/mean_tokens_per_second"] for m in metrics], summary


@pytest.mark.alone
def test_tokens_a_second_are_counted_under_every_layout(tmp_path: Path) -> None:
    training, _ = training_of(settings(Tokens, "train.steps=6"), tmp_path)
    counts = [sum(each.items for each in step) for step in training.batches()]
    assert len(set(counts)) > 2 and min(counts) > 0
    first = float(Tokens().items(Tokens().train_data()[:1]))
    assert sum(counts) != pytest.approx(6 * 8 * first), "the first sample does not speak for all"
    layouts = [("single", 1, ()), ("ddp", 2, ()), ("tensor", 2, ()), ("pipeline", 2, ("train.micro_batch_size=2",))]
    for strategy, world, more in layouts:
        for rates, means, summary in run_distributed(shown, world, world, strategy, str(tmp_path), *more):
            assert rates[0] == pytest.approx(counts[0]), (strategy, "the first step is a window of its own")
            assert summary["rate"] * summary["seconds"] == pytest.approx(sum(counts)), strategy
            assert means[-1] == summary["rate"], "one definition"


class Slow(Tokens):
    """An evaluation that takes a while."""

    slept = 0.0

    def eval_data(self) -> TensorDataset:
        return TensorDataset(*(tensor[:8] for tensor in self._tokens(seed=2).tensors))

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        time.sleep(0.05)
        self.slept += 0.05
        return super().metrics(model, batch)


def test_evaluation_is_no_training_time_and_batches_without_items_have_no_part_in_it(tmp_path: Path) -> None:
    more = ("train.steps=6", "train.eval_every=1")
    figures = []
    for size in (1, 8):
        training, events = training_of(settings(Slow, *more, f"train.eval_batch_size={size}"), tmp_path)
        began = time.monotonic()
        summary = training.run()
        slept = training.task.slept  # type: ignore[attr-defined]
        assert slept > 5.99 * 0.05 and summary["seconds"] <= time.monotonic() - began - slept
        *_, last = [event for event in events if isinstance(event, StepsDone)]
        assert last.rate == summary["rate"]
        figures.append(summary["metrics"]["eval/loss"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-5) and math.isfinite(figures[0])


class Empty(Masked):
    """Nothing counts in the first 16 samples that are drawn, nor anywhere else."""

    def train_data(self) -> TensorDataset:
        tokens, labels = self._tokens(seed=0).tensors
        return TensorDataset(tokens, torch.full_like(labels, IGNORED))


def test_a_step_without_an_item_changes_nothing_and_shows_no_loss(tmp_path: Path) -> None:
    training, events = training_of(settings(Empty, "optimizer.weight_decay=0.0"), tmp_path)
    before = {name: p.detach().clone() for name, p in training.parallel.named_parameters()}
    training.run()
    assert all(torch.equal(before[name], p) for name, p in training.parallel.named_parameters())
    assert logged(events) and not logged(events, "train/loss")


class Bad(Masked):
    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) * float("nan")


def test_nan_of_a_part_that_counts_is_still_an_error(tmp_path: Path) -> None:
    training, _ = training_of(settings(Bad, "train.micro_batch_size=1"), tmp_path)
    with pytest.raises(NonFiniteError, match="loss was not finite at step 1"):
        training.run()
