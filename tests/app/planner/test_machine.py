"""What a plan is for, what is tried of it on this machine, and what is measured: machine, trial, calibrate."""

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from app.cli.plan import _layout_keys
from app.config.io import load_config
from app.errors import RunFailed, UserError
from app.planner import calibrate, trial
from app.planner.calibrate import keep
from app.planner.device import assumptions, device_named
from app.planner.machine import MachineOptions, cpus, find_machine, of_shape
from app.planner.output import experiment
from app.planner.plan import make_plan
from app.planner.processes import in_processes
from app.planner.read import Reader
from app.planner.trial import Trial, max_batch, search
from cluster import hardware
from cluster.files import read_cluster
from cluster.hardware import HardwareError
from cluster.shape import ClusterShape, NodeState, shape_of_gpus, shape_of_nodes
from tests.app.planner.conftest import TINY, with_memory
from tests.running import invoke


def test_a_clusters_gpus_count_with_those_of_its_head() -> None:
    shape = read_cluster("onprem")
    assert of_shape(shape, None).world == of_shape(shape, 12).world == 12
    alone = replace(shape, head=replace(shape.head, gpus=2))
    assert of_shape(alone, None).world == 8 and of_shape(alone, None).per_node == 4, "nodes are alike, or apart"
    assert of_shape(replace(shape, max_workers=1), None).world == 8


def test_the_command_line_adds_to_a_cluster() -> None:
    found = find_machine(MachineOptions(cluster="onprem", gpus=8, interconnect="1Gb"), "auto")
    assert (found.world, found.link_across, found.assumption) == (8, 125e6, "")
    assert find_machine(MachineOptions(cluster="onprem", gpu="GeForce RTX 4090", per_node=4), "auto").world == 12
    assert find_machine(MachineOptions(cluster="onprem", gpu="cpu"), "4").device.gpu.name == "cpu"
    assert find_machine(MachineOptions(gpu="cpu", gpus=4, per_node=2, interconnect="8Gb"), "auto").link_across == 1e9


def test_what_ray_does_not_say_of_a_cluster_is_its_cpus_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def cluster(**worker: float) -> ClusterShape:
        head = {"node:__internal_head__": 1.0, "memory": 8e9, "CPU": 4.0}
        totals = [head, {"memory": 8e9, **worker}, {"memory": 8e9, **worker}]
        return shape_of_nodes([NodeState(address="a", kind="", total=total, available={}) for total in totals])

    monkeypatch.setattr("app.planner.machine.connected_shape", lambda: cluster(CPU=16.0))
    found = find_machine(MachineOptions(), "20")
    assert (found.world, found.per_node, found.device.is_cpu) == (20, 16, True)
    monkeypatch.setattr("app.planner.machine.connected_shape", lambda: cluster(GPU=4.0))
    with pytest.raises(UserError, match="name it with --gpu"):
        find_machine(MachineOptions(), "auto")
    found = of_shape(cluster(GPU=4.0), None, "t4")
    assert (found.world, found.per_node, found.device.gpu.name) == (8, 4, "t4")


def test_what_is_assumed_is_listed_in_two_lines_and_changed_by_name() -> None:
    machine = find_machine(MachineOptions(gpus=8, gpu="h100-80gb", assume=("across=0.5", "products=0.4")), "auto")
    assert (machine.device.across, machine.device.matmul["bf16"], machine.device.matmul["fp8"]) == (0.5, 0.4, 0.4)
    said = assumptions(machine.device, "bf16").splitlines()
    assert len(said) == 2 and "fitted to published runs" in said[0] and "across 0.5" in said[1]


def test_the_catalogue_is_complete_and_a_gpu_is_known_by_its_names() -> None:
    written = yaml.safe_load(hardware.CATALOGUE.read_text())
    for name, entry in written["gpus"].items():
        gpu = hardware.find_gpu(name)
        assert gpu.memory_bytes > 2**30 and gpu.memory_bandwidth > 1e9 and gpu.link_within > 1e9
        assert all(rate > 1e10 for rate in gpu.peak.values()) and entry["source"] in written["sources"]
    for offer in hardware.all_instances().values():
        assert hardware.find_gpu(offer.gpu).name == offer.gpu and offer.price_per_hour > 0.1 and offer.date
    names = {"NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA GeForce RTX 4090": "rtx-4090", "2080ti": "rtx-2080-ti"}
    names |= {"a100_40gb": "a100-40gb", "NVIDIA GH200 480GB": "gh200"}
    assert {written: hardware.find_gpu(written).name for written in names} == names


