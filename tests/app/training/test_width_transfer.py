"""Rates and initial weights transferred from a narrow model: the table, and what trains by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.config import Config, OptimizerConfig
from app.config.io import load_config
from app.errors import UserError
from app.models.gpt import GPT, TENSOR_PLAN
from app.run.base_model import widths_of
from app.storage.lease import write_lease
from app.storage.storage import Storage
from app.tasks import load_task
from app.tasks.base import Task
from app.training.optimizer import Optimizers, build_optimizer
from app.training.persistence import Persistence
from app.training.width_transfer import compare, rate_factor, require_rule
from tests.app.kit import logged, training_of
from tests.pool import run_distributed
from tests.running import same_bits

VOCABULARY = 32


class TinyGPT(Task):
    """A GPT on random tokens."""

    def __init__(self, *, d_model: int = 32, n_heads: int = 4, n_layers: int = 2) -> None:
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_layers = n_layers

    def build_model(self) -> nn.Module:
        return GPT(VOCABULARY, d_model=self.d_model, n_heads=self.n_heads, n_layers=self.n_layers)

    def train_data(self) -> TensorDataset:
        tokens = torch.randint(VOCABULARY, (64, 9), generator=torch.Generator().manual_seed(0))
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return TENSOR_PLAN

    def heads(self) -> int:
        return self.n_heads


def config(*more: str) -> Config:
    return load_config(
        [],
        [
            "task=tests.app.training.test_width_transfer:TinyGPT",
            "optimizer.width_transfer={base: {d_model: 16, n_heads: 2}}",
            "optimizer.lr=0.02",
            "optimizer.weight_decay=0.1",
            "train.steps=4",
            "train.global_batch_size=8",
            "train.log_every=1",
            *more,
        ],
    )


class Net(nn.Module):
    """One layer of each kind.

    Args:
        width: What grows.
    """

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 3, width))
        self.embed = nn.Embedding(10, width)
        self.hidden = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.conv = nn.Conv1d(2 * width, width, 3)
        self.depthwise = nn.Conv1d(width, width, 3, groups=width)
        self.upsample = nn.ConvTranspose1d(width, 5, 3)
        self.experts = nn.Parameter(torch.zeros(2, width, 4 * width))
        self.head = nn.Linear(width, 7)
        self.attention = nn.MultiheadAttention(width, heads)


KINDS = {
    # name: (kind, Adam's factor, SGD's factor) of a model 4 times as wide
    "positions": ("input", 1, 4),
    "embed.weight": ("input", 1, 4),
    "hidden.weight": ("hidden", 1 / 4, 1),
    "hidden.bias": ("input", 1, 4),
    "norm.weight": ("input", 1, 4),
    "conv.weight": ("hidden", 1 / 4, 1),
    "depthwise.weight": ("input", 1, 4),
    "upsample.weight": ("output", 1 / 4, 1 / 4),
    "upsample.bias": ("same", 1, 1),
    "experts": ("hidden", 1 / 4, 1),
    "head.weight": ("output", 1 / 4, 1 / 4),
    "head.bias": ("same", 1, 1),
    "attention.in_proj_weight": ("hidden", 1 / 4, 1),
}


@pytest.mark.pure
def test_each_kind_of_tensor_has_the_factors_of_the_table() -> None:
    widths = compare(Net(16, heads=4), Net(4, heads=1))
    for name, (kind, adam, sgd) in KINDS.items():
        width = widths[name]
        assert width.kind == kind, name
        for optimizer in ("adam", "adamw", "adagrad", "rmsprop", "nadam"):
            assert rate_factor(optimizer, width, {}) == adam, name
        for optimizer in ("sgd", "asgd"):
            assert rate_factor(optimizer, width, {}) == sgd, name
        wanted = {"hidden": 1 / 2, "output": 1 / 4}.get(kind, 1)
        assert width.initial_growth == wanted, name


@pytest.mark.pure
@pytest.mark.parametrize("adjustment", [None, "original", "match_rms_adamw"])
def test_an_orthogonal_step_is_as_large_as_the_shape_allows(adjustment: str | None) -> None:
    shapes = {"square": (8, 8), "up": (32, 8), "down": (8, 32)}

    def layers(growth: int) -> nn.Module:
        made = {
            name: nn.Linear(growth * fan_in, growth * fan_out, bias=False)
            for name, (fan_out, fan_in) in shapes.items()
        }
        return nn.ModuleDict(made)

    for name, width in compare(layers(4), layers(1)).items():
        factor = rate_factor("muon", width, {"adjust_lr_fn": adjustment})
        step = []
        for model in (layers(4), layers(1)):
            matrix = model.get_parameter(name)
            before = matrix.detach().clone()
            matrix.grad = torch.randn_like(matrix)
            torch.optim.Muon([matrix], lr=1e-2, weight_decay=0.0, adjust_lr_fn=adjustment).step()
            step.append(float(torch.linalg.matrix_norm(matrix.detach() - before, 2)))
        # Every singular value of the step is the same number, up to the precision of Muon's
        # iteration; of these shapes √(fan_out / fan_in) does not change with the width.
        assert factor * step[0] == pytest.approx(step[1], rel=0.3), name


@pytest.mark.pure
def test_groups_have_the_transferred_rate_and_decay() -> None:
    model = Net(16, heads=4)
    widths = compare(model, Net(4, heads=1))
    names = {parameter: name for name, parameter in model.named_parameters()}

    def groups(optimizer: OptimizerConfig) -> dict[str, tuple[float, float]]:
        built = build_optimizer(optimizer, model.parameters(), names=names, widths=widths)
        return {
            names[p]: (group["lr"], group["weight_decay"])
            for group in built.param_groups
            for p in group["params"]
        }

    adamw = groups(OptimizerConfig(lr=0.1, weight_decay=0.2, groups={"head.*": {"lr": 0.4}}))
    assert adamw["embed.weight"] == (0.1, 0.2)
    assert adamw["hidden.weight"] == (0.1 / 4, 0.2 * 4), "rate · decay stays"
    assert adamw["head.weight"] == (0.4 / 4, 0.2 * 4), "a group's rate is the base model's too"
    assert adamw["head.bias"] == (0.4, 0.0)
    adam = groups(OptimizerConfig(name="adam", lr=0.1, weight_decay=0.2))
    assert adam["hidden.weight"] == (0.1 / 4, 0.2), "its decay is part of the gradient"
    decoupled = {"decoupled_weight_decay": True}
    adam = groups(OptimizerConfig(name="adam", lr=0.1, weight_decay=0.2, args=decoupled))
    assert adam["hidden.weight"] == (0.1 / 4, 0.2 * 4)
    sgd = groups(OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.2))
    assert sgd["embed.weight"] == (0.1 * 4, 0.2 / 4)
    assert sgd["norm.bias"] == (0.1 * 4, 0.0)
    muon = build_optimizer(
        OptimizerConfig(name="muon", lr=0.1),
        model.parameters(),
        names=names,
        hidden={"hidden.weight"},
        widths=widths,
    )
    assert isinstance(muon, Optimizers)
    assert [group["lr"] for group in muon.named["muon"].param_groups] == [0.1 / 2]
    assert muon.named["adamw"].param_groups[0]["lr"] == 0.1, "the configured rate comes first"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rprop", "does not work with rprop, which finds the step of each weight itself"),
        ("adafactor", "does not work with adafactor, whose steps already follow the size of the"),
        ("my.module:Lion", "does not work with my.module:Lion, for which no rule between rate"),
    ],
)
def test_optimizers_without_a_rule_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        require_rule(name)


# --- training by it -------------------------------------------------------------------------------


def curves(rank: int, world: int, strategies: list[str]) -> list[dict[int, dict[str, float]]]:
    """What runs under each strategy log in each step."""
    result = []
    for strategy in strategies:
        run = config(f"strategy={strategy}")
        widths = widths_of(run, load_task(run.task, run.task_args))
        training, events = training_of(run, "/nowhere", rank, world, strategy, widths=widths)
        training.run()
        result.append({event.step: dict(event.values) for event in logged(events, "train/loss")})
    return result


@pytest.mark.alone
def test_every_layout_trains_the_same_transferred_model() -> None:
    [alone] = curves(0, 1, ["single"])
    strategies = ["ddp", "fsdp", "tensor", "pipeline"]
    (of_layouts, _) = run_distributed(curves, 2, 2, strategies)
    for strategy, values in zip(strategies, of_layouts, strict=True):
        for step in alone:
            expected = alone[step]["train/loss"]
            assert values[step]["train/loss"] == pytest.approx(expected, rel=1e-5), strategy
    assert alone[4]["train/lr"] == 0.02
    assert 0.01 in alone[4].values(), "the rate of hidden layers, in train/lr_group_1"


@pytest.mark.slow
@pytest.mark.pure
def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    def run(folder: str, steps: int) -> dict[str, Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        write_lease(Storage(str(tmp_path / folder)), "attempt", 0)
        settings = config(f"train.steps={steps}")
        widths = widths_of(settings, load_task(settings.task, settings.task_args))
        training, _ = training_of(
            settings, tmp_path / folder, widths=widths, persistence_class=Persistence
        )
        try:
            training.run()
            return training.parallel.full_model_state()
        finally:
            training.close()

    uninterrupted = run("uninterrupted", 4)
    run("parts", 2)
    assert same_bits(run("parts", 4), uninterrupted)
