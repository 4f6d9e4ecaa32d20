"""The gradient noise scale against its closed form, and what measuring it must not change.

Measured in a run: launchers/test_launchers.py."""

import pytest
import torch
from torch import nn

from app.noise_scale import Estimate, NoiseScale
from strategies.parallelize import Options, choose, parallelize
from tests.pool import run_distributed

DIM, SAMPLES, BATCH = 40, 36_000, 240


class Line(nn.Module):
    """Its gradient at one sample is that sample: mean and covariance of the gradient are those of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def samples() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.2, 2.0, DIM)
    return 0.35 + spread * torch.randn(SAMPLES, DIM, generator=draw)


def measure(rank: int, world: int, strategy: str, micro_batches: int) -> tuple[float, float, float, bool]:
    layout = choose(strategy, world)
    parallel = parallelize(Line, layout, Options(), device=torch.device("cpu"))
    noise = NoiseScale(parallel, 1, BATCH)
    noise.estimate = Estimate(window=10_000)
    data, share, same = samples(), BATCH // world, True
    for step in range(SAMPLES // BATCH):
        mine = data[step * BATCH + rank * share : step * BATCH + (rank + 1) * share]
        parts = list(mine.chunk(micro_batches))
        if step == 0 and world > 1:  # as the loop does: DDP sees a whole step first
            parallel.forward_backward(parts, [len(p) / BATCH for p in parts], loss)
        else:
            noise.forward_backward(parts, [len(p) / BATCH for p in parts], loss)
            gradient = next(iter(parallel.parameters())).grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            right = data[step * BATCH : (step + 1) * BATCH].mean(0)
            same = same and torch.allclose(whole, right, rtol=1e-4, atol=1e-5)
        for parameter in parallel.parameters():
            parameter.grad = None
    noise.values()
    found = noise.estimate.value()
    assert found is not None
    return (*found, same)


@pytest.mark.parametrize(("strategy", "world", "micro_batches"), [("single", 1, 7), ("ddp", 2, 1), ("fsdp", 2, 2)])
def test_within_five_percent_of_the_closed_form(strategy: str, world: int, micro_batches: int) -> None:
    results = run_distributed(measure, world, world, strategy, micro_batches)
    data = samples().double()
    true = float(data.var(0).sum() / data.mean(0).square().sum())
    for value, low, high, same in results:
        assert abs(value / true - 1) < 0.05, (value, true)
        assert low < true < high and (high - low) < 0.4 * true, "the spread holds the truth, and says something"
        assert same, "a measured step leaves the same gradients"
    assert len({result[0] for result in results}) == 1, "every worker says the same"


def test_no_value_without_enough_or_without_signal() -> None:
    estimate = Estimate()
    for _ in range(4):
        estimate.add(2.0, 1.5, 1 / 4, 8)
    assert estimate.value() is None
    for _ in range(20):
        estimate.add(2.0, 0.1, 1 / 4, 8)  # the batch's gradient is all noise
    assert estimate.value() is None
    parallel = parallelize(Line, choose("single", 1), Options(), device=torch.device("cpu"))
    assert NoiseScale.of(parallel, 10, 1) is None and NoiseScale.of(parallel, 10, 2) is not None