def test_one_that_is_not_in_it_is_known_once_measured_and_a_variant_is_what_is_written_of_it() -> None:
    with pytest.raises(HardwareError, match="run `trireme calibrate`"):
        hardware.find_gpu("Imaginary RTX 9090")
    entry = {"memory": 24576, "bandwidth": 900.0, "peak": {"fp32": 80.0, "bf16": 160.0}, "link": 25.0}
    entry |= {"source": "measured by trireme calibrate", "aka": ["Imaginary RTX 9090"]}
    keep({"gpu": "imaginary-rtx-9090", "entry": entry, "operation": 7e-6, "measured": True})
    machine = of_shape(shape_of_gpus(4, "Imaginary RTX 9090", 4), 4)
    assert machine.device.gpu.name == "imaginary-rtx-9090" and machine.device.operation == 7e-6
    assert machine.device.gpu.peak["bf16"] == pytest.approx(1.6e14)
    whole, limited = hardware.find_gpu("h100"), hardware.find_gpu("h100:hbm=2.4TB/s,power=500W")
    assert (limited.memory_bandwidth, limited.watts, limited.base) == (2.4e12, 500, "h100-80gb")
    assert limited.clock == pytest.approx((500 / 700) ** (1 / 3)) and whole.clock == 1
    assert (
        device_named(limited.name).peak("bf16") < device_named("h100").peak("bf16")
        and device_named(limited.name).fitted
    )


@pytest.mark.parametrize(
    ("text", "said"), [("gpus: [", "catalogue"), ("gpus: {x: {memory: many}}", "lacks"), ("[]", "catalogue")]
)
def test_a_catalogue_of_ones_own_that_is_wrong_is_one_sentence(text: str, said: str) -> None:
    Path(os.environ["TRIREME_HARDWARE"]).write_text(text)
    with pytest.raises(HardwareError, match=said):
        hardware.find_gpu("t4")


@pytest.mark.slow
def test_this_machine_is_calibrated() -> None:
    found = calibrate.calibrate(2)
    name, file = keep(found)
    assert name == "cpu" and file.exists() and cpus(2).device.measured
    assert cpus(2).device.gpu.rate("fp32") == found["peak"]["fp32"] > 1e8 and found["link_within"] > 1e6


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_the_search_finds_the_largest(count: int) -> None:
    for largest, first in itertools.product(range(-1, count), {0, count // 2, count - 1}):
        runs = mock.Mock(side_effect=largest.__ge__)
        assert search(first, range(1, count + 1), runs) == largest
        asked = [call.args[0] for call in runs.call_args_list]
        assert asked[0] == first and len(asked) == len(set(asked)) <= 2 * count.bit_length() + 1


def _hangs(rank: int, own: Any) -> None:
    time.sleep(600)


@pytest.mark.slow
def test_a_try_is_a_few_real_steps_and_what_fails_or_hangs_is_ended(tiny: Reader) -> None:
    plan = make_plan(load_config([], [*TINY, "strategy=single"]), tiny.task, cpus(1), reader=tiny)
    tree = experiment(plan, plan.rows[0])
    limit = 150 * 2**20
    done = trial.run(tree, 1, limit)
    assert done.seconds is not None and done.seconds > 0 and done.bytes < 1e8
    tree["task_args"] = {"data": "digits", "model": "mlp", "model_args": {"hidden": [4096, 4096]}}
    assert "allocate" in trial.run(tree, 1, limit).failure, "it ends by itself, before memory does"
    with pytest.raises(RunFailed, match="took more than 2 s"):
        in_processes(_hangs, 1, timeout=2)


def test_max_batch_writes_what_runs(tmp_path: Path, tiny: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, file = list[dict[str, Any]](), tmp_path / "best.yaml"

    def run(tree: dict[str, Any], workers: int, limit: float) -> Trial:
        tried.append(tree["train"])
        return Trial(0.1, 1e6) if tree["train"]["micro_batch_size"] <= 7 else Trial(failure="MemoryError")

    monkeypatch.setattr(trial, "run", run)
    command = ["plan", *TINY, "strategy=ddp", "--gpu", "cpu", "--gpus", "2", "--max-batch", "--write", str(file)]
    result = invoke(*command)
    assert "7 is the largest that runs" in result.output, result.output
    assert "8 does not (MemoryError)" in result.output
    assert load_config([file]).train.micro_batch_size == 7 and load_config([file]).strategy == "ddp"
    two = [min(64, 2 * 2 * each["micro_batch_size"]) for each in tried]
    assert [each["global_batch_size"] for each in tried] == two, "two micro-batches tell the memory of many"
    config, given = load_config([], [*TINY, "strategy=ddp"]), frozenset({"strategy", "train.activation_checkpointing"})
    plan = make_plan(config, tiny.task, cpus(2), fixed_keys=given, reader=tiny)
    machine = with_memory(cpus(2), trial._with_size(plan, plan.rows[0], 5).memory_bytes)
    monkeypatch.setattr(trial, "run", lambda *_: Trial(failure="no"))
    _, row, found = max_batch(make_plan(config, tiny.task, machine, fixed_keys=given, reader=tiny))
    assert row is None and (found["predicted"], found["largest"], found["share"]) == (5, 0, 32)
    written = load_config([], ["strategy=ddp", "parallel.ep=2", "parallel.cp=2"])
    assert {"strategy", "parallel.ep", "parallel.cp"} <= _layout_keys(written), "what a file says of a layout stays"
