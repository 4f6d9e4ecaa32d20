"""What a loss needs to know of the model before its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app.tasks.base import Task
from app.training.reference import Reference

pytestmark = pytest.mark.pure


class Plain(Task):
    """Says when it is asked for data, which may be costly to read."""

    def train_data(self) -> TensorDataset:
        raise AssertionError("the worker has this data already")

    def eval_data(self) -> TensorDataset | None:
        raise AssertionError("nothing is evaluated yet")


class Comparing(Plain):
    def eval_data(self) -> None:
        return None

    def reference(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(len(batch), 2)


def test_data_is_not_read_again_for_a_reference_that_no_loss_needs() -> None:
    data = TensorDataset(torch.ones(4, 1))
    assert Reference(Plain(), data).values == {}
    assert Reference(Comparing(), data).values == {}
    data.reference = torch.zeros(4, 2)  # type: ignore[attr-defined]
    assert Reference(Comparing(), data).values.keys() == {"train"}
