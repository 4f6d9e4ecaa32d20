"""Losses that are means over the items a task counts, such as labelled tokens.

They are the same under every layout, also where a micro-batch has no items, and the speed in items
per second is right.
"""

import functools
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

SAMPLES = 200
LENGTH = 6
CLASSES = 11
WIDTH = 8
IGNORED = -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Embedding(16, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.entry(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Masked(Task):
    """Half of the samples have no label that counts, the others 1 to 6; torch takes the mean."""

    def build_model(self) -> nn.Module:
        return Tagger()

    def train_data(self) -> TensorDataset:
        return self._tokens(seed=0)

    @staticmethod
    def _tokens(seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 16, (SAMPLES, LENGTH), generator=generator)
        labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
        labels[torch.arange(LENGTH) >= lengths] = IGNORED
        labels[torch.rand(SAMPLES, generator=generator) < 0.5] = IGNORED
        return TensorDataset(tokens, labels)

    def items(self, batch: Any) -> Tensor:
        return (batch[1] != IGNORED).sum()

    def loss(self, model: Any, batch: Any) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Divided(Masked):
    """Takes the mean itself, which without items is 0 / 0, and so is its gradient."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        tokens, labels = batch
        is_counted = labels != IGNORED
        losses = F.cross_entropy(
            model(tokens).flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none"
        )
        value = (losses * is_counted.flatten()).sum() / is_counted.sum()
        self.log("part", value)
        return value


class Scaled(Divided):
    """Multiplies by a parameter that only the loss uses, and adds a root of 0 without items.

    The gradient of that root is infinite.
    """

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
        is_counted = (labels != IGNORED).flatten()
        losses = F.cross_entropy(
            logits.flatten(0, 1) * temperature, labels.clamp(min=0).flatten(), reduction="none"
        )
        mean = (losses * is_counted).sum() / is_counted.sum()
        root_of_zero = (logits * 0.0).square().sum().sqrt() if not is_counted.any() else 0.0
        return mean + root_of_zero


class Inside(Masked):
    """The model computes its loss itself, as many published ones do."""

    class Model(Tagger):
        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
            logits = super().forward(tokens)
            if labels is None:
                return logits
            is_counted = (labels != IGNORED).flatten()
            losses = F.cross_entropy(
                logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none"
            )
            return (losses * is_counted).sum() / is_counted.sum()

    def build_model(self) -> nn.Module:
        return self.Model()

    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(*batch)


class Padded(Masked):
    """A mask of numbers tells which positions count; the losses are squares."""

    def train_data(self) -> TensorDataset:
        tokens, labels = self._tokens(seed=1).tensors
        return TensorDataset(tokens, labels.clamp(min=0).float(), (labels != IGNORED).float())

    def items(self, batch: Any) -> Tensor:
        return batch[2].sum()

    def loss(self, model: Any, batch: Any) -> Tensor:
        tokens, targets, mask = batch
        return ((model(tokens)[..., 0] - targets).square() * mask).sum() / mask.sum()


KINDS = [Masked, Divided, Scaled, Inside, Padded]
STEPS = 4


def settings(kind: type[Task], *overrides: str) -> Config:
    """The configuration of a short run of this task."""
    defaults = [
        f"task={kind.__module__}:{kind.__qualname__}",
        "run.name=items",
        "train.global_batch_size=8",
        f"train.steps={STEPS}",
        "train.log_every=1",
        "optimizer.lr=0.01",
    ]
    return load_config([], [*defaults, *overrides])


def curve(
    rank: int, world: int, kind: type[Task], strategy: str, folder: str, *overrides: str
) -> dict[str, Any]:
    """Losses and gradient norms by step, the task's logged part, and the trained weights."""
    training, events = training_of(settings(kind, *overrides), folder, rank, world, strategy)
    training.run()
    metrics = [event.values for event in logged(events)]
    names = ("train/loss", "train/grad_norm", "train/part")
    curves = {name: [values[name] for values in metrics if name in values] for name in names}
    return {**curves, "weights": training.parallel.full_model_state()}


@functools.cache
def curve_of_one_device(kind: type[Task]) -> dict[str, Any]:
    """The curve with whole batches."""
    return curve(0, 1, kind, "single", "/nowhere")


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
QUICK_LAYOUTS = (LAYOUTS[3], LAYOUTS[6])
MORE_LAYOUTS = [
    LAYOUTS[5],
    ("fsdp+pipeline", 4, ("train.micro_batch_size=1", "parallel.dp_shard=2", "parallel.pp=2")),
    ("ddp", 2, ("train.micro_batch_size=1", "parallel.find_unused_parameters=true")),
    ("single", 1, ("train.micro_batch_size=1", "train.noise_scale_every=2")),
    ("ddp", 2, ("train.noise_scale_every=2",)),
    ("single", 1, ("train.micro_batch_size=2", "train.activation_checkpointing=full")),
]
COMBINED_LAYOUTS = [
    ("fsdp+tensor", 4, ("train.micro_batch_size=1", "parallel.dp_shard=2", "parallel.tp=2")),
    ("ddp+pipeline", 4, ("train.micro_batch_size=1", "parallel.dp_replicate=2", "parallel.pp=2")),
    (
        "single",
        1,
        ("train.micro_batch_size=2", "train.compile=true", "train.compile_backend=aot_eager"),
    ),
]
"""Of what others try one by one, or whose losses tests/strategies/test_parity.py compares."""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "strategy", "world", "overrides"),
    [
        *((KINDS[0], *layout) for layout in LAYOUTS),
        *((kind, *layout) for kind in KINDS[1:] for layout in QUICK_LAYOUTS),
        *(
            pytest.param(kind, *layout, marks=pytest.mark.slow)
            for kind in KINDS[1:]
            for layout in LAYOUTS
            if layout not in QUICK_LAYOUTS
        ),
        *(pytest.param(Scaled, *layout, marks=pytest.mark.slow) for layout in MORE_LAYOUTS[1:3]),
        *((Scaled, *layout) for layout in MORE_LAYOUTS[3:]),
        *(pytest.param(Scaled, *layout, marks=pytest.mark.slow) for layout in COMBINED_LAYOUTS),
    ],
)
def test_micro_batches_weigh_by_their_items_and_those_without_are_left_out(
    kind: type[Task], strategy: str, world: int, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    expected = curve_of_one_device(kind)
    assert len(expected["train/loss"]) == STEPS and all(map(math.isfinite, expected["train/loss"]))
    result = run_distributed(curve, world, world, kind, strategy, str(tmp_path), *overrides)[0]
    for name in ("train/loss", "train/grad_norm"):
        assert result[name] == pytest.approx(expected[name], rel=2e-5), name
    if kind is Divided and strategy != "pipeline":
        # What the task logs is averaged in the same way.
        assert result["train/part"] == pytest.approx(expected["train/loss"], rel=2e-5)
    for name, weight in expected["weights"].items():
        assert torch.allclose(result["weights"][name], weight, atol=2e-5), name


# --- what the loss is the mean of -----------------------------------------------------------------


def remark(task: Task, batch: Any = None) -> str | None:
    """What a user is told about the items of this task, by a batch or its first six samples."""
    torch.manual_seed(0)
    model = task.build_model().eval()
    data: Any = task.train_data()
    batch = data[:6] if batch is None else batch
    return items_remark(task, batch, lambda part: task.loss(model, part))


def without_items(kind: type[Task], **methods: Any) -> Task:
    """A task of this kind whose items are its samples."""
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
    message = remark(without_items(kind))
    assert message is not None
    assert message.endswith(f"return {advice}`")
    assert "not over samples" in message
    assert remark(kind()) is None, "with `items` there is nothing to say"
    fixed = type("Fixed", (kind,), {"items": lambda self, batch: eval(advice, {"batch": batch})})()
    assert remark(fixed) is None and weighs_items(fixed), "the advice is right"


def test_padding_shifted_labels_and_weights_of_samples_are_told() -> None:
    tokens = torch.tensor([[3, 4, 5, 0, 0], [3, 0, 0, 0, 0], [1, 2, 3, 4, 5], [7, 2, 0, 0, 0]])

    def ignoring(self: Task, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)

    message = remark(without_items(Masked, loss=ignoring), (tokens, tokens))
    assert message is not None and "!= 0).sum()" in message
    labels = torch.where(tokens == 0, IGNORED, tokens)

    def shifted(self: Task, model: Any, batch: Any) -> Tensor:
        logits = model(batch["input_ids"])[:, :-1]
        targets = batch["labels"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    message = remark(without_items(Masked, loss=shifted), {"input_ids": tokens, "labels": labels})
    assert message is not None and "(batch['labels'][:, 1:] != -100).sum()" in message

    def weighted(self: Task, model: Any, batch: Any) -> Tensor:
        losses = model(batch[0]).square().mean((1, 2))
        return (losses * batch[1]).sum() / batch[1].sum()

    weights = torch.tensor([0.5, 2.0, 1.0, 4.0])
    message = remark(without_items(Masked, loss=weighted), (tokens, weights))
    assert message is not None and "batch[1].sum()" in message


def test_means_over_samples_need_no_items_and_superfluous_ones_are_told() -> None:
    def over_rows(self: Task, model: Any, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    assert remark(without_items(Masked, loss=over_rows)) is None
    message = remark(type("Beside", (Masked,), {"loss": over_rows})())
    assert message is not None and "`items`" in message and "leave `items` out" in message

    def coupled(self: Task, model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0]).flatten(1)
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    assert remark(without_items(Masked, loss=coupled)) is None, "not a mean over items of any kind"
    calls = []

    def same_lengths(self: Task, model: Any, batch: Any) -> Tensor:
        calls.append(batch)
        return model(batch[0]).square().mean()

    tokens = torch.randint(1, 16, (4, LENGTH))
    remark(without_items(Masked, loss=same_lengths), (tokens, torch.full((4, LENGTH), 7)))
    assert len(calls) <= 6, "candidates with equally many items per sample are not tried"


def test_a_task_that_counts_items_is_weighted_and_a_fixed_length_is_not() -> None:
    sizes: Any = {"data": "python", "d_model": 8, "n_layers": 1, "n_heads": 1}
    language = load_task("language_modelling", sizes)
    assert not weighs_items(language)
    assert weighs_items(Masked())
    assert not weighs_items(without_items(Masked))
    subclass = type(
        "Own", (LanguageModelling,), {"items": lambda self, batch: (batch[1] > 0).sum()}
    )
    assert weighs_items(subclass(**sizes)), "the `items` of a subclass count"
    negative = type("Negative", (Masked,), {"items": lambda self, batch: -3})()
    with pytest.raises(UserError, match="at least 0"):
        count_items(negative, (torch.zeros(2, 2),))


# --- the speed that is logged ---------------------------------------------------------------------


class Tokens(Divided):
    unit = "tokens"


def logged_speed(
    rank: int, world: int, strategy: str, folder: str, *overrides: str
) -> tuple[list[float], list[float], Any]:
    """The tokens of each step by the logged rates, the mean rates, and the run's summary."""
    run_config = settings(Tokens, "train.steps=6", *overrides)
    training, events = training_of(run_config, folder, rank, world, strategy)
    summary = training.run()
    metrics = [event.values for event in logged(events, "train/tokens_per_second")]
    rates = [
        values["train/tokens_per_second"] / values["train/samples_per_second"] * 8
        for values in metrics
    ]
    return rates, [values["train/mean_tokens_per_second"] for values in metrics], summary


@pytest.mark.alone
def test_tokens_per_second_are_right_under_every_layout(tmp_path: Path) -> None:
    training, _ = training_of(settings(Tokens, "train.steps=6"), tmp_path)
    counts = [sum(micro_batch.items for micro_batch in step) for step in training.batches()]
    assert len(set(counts)) > 2 and min(counts) > 0
    first_sample = float(Tokens().items(Tokens().train_data()[:1]))
    assert sum(counts) != pytest.approx(6 * 8 * first_sample), "samples differ in tokens"
    layouts = [
        ("single", 1, ()),
        ("ddp", 2, ()),
        ("tensor", 2, ()),
        ("pipeline", 2, ("train.micro_batch_size=2",)),
    ]
    for strategy, world, overrides in layouts:
        arguments = (strategy, str(tmp_path), *overrides)
        for tokens, means, summary in run_distributed(logged_speed, world, world, *arguments):
            assert tokens[0] == pytest.approx(counts[0]), f"{strategy}: the first step's own rate"
            assert summary["rate"] * summary["seconds"] == pytest.approx(sum(counts)), strategy
            assert means[-1] == summary["rate"], "both have the same definition"


class Slow(Tokens):
    """A task whose evaluation takes a while."""

    evaluation_seconds = 0.0

    def eval_data(self) -> TensorDataset:
        return TensorDataset(*(tensor[:8] for tensor in self._tokens(seed=2).tensors))

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        time.sleep(0.05)
        self.evaluation_seconds += 0.05
        return super().metrics(model, batch)


def test_evaluation_is_not_training_time_and_is_weighted_by_items(tmp_path: Path) -> None:
    overrides = ("train.steps=6", "train.eval_every=1")
    losses = []
    for batch_size in (1, 8):
        run_config = settings(Slow, *overrides, f"train.eval_batch_size={batch_size}")
        training, events = training_of(run_config, tmp_path)
        start = time.monotonic()
        summary = training.run()
        evaluation_seconds = training.task.evaluation_seconds  # type: ignore[attr-defined]
        assert evaluation_seconds > 5.99 * 0.05
        assert summary["seconds"] <= time.monotonic() - start - evaluation_seconds
        *_, last = [event for event in events if isinstance(event, StepsDone)]
        assert last.rate == summary["rate"]
        losses.append(summary["metrics"]["eval/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and math.isfinite(losses[0])


class Empty(Masked):
    """No sample has an item."""

    def train_data(self) -> TensorDataset:
        tokens, labels = self._tokens(seed=0).tensors
        return TensorDataset(tokens, torch.full_like(labels, IGNORED))


def test_a_step_without_items_changes_nothing_and_logs_no_loss(tmp_path: Path) -> None:
    training, events = training_of(settings(Empty, "optimizer.weight_decay=0.0"), tmp_path)
    before = {
        name: parameter.detach().clone() for name, parameter in training.parallel.named_parameters()
    }
    training.run()
    assert all(
        torch.equal(before[name], parameter)
        for name, parameter in training.parallel.named_parameters()
    )
    assert logged(events) and not logged(events, "train/loss")


class NotANumber(Masked):
    """A task whose loss is NaN."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) * float("nan")


def test_a_nan_loss_of_a_micro_batch_with_items_is_an_error(tmp_path: Path) -> None:
    training, _ = training_of(settings(NotANumber, "train.micro_batch_size=1"), tmp_path)
    with pytest.raises(NonFiniteError, match="loss was not finite at step 1"):
        training.run()
