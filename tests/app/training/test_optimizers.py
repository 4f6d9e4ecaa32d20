"""Optimizers, parameter groups and schedules: those of torch, under every layout."""

import functools
import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from app.config import OptimizerConfig, ScheduleConfig
from app.config.check import OPTIMIZERS
from app.config.io import load_config
from app.config.words import OPTIMIZER_ARGUMENTS
from app.errors import UserError
from app.training.optimizer import (
    BUILT_IN,
    Optimizers,
    build_optimizer,
    check_optimizer,
    hidden_matrices,
    learning_rate,
    require_matches,
)
from app.training.whole_matrix import Muon
from experiments.parity.curves import Curve, difference, train
from strategies.parallelize import Options, choose
from strategies.state import load_optimizer_state, optimizer_state
from tests.pool import run_distributed
from tests.strategies.models import PlainGPT, gpt_trial, seeded

CPU = torch.device("cpu")
LAYOUTS = ("fsdp", "tensor")
"""Those that split matrices; a pipeline's stage has whole ones."""
RATES = {"adadelta": 1.0, "rprop": 1e-3, "asgd": 0.05, "sgd": 0.05}
EPS = {"adagrad": 1e-3, "rmsprop": 1e-3, "adadelta": 1e-3}
"""Larger than usual: a gradient that is zero but for rounding would else be a step of full size."""


def _config(name: str) -> OptimizerConfig:
    args = {"eps": EPS[name]} if name in EPS else {}
    lr = RATES.get(name, 1e-2)
    return OptimizerConfig(name=name, lr=lr, eps=1e-3, weight_decay=0.0, args=args)


def _built(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return build_optimizer(_config(name), parameters)


def _curve(name: str, strategy: str, workers: int) -> Curve:
    trial = replace(gpt_trial(layers=1), steps=2, optimizer=functools.partial(_built, name))
    return train(trial, choose(strategy, workers), Options(), CPU)


def _curves(rank: int, names: list[str]) -> list[list[Curve]]:
    return [[_curve(name, layout, 2) for layout in LAYOUTS] for name in names]


@pytest.mark.alone
@pytest.mark.parametrize(
    "names",
    [
        ["muon", "adafactor", "rprop"],
        # Like rprop, and like adamw in other tests, they take each number by itself.
        pytest.param(["adadelta", "asgd", "radam"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_optimizers_train_the_same_model_under_every_layout(names: list[str]) -> None:
    """Those that need whole matrices, and those that no other test trains split."""
    for name, curves in zip(names, run_distributed(_curves, 2, names)[0], strict=True):
        single = _curve(name, "single", 1)
        for layout, curve in zip(LAYOUTS, curves, strict=True):
            distance = difference(single, curve)
            if name == "rprop":  # it steps by the sign of a gradient that is zero but for rounding
                assert distance.loss < 2e-5 and distance.norm < 2e-4, f"{layout}: {distance}"
            elif name == "muon":
                # It orthogonalizes in bfloat16, where a rounding that differs moves a weight by a
                # part of the rate, 1e-2; a part of a matrix alone would move it by the whole rate.
                assert distance.loss < 2e-5 and distance.norm < 2e-4, f"{layout}: {distance}"
                assert distance.weights < 1e-3, f"{layout}: {distance}"
            else:
                assert distance.within(2e-5), f"{name}, {layout}: {distance}"


@pytest.mark.pure
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_from_its_saved_state(name: str) -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 2, 4, 3)

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)])
        return model, build_optimizer(_config(name), model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for parameter, gradient in zip(model.parameters(), gradients[number]):
            parameter.grad = gradient.clone()
        optimizer.step()

    model, optimizer = start()
    for number in range(3):
        step(model, optimizer, number)
    names: dict[Any, str] = {p: n for n, p in model.named_parameters()}
    saved = optimizer_state(optimizer, names)
    resumed, resumed_optimizer = start()
    resumed.load_state_dict(model.state_dict())
    resumed_names: dict[Any, str] = {p: n for n, p in resumed.named_parameters()}
    load_optimizer_state(resumed_optimizer, saved, resumed_names)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(resumed, resumed_optimizer, number)
    for one, other in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(one, other)


@pytest.mark.pure
def test_muon_and_adafactor_are_torchs_own_on_one_device() -> None:
    for name, torch_class in (("muon", torch.optim.Muon), ("adafactor", torch.optim.Adafactor)):
        weights = [nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6)) for _ in range(2)]
        kwargs: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
        optimizers = [BUILT_IN[name]([weights[0]], **kwargs), torch_class([weights[1]], **kwargs)]
        for number in range(3):
            for weight, optimizer in zip(weights, optimizers):
                weight.grad = (weight.detach() * (number + 1)).cos()
                optimizer.step()
        assert torch.allclose(*weights, atol=1e-6), name


