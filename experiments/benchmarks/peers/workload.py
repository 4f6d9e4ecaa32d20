"""What every peer trains: two models, their data, and the note that each takes of its steps.

The models write down when each of their steps begins, so that all peers are timed by the same
clock, without a line in the code that is compared.
"""

from __future__ import annotations

import os
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.models.feedforward import CNN
from app.models.gpt import GPT

FOLDER = "TRIREME_PEERS_FOLDER"
"""The environment variable with the folder in which the processes write down their steps."""
RECORD = struct.Struct("dd")
"""A step's beginning, in seconds since 1970, and the most memory so far, in bytes."""
LOG_EVERY = 10
"""Steps between two losses that a peer logs to MLflow."""
WORKERS = 2
LR = 1e-3
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model with its data.

    Attributes:
        build: Makes the model.
        data: The inputs and targets.
        batch: The samples of a step, over all workers.
        steps: How many steps are trained.
    """

    build: Callable[[], nn.Module]
    data: TensorDataset
    batch: int
    steps: int

    @property
    def batch_of_worker(self) -> int:
        """The samples of a step that one worker takes."""
        return self.batch // WORKERS


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, of images' classes or of a text's next tokens."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class TimedGPT(GPT):
    """The GPT, which writes down when its steps begin."""

    def forward(self, tokens_BT: Tensor) -> Tensor:  # type: ignore[override]
        write_down_step(self)
        return super().forward(tokens_BT)


class TimedCNN(CNN):
    """The CNN, which writes down when its steps begin."""

    def forward(self, images: Tensor) -> Tensor:
        write_down_step(self)
        return super().forward(images)


def write_down_step(model: nn.Module) -> None:
    """Appends a record to this process's file; takes some microseconds."""
    if not model.training or FOLDER not in os.environ:
        return
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    file = Path(os.environ[FOLDER]) / str(os.getpid())
    with file.open("ab") as out:
        out.write(RECORD.pack(time.time(), memory))


def workload(name: str) -> Workload:
    """The workload of this name, with random data.

    Args:
        name: A key of `WORKLOADS`.
    """
    return WORKLOADS[name]()


def _gpt() -> Workload:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (4096, 129), generator=generator)
    return Workload(
        build=lambda: TimedGPT(vocab_size=256, d_model=128, n_layers=4, n_heads=4),
        data=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        batch=16,
        steps=80,
    )


def _mnist() -> Workload:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(5000, 1, 28, 28, generator=generator)
    classes = torch.randint(10, (5000,), generator=generator)
    return Workload(
        build=lambda: TimedCNN(1, 28, 28, 10),
        data=TensorDataset(images, classes),
        batch=64,
        steps=400,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {"gpt": _gpt, "mnist": _mnist}
"""By name, what makes a workload."""
