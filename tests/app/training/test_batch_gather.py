"""A loss that compares samples of a batch is the same on every layout and for all micro-batches."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.errors import UserError
from app.run.prepare import prepare, read_task
from app.tasks.base import Task
from app.training.batch_gather import POINTER, Gathering, may_gather
from app.training.events import Event
from app.training.job import Job, Place, SilentChannel
from app.training.loop import Training
from app.training.persistence import NullPersistence
from strategies.layout import LayoutError, choose
from tests.app.kit import logged, training_of
from tests.chain import config
from tests.pool import run_distributed
from tests.tasks import Points

CPU = torch.device("cpu")
BATCH = 12
STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Encoder(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(8, drop) for _ in range(2))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def info_nce(z: Tensor, t: Tensor) -> Tensor:
    """Contrastive loss of pairs: row i of `z` belongs to row i of `t`."""
    logits = F.normalize(z, dim=1) @ F.normalize(t, dim=1).t() / 0.1
    return F.cross_entropy(logits, torch.arange(len(logits)))


def hard_triplets(z: Tensor, labels: Tensor) -> Tensor:
    """Triplet loss with the farthest sample of the same class and the nearest of another."""
    distances = (z.unsqueeze(0) - z.unsqueeze(1)).square().sum(-1).add(1e-6).sqrt()
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    farthest = distances.where(same, -1.0).amax(1)
    nearest = distances.where(~same, 1e4).amin(1)
    return F.relu(farthest - nearest + 0.5).mean()


def supervised(views: Tensor, labels: Tensor) -> Tensor:
    """SupCon: Khosla et al. 2020, arXiv 2004.11362, equation 2.

    Args:
        views: Features of shape (samples, views, features).
        labels: The class of each sample.
    """
    z = F.normalize(views, dim=2).flatten(0, 1)
    labels = labels.repeat_interleave(views.size(1))
    itself = torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.t() / 0.2).masked_fill(itself, -1e4)
    positive = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~itself
    return -((logits.log_softmax(1) * positive).sum(1) / positive.sum(1)).mean()


def covariance(z: Tensor) -> Tensor:
    """The covariance and variance terms of VICReg, and a term that keeps the mean at 0."""
    mean_term = z.mean(0).square().sum()
    z = z - z.mean(0)
    c = z.t() @ z / (len(z) - 1)
    covariance_term = (c.square().sum() - c.diagonal().square().sum()) / z.size(1)
    variance_term = F.relu(1 - z.std(0)).mean()
    return covariance_term + variance_term + mean_term


class Coupled(Task):
    """A small encoder whose loss compares the samples of a batch.

    Args:
        kind: The loss: one of `KINDS`.
        drop: Rate of dropout.
        gathers: Whether the loss gathers the whole batch, or compares a worker's samples only.
    """

    def __init__(self, *, kind: str, drop: float = 0.0, gathers: bool = True) -> None:
        self.kind = kind
        self.drop = drop
        self.gathers = gathers

    def build_model(self) -> nn.Module:
        return Encoder(self.drop)

    def train_data(self) -> TensorDataset:
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
        targets = x.sin().repeat(1, 2)[:, :8]
        labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0)
        return TensorDataset(x, targets, labels, torch.arange(40))

    def eval_data(self) -> TensorDataset:
        return self.train_data()

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def together(self, x: Tensor) -> Tensor:
        """The rows of the whole batch, where this task gathers them."""
        return self.gather(x) if self.gathers else x

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, targets, labels, sample_ids = batch
        z = model(x)
        self.log("size", z.square().mean())
        if self.kind == "own anchors":
            keys = self.together(targets @ torch.ones(8, 8).tril() + z)
            all_ids = self.together(sample_ids)
            own_position = (all_ids.unsqueeze(0) == sample_ids.unsqueeze(1)).int().argmax(1)
            logits = F.normalize(z, dim=1) @ F.normalize(keys, dim=1).t() / 0.1
            return F.cross_entropy(logits, own_position)
        if self.kind == "supervised":
            views = torch.stack([z, model(x.flip(1))], 1)
            return supervised(self.together(views), self.together(labels))
        if self.kind == "triplets":
            # The second term is a mean over samples that are not compared.
            return hard_triplets(self.together(z), self.together(labels)) + z.square().mean()
        if self.kind == "covariance":
            return covariance(self.together(z))
        return info_nce(self.together(z), self.together(targets))


COUPLED = [
    "task=tests.app.training.test_batch_gather:Coupled",
    "task_args={kind: info_nce}",
    "train.eval_batch_size=4",
]
KINDS = ["info_nce", "own anchors", "triplets", "supervised", "covariance"]


class Weighted(Coupled):
    """A mean over items, where some micro-batches have no item at all."""

    items_vary = True

    def items(self, batch: Any) -> Tensor:
        return (batch[3] % 4 == 0).sum()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        has_item = batch[3] % 4 == 0
        keys = F.normalize(self.gather(z + batch[1]), dim=1)
        all_ids = self.gather(batch[3])
        own_position = (all_ids.unsqueeze(0) == batch[3].unsqueeze(1)).int().argmax(1)
        losses = F.cross_entropy(
            F.normalize(z, dim=1) @ keys.t() / 0.1, own_position, reduction="none"
        )
        return losses[has_item].mean()


def trained(
    rank: int, world: int, strategy: str, degrees: dict[str, int], kind: str, extra: list[str]
) -> Any:
    """The losses by step, and the weights, of a training run on this rank."""
    task = "Weighted" if kind == "weighted" else "Coupled"
    overrides = [
        f"task=tests.app.training.test_batch_gather:{task}",
        f"task_args={{kind: {kind}}}",
        f"train.steps={STEPS}",
        f"train.global_batch_size={BATCH}",
        "train.clip_norm=0.7",
        "optimizer.lr=0.01",
        "train.log_every=1",
    ]
    run_config = config(*overrides, "train.eval_every=null", "train.ema_decay=null", *extra)
    layout = choose(strategy, world, **degrees)
    job = Job(
        config=run_config,
        layout=layout,
        folder="/nowhere",
        attempt="attempt",
        run_uid="uid",
        steps=STEPS,
        cwd=os.getcwd(),
    )
    events: list[Event] = []
    channel = SilentChannel()
    channel.emit = events.append  # type: ignore[method-assign]
    place = Place(rank=rank, world_size=world, local_rank=rank, device=CPU)
    training = Training(job, place, channel, persistence_class=NullPersistence)
    training.run()
    metrics_by_step = {event.step: event.values for event in logged(events, "train/loss")}
    values = {
        step: (metrics["train/loss"], metrics["train/grad_norm"], metrics.get("train/size"))
        for step, metrics in metrics_by_step.items()
    }
    return values, training.parallel.full_model_state()


def trained_each(
    rank: int,
    world: int,
    strategy: str,
    degrees: dict[str, int],
    kinds: list[str],
    extra: list[str],
) -> dict[str, Any]:
    return {kind: trained(rank, world, strategy, degrees, kind, extra) for kind in kinds}


def on_ranks(
    world: int, strategy: str, degrees: dict[str, int], kinds: list[str], extra: list[str]
) -> dict[str, Any]:
    """What rank 0 returns, for each kind of loss."""
    if world == 1:
        return trained_each(0, 1, strategy, degrees, kinds, extra)
    return run_distributed(trained_each, world, world, strategy, degrees, kinds, extra)[0]


_truths: dict[tuple[str, ...], Any] = {}


def truth(kind: str, *extra: str) -> Any:
    """A run on one device with the whole batch, where gather is the identity."""
    if (kind, *extra) not in _truths:
        _truths[kind, *extra] = trained(0, 1, "single", {}, kind, list(extra))
    return _truths[kind, *extra]


def assert_same(
    result: Any, expected: Any, loss_tolerance: float, weight_tolerance: float = 2e-5
) -> None:
    assert result[0].keys() == expected[0].keys() and len(result[0]) == STEPS
    for step, values in expected[0].items():
        for value, expected_value in zip(result[0][step], values, strict=True):
            context = (step, result[0], expected[0])
            assert value == pytest.approx(expected_value, rel=loss_tolerance), context
    assert result[1].keys() == expected[1].keys()
    for name, weights in expected[1].items():
        difference = (result[1][name] - weights).abs().max()
        assert torch.allclose(result[1][name], weights, atol=weight_tolerance), (name, difference)


ROWS: list[tuple[str, int, dict[str, int]]] = [
    ("single", 1, {}),
    ("ddp", 2, {}),
    ("fsdp", 2, {}),
    ("zero1", 2, {}),
    ("zero2", 2, {}),
    ("tensor", 2, {}),
    ("hsdp", 4, {"dp_replicate": 2, "dp_shard": 2}),
    ("fsdp+tensor", 4, {"tp": 2}),
    ("ddp+tensor", 4, {"tp": 2}),
]


def cases() -> list[Any]:
    """All layouts and micro-batch sizes; only those with a smaller last micro-batch are quick.

    Of these, those of one device and of ddp try every kind of loss, and the others one that gathers
    tensors of two types and shapes from two calls of the model.
    """
    rows = []
    for strategy, world, degrees in ROWS:
        uneven_micro_batch = 2 if world == 4 and "tensor" not in strategy else 5
        for micro_batch in (None, 1, 2, 5):
            quick = micro_batch == uneven_micro_batch and strategy in (
                "single",
                "ddp",
                "fsdp",
                "tensor",
            )
            all_quick = quick and strategy in ("single", "ddp")
            name = f"{strategy} {micro_batch}"
            row = (strategy, world, degrees, micro_batch)
            marks = [] if all_quick else [pytest.mark.slow]
            rows.append(pytest.param(*row, KINDS, marks=marks, id=name))
            if quick and not all_quick:
                rows.append(pytest.param(*row, ["supervised"], id=f"{name} supervised"))
    return rows


@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "world", "degrees", "micro_batch", "kinds"), cases())
def test_a_coupled_loss_is_the_same_under_every_layout(
    strategy: str,
    world: int,
    degrees: dict[str, int],
    micro_batch: int | None,
    kinds: list[str],
) -> None:
    extra = [] if micro_batch is None else [f"train.micro_batch_size={micro_batch}"]
    results = on_ranks(world, strategy, degrees, kinds, extra)
    for kind in kinds:
        assert_same(results[kind], truth(kind), 2e-5 if "tensor" in strategy else 5e-6)


@pytest.mark.alone
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_without_gather_the_loss_differs(strategy: str) -> None:
    world = 2 if strategy == "ddp" else 1
    kinds = ["info_nce", "triplets", "covariance"]
    extra = ["train.micro_batch_size=6", "task_args.gathers=false"]
    for kind, result in on_ranks(world, strategy, {}, kinds, extra).items():
        assert result[0][1][0] != pytest.approx(truth(kind)[0][1][0], rel=1e-2)


PARTS = ["train.micro_batch_size=4"]
"""Splits the 6 samples of each of two workers into micro-batches of 4 and 2."""
SIXTEEN = 3e-3
"""Relative tolerance of losses with 16 bits."""


COMPILED = ["train.compile=true", "train.compile_backend=aot_eager"]


@pytest.mark.alone
@pytest.mark.parametrize(
    "micro_batches",
    [PARTS, pytest.param([], marks=pytest.mark.slow)],
    ids=["parts", "whole"],
)
@pytest.mark.parametrize(
    ("strategy", "options", "tolerance"),
    [
        ("ddp", ["train.activation_checkpointing=full"], 5e-6),
        (
            "fsdp",
            ["train.activation_checkpointing=selective", "parallel.accumulate_sharded=true"],
            5e-6,
        ),
        pytest.param(
            "fsdp",
            ["train.activation_checkpointing=full", "parallel.offload=true"],
            5e-6,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "zero1", ["parallel.reshard_after_forward=true"], 5e-6, marks=pytest.mark.slow
        ),
        ("ddp", ["parallel.find_unused_parameters=true", "parallel.bucket_mb=0.001"], 5e-6),
        pytest.param(
            "tensor", ["train.activation_checkpointing=full"], 2e-5, marks=pytest.mark.slow
        ),
        pytest.param("ddp", ["train.precision=fp16"], SIXTEEN, marks=pytest.mark.slow),
        pytest.param(
            "fsdp",
            ["train.precision=bf16", "train.activation_checkpointing=full"],
            SIXTEEN,
            marks=pytest.mark.slow,
        ),
        ("fsdp", ["train.precision=fp16"], SIXTEEN),
        pytest.param("fsdp", COMPILED, 5e-6, marks=pytest.mark.slow),
        pytest.param("ddp", COMPILED, 5e-6, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_options_change_values_by_rounding_only(
    strategy: str, options: list[str], tolerance: float, micro_batches: list[str]
) -> None:
    # The single-device run uses fp16 too, since its first steps overflow and are skipped.
    precision_options = [option for option in options if "fp16" in option]
    result = on_ranks(2, strategy, {}, ["supervised"], [*micro_batches, *options])["supervised"]
    for step, (loss, *_) in truth("supervised", *precision_options)[0].items():
        assert result[0][step][0] == pytest.approx(loss, rel=tolerance), step
    if tolerance < SIXTEEN:
        assert_same(result, truth("supervised"), tolerance)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "micro_batch"),
    [
        ("single", 1),
        ("ddp", 1),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        pytest.param("ddp", 6, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_without_items_are_gathered_and_weigh_nothing(
    strategy: str, micro_batch: int
) -> None:
    world = 1 if strategy == "single" else 2
    extra = [f"train.micro_batch_size={micro_batch}"]
    results = on_ranks(world, strategy, {}, ["weighted"], extra)
    assert_same(results["weighted"], truth("weighted"), 5e-6)


class Alternating(Coupled):
    """Two updates a step, only one with a coupled loss, by functions that each step creates."""

    def training_step(self, update: Any) -> None:
        update(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
        update(lambda model, batch: self.loss(model, batch))


def alternated(rank: int, world: int, strategy: str, extra: list[str]) -> Any:
    """The weights after three steps of `Alternating`."""
    run_config = config(
        "task=tests.app.training.test_batch_gather:Alternating",
        "task_args={kind: triplets}",
        "train.steps=3",
        "train.global_batch_size=12",
        "optimizer.lr=0.01",
        "train.log_every=2",
        *extra,
    )
    training, _ = training_of(run_config, "/nowhere", rank, world, strategy)
    for batches, _ in zip(training.batches(), range(3)):
        training.step(batches)
    return training.parallel.full_model_state()


@pytest.mark.alone
def test_a_step_may_have_coupled_and_other_losses() -> None:
    expected = alternated(0, 1, "single", [])
    for strategy in ("ddp", "fsdp"):
        weights = run_distributed(alternated, 2, 2, strategy, PARTS)[0]
        for name, value in expected.items():
            assert torch.allclose(weights[name], value, atol=2e-5), name


def test_dropout_is_repeated_and_nothing_is_logged_twice() -> None:
    """Other random numbers in the second forward pass would fail the first step."""
    first = trained(0, 1, "single", {}, "info_nce", [*PARTS, "task_args.drop=0.3"])
    second = trained(0, 1, "single", {}, "info_nce", [*PARTS, "task_args.drop=0.3"])
    assert first[0] == second[0] != truth("info_nce")[0]
    assert all(size > 0 for _, _, size in first[0].values())


# --- evaluation, and checks before a worker starts -----------------------------------------------


def evaluated(rank: int, world: int, strategy: str) -> float:
    """The held-out loss."""
    run_config = config(
        "task=tests.app.training.test_batch_gather:Coupled",
        "task_args={kind: info_nce}",
        "train.eval_batch_size=5",
    )
    training, _ = training_of(run_config, "/nowhere", rank, world, strategy)
    return training.evaluator.held_out_metrics(0)["loss"]


@pytest.mark.alone
def test_an_evaluation_compares_samples_within_each_evaluation_batch() -> None:
    task = Coupled(kind="info_nce")
    training, _ = training_of(config(*COUPLED[:2]), "/no")
    model = training.parallel.inner.eval()
    data = task.eval_data().tensors
    with torch.no_grad():
        losses = [task.loss(model, [t[i : i + 5] for t in data]).item() for i in range(0, 40, 5)]
    expected = sum(losses) / len(losses)
    assert evaluated(0, 1, "single") == pytest.approx(expected, rel=1e-6)
    assert run_distributed(evaluated, 2, 2, "ddp") == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "strategy=pipeline parallel.pp=2",
            "calls self.gather, but a pipeline has one micro-batch .*: write str",
        ),
        (
            "strategy=context parallel.cp=2",
            "with parallel.cp a worker has a part of every sample: write",
        ),
        (
            "strategy=ddp train.noise_scale_every=2",
            "train.noise_scale_every compares .* calls self.gather",
        ),
    ],
)
def test_a_layout_that_cannot_gather_is_refused_before_a_worker_starts(
    overrides: str, message: str
) -> None:
    run_config = config(*COUPLED, *overrides.split())
    with pytest.raises((UserError, LayoutError), match=message):
        prepare(run_config, read_task(run_config), 2, devices_per_node=2)


def test_the_note_on_evaluations_names_the_batch_and_where_to_write_it() -> None:
    run_config = config(*COUPLED[:2], "strategy=ddp")  # which is evaluated at its end
    (note,) = prepare(run_config, read_task(run_config), 2, devices_per_node=2).notes
    assert "here of 8 samples: write train.eval_batch_size" in note
    run_config = config(*COUPLED, "strategy=ddp", "train.eval_every=2")
    task = read_task(run_config)
    assert not prepare(run_config, task, 2, devices_per_node=2).notes and task.gathering is None
    assert "self.gather" in POINTER


class Late(Coupled):
    """Gathers from its fifth loss on."""

    losses_computed = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.losses_computed += 1
        if self.losses_computed > 4:
            return super().loss(model, batch)
        return model(batch[0]).square().mean()


class Hidden(Points):
    """Its loss gathers in a way that its code does not show."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return getattr(self, "ga" + "ther")(super().loss(model, batch).expand(len(batch[0]))).mean()


@pytest.mark.parametrize("task", ["Late", "Hidden"])
def test_a_loss_that_gathers_unexpectedly_ends_with_a_sentence(task: str) -> None:
    args = "{kind: info_nce}" if task == "Late" else "{}"
    run_config = config(
        f"task=tests.app.training.test_batch_gather:{task}",
        f"task_args={args}",
        "train.micro_batch_size=8",
    )
    training, _ = training_of(run_config, "/nowhere")
    message = "but did not in its first step, or calls it in code that is not in the task"
    with pytest.raises(UserError, match=message):
        for batches in training.batches():
            training.step(batches)


def test_only_a_task_whose_code_mentions_gather_may_gather() -> None:
    assert may_gather(Coupled(kind="info_nce")) and may_gather(Late(kind="info_nce"))
    assert not may_gather(Points())
    training, _ = training_of(config(), "/nowhere")
    assert isinstance(training.gathering, Gathering) and not training.gathering._may_gather
