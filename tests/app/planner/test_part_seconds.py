"""What the host, which launches operations, adds to the time of a step."""

import pytest

from app.planner.machine import Machine, cpus
from app.planner.read import Reader
from tests.app.planner.conftest import gpus, plan_of

pytestmark = pytest.mark.pure


def step_seconds(reader: Reader, machine: Machine, mode: str, *keys: str) -> float:
    """Of the only layout of a small GPT whose blocks are recomputed."""
    mode_key = f"train.activation_checkpointing={mode}"
    keys = (mode_key, "strategy=single", "train.micro_batch_size=1", "train.precision=fp32", *keys)
    fixed = tuple(key.partition("=")[0] for key in keys)
    plan = plan_of(reader, machine, *keys, "train.global_batch_size=1", fixed_keys=fixed)
    (row,) = plan.rows
    return row.step_seconds


def test_a_small_model_waits_for_the_host_that_recomputes_it(small: Reader) -> None:
    none, full, selective = (
        step_seconds(small, gpus(1), mode) for mode in ("none", "full", "selective")
    )
    assert 1.2 * none < full
    assert 1.1 * full < selective, "it calls Python for each operation"


def test_on_a_cpu_the_host_computes_as_well(small: Reader) -> None:
    none, selective = (step_seconds(small, cpus(1), mode) for mode in ("none", "selective"))
    assert 1.1 * none < selective


def test_compiled_blocks_are_not_recomputed_by_the_host(small: Reader) -> None:
    none, selective = (
        step_seconds(small, gpus(1), mode, "train.compile=true") for mode in ("none", "selective")
    )
    assert selective < 1.1 * none
