"""What is trained while things are killed: a chain of small blocks that writes down which samples it has seen.

FOLDER/seen/TIME-RANK-PID.jsonl   one line per micro-batch whose loss was computed: [Unix time, positions, samples]
FOLDER/slow                       while it is there, every step takes `step_seconds` longer
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from app.tasks.base import Task
from experiments.benchmarks.chaos import boundaries

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of the plane and their quadrant; a batch also holds the samples' numbers and positions in the stream."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> Batch:
        picked = torch.tensor(indices)
        return self.x[picked], self.y[picked], picked, torch.tensor(positions)


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """The same points, each with its number, for loaders that tell no positions."""

    def __init__(self, count: int) -> None:
        self.points = Points(count)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return (*self.points[index], index)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int, blocks: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(2, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def open_record(folder: str, rank: int) -> int:
    """A descriptor to write down there what this process has seen; each write is whole, whenever it is killed."""
    seen = Path(folder, "seen")
    seen.mkdir(exist_ok=True)
    name = seen / f"{time.time_ns()}-{rank}-{os.getpid()}.jsonl"
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(record: int, positions: list[int], samples: list[int]) -> None:
    os.write(record, (json.dumps([time.time(), positions, samples]) + "\n").encode())


class Recorded(Task):
    """folder: where to write down what was seen and to look for orders; "" for neither. dropout: 0 where other numbers
    of workers are to compute the same."""

    def __init__(
        self, *, folder: str = "", step_seconds: float = 0.0, width: int = 16, n_blocks: int = 4, dropout: float = 0.1
    ) -> None:
        self.folder, self.step_seconds = folder, step_seconds
        self.width, self.n_blocks, self.dropout = width, n_blocks, dropout
        self.record: int | None = None

    def build_model(self) -> nn.Module:
        return Net(self.width, self.n_blocks, self.dropout)

    def train_data(self) -> Points:
        if self.folder and dist.is_initialized() and self.record is None:
            boundaries.watch(self.folder, dist.get_rank())
            self.record = open_record(self.folder, dist.get_rank())
        return Points(250)  # no whole number of batches

    def eval_data(self) -> TensorDataset:
        points = Points(40)
        return TensorDataset(points.x, points.y)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        training = model.training and torch.is_grad_enabled()  # pipelines look at a first batch without numbers
        if self.record is not None and training and len(batch) == 4 and batch[3].device.type != "meta":
            note(self.record, batch[3].tolist(), batch[2].tolist())
            if self.step_seconds and os.path.exists(f"{self.folder}/slow"):
                time.sleep(self.step_seconds)
        return loss

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1])}
