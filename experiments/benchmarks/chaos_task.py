"""What is trained while things are killed: a perceptron that writes down which samples it has seen.

FOLDER/seen/TIME-RANK-PID.jsonl   one line per micro-batch whose loss was computed: [Unix time, positions, samples]

And that read again: was every sample used once?
"""

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.order import Order
from app.models.feedforward import MLP
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


class Recorded(Task):
    """folder: where to write down what was seen; "": nowhere. step_seconds: that every micro-batch takes longer.
    dropout: 0 where other numbers of workers are to compute the same."""

    def __init__(
        self, *, folder: str = "", step_seconds: float = 0.0, dropout: float = 0.1
    ) -> None:
        self.folder, self.step_seconds, self.dropout = folder, step_seconds, dropout
        self.record: int | None = None

    def build_model(self) -> nn.Module:
        return MLP(2, 4, hidden=[16] * 5, activation="tanh", dropout=self.dropout)

    def train_data(self) -> Points:
        if self.folder and dist.is_initialized() and self.record is None:
            name = Path(
                self.folder, "seen", f"{time.time_ns()}-{dist.get_rank()}-{os.getpid()}.jsonl"
            )
            name.parent.mkdir(exist_ok=True)
            self.record = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return Points()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        training = (
            model.training and torch.is_grad_enabled()
        )  # pipelines look at a first batch without numbers
        if (
            self.record is not None
            and training
            and len(batch) == 4
            and batch[3].device.type != "meta"
        ):
            line = json.dumps([time.time(), batch[3].tolist(), batch[2].tolist()])
            os.write(
                self.record, f"{line}\n".encode()
            )  # at once, so that it is whole whenever the process is killed
            time.sleep(self.step_seconds)
        return loss


# --- read again -------------------------------------------------------------------------------------------------


@dataclass
class Start:
    """One process's part in one start of the workers. lines: (Unix time, positions in the stream, samples) of each
    micro-batch, in order."""

    began: float
    rank: int
    pid: int
    lines: list[tuple[float, list[int], list[int]]]


def read(folder: Path, newest: int = 0) -> list[Start]:
    """All starts, or the newest ones, the first one first."""
    found = []
    paths = sorted(folder.glob("seen/*.jsonl"), key=lambda path: int(path.stem.split("-")[0]))
    for path in paths[-newest:]:
        began, rank, pid = path.stem.split("-")
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        # What is tried out before training has the first samples as they lie.
        found.append(
            Start(
                int(began) / 1e9,
                int(rank),
                int(pid),
                [line for line in lines if line[1] != line[2]],
            )
        )
    return found


def seen(starts: Iterable[Start]) -> tuple[dict[int, tuple[float, int, int]], list[str]]:
    """Position → (Unix time, rank, sample) of when it was computed last, which is what the final weights come from; and
    what one start did twice, a sentence each."""
    last: dict[int, tuple[float, int, int]] = {}
    problems = []
    for start in starts:
        own: set[int] = set()
        for at, positions, samples in start.lines:
            if twice := own.intersection(positions):
                problems.append(
                    f"rank {start.rank} used position {min(twice):,} twice in one start"
                )
            own.update(positions)
            for position, sample in zip(positions, samples, strict=True):
                last[position] = max(last.get(position, (0.0, 0, 0)), (at, start.rank, sample))
    return last, problems


def lost_or_repeated(starts: Iterable[Start], total: int, samples: int, seed: int = 0) -> list[str]:
    """What is wrong with the `total` positions that were trained on, a sentence each; [] if nothing is.

    Each must have been used, with the sample that the order of (seed, position) has there. That what was used came to
    be in the weights is another question, which their bits answer.
    """
    last, problems = seen(starts)
    expected = Order(samples, seed).indices(0, total).tolist()
    kinds = {
        "lost": [p for p in range(total) if p not in last and p != expected[p]],
        "too many": sorted(p for p in last if p >= total),
        "other than the order has": [
            p for p in range(total) if p in last and last[p][2] != expected[p]
        ],
    }
    return problems + [
        f"{len(at)} samples {what}, the first at position {at[0]:,}"
        for what, at in kinds.items()
        if at
    ]