@pytest.mark.pure
def test_muon_is_for_matrices_of_hidden_layers() -> None:
    model = seeded(lambda: PlainGPT(layers=2))()
    hidden = hidden_matrices(model, ["blocks.0", "blocks.1"])
    assert hidden == {
        f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("q", "k", "v", "out", "up", "down")
    }
    without_blocks = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4))
    assert hidden_matrices(without_blocks, []) == {"1.weight"}
    names = {parameter: name for name, parameter in model.named_parameters()}
    config = OptimizerConfig(name="muon", weight_decay=0.1, args={"ns_steps": 3})
    optimizer = build_optimizer(config, model.parameters(), names=names, hidden=hidden)
    assert isinstance(optimizer, Optimizers)
    muon = optimizer.named["muon"]
    assert isinstance(muon, Muon) and muon.param_groups[0]["ns_steps"] == 3
    assert {names[p] for group in muon.param_groups for p in group["params"]} == hidden
    others = [names[p] for g in optimizer.named["adamw"].param_groups for p in g["params"]]
    assert "embed.weight" in others and "head.weight" in others and "norm.bias" in others


@pytest.mark.pure
def test_an_argument_that_is_named_for_optimizer_args_is_one_of_an_optimizer() -> None:
    taken = {name for chosen in BUILT_IN.values() for name in inspect.signature(chosen).parameters}
    assert set(OPTIMIZER_ARGUMENTS) <= taken


@pytest.mark.pure
def test_groups_by_pattern() -> None:
    text = "optimizer.groups={'*.bias': {weight_decay: 0.5}, 'head.*': {lr: 0.3, weight_decay: 0}}"
    config = load_config([], [text, "optimizer.weight_decay=0.1", "optimizer.lr=0.1"]).optimizer
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(config, model.parameters(), names=names)
    values = {
        names[p]: (group["lr"], group["weight_decay"], group.get("initial_lr"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert values == {
        "body.weight": (0.1, 0.1, None),
        "body.bias": (0.1, 0.5, None),
        "head.weight": (0.3, 0, 0.3),
        "head.bias": (0.3, 0, 0.3),
    }
    check_optimizer(config)
    require_matches(config, names.values())
    with pytest.raises(UserError, match=r"'head\.\*', which matches no trained parameter"):
        require_matches(config, ["body.weight", "body.bias"])
    wrong = OptimizerConfig(groups={"*": {"wieght_decay": 0}})
    with pytest.raises(UserError, match=r"wieght_decay: adamw has no such argument.*weight_decay"):
        check_optimizer(wrong)
    with pytest.raises(
        UserError, match=r"optimizer\.groups\['\*'\] is 3, but it must be a mapping"
    ):
        load_config([], ["optimizer.groups={'*': 3}"])
    with pytest.raises(
        UserError, match=r"args\.amsgrad: optimizer 'muon' has no such argument; it"
    ):
        check_optimizer(OptimizerConfig(name="muon", args={"amsgrad": True}))
    check_optimizer(OptimizerConfig(name="muon", args={"eps": 1e-6, "momentum": 0.9}))
    check_optimizer(OptimizerConfig(name="rmsprop", args={"eps": 1e-6, "momentum": 0.9}))
    for name, taken in (("adamw", "eps"), ("sgd", "momentum"), ("muon", "weight_decay")):
        with pytest.raises(UserError, match=f"{name} gets it from optimizer.{taken}: write"):
            check_optimizer(OptimizerConfig(name=name, args={taken: 0.1}))
    with pytest.raises(UserError, match="adamw does not take these arguments: Invalid epsilon"):
        build_optimizer(OptimizerConfig(eps=-1.0), [nn.Parameter(torch.zeros(2))])
    with pytest.raises(UserError, match="lbfgs computes the loss several times"):
        load_config([], ["optimizer.name=LBFGS"])
    with pytest.raises(UserError, match="rprop has none"):
        load_config([], ["optimizer.name=rprop", "optimizer.weight_decay=0.1"])


@pytest.mark.pure
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleConfig("wsd", decay_steps=4), {0: 2.0, 16: 2.0, 18: 1.0, 20: 0.0}),
        (ScheduleConfig("wsd", 2, 0.5), {0: 1.0, 17: 2.0, 20: 1.0}),
        (ScheduleConfig("inverse_sqrt", 4), {0: 0.5, 3: 2.0, 15: 1.0}),
        (ScheduleConfig("step", decay_steps=8), {7: 2.0, 8: 0.2, 16: 0.02}),
        (ScheduleConfig("step", decay_factor=0.5), {6: 2.0, 7: 1.0, 14: 0.5}),
        (ScheduleConfig("one_cycle", 10, 0.1), {0: 0.08, 5: 1.04, 10: 2.0, 15: 1.1, 20: 0.2}),
        (ScheduleConfig("one_cycle"), {0: 0.08, 6: 2.0, 20: 0.0}),
    ],
)
def test_schedules(schedule: ScheduleConfig, expected: dict[int, float]) -> None:
    config = OptimizerConfig(lr=2.0)
    rates = {step: learning_rate(config, schedule, step, steps=21) for step in expected}
    assert rates == pytest.approx(expected)
