"""What the built-in tasks have in common: data in two parts, and classification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.tasks.base import Batch, Task


class InParts(Task):
    """A task whose `__init__` has read its data into `_train` and `_eval` and knows how to build its model."""

    _train: Any
    _eval: Any
    _build: Callable[[], nn.Module]

    def build_model(self) -> nn.Module:
        return self._build()

    def train_data(self) -> Dataset[Any]:
        return self._train

    def eval_data(self) -> Dataset[Any] | None:
        return self._eval

    def sizes(self) -> tuple[int, int]:
        """How many samples there are to train on, and held out."""
        return len(self._train), 0 if self._eval is None else len(self._eval)


class Classification(InParts):
    """Batches are (inputs, int64 class); the model gives logits (batch, classes)."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs).float(), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = model(inputs).float()
        right = (logits.argmax(dim=-1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": right}
