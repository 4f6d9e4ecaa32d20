"""The parts of the training loop, each by itself."""

import math

import pytest
import torch
from torch import nn

from app.config import OptimizerConfig, ScheduleConfig
from app.errors import NonFiniteError, UserError
from app.optimizer import LossScale, build_optimizer, learning_rate
from app.randomness import mix, seed_step
from app.step_sync import StepSync
from tests.pool import run_distributed


def schedule(name: str, step: int, warmup: int = 0, final: float = 0.0) -> float:
    return learning_rate(OptimizerConfig(lr=2.0), ScheduleConfig(name, warmup, final), step, steps=11)


def test_learning_rates() -> None:
    assert [schedule("constant", s, warmup=4) for s in (0, 1, 3, 4)] == [0.5, 1.0, 2.0, 2.0]
    assert [schedule("linear", s) for s in (0, 5, 10)] == [2.0, 1.0, 0.0]
    assert [schedule("cosine", s) for s in (0, 5, 10)] == pytest.approx([2.0, 1.0, 0.0])
    assert schedule("linear", 10, final=0.25) == pytest.approx(0.5)
    assert schedule("cosine", 10, warmup=3, final=0.1) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("scaling", "factor", "smaller"), [("none", 1.0, 1.0), ("linear", 4.0, 0.25), ("sqrt", 2.0, 0.5)]
)
def test_learning_rate_follows_the_batch(scaling: str, factor: float, smaller: float) -> None:
    optimizer = OptimizerConfig(lr=0.1, lr_scaling=scaling, lr_batch_size=64)
    constant = ScheduleConfig(warmup_steps=10)
    assert learning_rate(optimizer, constant, 50, 100, 256) == pytest.approx(0.1 * factor)
    bottom = 0.1 if factor > 1 else 0.0  # Goyal et al.: from the unscaled rate up
    assert learning_rate(optimizer, constant, 0, 100, 256) == pytest.approx(bottom + (0.1 * factor - bottom) / 10)
    assert learning_rate(optimizer, ScheduleConfig(), 5, 100, 16) == pytest.approx(0.1 * smaller)
    assert learning_rate(optimizer, constant, 50, 100) == pytest.approx(0.1), "without a batch size: as written"


def test_biases_and_norms_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.1), model.parameters())
    decayed, others = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 4)] and decayed["weight_decay"] == 0.1
    assert all(p.dim() == 1 for p in others["params"]) and others["weight_decay"] == 0.0


def test_optimizers_learn() -> None:
    for name in ("adamw", "adam", "sgd", "torch.optim:RMSprop"):
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.1), [weight])
        for _ in range(20):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        assert weight.abs().max() < 0.9
    with pytest.raises(UserError, match="math:sqrt"):
        build_optimizer(OptimizerConfig(name="math:sqrt"), [weight])


def test_randomness_depends_on_seed_step_and_data_rank() -> None:
    drawn = []
    for key in [(0, 1, 0), (0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0)]:
        seed_step(*key, torch.device("cpu"))
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] and len(set(drawn)) == 4
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500


def test_loss_scale_skips_recovers_and_gives_up() -> None:
    scale = LossScale(enabled=True, growth_interval=3)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), scale.scale)
    scale.unscale_([weight])
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]
    begun = scale.scale
    assert not scale.accepts(torch.tensor(math.inf), 1)
    assert scale.scale == begun / 2
    assert all(scale.accepts(torch.tensor(1.0), step) for step in (2, 3, 4))
    assert scale.scale == begun
    again = LossScale(enabled=True)
    again.load_state(scale.state())
    assert (again.scale, again.good_steps) == (scale.scale, scale.good_steps)
    with pytest.raises(NonFiniteError, match="step 7"):
        for _ in range(100):
            again.accepts(torch.tensor(math.nan), 7)


def _agree(rank: int) -> None:
    sync = StepSync(1, first_step=1)
    assert sync.due(1)
    sync.add(torch.tensor(1.0 + rank))
    sync.log(1, 0.1, torch.tensor(7.0))
    sync.add(torch.tensor(9.0))
    agreed = sync.agree(2, stop=rank == 1, save=False)
    assert (agreed.stop, agreed.save) == (True, False) and 3 <= sync.next_step <= 2 + 200
    assert [(e.step, e.loss, e.grad_norm, e.learning_rate) for e in agreed.logged] == [(1, 3.0, 7.0, 0.1)]
    for loss in (1.0, math.nan if rank == 1 else 1.0, 1.0):
        sync.add(torch.tensor(loss))
    with pytest.raises(NonFiniteError, match="loss was not finite at step 4 on rank 1;"):
        sync.agree(5, stop=False, save=False)
    sync = StepSync(1, first_step=1)
    sync.add(torch.tensor(1.0))
    sync.log(1, 0.1, torch.tensor(math.inf))
    with pytest.raises(NonFiniteError, match="gradient was not finite at step 1 on ranks 0, 1;"):
        sync.agree(1, stop=False, save=False)


def test_two_ranks_agree_on_losses_flags_and_what_is_not_finite() -> None:
    run_distributed(_agree, 2)
