"""What a task's methods return instead of a number is told in one sentence."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.config.io import load_config
from app.errors import UserError
from app.run.prepare import Prepared, prepare, read_task
from app.tasks.items import count_items
from app.tasks.returned import derived_metrics, require_number, require_truth
from app.training.hooks import stops_early
from tests.tasks import Points

pytestmark = pytest.mark.pure

NUMBERS = [3, 0, 0.5, True, torch.tensor(2), torch.tensor(0.25), np.float32(1.5), np.int64(4)]
REFUSED: dict[str, Any] = {
    "nothing": None,
    "a str": "64",
    "a list": [64],
    "a tuple": (1.0,),
    r"a tensor of shape \(64,\)": torch.ones(64),
    r"a tensor of shape \(1,\)": torch.ones(1),
    r"an array of shape \(3,\)": np.ones(3),
    "the class float": float,
    "-1": -1,
    "nan": float("nan"),
    "inf": torch.tensor(float("inf")),
}

WHAT_IS_NEITHER: dict[str, Any] = {
    "a str": "no",
    "a list": [],
    r"a tensor of shape \(2,\)": torch.ones(2),
    "0.5": 0.5,
    "nan": float("nan"),
    "a method": Points().stop_early,
}


def prepared(method: str, function: Callable[..., Any]) -> Prepared:
    """A run of one worker whose task has this method."""
    run = load_config([], ["task=tests.tasks:Points", "run.name=own", "train.steps=8"])
    read = read_task(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Points, method, function)
        return prepare(run, read, 1, devices_per_node=1)


@pytest.mark.parametrize("value", NUMBERS, ids=str)
def test_a_number_of_any_library_is_taken(value: Any) -> None:
    assert require_number(value, "it is") == float(value)
    prepared("schedule", lambda self, step, steps: value)


@pytest.mark.parametrize(("shown", "value"), REFUSED.items(), ids=REFUSED)
def test_what_is_no_number_is_refused_before_a_worker_starts(shown: str, value: Any) -> None:
    message = rf"^the task's schedule\(0, 8\) returns {shown}, but it must be a number of at leas"
    if value is None:  # the configured schedule
        prepared("schedule", lambda self, step, steps: value)
    else:
        with pytest.raises(UserError, match=message):
            prepared("schedule", lambda self, step, steps: value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Points, "items", lambda self, batch: value)
        with pytest.raises(UserError, match=rf"items\(batch\) gives {shown}, but it must be a nu"):
            count_items(Points(), (torch.ones(4, 2), torch.ones(4)))


@pytest.mark.parametrize("library", [bool, int, np.bool_, np.float32, torch.tensor])
def test_yes_and_no_of_any_library_are_taken(library: Callable[[bool], Any]) -> None:
    assert require_truth(library(True), "it is") is True
    assert require_truth(library(False), "it is") is False
    assert require_truth(None, "it is") is False, "a method that ends without return"


@pytest.mark.parametrize(("shown", "value"), WHAT_IS_NEITHER.items(), ids=WHAT_IS_NEITHER)
def test_what_is_neither_yes_nor_no_is_refused(shown: str, value: Any) -> None:
    task = Points()
    message = rf"^the task's stop_early\(\) returns {shown}, but it must be True or False$"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "stop_early", lambda evaluations: value)
        with pytest.raises(UserError, match=message):
            stops_early(load_config([], ["task=tests.tasks:Points"]), task, [{"loss": 1.0}])


def test_a_schedule_that_is_wrong_at_its_end_is_refused_at_the_start() -> None:
    with pytest.raises(UserError, match=r"schedule\(7, 8\) returns -0.4, but"):
        prepared("schedule", lambda self, step, steps: 1 - step / 5)
    with pytest.raises(UserError, match="the task's schedule fails: ZeroDivisionError"):
        prepared("schedule", lambda self, step, steps: 1 / abs(step - 4))


METRICS: dict[str, tuple[Any, str]] = {
    "a tensor": (torch.ones(()), r"metrics\(\) returns a tensor, but it must be a dict of scalar"),
    "nothing": (None, r"metrics\(\) returns nothing, but"),
    "a number": ({"loss": torch.ones(()), "acc": 0.5}, r"gives 'acc' as a float, .* without .item"),
    "a text": ({"loss": torch.ones(()), "acc": "x"}, r"gives 'acc' as a str, .* a scalar tensor: "),
    "nested": ({"loss": {"a": torch.ones(())}}, r"gives 'loss' as a dict, .* a scalar tensor: "),
}
DERIVED: dict[str, tuple[Any, str]] = {
    "nothing": (None, r"derived\(\) returns nothing, but it must be a dict of numbers by name"),
    "a text": ({"x": "s"}, r"derived\(\) gives 'x' as a str, but it must be a number"),
    "several": ({"x": torch.ones(2)}, r"gives 'x' as a tensor of shape \(2,\), but"),
}


@pytest.mark.parametrize(("returned", "message"), METRICS.values(), ids=METRICS)
def test_metrics_that_are_no_tensors_by_name_are_refused(returned: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepared("metrics", lambda self, model, batch: returned)


@pytest.mark.parametrize(("returned", "message"), DERIVED.values(), ids=DERIVED)
def test_derived_metrics_that_are_no_numbers_by_name_are_refused(
    returned: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepared("derived", lambda self, means: returned)


def test_a_derived_metric_may_be_a_tensor_and_infinite() -> None:
    task = Points()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "derived", lambda means: {"x": torch.tensor(2.0), "y": float("inf")})
        assert derived_metrics(task, {}) == {"x": 2.0, "y": float("inf")}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda loss: 0.5, "logs 'part' with a float: give the tensor itself, without .item"),
        (lambda loss: loss.expand(3), r"logs 'part' with a tensor of shape \(3,\), but it must"),
    ],
)
def test_a_logged_part_that_is_no_scalar_is_refused(
    part: Callable[[Tensor], Any], message: str
) -> None:
    plain_loss = Points.loss

    def loss(self: Points, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = plain_loss(self, model, batch)
        self.log("part", part(value))
        return value

    with pytest.raises(UserError, match=message):
        prepared("loss", loss)
