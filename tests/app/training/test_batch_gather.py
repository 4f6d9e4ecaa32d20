"""Losses in which the samples of a batch meet are the same on every layout and every number of micro-batches."""

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
BATCH, STEPS = 12, 3


class Block(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
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
    logits = F.normalize(z, dim=1) @ F.normalize(t, dim=1).t() / 0.1
    return F.cross_entropy(logits, torch.arange(len(logits)))


def hard_triplets(z: Tensor, labels: Tensor) -> Tensor:
    """The farthest of the same class, the nearest of another."""
    distances = (z.unsqueeze(0) - z.unsqueeze(1)).square().sum(-1).add(1e-6).sqrt()
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    farthest = distances.where(same, -1.0).amax(1)
    nearest = distances.where(~same, 1e4).amin(1)
    return F.relu(farthest - nearest + 0.5).mean()


def supervised(views: Tensor, labels: Tensor) -> Tensor:
    """SupCon: Khosla et al. 2020, arXiv 2004.11362, equation 2. views: (samples, views, features)."""
    z = F.normalize(views, dim=2).flatten(0, 1)
    labels = labels.repeat_interleave(views.size(1))
    itself = torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.t() / 0.2).masked_fill(itself, -1e4)
    positive = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~itself
    return -((logits.log_softmax(1) * positive).sum(1) / positive.sum(1)).mean()


def covariance(z: Tensor) -> Tensor:
    """Part of VICReg: squares of sums over the batch; and the mean's, without which nothing says where it is."""
    of_mean = z.mean(0).square().sum()
    z = z - z.mean(0)
    c = z.t() @ z / (len(z) - 1)
    return (c.square().sum() - c.diagonal().square().sum()) / z.size(1) + F.relu(1 - z.std(0)).mean() + of_mean


class Coupled(Task):
    """kind: of loss."""

    def __init__(self, *, kind: str, drop: float = 0.0, gathers: bool = True) -> None:
        self.kind, self.drop, self.gathers = kind, drop, gathers

    def build_model(self) -> nn.Module:
        return Encoder(self.drop)

    def train_data(self) -> TensorDataset:
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sin().repeat(1, 2)[:, :8], (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0), torch.arange(40))

    def eval_data(self) -> TensorDataset:
        return self.train_data()

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def together(self, x: Tensor) -> Tensor:
        return self.gather(x) if self.gathers else x

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, other, labels, number = batch
        z = model(x)
        self.log("size", z.square().mean())
        if self.kind == "own anchors":
            keys, numbers = self.together(other @ torch.ones(8, 8).tril() + z), self.together(number)
            place = (numbers.unsqueeze(0) == number.unsqueeze(1)).int().argmax(1)
            return F.cross_entropy(F.normalize(z, dim=1) @ F.normalize(keys, dim=1).t() / 0.1, place)
        if self.kind == "supervised":
            views = torch.stack([z, model(x.flip(1))], 1)
            return supervised(self.together(views), self.together(labels))
        if self.kind == "triplets":
            return hard_triplets(self.together(z), self.together(labels)) + z.square().mean()  # and a sum over samples
        if self.kind == "covariance":
            return covariance(self.together(z))
        return info_nce(self.together(z), self.together(other))


KINDS = ["info_nce", "own anchors", "triplets", "supervised", "covariance"]


class Weighted(Coupled):
    """A mean over items, of which whole micro-batches have none."""

    items_vary = True

    def items(self, batch: Any) -> Tensor:
        return (batch[3] % 4 == 0).sum()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        counts = batch[3] % 4 == 0
        keys = F.normalize(self.gather(z + batch[1]), dim=1)
        numbers = self.gather(batch[3])
        place = (numbers.unsqueeze(0) == batch[3].unsqueeze(1)).int().argmax(1)
        losses = F.cross_entropy(F.normalize(z, dim=1) @ keys.t() / 0.1, place, reduction="none")
        return losses[counts].mean()


