"""Fixtures of the planner's tests: separate caches, models read once, and imaginary machines."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from app.config.io import load_config
from app.planner.machine import Machine, of_shape
from app.planner.plan import Plan, make_plan
from app.planner.read import Reader
from app.tasks import load_task
from cluster import hardware
from cluster.shape import shape_of_gpus
from tests.running import ROOT

EXPERIMENT = str(ROOT / "experiments" / "gpt.yaml")
LARGE = [
    "task_args.d_model=4096",
    "task_args.n_layers=16",
    "task_args.n_heads=32",
    "task_args.sequence_length=1024",
    "task_args.vocab_size=65536",
]
TINY = [
    "task=image_classification",
    "task_args={data: digits, model: mlp, model_args: {hidden: [64]}}",
    "train.global_batch_size=64",
]


@pytest.fixture(autouse=True)
def separate_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives each test its own planner cache and catalogue of hardware, and no cluster."""
    monkeypatch.setattr("app.planner.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setenv("TRIREME_HARDWARE", str(tmp_path / "hardware.yaml"))
    for name in ("RAY_ADDRESS", "TRIREME_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    hardware._catalogue.cache_clear()
    yield
    hardware._catalogue.cache_clear()


def read(files: tuple[str, ...], *overrides: str) -> Reader:
    """Reads the model of an experiment."""
    config = load_config(files, overrides)
    return Reader(load_task(config.task, config.task_args))


@pytest.fixture(scope="session")
def small() -> Reader:
    """A GPT that fits any GPU."""
    return read((EXPERIMENT,))


@pytest.fixture(scope="session")
def large() -> Reader:
    """A GPT whose training state does not fit one GPU."""
    return read((EXPERIMENT,), *LARGE)


@pytest.fixture(scope="session")
def tiny() -> Reader:
    """An MLP that a CPU trains in seconds."""
    return read((), *TINY)


def gpus(count: int = 8, gpu: str = "h100-80gb", across: str = "3200Gb") -> Machine:
    """Nodes of up to eight GPUs each, joined by links of `across` bits per second."""
    return of_shape(shape_of_gpus(count, gpu, min(count, 8), across), count)


def with_memory(machine: Machine, size: float) -> Machine:
    """The same machine with `size` bytes for tensors per device."""
    gpu = replace(machine.device.gpu, memory_bytes=int(size + machine.device.context))
    return replace(machine, device=replace(machine.device, gpu=gpu))


def plan_of(
    reader: Reader, machine: Machine, *overrides: str, fixed_keys: tuple[str, ...] = ()
) -> Plan:
    """Plans the experiment's model on a machine; `fixed_keys` are the keys the user has set."""
    config = load_config([EXPERIMENT], overrides)
    return make_plan(config, reader.task, machine, fixed_keys=frozenset(fixed_keys), reader=reader)


def allocated_peak(work: Callable[[], None], folder: Path) -> float:
    """The most bytes that torch's allocator on the CPU has handed out during `work`.

    With several threads, a processor with AMX copies a matrix before it multiplies by it.

    Args:
        work: What is done.
        folder: Where the profiler writes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        marker = torch.ones(1)
        work()
        del marker
    torch.set_num_threads(threads)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = [
        (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
    ]
    _, first_total, first_bytes = min(sizes)
    return max(total for _, total, _ in sizes) - (first_total - first_bytes)
