"""What a plan is for, what is tried of it on this machine, and what is measured: machine, trial, calibrate."""

import dataclasses
import inspect
import itertools
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from app.cli import group
from app.config_io import load_config
from app.errors import RunFailed, UserError
from app.planner import calibrate, trial
from app.planner.calibrate import keep
from app.planner.device import assumptions, device
from app.planner.machine import Asked, cpus, find, of_shape
from app.planner.output import experiment
from app.planner.plan import make_plan
from app.planner.processes import in_processes
from app.planner.read import Reader
from app.planner.trial import Trial, max_batch, search
from cluster import hardware
from cluster.files import read_cluster
from cluster.hardware import HardwareError
from cluster.shape import ClusterShape, NodeState, of_gpus, of_nodes
from tests.app.planner.conftest import TINY, with_memory


def test_the_heads_gpus_count() -> None:
    shape = read_cluster("onprem")
    assert of_shape(shape, None).world == of_shape(shape, 12).world == 12
    with pytest.raises(UserError, match="at most 12"):
        of_shape(shape, 13)
    alone = dataclasses.replace(shape, head=dataclasses.replace(shape.head, gpus=2))
    assert of_shape(alone, None).world == 8 and of_shape(alone, None).per_node == 4, "nodes are alike, or apart"
    assert of_shape(dataclasses.replace(shape, max_workers=1), None).world == 8


def test_the_command_line_adds_to_a_cluster_and_does_not_contradict_it() -> None:
    found = find(Asked(cluster="onprem", gpus=8, interconnect="1Gb"), "auto")
    assert (found.world, found.across, found.assumed) == (8, 125e6, "")
    assert find(Asked(cluster="onprem", gpu="GeForce RTX 4090", per_node=4), "auto").world == 12
    assert find(Asked(cluster="onprem", gpu="cpu"), "4").device.gpu.name == "cpu"
    assert find(Asked(gpu="cpu", gpus=4, per_node=2, interconnect="8Gb"), "auto").across == 1e9
    for asked, said in (
        (Asked(cluster="onprem", gpu="h100-80gb"), "has rtx-4090"),
        (Asked(cluster="onprem", per_node=8), "have 4"),
    ):
        with pytest.raises(UserError, match=said):
            find(asked, "auto")


def test_a_cluster_without_gpus_is_its_cpus_and_a_gpu_that_ray_does_not_name_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cluster(**worker: float) -> ClusterShape:
        head = NodeState("a", "", {"node:__internal_head__": 1.0, "memory": 8e9, "CPU": 4.0}, {})
        return of_nodes([head, *(NodeState(name, "", {"memory": 8e9, **worker}, {}) for name in "bc")])

    monkeypatch.setattr("app.planner.machine.connected_shape", lambda: cluster(CPU=16.0))
    found = find(Asked(), "20")
    assert (found.world, found.per_node, found.device.is_cpu) == (20, 16, True)
    monkeypatch.setattr("app.planner.machine.connected_shape", lambda: cluster(GPU=4.0))
    with pytest.raises(UserError, match="name it with --gpu"):
        find(Asked(), "auto")
    found = of_shape(cluster(GPU=4.0), None, "t4")
    assert (found.world, found.per_node, found.device.gpu.name) == (8, 4, "t4")


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


def test_this_machine_is_calibrated() -> None:
    found = calibrate.calibrate(2)
    name, file = keep(found)
    assert name == "cpu" and file.exists() and cpus(2).device.measured
    assert cpus(2).device.gpu.rate("fp32") == found["peak"]["fp32"] > 1e8 and found["link_within"] > 1e6


