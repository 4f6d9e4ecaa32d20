"""Backward in two halves leaves the gradients that one backward does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies import activation_checkpointing
from strategies.pipeline.weight_grad import DeferredWeightGrad, finish
from tests.strategies.models import HEADS, WIDTH, Block, seeded

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (lambda: Block(WIDTH, HEADS), (2, 5, WIDTH)),
    "without bias": (lambda: nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 2)), (4, 3)),
}


def _gradients(name: str, deferred: bool, recompute: str = "none") -> tuple[Any, ...]:
    make, shape = MODELS[name]
    model, later = seeded(make)(), DeferredWeightGrad()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    waited: list[str] = []
    if deferred:
        later.wrap(model)
    activation_checkpointing.apply(model, [], recompute)
    for _ in range(2):  # gradients add up
        y = model(x)
        later.waiting = [] if deferred else None
        y.square().sum().backward()
        waited += [key for key, p in model.named_parameters() if p.grad is None]
        if later.waiting is not None:
            finish(later.waiting)
    return x.grad, {key: p.grad for key, p in model.named_parameters()}, waited


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_both_halves_make_the_whole(name: str, recompute: str) -> None:
    whole, halves = _gradients(name, False), _gradients(name, True, recompute)
    torch.testing.assert_close(halves[0], whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(halves[1], whole[1], rtol=1e-5, atol=1e-5)
    assert halves[2], "some weights had no gradient before they were finished"
    assert all(key.endswith("weight") for key in halves[2])
    assert not whole[2]
