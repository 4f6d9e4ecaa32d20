"""A task whose model is a chain of blocks, slow on purpose and with dropout, for pipelines."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.config import Config
from app.config.io import load_config
from tests.tasks import Points


def config(*overrides: str) -> Config:
    """The configuration of a short run of `Chain`, unless `overrides` names another task."""
    defaults = ["task=tests.chain:Chain", "train.steps=5", "train.global_batch_size=16"]
    return load_config([], [*defaults, *overrides])


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, hang: str = "", seconds: float = 0.0) -> None:
        super().__init__()
        self.hang = hang
        self.seconds = seconds
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.hang and Path(self.hang).exists():
            Path(self.hang).unlink()
            time.sleep(3600)
        if not x.is_meta:
            time.sleep(self.seconds)
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int, blocks: int, dropout: float, hang: str = "") -> None:
        super().__init__()
        self.entry = nn.Linear(2, width)
        self.head = nn.Linear(width, 4)
        self.blocks = nn.ModuleList(
            Block(width, dropout, hang if i == blocks - 1 else "") for i in range(blocks)
        )
        self.fork = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        if self.fork:
            return self.head(sum(block(x) for block in self.blocks))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Chain(Points):
    """Classifies points by a few residual blocks.

    Args:
        step_seconds: How much longer each micro-batch takes on every stage.
        hang: A file. Once it exists, the last block deletes it and sleeps for an hour.
        dropout: The share of numbers that dropout sets to zero.
        slow_block_seconds: How much longer each of the last two blocks takes, of which no plan
            knows.
    """

    def __init__(
        self,
        *,
        step_seconds: float = 0.0,
        hang: str = "",
        dropout: float = 0.1,
        slow_block_seconds: float = 0.0,
    ) -> None:
        super().__init__(step_seconds=step_seconds)
        self.hang = hang
        self.dropout = dropout
        self.slow_block_seconds = slow_block_seconds

    def build_model(self) -> nn.Module:
        model = Net(self.width, 4, self.dropout, self.hang)
        for number in (2, 3):
            model.get_submodule(f"blocks.{number}").seconds = self.slow_block_seconds
        return model


class OwnGenerator(Dataset[Any]):
    """Draws from a generator that nothing seeds again."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(2, generator=self.generator), torch.tensor(0)


class Wrong(Chain):
    """A task with a mistake in its model or data.

    Args:
        what: The mistake: fork, empty, misnamed, own generator, twice, or twice in metrics.
    """

    def __init__(self, *, what: str = "fork") -> None:
        super().__init__()
        self.what = what

    def build_model(self) -> nn.Module:
        if self.what == "empty":
            return nn.Sequential(nn.Flatten(), nn.Flatten())
        model = Net(self.width, 4, 0.0)
        model.fork = self.what == "fork"
        return model

    def train_data(self) -> Any:
        return OwnGenerator() if self.what == "own generator" else super().train_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if self.what == "twice":
            loss = loss + super().loss(model, (batch[0] + 1, batch[1]))
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        other = {"other": model(batch[0] + 1).mean()} if self.what == "twice in metrics" else {}
        return super().metrics(model, batch) | other

    def blocks(self, model: nn.Module) -> list[str] | None:
        return ["blocks.0", "bloks.1"] if self.what == "misnamed" else None

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        return {"blocks.*.upp": "colwise"}
