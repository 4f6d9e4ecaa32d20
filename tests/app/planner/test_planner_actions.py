"""What a plan is for, what is tried of it on this machine, and what is learned: where, measure, probe, calibrate."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from click.testing import CliRunner

from app.cli.plan import command
from app.config_io import load_config, to_dict
from app.errors import UserError
from app.planner import calibration, gauge, probe, tries
from app.planner.calibrate import keep, products_of
from app.planner.calibrate_cluster import kinds_of
from app.planner.measure import Measured, measure, stop
from app.planner.plan import Plan, make_plan
from app.planner.prediction import FitsNowhere, choose_layout
from app.planner.read import Reader
from app.planner.where import Asked, _of_cluster, cpus, cpus_of, find, machine_of, refuse_elsewhere
from app.tasks import load_task
from cluster import hardware
from cluster.shape import of_gpus, of_nodes, read_cluster
from tests.running import ROOT

EXPERIMENT = str(ROOT / "experiments" / "gpt.yaml")
TINY = [
    "task=image_classification",
    "task_args={data: digits, model: mlp, model_args: {hidden: [64]}}",
    "train.global_batch_size=64",
]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path / "planner")
    monkeypatch.setenv("TRIREME_HARDWARE", str(tmp_path / "hardware.yaml"))
    for name in ("RAY_ADDRESS", "TRIREME_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    _forget()
    yield
    _forget()


def _forget() -> None:
    hardware._catalogue.cache_clear()
    hardware._by_alias.cache_clear()


@pytest.fixture(scope="module")
def reader() -> Reader:
    config = load_config([], TINY)
    return Reader(load_task(config.task, config.task_args))


def _plan(reader: Reader, workers: int = 2, *overrides: str) -> Plan:
    config = load_config([], [*TINY, *overrides])
    return make_plan(config, reader.task, cpus(workers), given=frozenset({"strategy"}), reader=reader)


def _refused(*arguments: str) -> str:
    result = CliRunner().invoke(command, [EXPERIMENT, *arguments])
    assert result.exit_code == 2 and len(result.output.strip().splitlines()) == 1, result.output
    return result.output


# --- what a plan is for ------------------------------------------------------------------------------------------


def test_the_heads_gpus_count() -> None:
    shape = read_cluster("onprem")
    assert machine_of(shape, None).world == machine_of(shape, 12).world == 12
    with pytest.raises(UserError, match="at most 12"):
        machine_of(shape, 13)
    alone = dataclasses.replace(shape, head=dataclasses.replace(shape.head, gpus=2))
    assert machine_of(alone, None).world == 8 and machine_of(alone, None).per_node == 4, "nodes are alike, or apart"
    assert machine_of(dataclasses.replace(shape, max_workers=1), None).world == 8


def test_the_command_line_adds_to_a_cluster_and_does_not_contradict_it() -> None:
    found = find(Asked(cluster="onprem", gpus=8, interconnect="1Gb"), "auto")
    assert (found.world, found.across, found.assumed) == (8, 125e6, "")
    assert find(Asked(cluster="onprem", gpu="GeForce RTX 4090", per_node=4), "auto").world == 12
    with pytest.raises(UserError, match="has rtx-4090"):
        find(Asked(cluster="onprem", gpu="h100-80gb"), "auto")
    with pytest.raises(UserError, match="have 4"):
        find(Asked(cluster="onprem", per_node=8), "auto")
    with pytest.raises(UserError, match="at most 12"):
        find(Asked(cluster="onprem", gpus=16), "auto")
    with pytest.raises(UserError, match="--interconnect"):
        find(Asked(gpu="cpu", gpus=2, interconnect="1Gb"), "auto")
    assert find(Asked(cluster="onprem", gpu="cpu"), "4").device.gpu.name == "cpu"


def _node(address: str, head: bool = False, accelerator: str = "", **resources: float) -> dict[str, Any]:
    first = {"node:__internal_head__": 1.0} if head else {}
    first |= {f"accelerator_type:{accelerator}": 1.0} if accelerator else {}
    return {
        "Resources": {**first, "memory": 8e9, **resources},
        "Labels": {},
        "NodeManagerAddress": address,
        "NodeID": address,
        "Alive": True,
    }


def test_a_cluster_without_gpus_is_said_and_its_own_cpus_are_planned() -> None:
    shape = of_nodes([_node("a", True, CPU=4.0), _node("b", CPU=16.0), _node("c", CPU=16.0)])
    found = cpus_of(shape, 20)
    assert (found.world, found.per_node) == (20, 16) and "no GPUs: the plan is for its 36 CPUs" in found.assumed
    assert found.device.gpu.memory_bytes == pytest.approx(8e9 / 16)


def test_a_gpu_that_ray_does_not_name_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = of_nodes([_node("a", True, CPU=4.0), _node("b", GPU=4.0), _node("c", GPU=4.0)])
    monkeypatch.setattr("app.planner.where.connected_shape", lambda: shape)
    with pytest.raises(UserError, match="say it with --gpu"):
        find(Asked(), "auto")
    found = _of_cluster(shape, Asked(gpu="t4"), None)
    assert (found.world, found.per_node, found.device.gpu.name) == (8, 4, "t4")


def test_only_what_this_machine_has_is_tried() -> None:
    assert "this machine" in _refused("--gpus", "4096", "--gpu", "h100-80gb", "--probe")
    assert "too many here" in _refused("--gpus", "4096", "--gpu", "cpu", "--max-batch")
    with pytest.raises(UserError, match="the cluster big"):
        refuse_elsewhere(dataclasses.replace(cpus(2), name="big"), "--probe")
    refuse_elsewhere(cpus(2), "--probe")


# --- trying ------------------------------------------------------------------------------------------------------


def test_what_is_stopped_leaves_no_process() -> None:
    """As torchrun's workers are: sessions of their own, and deaf to SIGTERM."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    agent = (
        f"import subprocess, sys, time; c = [sys.executable, '-c', {deaf!r}]\n"
        "p = subprocess.Popen(c, start_new_session=True, stdout=subprocess.PIPE); p.stdout.readline()\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    started = subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True)
    assert started.stdout
    worker = int(started.stdout.readline())
    assert psutil.pid_exists(worker)
    stop(started)
    assert started.poll() is not None
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


