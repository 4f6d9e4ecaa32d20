"""The machine of a plan, the catalogue of GPUs, trials of a layout here, and calibration."""

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
from app.planner.assumptions import assumptions_text
from app.planner.calibrate import keep
from app.planner.device import Device, constants, device_named
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


def test_the_gpus_of_a_clusters_head_count_too() -> None:
    shape = read_cluster("onprem")
    assert of_shape(shape, None).world == of_shape(shape, 12).world == 12
    alone = replace(shape, head=replace(shape.head, gpus=2))
    assert of_shape(alone, None).world == 8, "the head has other GPUs than its workers"
    assert of_shape(alone, None).per_node == 4
    assert of_shape(replace(shape, max_workers=1), None).world == 8


def test_the_command_line_adds_to_a_cluster() -> None:
    machine = find_machine(MachineOptions(cluster="onprem", gpus=8, interconnect="1Gb"), "auto")
    assert (machine.world, machine.link_across, machine.assumption) == (8, 125e6, "")
    options = MachineOptions(cluster="onprem", gpu="GeForce RTX 4090", per_node=4)
    assert find_machine(options, "auto").world == 12
    options = MachineOptions(cluster="onprem", gpu="cpu")
    assert find_machine(options, "4").device.gpu.name == "cpu"
    options = MachineOptions(gpu="cpu", gpus=4, per_node=2, interconnect="8Gb")
    assert find_machine(options, "auto").link_across == 1e9


def test_where_ray_does_not_name_the_gpu_its_cpus_count_or_the_user_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cluster(**worker: float) -> ClusterShape:
        head = {"node:__internal_head__": 1.0, "memory": 8e9, "CPU": 4.0}
        totals = [head, {"memory": 8e9, **worker}, {"memory": 8e9, **worker}]
        nodes = [NodeState(address="a", kind="", total=total, available={}) for total in totals]
        return shape_of_nodes(nodes)

    monkeypatch.setattr("app.planner.machine.connected_shape", lambda: cluster(CPU=16.0))
    machine = find_machine(MachineOptions(), "20")
    assert (machine.world, machine.per_node, machine.device.is_cpu) == (20, 16, True)
    monkeypatch.setattr("app.planner.machine.connected_shape", lambda: cluster(GPU=4.0))
    with pytest.raises(UserError, match="name it with --gpu"):
        find_machine(MachineOptions(), "auto")
    machine = of_shape(cluster(GPU=4.0), None, "t4")
    assert (machine.world, machine.per_node, machine.device.gpu.name) == (8, 4, "t4")


def test_assumptions_are_listed_in_two_lines_and_changed_by_name() -> None:
    options = MachineOptions(gpus=8, gpu="h100-80gb", assume=("across=0.5", "products=0.4"))
    device = find_machine(options, "auto").device
    assert device.across == 0.5
    assert device.matmul["bf16"] == device.matmul["fp8"] == 0.4
    lines = assumptions_text(device, "bf16").splitlines()
    assert len(lines) == 2 and "fitted to published runs" in lines[0] and "across 0.5" in lines[1]


@pytest.mark.parametrize(("gpu", "flash_of_torch"), [("h100-80gb", 1.4), ("a100-80gb", 1.0)])
def test_attention_is_assumed_relative_to_flash_attention_2(
    gpu: str, flash_of_torch: float
) -> None:
    def device(*assume: str) -> Device:
        return find_machine(MachineOptions(gpus=1, gpu=gpu, assume=assume), "auto").device

    slow = device("flash=0.5")
    assert slow.attention == pytest.approx(device().attention * 0.5 / flash_of_torch)
    assert "flash 0.5" in assumptions_text(slow, "bf16")
    assert device(f"flash={flash_of_torch}").attention == pytest.approx(device().attention)
    assert device("logits=28").logits == 28


