"""A model's own initial weights, measured, and base models that cannot be used."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.config import Config
from app.config.io import load_config
from app.errors import UserError
from app.run.base_model import grown, widths_of
from app.tasks import load_task
from app.tasks.base import Task
from app.training.width_transfer import TensorWidth, scale_initial_weights

pytestmark = pytest.mark.pure


class Mlp(Task):
    """A network whose layers have initial weights of different rules.

    Args:
        width: Of its hidden layers.
        depth: How many there are.
        heads: Whether it attends, with one head.
        tied: Whether its first and last matrix are one.
        own_optimizer: Whether it makes its optimizer.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        depth: int = 1,
        scale: float = 1.0,
        heads: bool = False,
        tied: bool = False,
    ) -> None:
        self.width = width
        self.depth = depth
        self.scale = scale
        self.heads = heads
        self.tied = tied

    def build_model(self) -> nn.Module:
        model = nn.Module()
        model.embed = nn.Embedding(50, self.width)
        model.body = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(self.depth))
        model.constant = nn.Linear(self.width, self.width)
        nn.init.normal_(model.constant.weight, std=0.02)
        nn.init.zeros_(model.constant.bias)
        model.inverse = nn.Linear(self.width, self.width, bias=False)
        nn.init.normal_(model.inverse.weight, std=1 / self.width)
        model.table = nn.Parameter(torch.randn(40, self.width) / math.sqrt(self.width))
        model.norm = nn.LayerNorm(self.width)
        model.head = nn.Linear(self.width, 50)
        if self.heads:
            model.attention = nn.MultiheadAttention(self.width, 1)
        if self.tied:
            model.head.weight = model.embed.weight
        return model

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(4, 2))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError("no test trains it")


class WithOptimizer(Mlp):
    """One that makes its optimizer itself."""

    def optimizer(self, parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in parameters])


def config(base: str, *more: str) -> Config:
    keys = [f"optimizer.width_transfer={{base: {base}}}", *more]
    return load_config([], [f"task={__name__}:Mlp", *keys])


def measured(base: str, *more: str) -> dict[str, TensorWidth]:
    run = config(base, *more)
    return widths_of(run, load_task(run.task, run.task_args))


def test_initial_weights_follow_the_table_whatever_the_models_own_rule() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    widths = measured("{width: 16}")
    assert torch.equal(torch.get_rng_state(), before), "what the run draws later is the same"
    factors = {name: width.initial for name, width in widths.items()}
    assert factors == {
        "embed.weight": 1,  # its own rule: a constant; wanted: a constant
        "body.0.weight": 1,  # 1/√width; 1/√width
        "body.0.bias": 2,  # 1/√width; a constant
        "constant.weight": 0.5,  # a constant; 1/√width
        "constant.bias": 1,  # zeros
        "inverse.weight": 2,  # 1/width; 1/√width
        "table": 2,  # 1/√width; a constant
        "norm.weight": 1,  # ones
        "norm.bias": 1,
        "head.weight": 0.5,  # 1/√width; 1/width
        "head.bias": 2,  # 1/√width; a constant
    }
    model = Mlp().build_model()
    scaled = Mlp().build_model()
    scaled.load_state_dict(model.state_dict())
    scale_initial_weights(scaled, widths)
    for name, parameter in scaled.named_parameters():
        assert torch.equal(parameter, factors[name] * model.get_parameter(name)), name


def test_weights_that_are_loaded_are_not_scaled() -> None:
    widths = measured("{width: 16}", "checkpoint.load=runs/other")
    assert {width.initial for width in widths.values()} == {1.0}
    assert widths["head.weight"].kind == "output"


def test_a_model_that_is_its_base_trains_as_configured() -> None:
    assert measured("{width: 64}") == {}
    assert measured("{width: 16}", "task_args.width=16") == {}


def test_what_grows_is_what_differs() -> None:
    base = {"width": 8, "depth": 3, "nested": {"sizes": [4, 6], "layers": 2}, "name": "a"}
    arguments = {"width": 32, "depth": 3, "nested": {"sizes": [8, 12], "layers": 2}}
    wider = {"width": 16, "depth": 3, "nested": {"sizes": [8, 12], "layers": 2}, "name": "a"}
    assert grown(base, arguments, 2) == wider
    with pytest.raises(UserError, match=r"the number 4, whose 1\.1 times is not whole"):
        grown({"sizes": [4]}, {}, 1.1)


@pytest.mark.parametrize(
    ("base", "more", "sentence"),
    [
        (
            "{width: 16}",
            ["task_args.tied=true"],
            "embed.weight and head.weight are one tensor, which as input and as output would need",
        ),
        ("{width: 16}", ["task_args.heads=true"], "heads of size 16, the model has ones of 64"),
        ("{width: 16, depth: 2}", [], "with the parameter body.1.weight, which the model itself"),
        ("{width: 16}", ["task_args.depth=2", "optimizer.width_transfer.base.depth=1"], "without"),
        ("{scale: 2.0}", [], "base changes the size of no parameter"),
        ("{wdth: 16}", [], "no model with wdth=16 can be made: .*wdth.*width"),
        ("{width: 16}", ["optimizer.name=rprop"], "does not work with rprop"),
        ("{width: 16}", [f"task={__name__}:WithOptimizer"], "makes its own optimizer"),
    ],
)
def test_a_base_that_cannot_be_used_is_one_sentence(
    base: str, more: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        measured(base, *more)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["{bse: {width: 4}}", "{base: 4}", "{base: {width: 4}, more: 1}"])
def test_other_keys_are_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"must be base with arguments of the task: \{base:"):
        load_config([], [f"task={__name__}:Mlp", f"optimizer.width_transfer={value}"])
