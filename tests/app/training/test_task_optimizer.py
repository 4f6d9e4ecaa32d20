"""A task's own optimizer that cannot train the model is refused before a worker starts."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from app.config.io import load_config
from app.errors import UserError
from app.run.prepare import Prepared, prepare, read_task
from app.training.optimizer import optimizer_class
from app.training.task_optimizer import left_out, require_optimizer
from tests.tasks import Points

pytestmark = pytest.mark.pure

Named = list[tuple[str, nn.Parameter]]


def values(parameters: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in parameters]


def copies(parameters: Named) -> Iterator[nn.Parameter]:
    return (nn.Parameter(parameter.detach().clone()) for _, parameter in parameters)


def with_scheduler(parameters: Named) -> tuple[list[Any], list[Any]]:
    """What Lightning's configure_optimizers returns."""
    optimizer = AdamW(values(parameters))
    return [optimizer], [CosineAnnealingLR(optimizer, 5)]


WRONG: dict[str, tuple[Callable[[Named], Any], str]] = {
    "several without names": (
        lambda parameters: [SGD([p]) for _, p in parameters],
        r"optimizer\(\) returns a list, but it must be a torch.optim.Optimizer, or, .* by name$",
    ),
    "with a scheduler": (with_scheduler, r"returns a tuple, .* is the task's schedule\(step, step"),
    "with a scheduler by name": (
        lambda parameters: {"optimizer": AdamW(values(parameters)), "lr_scheduler": "cosine"},
        r"a dict in which 'lr_scheduler' is a str, .* the task's schedule\(step, steps\)",
    ),
    "a class": (lambda parameters: AdamW, "returns the class AdamW, but"),
    "a function": (lambda parameters: len, "returns a builtin_function_or_method, but"),
    "no optimizer by name": (lambda parameters: {}, "returns an empty dict, but"),
    "one that needs a closure": (
        lambda parameters: LBFGS(values(parameters)),
        "LBFGS computes the loss itself in its step",
    ),
    "of copies": (
        lambda parameters: AdamW(copies(parameters)),
        "has 4 parameters that it was not called with, .* make it of those",
    ),
    "of one parameter more": (
        lambda parameters: AdamW([*values(parameters), nn.Parameter(torch.ones(1))]),
        "has 1 parameter that it was not called with",
    ),
    "of copies beside the model's": (
        lambda parameters: {"a": AdamW(values(parameters)), "b": AdamW(copies(parameters))},
        "has 4 parameters that it was not called with",
    ),
}
RIGHT: dict[str, tuple[Callable[[Named], Any], int]] = {
    "of all parameters": (lambda parameters: AdamW(values(parameters)), 0),
    "of parameters with names": (lambda parameters: AdamW(parameters), 0),
    "in groups": (
        lambda parameters: AdamW([{"params": [p], "lr": 1e-3} for _, p in parameters]),
        0,
    ),
    "several by name": (
        lambda parameters: {"a": AdamW(values(parameters)[:2]), "b": SGD(values(parameters)[2:])},
        0,
    ),
    "of some parameters": (lambda parameters: AdamW(values(parameters)[:2]), 2),
    "that needs numbers": (
        lambda parameters: AdamW(values(parameters), lr=float(parameters[0][1].detach().std())),
        0,
    ),
    "none": (lambda parameters: None, 0),
}


def prepared(make: Callable[[Named], Any], workers: int) -> Prepared:
    """A run whose task has this optimizer, prepared for some workers."""
    run = load_config(
        [], ["task=tests.tasks:Points", "run.name=own", "train.steps=2", "strategy=ddp"]
    )
    read = read_task(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Points, "optimizer", lambda self, parameters: make(parameters))
        return prepare(run, read, workers, devices_per_node=2)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_train_the_model_is_refused(
    make: Callable[[Named], Any], message: str, workers: int
) -> None:
    with pytest.raises(UserError, match=message):
        prepared(make, workers)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("make", "omitted"), RIGHT.values(), ids=RIGHT)
def test_what_trains_some_or_all_of_the_model_is_taken(
    make: Callable[[Named], Any], omitted: int, workers: int
) -> None:
    """What no optimizer has is told, because somebody may have forgotten it."""
    notes = [note for note in prepared(make, workers).notes if "leaves out" in note]
    assert len(notes) == bool(omitted)
    assert all(f"leaves out {omitted} of 4 parameters" in note for note in notes)


def test_the_first_parameter_that_is_left_out_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters = list(model.named_parameters())
    optimizer = AdamW([model[0].weight, model[1].bias])
    assert require_optimizer(optimizer, parameters) is optimizer
    assert left_out(optimizer, parameters) == ["0.bias", "1.weight"]


def test_a_configured_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer.name is 'torch.optim:LBFGS': LBFGS computes"):
        optimizer_class("torch.optim:LBFGS")
