"""What is trained while things are killed: a chain of small blocks that writes down which samples it has seen.

FOLDER/seen/TIME-RANK-PID.jsonl   one line per micro-batch whose loss was computed: [Unix time, positions, samples]
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
from torch.utils.data import Dataset

from app.tasks.base import Task

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
SAMPLES = 250
"""Not a whole number of batches."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of the plane and their quadrant; a batch also holds the samples' numbers and positions in the stream."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> Batch:
        picked = torch.tensor(indices)
        return self.x[picked], self.y[picked], picked, torch.tensor(positions)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Recorded(Task):
    """folder: where to write down what was seen; "": nowhere. step_seconds: that every micro-batch takes longer.
    dropout: 0 where other numbers of workers are to compute the same."""

    def __init__(self, *, folder: str = "", step_seconds: float = 0.0, dropout: float = 0.1) -> None:
        self.folder, self.step_seconds, self.dropout = folder, step_seconds, dropout
        self.record: int | None = None

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), *(Block(16, self.dropout) for _ in range(4)), nn.Linear(16, 4))

    def train_data(self) -> Points:
        if self.folder and dist.is_initialized() and self.record is None:
            name = Path(self.folder, "seen", f"{time.time_ns()}-{dist.get_rank()}-{os.getpid()}.jsonl")
            name.parent.mkdir(exist_ok=True)
            self.record = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return Points()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        training = model.training and torch.is_grad_enabled()  # pipelines look at a first batch without numbers
        if self.record is not None and training and len(batch) == 4 and batch[3].device.type != "meta":
            line = json.dumps([time.time(), batch[3].tolist(), batch[2].tolist()])
            os.write(self.record, f"{line}\n".encode())  # at once, so that it is whole whenever the process is killed
            time.sleep(self.step_seconds)
        return loss
