"""The DeepSpeed engine trains the same model.

That test needs the optional extra: `make test-deepspeed`.
"""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from experiments.parity import curves
from experiments.parity.curves import Curve
from strategies import deepspeed, registry
from strategies.layout import LayoutError
from strategies.parallelize import Options, choose
from tests.pool import run_distributed
from tests.strategies.models import CPU, gpt_trial

IS_INSTALLED = importlib.util.find_spec("deepspeed") is not None
DEEPSPEED = choose("deepspeed", 2)
FSDP = choose("fsdp", 2)
TRIAL: dict[str, Any] = {"tied": True, "micro_batches": 2, "clip": 0.5, "steps": 10}


def _options(stage: int) -> Options:
    return Options(deepspeed={"zero_optimization": {"stage": stage}})


def _train_and_continue(rank: int, folder: str) -> tuple[dict[int, Curve], dict[str, Curve]]:
    """The curve of each stage, and curves that continue another layout's checkpoint.

    All in one call, since the engine keeps the first process group that it gets.
    """
    curves_by_stage = {}
    for stage in (1, 2, 3):
        trial = gpt_trial(**TRIAL)
        curves_by_stage[stage] = curves.train(trial, DEEPSPEED, _options(stage), CPU)
    layouts = {"deepspeed": (DEEPSPEED, _options(2)), "fsdp": (FSDP, Options())}
    continued = {}
    for first, second in itertools.permutations(layouts):
        checkpoint = f"{folder}/{first}"
        layout, options = layouts[first]
        trial = gpt_trial(**TRIAL)
        curves.train(trial, layout, options, CPU, steps=range(5), save=checkpoint)
        layout, options = layouts[second]
        trial = gpt_trial(**TRIAL)
        continued[f"{first} → {second}"] = curves.train(
            trial, layout, options, CPU, steps=range(5, 10), load=checkpoint
        )
    return curves_by_stage, continued


@pytest.mark.alone
@pytest.mark.skipif(
    not IS_INSTALLED, reason="the optional extra is not installed: make test-deepspeed"
)
def test_every_stage_trains_the_same_model_and_shares_checkpoints(tmp_path: Path) -> None:
    expected = curves.train(gpt_trial(**TRIAL), choose("single", 1), Options(), CPU)
    expected_second_half = Curve(expected.losses[5:], expected.norms[5:], expected.weights)
    results = run_distributed(_train_and_continue, 2, str(tmp_path), timeout=280)
    curves_by_stage, continued = results[0]
    assert len(curves_by_stage) == 3
    assert len(continued) == 2
    for stage, curve in curves_by_stage.items():
        difference = curves.difference(expected, curve)
        assert difference.within(2e-5), (stage, difference)
    for layouts, curve in continued.items():
        difference = curves.difference(expected_second_half, curve)
        assert difference.within(2e-5), (layouts, difference)


@pytest.mark.pure
def test_the_engine_gets_the_users_json_with_the_experiments_batch_and_clipping() -> None:
    """By itself DeepSpeed clips at 1.0, and refuses other optimizers than its own on the CPU.

    "auto" is Hugging Face's.
    """
    zero = {"stage": 3, "reduce_bucket_size": 7, "offload_optimizer": {"device": "cpu"}}
    user_json = {"train_batch_size": "auto", "zero_optimization": zero}
    configuration = deepspeed.engine_configuration(user_json)
    assert configuration["zero_optimization"] == zero
    assert "train_batch_size" not in configuration
    assert configuration["gradient_clipping"] == 0.0
    assert configuration["gradient_accumulation_steps"] == 1
    assert configuration["zero_force_ds_cpu_optimizer"] is False
    assert user_json["train_batch_size"] == "auto"


@pytest.mark.pure
@pytest.mark.skipif(IS_INSTALLED, reason="deepspeed is installed here")
def test_a_missing_package_is_reported_before_anything_starts() -> None:
    pattern = r"needs the deepspeed package.*pip install deepspeed, or write strategy="
    with pytest.raises(LayoutError, match=pattern):
        registry.require_installed("deepspeed")
