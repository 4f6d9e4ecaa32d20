"""Training and evaluation mode: which parts of a model are in which, from the first step on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.training_mode import begin, evaluating
from tests.app.kit import training_of
from tests.chain import config
from tests.tasks import Points

pytestmark = pytest.mark.pure
HERE = "tests.strategies.test_training_mode"


class Student(nn.Module):
    """A frozen part and a part that trains.

    Args:
        keeps: Whether its `train` keeps the frozen part in evaluation mode.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.keeps = keeps
        self.frozen = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5)).requires_grad_(False)
        self.trained = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 4))

    def train(self, mode: bool = True) -> "Student":
        super().train(mode)
        if self.keeps:
            self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x))


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in module.named_modules()}


WITH_FROZEN_PART = {name: not name.startswith("frozen") for name in modes(Student())}


def test_a_model_is_in_the_mode_that_its_author_meant() -> None:
    assert modes(begin(Student(keeps=True))) == WITH_FROZEN_PART
    model = Student()
    model.frozen.eval()
    assert modes(begin(model)) == WITH_FROZEN_PART
    assert all(modes(begin(Student().eval())).values()), "as a library reads it from a file"
    model = Student()
    model.trained.eval()
    assert all(modes(begin(model)).values()), "as a library reads an encoder that is to train"


@pytest.mark.parametrize("keeps", [False, True])
def test_an_evaluation_leaves_every_part_in_its_mode(keeps: bool) -> None:
    model = begin(Student(keeps=keeps))
    model.frozen.eval()
    with evaluating(model):
        assert not any(modes(model).values())
    assert modes(model) == WITH_FROZEN_PART


class Distilled(Points):
    """Notes in which modes the parts of the model are whenever the loss is computed to train.

    Args:
        by: How the frozen part gets into evaluation mode: `train` or `build_model`; `nothing`: a
            library has put the whole model into it.
    """

    def __init__(self, *, by: str) -> None:
        super().__init__()
        self.by = by
        self.modes: list[dict[str, bool]] = []

    def build_model(self) -> nn.Module:
        model = Student(keeps=self.by == "train")
        if self.by == "build_model":
            model.frozen.eval()
        return model.eval() if self.by == "nothing" else model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            self.modes.append(modes(model))
        return super().loss(model, batch)


@pytest.mark.parametrize("by", ["train", "build_model", "nothing"])
def test_every_step_trains_the_parts_that_it_should(by: str, tmp_path: Path) -> None:
    words = [f"task={HERE}:Distilled", f"task_args={{by: {by}}}", "train.eval_every=2"]
    training, _ = training_of(config(*words, "train.steps=4"), tmp_path)
    training.run()
    expected = dict.fromkeys(WITH_FROZEN_PART, True) if by == "nothing" else WITH_FROZEN_PART
    assert isinstance(training.task, Distilled)
    assert training.task.modes == [expected] * 4
