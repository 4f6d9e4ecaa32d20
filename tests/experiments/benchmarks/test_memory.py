"""The allocator's peak of trainings on CPUs, and which published peak a plan is compared with."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.planner.plan import GIB
from experiments.benchmarks import memory
from experiments.benchmarks.compared import Compared
from experiments.benchmarks.published_runs import runs
from tests.app.planner.conftest import TINY, gpus, plan_of, read


@pytest.mark.pure
def test_trainings_are_of_many_kinds_and_their_keys_can_be_read(tmp_path: Path) -> None:
    trainings = memory.trainings()
    assert len(trainings) >= 20
    words = {word for _, keys in trainings.values() for word in keys}
    for name in ("single", "ddp", "fsdp", "zero1", "zero2", "tensor", "pipeline", "context"):
        assert f"strategy={name}" in words
    for name in ("bf16", "expert, fsdp"):
        workers, keys = trainings[name]
        config, layout = memory.config_of(keys, workers, tmp_path)
        assert layout.dims.world_size == workers
        assert config.task_args["data"] == f"{tmp_path}/tokens.bin"


@pytest.mark.alone
@pytest.mark.slow
def test_the_plan_of_a_training_is_what_the_allocator_hands_out(tmp_path: Path) -> None:
    memory.write_files(tmp_path)
    # Of one worker the plan is exact: only the operations of a model say which copies autocast
    # keeps, and how long.
    limits = {"single": 0.005, "bf16": 0.005, "recomputation, bf16": 0.02, "zero2": 0.05}
    for name, measured in memory.measure(list(limits), tmp_path):
        assert isinstance(measured, memory.Measured), measured
        row, error = memory.row_of(name, measured, tmp_path, {})
        assert abs(error) < limits[name], row
        assert measured.process > 0 and measured.data < 0.05 * measured.tensors


@pytest.mark.slow
@pytest.mark.pure
def test_a_published_peak_is_compared_with_the_plan_of_the_same_quantity() -> None:
    run = next(run for run in runs() if run.memory_gib and run.peak == "allocated")
    plan = plan_of(read((), *TINY), gpus(1)).rows[0]
    gib = {
        peak: Compared(replace(run, peak=peak), plan, context=2.0 * GIB).memory_gib
        for peak in ("allocated", "reserved", "card")
    }
    assert gib["allocated"] * GIB == pytest.approx(plan.allocated_bytes)
    assert gib["reserved"] * GIB == pytest.approx(plan.memory_bytes)
    assert gib["card"] == pytest.approx(gib["reserved"] + 2.0)
    peaks = {run.peak for run in runs() if run.memory_gib}
    assert peaks == {"allocated", "reserved", "card", ""}
