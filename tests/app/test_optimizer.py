"""The learning rate by step and batch size."""

from __future__ import annotations

import pytest

from app.config import OptimizerConfig, ScheduleConfig
from app.optimizer import learning_rate
from tests.running import POINTS, trireme


@pytest.mark.parametrize(
    ("scaling", "factor", "smaller"), [("none", 1.0, 1.0), ("linear", 4.0, 0.25), ("sqrt", 2.0, 0.5)]
)
def test_learning_rate_follows_the_batch(scaling: str, factor: float, smaller: float) -> None:
    optimizer = OptimizerConfig(lr=0.1, lr_scaling=scaling, lr_batch_size=64)
    constant = ScheduleConfig(warmup_steps=10)
    assert learning_rate(optimizer, constant, 50, 100, 256) == pytest.approx(0.1 * factor)
    first = learning_rate(optimizer, constant, 0, 100, 256)
    bottom = 0.1 if factor > 1 else 0.0  # Goyal et al.: from the unscaled rate up
    assert first == pytest.approx(bottom + (0.1 * factor - bottom) / 10)
    assert learning_rate(optimizer, constant, 9, 100, 256) == pytest.approx(0.1 * factor)
    assert learning_rate(optimizer, ScheduleConfig(), 5, 100, 16) == pytest.approx(0.1 * smaller)
    assert learning_rate(optimizer, constant, 50, 100) == pytest.approx(0.1), (
        "without a batch size it is what is written"
    )


def test_scaling_without_a_reference_is_refused() -> None:
    ended = trireme("train", *POINTS, "train.steps=5", "run.name=x", "optimizer.lr_scaling=linear")
    assert ended.code == 2 and "optimizer.lr_batch_size" in ended.err
