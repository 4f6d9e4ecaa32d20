"""A model with lazy layers has its sizes, and is as a new one otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.tasks.base import Task
from app.tasks.build import build_model

pytestmark = pytest.mark.pure


class Remembering(nn.Module):
    """Counts its calls, and keeps its last input, that of its block, and the loss's label."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.LazyLinear(3)
        self.calls = 0
        self.seen: dict[str, Tensor] = {"always": torch.zeros(())}
        self.kept: list[Tensor] = []
        self.block.register_forward_hook(lambda _, args, y: self.seen.update(block=y))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last_input = x
        self.kept.append(x)
        return self.block(x)


class Lazy(Task):
    def build_model(self) -> nn.Module:
        return Remembering()

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.ones(4, 5))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (x,) = batch
        return model(x).square().mean()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_giving_lazy_layers_their_sizes_leaves_nothing_else(device: str) -> None:
    with torch.device(device):
        model: Any = build_model(Lazy())
    assert model.block.weight.shape == (3, 5)
    assert type(model.block) is nn.Linear
    assert model.calls == 0
    assert not hasattr(model, "last_input")
    assert model.seen.keys() == {"always"} and model.kept == []
    model(torch.ones(1, 5, device=device))
    assert model.calls == 1 and model.seen.keys() == {"always", "block"}, "hooks work as before"