def test_the_catalogue_is_complete_and_a_gpu_is_known_by_its_names() -> None:
    catalogue = yaml.safe_load(hardware.CATALOGUE.read_text())
    for name, entry in catalogue["gpus"].items():
        gpu = hardware.find_gpu(name)
        assert gpu.memory_bytes > 2**30 and gpu.memory_bandwidth > 1e9 and gpu.link_within > 1e9
        assert all(rate > 1e10 for rate in gpu.peak.values())
        assert entry["source"] in catalogue["sources"]
    for offer in hardware.all_instances().values():
        assert hardware.find_gpu(offer.gpu).name == offer.gpu
        assert offer.price_per_hour > 0.1
        assert offer.date
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "2080ti": "rtx-2080-ti",
        "a100_40gb": "a100-40gb",
        "NVIDIA GH200 480GB": "gh200",
    }
    assert {name: hardware.find_gpu(name).name for name in names} == names


def test_a_gpu_outside_the_catalogue_is_known_once_it_is_measured() -> None:
    with pytest.raises(HardwareError, match="run `trireme calibrate`"):
        hardware.find_gpu("Imaginary RTX 9090")
    entry = {
        "memory": 24576,
        "bandwidth": 900.0,
        "peak": {"fp32": 80.0, "bf16": 160.0},
        "link": 25.0,
        "source": "measured by trireme calibrate",
        "aka": ["Imaginary RTX 9090"],
    }
    keep({"gpu": "imaginary-rtx-9090", "entry": entry, "operation": 7e-6, "measured": True})
    machine = of_shape(shape_of_gpus(4, "Imaginary RTX 9090", 4), 4)
    assert machine.device.gpu.name == "imaginary-rtx-9090" and machine.device.operation == 7e-6
    assert machine.device.gpu.peak["bf16"] == pytest.approx(1.6e14)


def test_a_variant_of_a_gpu_has_the_limits_that_its_name_says() -> None:
    full = hardware.find_gpu("h100")
    variant = hardware.find_gpu("h100:hbm=2.4TB/s,power=500W")
    assert (variant.memory_bandwidth, variant.watts, variant.base) == (2.4e12, 500, "h100-80gb")
    assert variant.clock == pytest.approx((500 / 700) ** (1 / 3)) and full.clock == 1
    assert device_named(variant.name).peak("bf16") < device_named("h100").peak("bf16")
    assert device_named(variant.name).fitted


def test_cards_that_cannot_reach_each_other_send_through_the_host_without_a_bridge() -> None:
    card = device_named("rtx-3090")
    workstation = device_named("rtx-a6000")
    assert card.gpu.link_within == workstation.gpu.link_within
    assert card.within < workstation.within / 3
    assert card.latency_within > workstation.latency_within
    bridged = device_named("rtx-3090:link=56GB/s")
    assert bridged.within == workstation.within
    assert bridged.latency_within == workstation.latency_within
    assert device_named("rtx-3090", {"link_within": 5e10}).within == workstation.within
    assert device_named("rtx-3090", {"link_within": 5e9, "within": 1.0}).within == 1.0  # measured


def test_every_gpu_has_a_share_of_its_peak_for_every_precision() -> None:
    """A family that names some precisions keeps the default shares of the others."""
    default = constants()["default"]["matmul"]
    for gpu in yaml.safe_load(hardware.CATALOGUE.read_text())["gpus"]:
        device = device_named(gpu)
        assert device.matmul.keys() == default.keys(), gpu
    assert device_named("b200").matmul["tf32"] == default["tf32"]
    assert device_named("b200").matmul["bf16"] != default["bf16"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("gpus: [", "catalogue"), ("gpus: {x: {memory: many}}", "lacks"), ("[]", "catalogue")],
)
def test_a_mistake_in_a_users_catalogue_is_one_sentence(text: str, message: str) -> None:
    Path(os.environ["TRIREME_HARDWARE"]).write_text(text)
    with pytest.raises(HardwareError, match=message):
        hardware.find_gpu("t4")


