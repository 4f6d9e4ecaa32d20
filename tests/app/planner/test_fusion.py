"""The bytes that fused kernels move, compared with a count by hand."""

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.planner.trace import watch

pytestmark = pytest.mark.pure
ROWS = 64
WIDTH = 32
SIZE = 4.0 * ROWS * WIDTH
"""Bytes of one activation."""


class _Model(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH, bias=False)
        self.after = nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.between(self.before(x)))


def _counted(between: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Bytes and kernels of a step with what is between two matrix products."""
    x = torch.randn(ROWS, WIDTH)
    trace = watch(_Model(between), [], lambda model: model(x)[0, 0])
    values = trace.parts["before"].values
    return defaultdict(float, values)


def _written_out_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


def _one_hot_difference(x: Tensor) -> Tensor:
    """What is made of positions alone need not be in memory."""
    is_first = torch.arange(WIDTH) == torch.zeros(ROWS, 1)
    return torch.where(is_first, x, 0.0) - is_first.float()


def _softmax_and_its_sum(x: Tensor) -> Tensor:
    """A kernel that has a row at hand sums it on the way."""
    probabilities = F.softmax(x, 1)
    return probabilities * probabilities.square().sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("between", "operations"),
    [
        (torch.sigmoid, 1),
        (lambda x: torch.tanh(torch.sigmoid(x) * 2), 3),
        (lambda x: x * torch.sigmoid(x) + torch.tanh(x), 4),
        (lambda x: F.layer_norm(torch.sigmoid(x), (WIDTH,)), 2),
        (lambda x: torch.cat([x[:, WIDTH // 2 :], -x[:, : WIDTH // 2]], 1).exp(), 3),
        (_written_out_gelu, 8),
        (_one_hot_difference, 7),
        (_softmax_and_its_sum, 4),
    ],
)
def test_operations_between_two_products_read_and_write_memory_once(
    between: Callable[[Tensor], Tensor], operations: int
) -> None:
    values = _counted(between)
    assert values["fused_moved_forward"] == pytest.approx(2 * SIZE, rel=0.02), (
        "the norm's statistics are small"
    )
    assert values["fused_operations_forward"] == 3, "two products and one kernel"
    assert values["operations_forward"] == 2 + operations
    assert values["moved_forward"] >= 2 * SIZE


@pytest.mark.parametrize(
    "between",
    [
        F.gelu,
        torch.sigmoid,
        _written_out_gelu,
        lambda x: x * torch.sigmoid(x),
        lambda x: x + torch.sigmoid(x),
    ],
)
def test_backward_computes_again_what_it_can_from_the_result_of_a_product(
    between: Callable[[Tensor], Tensor],
) -> None:
    """However many results autograd saves, it reads one, and a gradient, and writes one."""
    gradient_of_loss = _counted(lambda x: x)["fused_moved_backward"]
    moved = _counted(between)["fused_moved_backward"]
    assert moved - gradient_of_loss == pytest.approx(3 * SIZE)


def test_a_residual_around_a_product_is_written_and_read_again() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.layers
            # Read, and written twice: for the product that follows and for the sum.
            x = torch.sigmoid(first(x))
            x = x + second(x)  # both read, the sum written
            return third(x)

    x = torch.randn(ROWS, WIDTH)
    values = watch(Residual(), [], lambda model: model(x)[0, 0]).parts["before"].values
    assert values["fused_moved_forward"] == pytest.approx(5 * SIZE)
    assert values["fused_operations_forward"] == 5


def test_fused_kernels_never_move_or_launch_more_than_single_ones() -> None:
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
    )
    x = torch.randn(2, 16, 32)
    trace = watch(model, ["0", "1"], lambda m: m(x).sum())
    for name, part in trace.parts.items():
        for phase in ("forward", "backward"):
            values = defaultdict(float, part.values)
            assert values[f"fused_operations_{phase}"] <= values[f"operations_{phase}"], (
                name,
                phase,
            )
            if name.startswith("block"):
                assert 0 < values[f"fused_moved_{phase}"] < values[f"moved_{phase}"], (name, phase)


def test_what_is_sorted_or_scattered_is_in_memory_before_and_after() -> None:
    """Three kernels between two products: what is before, the operation itself, what is behind."""
    order = torch.randperm(ROWS)

    def scattered(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_copy(0, order, torch.sigmoid(x)) * 2

    for between, kernels in ((lambda x: torch.sigmoid(x).sort().values * 2, 3), (scattered, 3)):
        values = _counted(between)
        assert values["fused_operations_forward"] == 2 + kernels
        # Each kernel reads and writes at least once; sorting writes positions of 8 bytes too.
        assert values["fused_moved_forward"] >= 6 * SIZE
        assert values["fused_moved_forward"] <= values["moved_forward"]
