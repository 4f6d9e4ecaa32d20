"""A task whose model is a chain of blocks, slow on purpose and with dropout: for pipelines that are disturbed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.tasks import Points


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(2, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Chain(Points):
    """Points, classified by a few residual blocks; each micro-batch takes `step_seconds` more on every stage."""

    def __init__(self, *, n_blocks: int = 4, dropout: float = 0.1, step_seconds: float = 0.0, width: int = 16) -> None:
        super().__init__(width=width, step_seconds=step_seconds)
        self.n_blocks, self.dropout = n_blocks, dropout

    def build_model(self) -> nn.Module:
        return Net(self.width, self.n_blocks, self.dropout)