@pytest.mark.slow
def test_this_machine_is_calibrated() -> None:
    measurement = calibrate.calibrate(2)
    name, file = keep(measurement)
    assert name == "cpu" and file.exists() and cpus(2).device.measured
    assert cpus(2).device.gpu.rate("fp32") == measurement["peak"]["fp32"] > 1e8
    assert measurement["link_within"] > 1e6


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_the_search_finds_the_largest(count: int) -> None:
    for largest, first in itertools.product(range(-1, count), {0, count // 2, count - 1}):
        runs = mock.Mock(side_effect=largest.__ge__)
        assert search(first, range(1, count + 1), runs) == largest
        sizes_tried = [call.args[0] for call in runs.call_args_list]
        assert sizes_tried[0] == first
        assert len(sizes_tried) == len(set(sizes_tried)) <= 2 * count.bit_length() + 1


def _hangs(rank: int, argument: Any) -> None:
    time.sleep(600)


@pytest.mark.slow
def test_a_try_is_a_few_real_steps_and_what_fails_or_hangs_is_ended(tiny: Reader) -> None:
    plan = make_plan(load_config([], [*TINY, "strategy=single"]), tiny.task, cpus(1), reader=tiny)
    values = experiment(plan, plan.rows[0])
    limit = 150 * 2**20
    result = trial.run(values, 1, limit)
    assert result.seconds is not None and result.seconds > 0 and result.bytes < 1e8
    values["task_args"] = {"data": "digits", "model": "mlp", "model_args": {"hidden": [4096, 4096]}}
    assert "allocate" in trial.run(values, 1, limit).failure, (
        "it ends by itself, before memory does"
    )
    with pytest.raises(RunFailed, match="took more than 2 s"):
        in_processes(_hangs, 1, timeout=2)


def test_max_batch_writes_what_runs(
    tmp_path: Path, tiny: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_values = list[dict[str, Any]]()
    file = tmp_path / "best.yaml"

    def run(tree: dict[str, Any], workers: int, limit: float) -> Trial:
        train_values.append(tree["train"])
        fits = tree["train"]["micro_batch_size"] <= 7
        return Trial(0.1, 1e6) if fits else Trial(failure="MemoryError")

    monkeypatch.setattr(trial, "run", run)
    flags = ["--gpu=cpu", "--gpus=2", "--max-batch", f"--write={file}"]
    result = invoke("plan", *TINY, "strategy=ddp", *flags)
    assert "7 is the largest that runs" in result.output, result.output
    assert "8 does not (MemoryError)" in result.output
    assert load_config([file]).train.micro_batch_size == 7 and load_config([file]).strategy == "ddp"
    two_micro_batches = [min(64, 2 * 2 * train["micro_batch_size"]) for train in train_values]
    assert [train["global_batch_size"] for train in train_values] == two_micro_batches, (
        "the memory of two micro-batches is that of many"
    )
    config = load_config([], [*TINY, "strategy=ddp"])
    fixed_keys = frozenset({"strategy", "train.activation_checkpointing"})
    plan = make_plan(config, tiny.task, cpus(2), fixed_keys=fixed_keys, reader=tiny)
    machine = with_memory(cpus(2), trial._with_size(plan, plan.rows[0], 5).memory_bytes)
    monkeypatch.setattr(trial, "run", lambda *_: Trial(failure="no"))
    plan = make_plan(config, tiny.task, machine, fixed_keys=fixed_keys, reader=tiny)
    _, row, summary = max_batch(plan)
    assert row is None
    assert (summary["predicted"], summary["largest"], summary["share"]) == (5, 0, 32)
    written = load_config([], ["strategy=ddp", "parallel.ep=2", "parallel.cp=2"])
    assert {"strategy", "parallel.ep", "parallel.cp"} <= _layout_keys(written), (
        "keys of a layout that a file sets are kept"
    )
