"""The memory of an optimizer's step beside its state, as torch's allocator hands it out."""

from pathlib import Path

import pytest
import torch
from torch import nn

from app.config import OptimizerConfig
from app.planner.machine import cpus
from app.planner.memory import step_copies
from app.training.optimizer import BUILT_IN, build_optimizer
from strategies.costs import STEP_COPIES
from tests.app.planner.conftest import allocated_peak, gpus

pytestmark = pytest.mark.pure
SHAPE = (64, 256)
PARAMETERS = 16


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_step_makes_the_planned_copies_of_the_parameters(name: str, tmp_path: Path) -> None:
    """With `foreach`, which is torch's default on GPUs but not on CPUs."""
    copies = STEP_COPIES.get(name, 0)
    parameters = [nn.Parameter(torch.randn(SHAPE)) for _ in range(PARAMETERS)]
    config = OptimizerConfig(name=name, args={"foreach": True} if copies else {})
    optimizer = build_optimizer(config, parameters)
    for parameter in parameters:
        parameter.grad = torch.randn(SHAPE)
    optimizer.step()  # makes the state

    def step() -> None:
        optimizer.step()

    measured = allocated_peak(step, tmp_path)
    bytes_of_all = sum(parameter.nbytes for parameter in parameters)
    if copies:
        assert measured == pytest.approx(copies * bytes_of_all, rel=0.02)
    else:
        assert measured < 0.7 * bytes_of_all, "no more than a few parameters at once"


def test_only_gpus_update_all_parameters_at_once() -> None:
    copies = {}
    for machine in (gpus(1), cpus(1)):
        for name in ("adagrad", "adamw"):
            copies[machine.device.is_cpu, name] = step_copies(machine.device, name)
    assert copies.pop((False, "adagrad")) == 2
    assert set(copies.values()) == {0}
