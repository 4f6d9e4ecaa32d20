"""Copies of modules: functions of a copy see the copy."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from strategies.module_copy import copy_module

pytestmark = pytest.mark.pure


def _by_closure(model: nn.Module, child: nn.Module) -> None:
    child.register_forward_hook(lambda module, args, output: model.seen.update(y=output))


def _by_default(model: nn.Module, child: nn.Module) -> None:
    def record(module: nn.Module, args: object, output: Tensor, to: nn.Module = model) -> None:
        to.seen.update(y=output)

    child.register_forward_hook(record)


def _by_named_default(model: nn.Module, child: nn.Module) -> None:
    def record(module: nn.Module, args: object, output: Tensor, *, to: nn.Module = model) -> None:
        to.seen.update(y=output)

    child.register_forward_hook(record)


def _by_inner_function(model: nn.Module, child: nn.Module) -> None:
    def keep(output: Tensor) -> None:
        model.seen.update(y=output)

    child.register_forward_hook(lambda module, args, output: keep(output))


def _by_method(model: nn.Module, child: nn.Module) -> None:
    keep = model.keep
    child.register_forward_hook(lambda module, args, output: keep(output))


def _by_replaced_forward(model: nn.Module, child: nn.Module) -> None:
    forward = child.forward

    def recording_forward(x: Tensor) -> Tensor:
        output = forward(x)
        model.seen.update(y=output)
        return output

    child.forward = recording_forward


class Recording(nn.Module):
    def __init__(self, record: Callable[[nn.Module, nn.Module], None]) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.child = nn.Linear(2, 2)
        record(self, self.child)

    def keep(self, output: Tensor) -> None:
        self.seen.update(y=output)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


@pytest.mark.parametrize(
    "record",
    [
        _by_closure,
        _by_default,
        _by_named_default,
        _by_inner_function,
        _by_method,
        _by_replaced_forward,
    ],
)
def test_what_a_function_of_a_copy_records_is_in_the_copy(
    record: Callable[[nn.Module, nn.Module], None],
) -> None:
    model = Recording(record)
    copied = copy_module(model)
    with torch.no_grad():
        copied.child.weight.zero_()
        copied.child.bias.fill_(7.0)
    assert copied(torch.ones(1, 2)).eq(7).all()
    assert model.seen == {} and copied.seen["y"].eq(7).all()
    output = model(torch.ones(1, 2))
    assert model.seen["y"] is output and copied.seen["y"] is not output


def test_a_function_that_stands_in_its_own_closure_is_copied_once() -> None:
    model = nn.Linear(2, 2)

    def count_down(number: int) -> list[nn.Module]:
        return [model, *count_down(number - 1)] if number else []

    model.count_down = count_down
    meta = nn.Parameter(torch.empty(2, 2, device="meta"))
    copied = copy_module(model, {id(model.weight): meta})
    assert copied.weight is meta and not model.weight.is_meta
    assert all(each is copied for each in copied.count_down(2))
    assert all(each is model for each in model.count_down(2))