def test_what_is_measured_is_measured_on_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones draw less power, so that a GPU's clock stays higher than in training."""
    spread = list[float]()

    def once(function: Any, *_: Any, **__: Any) -> float:
        function()
        used = inspect.getclosurevars(function).nonlocals.values()
        spread.extend(x.float().std().item() for x in used if isinstance(x, torch.Tensor) and x.numel() > 2**16)
        return 1.0

    monkeypatch.setattr(calibrate.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(calibrate.dist, "all_reduce", lambda x, op=None: None)
    monkeypatch.setattr(calibrate, "seconds_of", once)
    calibrate._alone(torch.device("cpu"))
    calibrate._links(torch.device("cpu"), "within")
    assert len(spread) == 7 and min(spread) > 0.4, "of two products, an addition and an all-reduce"


def test_a_gpu_that_the_catalogue_lacks_is_known_once_measured() -> None:
    entry = {
        "memory": 24576, "bandwidth": 900.0, "peak": {"fp32": 80.0, "bf16": 160.0}, "link": 25.0,
        "source": "measured by trireme calibrate", "aka": ["Imaginary RTX 9090"],
    }  # fmt: skip
    with pytest.raises(hardware.HardwareError, match="run `trireme calibrate`"):
        hardware.gpu("Imaginary RTX 9090")
    keep({"gpu": "imaginary-rtx-9090", "entry": entry, "operation": 7e-6, "measured": True})
    machine = of_shape(of_gpus(4, "Imaginary RTX 9090", 4), 4)
    assert machine.device.gpu.name == "imaginary-rtx-9090" and machine.device.operation == 7e-6
    assert machine.device.gpu.peak["bf16"] == pytest.approx(1.6e14)


@pytest.mark.parametrize(
    ("text", "said"), [("gpus: [", "catalogue"), ("gpus: {x: {memory: many}}", "lacks"), ("[]", "catalogue")]
)
def test_a_catalogue_of_ones_own_that_is_wrong_is_one_sentence(text: str, said: str) -> None:
    Path(os.environ["TRIREME_HARDWARE"]).write_text(text)
    with pytest.raises(hardware.HardwareError, match=said):
        hardware.gpu("t4")


def test_max_batch_writes_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, file, cpu = list[dict[str, Any]](), tmp_path / "best.yaml", ["--gpu", "cpu", "--gpus", "2", "--max-batch"]

    def run(tree: dict[str, Any], workers: int, limit: float) -> Trial:
        tried.append(tree["train"])
        return Trial(0.1, 1e6) if tree["train"]["micro_batch_size"] <= 7 else Trial(failure="MemoryError")

    monkeypatch.setattr(trial, "run", run)
    result = CliRunner().invoke(group, ["plan", *TINY, "strategy=ddp", *cpu, "--write", str(file)])
    assert result.exit_code == 0 and "7 is the largest that runs" in result.output, result.output
    assert "8 does not (MemoryError)" in result.output
    assert load_config([file]).train.micro_batch_size == 7 and load_config([file]).strategy == "ddp"
    two = [min(64, 2 * 2 * each["micro_batch_size"]) for each in tried]
    assert [each["global_batch_size"] for each in tried] == two, "two micro-batches tell the memory of many"


def test_none_may_run_of_what_is_tried(tiny: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    config, given = load_config([], [*TINY, "strategy=ddp"]), frozenset({"strategy", "train.activation_checkpointing"})
    plan = make_plan(config, tiny.task, cpus(2), given=given, reader=tiny)
    machine = with_memory(cpus(2), trial._with_size(plan, plan.rows[0], 5).memory_bytes)
    plan = make_plan(config, tiny.task, machine, given=given, reader=tiny)
    monkeypatch.setattr(trial, "run", lambda *_: Trial(failure="no"))
    _, row, found = max_batch(plan)
    assert row is None and (found["predicted"], found["largest"], found["share"]) == (5, 0, 32)


def test_a_variant_of_a_gpu_is_what_is_written_of_it_and_slower_by_its_power_limit() -> None:
    whole, limited = hardware.gpu("h100"), hardware.gpu("h100:hbm=2.4TB/s,power=500W")
    assert (limited.memory_bandwidth, limited.watts, limited.base) == (2.4e12, 500, "h100-80gb")
    assert limited.clock == pytest.approx((500 / 700) ** (1 / 3)) and whole.clock == 1
    assert device(limited.name).peak("bf16") < device("h100").peak("bf16") and device(limited.name).fitted
    with pytest.raises(HardwareError, match="memory=…GiB, hbm=…TB/s"):
        hardware.gpu("h100:hbm=fast")


def test_what_is_assumed_is_listed_in_two_lines_and_changed_by_name() -> None:
    machine = find(Asked(gpus=8, gpu="h100-80gb", assume=("across=0.5", "products=0.4")), "auto")
    assert (machine.device.across, machine.device.matmul["bf16"], machine.device.matmul["fp8"]) == (0.5, 0.4, 0.4)
    said = assumptions(machine.device, "bf16").splitlines()
    assert len(said) == 2 and "fitted to published runs" in said[0] and "across 0.5" in said[1]
    with pytest.raises(UserError, match="--assume speed=2: write one of products"):
        find(Asked(gpus=8, gpu="h100-80gb", assume=("speed=2",)), "auto")
