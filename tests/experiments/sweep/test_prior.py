"""The law of the best batch size and learning rate of language models."""

from pathlib import Path

import pytest

from app.config.io import load_config
from experiments.sweep.prior import Prior, nearest_point, prior_of, step_law
from experiments.sweep.search import read_space

pytestmark = pytest.mark.pure

GPT = [
    "task=language_modelling",
    "task_args={data: python, sequence_length: 64, d_model: 32, n_layers: 2, n_heads: 2}",
    "train.steps=100",
    "train.global_batch_size=16",
    "workers=1",
]


def test_the_law_is_that_of_its_paper() -> None:
    """1 B parameters and 100 B tokens, the paper's example."""
    rate, batch = step_law(1e9, 100e9)
    assert rate == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307)
    assert 1e-3 < rate < 2e-3
    assert 1.0e6 < batch < 1.2e6


@pytest.mark.slow
def test_a_language_model_has_a_prior(own_cache: Path) -> None:
    prior = prior_of(load_config([], GPT))
    assert prior is not None
    assert prior.tokens == 100 * 16 * 64
    width = 32
    blocks = 2 * (4 * width * width + 3 * width * 128)
    assert blocks <= prior.parameters < 1.01 * blocks, "without the embedding and the head"
    assert "M parameters" in prior.sentence


@pytest.mark.parametrize(
    "overrides",
    [
        [*GPT, "optimizer.name=sgd"],
        ["task=tests.tasks:Points", "train.steps=10", "train.global_batch_size=16", "workers=1"],
        [*GPT, "checkpoint.load=runs/other"],
    ],
)
def test_what_the_law_was_not_fitted_to_has_none(overrides: list[str], own_cache: Path) -> None:
    assert prior_of(load_config([], overrides)) is None


PRIOR = Prior(rate=0.0031, batch=48.0, parameters=10**6, tokens=1e7)
SPACES = [
    (
        {"train.global_batch_size": [16, 64, 256], "optimizer.lr": [1e-4, 1e-3, 1e-2]},
        {"train.global_batch_size": 64, "optimizer.lr": 1e-3},
    ),
    ({"optimizer.lr": {"loguniform": [1e-4, 1e-3]}}, {"optimizer.lr": 1e-3}),
    (
        {"train.global_batch_size": {"lograndint": [8, 128]}, "optimizer.lr": [0.0, 0.1]},
        {"train.global_batch_size": 48, "optimizer.lr": 0.1},
    ),
    ({"optimizer.lr": [1e-3], "optimizer.name": ["adamw", "sgd"]}, None),
]


@pytest.mark.parametrize(("space", "point"), SPACES)
def test_the_first_point_is_the_nearest_of_the_space(
    space: dict[str, object], point: dict[str, float] | None
) -> None:
    assert nearest_point(PRIOR, read_space(space)) == point
