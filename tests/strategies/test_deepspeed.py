"""The DeepSpeed engine trains the same model: runs where the optional extra is installed (`make test-deepspeed`)."""

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

HERE = importlib.util.find_spec("deepspeed") is not None
DEEPSPEED, FSDP = choose("deepspeed", 2), choose("fsdp", 2)
TRIAL: dict[str, Any] = {"tied": True, "micro_batches": 2, "clip": 0.5, "steps": 10}


def _options(stage: int) -> Options:
    return Options(deepspeed={"zero_optimization": {"stage": stage}})


def _everything(_: int, folder: str) -> tuple[dict[int, Curve], dict[str, Curve]]:
    """Each stage's curve, and those continued from another's checkpoint. In one call: the engine keeps the process
    group that it met first."""
    stages = {stage: curves.train(gpt_trial(**TRIAL), DEEPSPEED, _options(stage), CPU) for stage in (1, 2, 3)}
    ways: dict[str, Any] = {"deepspeed": (DEEPSPEED, _options(2)), "fsdp": (FSDP, Options())}
    continued = {}
    for first, second in itertools.permutations(ways):
        place = f"{folder}/{first}"
        curves.train(gpt_trial(**TRIAL), *ways[first], CPU, steps=range(5), save=place)
        rest = curves.train(gpt_trial(**TRIAL), *ways[second], CPU, steps=range(5, 10), load=place)
        continued[f"{first} → {second}"] = rest
    return stages, continued


@pytest.mark.alone
@pytest.mark.skipif(not HERE, reason="the optional extra is not installed: make test-deepspeed")
def test_every_stage_trains_the_same_model_and_checkpoints_go_both_ways(tmp_path: Path) -> None:
    truth = curves.train(gpt_trial(**TRIAL), choose("single", 1), Options(), CPU)
    rest = Curve(truth.losses[5:], truth.norms[5:], truth.weights)
    found_curves, continued = run_distributed(_everything, 2, str(tmp_path), timeout=280)[0]
    found = {f"stage {stage}": curves.difference(truth, curve) for stage, curve in found_curves.items()}
    found |= {name: curves.difference(rest, curve) for name, curve in continued.items()}
    assert len(found) == 5
    assert all(difference.within(2e-5) for difference in found.values()), found


@pytest.mark.pure
def test_a_configuration_keeps_what_is_the_persons_and_takes_what_is_the_experiments() -> None:
    """DeepSpeed itself clips at 1.0, and refuses any optimizer but its own beside CPU offload. "auto" is Hugging
    Face's."""
    zero = {"stage": 3, "reduce_bucket_size": 7, "offload_optimizer": {"device": "cpu"}}
    given = {"train_batch_size": "auto", "zero_optimization": zero}
    found = deepspeed.engine_configuration(given)
    assert found["zero_optimization"] == zero and "train_batch_size" not in found
    assert found["gradient_clipping"] == 0.0 and found["gradient_accumulation_steps"] == 1
    assert found["zero_force_ds_cpu_optimizer"] is False and given["train_batch_size"] == "auto"


@pytest.mark.pure
@pytest.mark.skipif(HERE, reason="deepspeed is installed here")
def test_a_missing_package_is_said_before_anything_starts() -> None:
    with pytest.raises(LayoutError, match=r"needs the deepspeed package.*pip install deepspeed, or write strategy="):
        registry.require_installed(choose("deepspeed", 2))