def trained(rank: int, world: int, strategy: str, degrees: dict[str, int], kind: str, more: list[str]) -> Any:
    """(losses by step, weights) of a training."""
    task = "Weighted" if kind == "weighted" else "Coupled"
    given = [f"task=tests.app.training.test_batch_gather:{task}", f"task_args={{kind: {kind}}}", f"train.steps={STEPS}"]
    given += [f"train.global_batch_size={BATCH}", "train.clip_norm=0.7", "optimizer.lr=0.01", "train.log_every=1"]
    wanted = config(*given, "train.eval_every=null", "train.ema_decay=null", *more)
    layout = choose(strategy, world, **degrees)
    job = Job(
        config=wanted,
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
    found = {event.step: event.values for event in logged(events, "train/loss")}
    values = {step: (v["train/loss"], v["train/grad_norm"], v.get("train/size")) for step, v in found.items()}
    return values, training.parallel.full_model_state()


def trained_each(
    rank: int, world: int, strategy: str, degrees: dict[str, int], kinds: list[str], more: list[str]
) -> dict[str, Any]:
    return {kind: trained(rank, world, strategy, degrees, kind, more) for kind in kinds}


def on_ranks(world: int, strategy: str, degrees: dict[str, int], kinds: list[str], more: list[str]) -> dict[str, Any]:
    """By kind what rank 0 has."""
    if world == 1:
        return trained_each(0, 1, strategy, degrees, kinds, more)
    return run_distributed(trained_each, world, world, strategy, degrees, kinds, more)[0]


_truths: dict[tuple[str, ...], Any] = {}


def truth(kind: str, *more: str) -> Any:
    """One device with the whole batch, where gather is the identity."""
    if (kind, *more) not in _truths:
        _truths[kind, *more] = trained(0, 1, "single", {}, kind, list(more))
    return _truths[kind, *more]


def assert_same(found: Any, expected: Any, loss: float, weights: float = 2e-5) -> None:
    assert found[0].keys() == expected[0].keys() and len(found[0]) == STEPS
    for step, values in expected[0].items():
        for mine, other in zip(found[0][step], values, strict=True):
            assert mine == pytest.approx(other, rel=loss), (step, found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.allclose(found[1][name], value, atol=weights), (name, (found[1][name] - value).abs().max())


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
    """Each row with a last micro-batch that is smaller; the others take minutes."""
    found = []
    for strategy, world, degrees in ROWS:
        uneven = 2 if world == 4 and "tensor" not in strategy else 5
        for micro in (None, 1, 2, 5):
            quick = micro == uneven and strategy in ("single", "ddp", "fsdp", "tensor")
            marks = [] if quick else [pytest.mark.slow]
            found.append(pytest.param(strategy, world, degrees, micro, marks=marks, id=f"{strategy} {micro}"))
    return found


@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "world", "degrees", "micro"), cases())
def test_a_coupled_loss_is_the_same_under_every_layout(
    strategy: str, world: int, degrees: dict[str, int], micro: int | None
) -> None:
    more = [] if micro is None else [f"train.micro_batch_size={micro}"]
    found = on_ranks(world, strategy, degrees, KINDS, more)
    for kind in KINDS:
        assert_same(found[kind], truth(kind), 2e-5 if "tensor" in strategy else 5e-6)


@pytest.mark.alone
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_without_gather_it_is_another_loss(strategy: str) -> None:
    world = 1 + (strategy == "ddp")
    more = ["train.micro_batch_size=6", "task_args.gathers=false"]
    for kind, found in on_ranks(world, strategy, {}, ["info_nce", "triplets", "covariance"], more).items():
        assert found[0][1][0] != pytest.approx(truth(kind)[0][1][0], rel=1e-2)


PARTS = ["train.micro_batch_size=4"]
"""Of two workers' 6 samples: 4 and 2."""
SIXTEEN = 3e-3


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "options", "gate"),
    [
        ("ddp", ["train.activation_checkpointing=full"], 5e-6),
        ("fsdp", ["train.activation_checkpointing=selective", "parallel.accumulate_sharded=true"], 5e-6),
        ("fsdp", ["train.activation_checkpointing=full", "parallel.offload=true"], 5e-6),
        ("zero1", ["parallel.reshard_after_forward=true"], 5e-6),
        ("ddp", ["parallel.find_unused_parameters=true", "parallel.bucket_mb=0.001"], 5e-6),
        ("tensor", ["train.activation_checkpointing=full"], 2e-5),
        ("ddp", ["train.precision=fp16"], SIXTEEN),
        ("fsdp", ["train.precision=bf16", "train.activation_checkpointing=full"], SIXTEEN),
        ("fsdp", ["train.precision=fp16"], SIXTEEN),
        pytest.param("fsdp", ["train.compile=true", "train.compile_backend=aot_eager"], 5e-6, marks=pytest.mark.slow),
        pytest.param("ddp", ["train.compile=true", "train.compile_backend=aot_eager"], 5e-6, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_options_change_no_number_but_by_rounding(strategy: str, options: list[str], gate: float) -> None:
    narrow = [option for option in options if "fp16" in option]  # with its first steps that overflow
    for more in ([], PARTS):
        found = on_ranks(2, strategy, {}, ["supervised"], [*more, *options])["supervised"]
        for step, (loss, *_) in truth("supervised", *narrow)[0].items():
            assert found[0][step][0] == pytest.approx(loss, rel=gate), (more, step)
        if gate < SIXTEEN:
            assert_same(found, truth("supervised"), gate)


@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "micro"), [("single", 1), ("ddp", 1), ("fsdp", 2), ("ddp", 6)])
def test_parts_without_items_give_their_rows_and_weigh_nothing(strategy: str, micro: int) -> None:
    found = on_ranks(1 + (strategy != "single"), strategy, {}, ["weighted"], [f"train.micro_batch_size={micro}"])
    assert_same(found["weighted"], truth("weighted"), 5e-6)