def test_the_kernel_takes_a_probe_first() -> None:
    code = "from app.planner.measure import _expendable as e; e(); print(open('/proc/self/oom_score_adj').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1000"


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_the_search_finds_the_largest(count: int) -> None:
    for largest in range(-1, count):
        for first in {0, count // 2, count - 1}:
            asked: list[int] = []

            def runs(place: int, asked: list[int] = asked, largest: int = largest) -> bool:
                asked.append(place)
                return place <= largest

            assert probe.search(first, range(1, count + 1), runs) == largest
            assert asked[0] == first and len(asked) == len(set(asked)) <= 2 * count.bit_length() + 1


def test_the_largest_micro_batch_is_sought_upwards_too(reader: Reader) -> None:
    plan = _plan(reader, 2, "strategy=ddp")
    tried: list[dict[str, Any]] = []

    def attempt(tree: dict[str, Any]) -> Measured:
        tried.append(tree)
        size = tree["train"]["micro_batch_size"]
        return Measured(0.1, 2e9, 1e9) if size <= 21 else Measured(None, failure="OutOfMemoryError: too much")

    best = plan.best()
    assert best is not None
    five = probe.costs_of(plan, best, np.array([5])).bytes[0]
    small = dataclasses.replace(plan.machine.device.gpu, memory_bytes=int(five))
    plan.machine = dataclasses.replace(plan.machine, device=dataclasses.replace(plan.machine.device, gpu=small))
    found = probe.largest(plan, best, attempt)
    assert (found.predicted, found.found, found.share) == (5, 21, 32)
    assert "predicted 5, tried: 21 is the largest" in found.sentence and "22 does not (OutOfMem" in found.sentence
    assert [size for size, _ in found.tries][:2] == [5, 10]
    assert all(tree["strategy"] == "ddp" for tree in tried)
    assert tried[0]["train"]["global_batch_size"] == 2 * 2 * 5, "two micro-batches tell the memory of many"


def test_max_batch_holds_what_the_file_says() -> None:
    config = load_config([], [*TINY, "strategy=hsdp", "parallel.dp_shard=2", "train.precision=bf16"])
    assert {"strategy", "parallel.dp_shard", "train.precision", "train.activation_checkpointing"} <= tries.written(
        config
    )
    assert "strategy" not in tries.written(load_config([], [*TINY, "strategy=auto"]))


def test_a_probe_decides_and_json_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def measured(tree: dict[str, Any], machine: Any) -> Measured:
        seen.append(tree)
        return Measured(None, failure="MemoryError") if len(seen) == 1 else Measured(1.0 / len(seen), 3e8, 1e8)

    monkeypatch.setattr(tries, "measure", measured)
    file = tmp_path / "best.yaml"
    arguments = [*TINY, "--gpu", "cpu", "--gpus", "2", "--probe", "--json", "--write", str(file)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[0])["probe"]
    assert len(found) == 3 and [one["measured"]["ran"] for one in found] == [False, True, True]
    assert found[0]["measured"]["failure"] == "MemoryError" and found[1]["measured"]["memory_bytes"] < 2e8
    assert len({json.dumps([one["strategy"], one["parallel"]]) for one in found}) == 3
    written = yaml.safe_load(file.read_text())
    assert written["strategy"] == found[2]["strategy"] and written["parallel"]["tp"] == found[2]["parallel"]["tp"]


def test_what_needs_more_than_it_may_have_fails_alone(tmp_path: Path) -> None:
    large = load_config([], [*TINY, "workers=1", "strategy=single", "task_args.model_args.hidden=[4096, 4096]"])
    small = load_config([], [*TINY, "workers=1", "strategy=single"])
    first, second = measure([to_dict(large), to_dict(small)], 1, budget=0.0, limit=150 * 2**20)
    assert first.seconds is None and "allocate" in first.failure
    assert second.seconds is not None and second.own < 100 * 2**20


@pytest.mark.slow
def test_max_batch_and_probe_for_real() -> None:
    """With memory for a part of the batch: the worker's limit is what the machine is said to have."""
    own = [TINY[0], "task_args={data: digits, model: cnn, model_args: {widths: [2048]}}", "train.global_batch_size=128"]
    config = load_config([], [*own, "strategy=single", "workers=1"])
    plan = make_plan(config, load_task(config.task, config.task_args), cpus(1), given=tries.written(config))
    best = plan.best()
    assert best is not None
    half = probe.costs_of(plan, best, np.array([64])).bytes[0]
    gpu = dataclasses.replace(plan.machine.device.gpu, memory_bytes=int(half))
    plan.machine = dataclasses.replace(plan.machine, device=dataclasses.replace(plan.machine.device, gpu=gpu))
    found = tries.max_batch(plan).json
    assert found["predicted"] == found["tries"][0]["micro_batch_size"] == 64 and found["largest"] >= 1
    failed = [one["micro_batch_size"] for one in found["tries"] if not one["ran"]]
    assert failed and found["largest"] < min(failed) <= found["largest"] * 33 // 32 + 1
    probed = tries.probe(plan, 1)
    assert len(probed.json) == 1 and "measured" in probed.json[0]


# --- auto --------------------------------------------------------------------------------------------------------


def test_auto_plans_for_one_worker_too(reader: Reader) -> None:
    found = choose_layout(load_config([], [*TINY, "strategy=auto"]), reader.task, 1)
    assert found.layout.name == "single" and "predicted" in found.sentence and found.micro_batch_size == 64
    whole = load_config([], [*TINY, "strategy=auto", "train.global_batch_size=1024"])
    assert choose_layout(whole, reader.task, 1).micro_batch_size == 1024, "a small model takes its whole share"


def test_auto_does_not_start_what_fits_nowhere(reader: Reader) -> None:
    machine = cpus(2)
    gpu = dataclasses.replace(machine.device.gpu, memory_bytes=10_000)
    full = dataclasses.replace(machine, device=dataclasses.replace(machine.device, gpu=gpu))
    with pytest.raises(FitsNowhere, match=r"auto finds nothing that fits.*smallest cluster"):
        choose_layout(load_config([], [*TINY, "strategy=auto"]), reader.task, 2, full)


def test_auto_carries_what_makes_it_fit() -> None:
    """State in host memory, where shards and recomputing are not enough."""
    config = load_config([EXPERIMENT], ["strategy=auto", "task_args.d_model=1024", "train.global_batch_size=8"])
    task = load_task(config.task, config.task_args)
    machine = machine_of(of_gpus(2, "t4", 2), 2)
    least = 0.55 * min(_bytes(config, task, machine))
    gpu = dataclasses.replace(machine.device.gpu, memory_bytes=int(least + machine.device.context))
    found = choose_layout(
        config, task, 2, dataclasses.replace(machine, device=dataclasses.replace(machine.device, gpu=gpu))
    )
    config = found.in_config(config)
    assert config.parallel.offload and found.layout.dims.dp_shard == 2
    assert config.train.micro_batch_size == found.micro_batch_size


def _bytes(config: Any, task: Any, machine: Any) -> list[float]:
    plan = make_plan(config, task, machine, given=frozenset({"parallel.offload", "train.precision"}))
    return [float(b) for b in plan.costs.bytes]


# --- what is measured and learned --------------------------------------------------------------------------------


def _line(model: str, seconds: float, memory: float, trained: float = 60.0) -> dict[str, Any]:
    return {
        "model": model,
        "gpu": "t4",
        "trained": trained,
        "measured_seconds": seconds,
        "uncorrected_seconds": 1.0,
        "measured_bytes": memory,
        "uncorrected_bytes": 1e9,
    }


def test_a_new_model_learns_from_the_others() -> None:
    for model, seconds in (("a", 1.5), ("b", 2.0)):
        calibration.note(_line(model, seconds, 1.2e9))
    assert calibration.correction("new", "t4") == 1.0, "two models are not enough"
    calibration.note(_line("c", 3.0, 1.3e9))
    assert calibration.correction("new", "t4") == 2.0 and calibration.correction("a", "t4") == 1.5
    assert calibration.correction("new", "a10") == 1.0
    calibration.note(_line("a", 9.0, 5e9, trained=2.0))
    assert calibration.correction("a", "t4") == 1.5, "a short run teaches nothing"
    machine = machine_of(of_gpus(1, "t4", 1), 1)
    taught = calibration.learned(machine, "a").device.fragmentation
    assert 1 + taught == pytest.approx(1.2 * (1 + machine.device.fragmentation))


def test_rates_are_found_again_from_the_times_they_give() -> None:
    rate, half = 2e10, 40.0

    class Device:
        type = "cpu"

    shapes: list[tuple[int, int, int]] = []

    def seconds(function: Any) -> float:
        m, n, k = shapes.pop(0)
        return 2 * m * n * k / (rate * k / (k + half) * (m * n) / (m * n + 256))

    shapes += [(512, 512, 512), (512, 512, 32), (512, 512, 128)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gauge, "_product", lambda device, m, n, k, precision: None)
        assert gauge._k_half(Device(), "fp32", seconds) == pytest.approx(half)
        shapes += [(64, 64, 64), (100, 300, 50)]
        own = [[64.0, 64.0, 64.0, 3.0], [100.0, 300.0, 50.0, 1.0]]
        assert gauge._products(Device(), "fp32", own, half, 256.0, seconds) == pytest.approx(rate)


def test_the_products_of_a_model_are_its_own() -> None:
    config = load_config([], [*TINY, "train.micro_batch_size=16"])
    found = products_of(config)
    assert found and {16.0, 64.0} <= set(found[0][:3]) and len(found) <= 8


def test_a_gpu_that_the_catalogue_lacks_is_known_once_measured() -> None:
    entry = {
        "memory": 24576, "bandwidth": 900.0, "peak": {"fp32": 80.0, "bf16": 160.0}, "link": 25.0,
        "source": "measured by trireme calibrate", "aka": ["Imaginary RTX 9090"],
    }  # fmt: skip
    with pytest.raises(hardware.HardwareError, match="run `trireme calibrate`"):
        hardware.gpu("Imaginary RTX 9090")
    keep({"gpu": "imaginary-rtx-9090", "entry": entry, "k_half": 70.0, "measured": True})
    machine = machine_of(of_gpus(4, "Imaginary RTX 9090", 4), 4)
    assert machine.device.gpu.name == "imaginary-rtx-9090" and machine.device.k_half == 70.0
    assert machine.device.gpu.peak["bf16"] == pytest.approx(1.6e14)


@pytest.mark.parametrize(
    ("text", "said"), [("gpus: [", "no catalogue"), ("gpus: {x: {memory: many}}", "lacks"), ("[]", "no catalogue")]
)
def test_a_catalogue_of_ones_own_that_is_wrong_is_one_sentence(text: str, said: str) -> None:
    Path(os.environ["TRIREME_HARDWARE"]).write_text(text)
    with pytest.raises(hardware.HardwareError, match=said):
        hardware.gpu("t4")


def test_every_kind_of_a_cluster_is_measured_once() -> None:
    nodes = [
        _node("a", True, CPU=8.0),
        _node("b", GPU=8.0, accelerator="A100"),
        _node("c", GPU=8.0, accelerator="A100"),
        _node("d", GPU=1.0, accelerator="A100"),
        _node("e", GPU=2.0, accelerator="T4"),
    ]
    found = kinds_of(nodes)
    assert {kind: [n["NodeID"] for n in own] for kind, own in found.items()} == {
        ("A100", 8): ["b", "c"],
        ("T4", 2): ["e"],
    }
    assert list(kinds_of(nodes[:1])) == [("cpu", 0)]
