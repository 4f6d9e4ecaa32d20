"""Plans beside what one GPU was measured to take (gpu_first/one_gpu.py)."""

import re
from pathlib import Path

import numpy as np
import pytest

from app.planner.device import CONSTANTS, constants
from experiments.benchmarks.gpu_first import one_gpu

pytestmark = pytest.mark.pure
RESULTS = Path(one_gpu.__file__).parents[1] / "RESULTS.md"
NAMES = ("gpt-350m", "gpt-1.3b", "gpt-1.3b-fp8-4k")
"""Trainings that keep the GPU busy, two of them in the set that the planner was mended with."""


@pytest.mark.slow
def test_a_plan_is_within_a_tenth_of_what_one_gpu_took(tmp_path: Path) -> None:
    lines = [line for line in one_gpu.lines() if line.name in NAMES]
    compared = list(one_gpu.compare(lines, tmp_path))
    assert {line.name for _, line, _ in compared} == set(NAMES)
    for row, line, now in compared:
        assert now.planned_ms == pytest.approx(line.ms, rel=0.1), row
        assert now.planned_gib == pytest.approx(line.gib, rel=0.1), row
        assert row["inside"] == "yes", row


@pytest.mark.slow
def test_the_probability_of_fitting_is_of_what_trireme_has_measured(tmp_path: Path) -> None:
    """`peaks` in constants.yaml: of one H100, and of CPUs as RESULTS.md has them, half each."""
    on_gpu = [
        line.gib / now.planned_gib for _, line, now in one_gpu.compare(one_gpu.lines(), tmp_path)
    ]
    on_cpus = _measured_on_cpus()
    assert len(on_gpu) == 24
    pairs = sorted((ratio, 1 / len(of_set)) for of_set in (on_gpu, on_cpus) for ratio in of_set)
    ratios, weights = np.array(pairs).T
    levels = (np.cumsum(weights) - weights / 2) / weights.sum()
    known = constants()["peaks"]
    assert known == pytest.approx(
        {level: round(float(np.interp(level, levels, ratios)), 3) for level in known}, abs=0.01
    )


def _measured_on_cpus() -> list[float]:
    """Measured peaks relative to their plans, as RESULTS.md has them."""
    table = RESULTS.read_text().partition("<!-- memory at")[2].partition("<!-- end")[0]
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \| ", table, re.MULTILINE)
    return [float(measured) / float(planned) for planned, measured in rows]


def test_the_probability_of_fitting_is_of_as_many_trainings_as_were_measured() -> None:
    """Noticed at once where the table of RESULTS.md has rows that `peaks` was not made of."""
    assert f"and {len(_measured_on_cpus())} on CPUs (" in CONSTANTS.read_text()


ALIGNED = 669e12
"""FLOP/s of products with 50,264 or 50,304 words: the middle of what part_seconds.py says."""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "rate"), [(50257, 126e12), (50260, 266e12), (50264, ALIGNED)])
def test_the_last_layer_of_an_odd_vocabulary_is_planned_as_slow_as_it_is(
    words: int, rate: float, tmp_path: Path
) -> None:
    """In what its products take more: the loss moves as many bytes with any vocabulary."""
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(1 << 16))
    width, length, batch = 256, 1024, 16

    def seconds(vocabulary: int) -> float:
        training = {"gpt": [width, 1, 4], "length": length, "batch": batch, "precision": "bf16"}
        config = one_gpu.config_of(training, tmp_path, weights=False)
        args = config.task_args | {"vocab_size": vocabulary, "data": str(tokens)}
        task = one_gpu.load_task(config.task, args)
        machine = one_gpu.find_machine(one_gpu.MachineOptions(gpu="h100-80gb", gpus=1), "1")
        estimate = one_gpu.predict(config, task, one_gpu.choose("single", 1), machine)
        return estimate.seconds["compute"]

    flops = 6 * batch * length * width * words
    longer = flops * (1 / rate - 1 / ALIGNED)
    assert seconds(words) - seconds(50304) == pytest.approx(longer, rel=0.25, abs=1e-4)


def test_every_measured_training_can_be_planned_again() -> None:
    names = one_gpu.trainings()
    assert all(line.name in names for line in one_gpu.lines())
    assert {values["set"] for values in names.values()} == {"first", "fresh"}