class Alternating(Coupled):
    """Two updates a step, of which one is coupled, and functions that are new in each step."""

    def training_step(self, update: Any) -> None:
        update(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
        update(lambda model, batch: self.loss(model, batch))


def alternated(rank: int, world: int, strategy: str, more: list[str]) -> Any:
    wanted = config(
        "task=tests.app.training.test_batch_gather:Alternating",
        "task_args={kind: triplets}",
        "train.steps=3",
        "train.global_batch_size=12",
        "optimizer.lr=0.01",
        "train.log_every=2",
        *more,
    )
    training, _ = training_of(wanted, "/nowhere", rank, world, strategy)
    for batches, _ in zip(training.batches(), range(3)):
        training.step(batches)
    return training.parallel.full_model_state()


@pytest.mark.alone
def test_a_step_of_several_losses_some_of_which_are_coupled() -> None:
    expected = alternated(0, 1, "single", [])
    for strategy in ("ddp", "fsdp"):
        found = run_distributed(alternated, 2, 2, strategy, PARTS)[0]
        assert all(torch.allclose(found[name], value, atol=2e-5) for name, value in expected.items())


def test_dropout_is_repeated_and_nothing_is_logged_twice() -> None:
    """Other random numbers in a second forward would end the first step."""
    found = trained(0, 1, "single", {}, "info_nce", [*PARTS, "task_args.drop=0.3"])
    again = trained(0, 1, "single", {}, "info_nce", [*PARTS, "task_args.drop=0.3"])
    assert found[0] == again[0] != truth("info_nce")[0] and all(v[2] > 0 for v in found[0].values())


# --- evaluation, and what is known before a worker starts -------------------------------------------------------------


def evaluated(rank: int, world: int, strategy: str) -> float:
    wanted = config(
        "task=tests.app.training.test_batch_gather:Coupled", "task_args={kind: info_nce}", "train.eval_batch_size=5"
    )
    training, _ = training_of(wanted, "/nowhere", rank, world, strategy)
    return training.evaluator.held_out_metrics(0)["loss"]


@pytest.mark.alone
def test_an_evaluation_is_of_its_batches_as_they_are() -> None:
    task = Coupled(kind="info_nce")
    training, _ = training_of(
        config("task=tests.app.training.test_batch_gather:Coupled", "task_args={kind: info_nce}"), "/no"
    )
    model, data = training.parallel.inner.eval(), task.eval_data().tensors
    with torch.no_grad():
        losses = [task.loss(model, [t[i : i + 5] for t in data]).item() for i in range(0, 40, 5)]
    expected = sum(losses) / len(losses)
    assert evaluated(0, 1, "single") == pytest.approx(expected, rel=1e-6)
    assert run_distributed(evaluated, 2, 2, "ddp") == pytest.approx([expected] * 2, rel=1e-6)


COUPLED = ["task=tests.app.training.test_batch_gather:Coupled", "task_args={kind: info_nce}", "train.eval_batch_size=4"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["strategy=pipeline", "parallel.pp=2"], "calls self.gather, but a pipeline has one micro-batch .*: write str"),
        (["strategy=context", "parallel.cp=2"], "with parallel.cp a worker has a part of every sample: write"),
        (["strategy=ddp", "train.noise_scale_every=2"], "train.noise_scale_every compares .* calls self.gather"),
    ],
)
def test_what_cannot_gather_is_one_sentence_before_a_worker_starts(more: list[str], said: str) -> None:
    wanted = config(*COUPLED, *more)
    with pytest.raises((UserError, LayoutError), match=said):
        prepare(wanted, read_task(wanted), 2, devices_per_node=2)


def test_the_note_on_evaluations_names_the_batch_and_where_to_write_it() -> None:
    wanted = config(*COUPLED[:2], "strategy=ddp", "train.eval_every=2")
    (note,) = prepare(wanted, read_task(wanted), 2, devices_per_node=2).notes
    assert "here of 8 samples: write train.eval_batch_size" in note
    wanted = config(*COUPLED, "strategy=ddp", "train.eval_every=2")
    task = read_task(wanted)
    assert not prepare(wanted, task, 2, devices_per_node=2).notes and task.gathering is None
    assert "self.gather" in POINTER


class Late(Coupled):
    """Gathers from its third loss on."""

    seen = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        return super().loss(model, batch) if self.seen > 4 else model(batch[0]).square().mean()


class Hidden(Points):
    """Its loss gathers in a way that its code does not show."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return getattr(self, "ga" + "ther")(super().loss(model, batch).expand(len(batch[0]))).mean()


@pytest.mark.parametrize("task", ["Late", "Hidden"])
def test_a_loss_that_gathers_where_nothing_said_so_ends_with_a_sentence(task: str) -> None:
    args = "{kind: info_nce}" if task == "Late" else "{}"
    wanted = config(
        f"task=tests.app.training.test_batch_gather:{task}", f"task_args={args}", "train.micro_batch_size=8"
    )
    training, _ = training_of(wanted, "/nowhere")
    with pytest.raises(UserError, match="in some steps and not in its first one, or where its module does not show"):
        for batches in training.batches():
            training.step(batches)


def test_only_tasks_whose_code_mentions_it_are_asked() -> None:
    assert may_gather(Coupled(kind="info_nce")) and may_gather(Late(kind="info_nce"))
    assert not may_gather(Points())
    training, _ = training_of(config(), "/nowhere")
    assert isinstance(training.gathering, Gathering) and not training.gathering._may_gather
