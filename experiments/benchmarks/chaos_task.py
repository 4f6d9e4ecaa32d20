"""What is trained while things are killed: a perceptron that records which samples it has seen.

    FOLDER/seen/TIME-RANK-PID.jsonl   one line per micro-batch whose loss was computed:
                                      [Unix time, positions, samples]

The records are read again to tell whether every sample was used once.
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
"""Points, quadrants, and the numbers and positions of the samples."""
SAMPLES = 250
"""Not a whole number of batches."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of the plane and their quadrants.

    A batch also has the numbers of its samples, and their positions in the data's order.
    """

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> Batch:
        samples = torch.tensor(indices)
        return self.x[samples], self.y[samples], samples, torch.tensor(positions)


class Recorded(Task):
    """Classifies points, and records which samples were used.

    Args:
        folder: Where they are recorded; "" for nowhere.
        step_seconds: How much longer every micro-batch takes.
        dropout: The model's dropout; 0 if other numbers of workers are to compute the same.
    """

    def __init__(
        self,
        *,
        folder: str = "",
        step_seconds: float = 0.0,
        dropout: float = 0.1,
    ) -> None:
        self.folder = folder
        self.step_seconds = step_seconds
        self.dropout = dropout
        self.record: int | None = None

    def build_model(self) -> nn.Module:
        return MLP(2, 4, hidden=[16] * 5, activation="tanh", dropout=self.dropout)

    def train_data(self) -> Points:
        if self.folder and dist.is_initialized() and self.record is None:
            name = f"{time.time_ns()}-{dist.get_rank()}-{os.getpid()}.jsonl"
            file = Path(self.folder, "seen", name)
            file.parent.mkdir(exist_ok=True)
            self.record = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return Points()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        is_training = model.training and torch.is_grad_enabled()
        # A pipeline traces its stages with a batch that has no numbers.
        has_numbers = len(batch) == 4 and batch[3].device.type != "meta"
        if self.record is not None and is_training and has_numbers:
            line = json.dumps([time.time(), batch[3].tolist(), batch[2].tolist()])
            # In one call, so that the line is whole whenever the process is killed.
            os.write(self.record, f"{line}\n".encode())
            time.sleep(self.step_seconds)
        return loss


# --- the records, read again ----------------------------------------------------------------------


@dataclass
class Start:
    """One process's part in one start of the workers.

    Attributes:
        began: The Unix time at which it began.
        rank: Its rank.
        pid: Its process id.
        lines: Unix time, positions and samples of each micro-batch, in order.
    """

    began: float
    rank: int
    pid: int
    lines: list[tuple[float, list[int], list[int]]]


def read(folder: Path, newest: int = 0) -> list[Start]:
    """Reads the records of starts, the first start first.

    Args:
        folder: The task's folder.
        newest: Only so many of the newest ones are read; 0 for all.
    """
    files = sorted(folder.glob("seen/*.jsonl"), key=lambda file: int(file.stem.split("-")[0]))
    starts = []
    for file in files[-newest:]:
        began, rank, pid = file.stem.split("-")
        complete_lines = file.read_bytes().split(b"\n")[:-1]
        lines = []
        for text in complete_lines:
            line = json.loads(text)
            # What is tried out before training has the first samples in their own order.
            if line[1] != line[2]:
                lines.append(line)
        starts.append(Start(began=int(began) / 1e9, rank=int(rank), pid=int(pid), lines=lines))
    return starts


@dataclass(frozen=True, order=True)
class Use:
    """The use of a sample.

    Attributes:
        time: The Unix time.
        rank: The rank that used it.
        sample: The sample's number.
    """

    time: float
    rank: int
    sample: int


def last_uses(starts: Iterable[Start]) -> tuple[dict[int, Use], list[str]]:
    """The last use of each position, which is what the final weights come from.

    Returns:
        By position its last use, and a sentence for each position that one start used twice.
    """
    uses: dict[int, Use] = {}
    problems = []
    for start in starts:
        positions_of_start: set[int] = set()
        for seconds, positions, samples in start.lines:
            repeated = positions_of_start.intersection(positions)
            if repeated:
                position = min(repeated)
                problems.append(f"rank {start.rank} used position {position:,} twice in one start")
            positions_of_start.update(positions)
            for position, sample in zip(positions, samples, strict=True):
                use = Use(time=seconds, rank=start.rank, sample=sample)
                uses[position] = max(uses.get(position, use), use)
    return uses, problems


def lost_or_repeated(
    starts: Iterable[Start],
    total: int,
    samples: int,
    seed: int = 0,
) -> list[str]:
    """What is wrong with the positions that were trained on.

    Each position must have been used, with the sample that the data's order has there. Whether what
    was used has come to be in the weights is another question, which their bits answer.

    Args:
        starts: The records of all starts.
        total: The number of positions.
        samples: The number of samples.
        seed: The seed of the data's order.

    Returns:
        Sentences; empty if nothing is wrong.
    """
    uses, problems = last_uses(starts)
    expected = Order(samples, seed).indices(0, total).tolist()
    lost = []
    wrong = []
    for position in range(total):
        if position in uses:
            if uses[position].sample != expected[position]:
                wrong.append(position)
        elif position != expected[position]:  # `read` leaves out what is equal, see there
            lost.append(position)
    too_many = sorted(position for position in uses if position >= total)
    kinds = (
        ("lost", lost),
        ("too many", too_many),
        ("other than the order has", wrong),
    )
    for kind, positions in kinds:
        if positions:
            count = len(positions)
            problems.append(f"{count} samples {kind}, the first at position {positions[0]:,}")
    return problems
