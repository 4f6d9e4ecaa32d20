"""The gradient's norm, against float64; between layouts: test_state.py."""

import pytest
import torch
from torch import Tensor, nn

from strategies.clip import PIECE, GradNorm
from tests.strategies.models import random

CPU = torch.device("cpu")


def _measured(gradients: list[Tensor], bound: float | None = None) -> float:
    parameters = [nn.Parameter(torch.empty_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    return GradNorm(parameters, CPU)(bound).item()


def _exact(gradients: list[Tensor]) -> float:
    return torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()


@pytest.mark.parametrize("numbers", [1, PIECE + 1, 1 << 22])
def test_the_norm_is_right_to_float32_rounding_whatever_the_size(numbers: int) -> None:
    """torch's own would be off by 1e-5 and more."""
    gradients = [random(numbers), random(60, 50).t(), random(PIECE).bfloat16()]
    assert _measured(gradients) == pytest.approx(_exact(gradients), rel=3e-6)


def test_a_long_gradient_is_scaled_to_the_bound() -> None:
    gradient = random(1 << 22)
    assert _measured([gradient], bound=0.5) > 0.5
    assert _exact([gradient]) == pytest.approx(0.5, rel=3e-6)
