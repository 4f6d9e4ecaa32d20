"""Tasks that tests train: small, and slow or faulty on purpose. Named as `tests.tasks:Slow` in experiments."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from app.tasks.base import Task


class Points(Task):
    """Classifies points of the plane by quadrant; with dropout, so that randomness is part of what must resume.

    step_seconds: that a step sleeps. slow_while: a file without which it does not."""

    def __init__(
        self, *, samples: int = 256, width: int = 16, step_seconds: float = 0.0, slow_while: str = "/"
    ) -> None:
        self.samples, self.width, self.step_seconds, self.slow_while = samples, width, step_seconds, slow_while

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(self.width, 4))

    def train_data(self) -> TensorDataset:
        return self._points(self.samples, seed=0)

    def eval_data(self) -> TensorDataset:
        return self._points(100, seed=1)

    @staticmethod
    def _points(count: int, seed: int) -> TensorDataset:
        x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.step_seconds and model.training and os.path.exists(self.slow_while):
            time.sleep(self.step_seconds)
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, targets = batch
        logits = model(inputs)
        return {"loss": F.cross_entropy(logits, targets), "accuracy": (logits.argmax(1) == targets).float().mean()}


class Plain(Points):
    """Without dropout: one worker and several compute the same."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 4))


class Infinite(Points):
    """Its loss is nan from the step after `good_steps` on, on rank 1 (or the only rank)."""

    def __init__(self, *, good_steps: int = 5, samples: int = 256) -> None:
        super().__init__(samples=samples)
        self.good_steps, self.seen = good_steps, 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            self.seen += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 1
        return loss * float("nan") if self.seen > self.good_steps and rank == 1 else loss


class Raises(Points):
    """A user's bug, at a step of its own."""

    def __init__(self, *, good_steps: int = 0) -> None:
        super().__init__()
        self.good_steps, self.seen = good_steps, 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.seen += 1
        if self.seen > self.good_steps:
            raise KeyError("a bug of the user's")
        return super().loss(model, batch)


class Hungry(Plain):
    """Once the file `hungry` is there, rank 1 takes it away and asks for 512 MiB, which it writes to."""

    def __init__(self, *, hungry: str, step_seconds: float = 0.0) -> None:
        super().__init__(step_seconds=step_seconds)
        self.hungry = Path(hungry)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == 1 and self.hungry.exists():
            self.hungry.unlink()
            torch.ones(128 << 20)
        return super().loss(model, batch)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2 + index), 0


class WithoutLoss(Task):
    def build_model(self) -> nn.Module:
        return nn.Linear(2, 4)

    def train_data(self) -> Any:
        return Ragged()


class Odd(Points):
    """A task that is none; what: no loss, vector, ragged, stream."""

    def __new__(cls, *, what: str) -> Any:
        return WithoutLoss() if what == "no loss" else super().__new__(cls)

    def __init__(self, *, what: str) -> None:
        super().__init__()
        self.what = what

    def train_data(self) -> Any:
        return {"ragged": Ragged, "stream": Stream}.get(self.what, super().train_data)()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]) if self.what == "vector" else super().loss(model, batch)
