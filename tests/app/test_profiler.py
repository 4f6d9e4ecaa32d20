"""Profiles of steps: what is added up for their tables. A run's: launchers/test_launchers.py."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from torch.autograd import DeviceType

from app.cli import group
from app.profiler import shares
from tests.running import mlflow_run, mlflow_text

ON_CPU, ON_GPU = DeviceType.CPU, DeviceType.CUDA


def event(name: str, start: float, end: float, device: Any = ON_CPU, **more: Any) -> Any:
    own = {"thread": 1, "is_async": False, "is_user_annotation": False} | more
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device, **own)


def milliseconds(events: list[Any], on_gpu: bool) -> dict[str, float]:
    found = shares(events, steps=1, on_gpu=on_gpu)
    return {name.removesuffix("_seconds"): round(value * 1e3, 6) for name, value in found.items()}


def test_communication_beside_a_gpus_kernels_is_hidden_and_the_rest_exposed() -> None:
    events = [
        event("ProfilerStep*", 0, 8_000, is_user_annotation=True),
        event("aten::mm", 0, 7_000),  # of the host, which says nothing of the device
        event("sgemm", 1_000, 4_000, ON_GPU),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3_000, 6_000, ON_GPU),
        event("nccl:all_reduce", 0, 9_000, ON_GPU, is_user_annotation=True),
        event("multi_tensor_apply", 8_000, 10_000, ON_GPU),
    ]
    expected = {"step": 10, "computing": 5, "communication": 3, "exposed_communication": 2, "idle": 3}
    assert milliseconds(events, on_gpu=True) == expected


def test_on_cpus_what_a_collective_computes_itself_is_communication() -> None:
    events = [
        event("ProfilerStep*", 0, 10_000, is_user_annotation=True),
        event("autograd::engine::evaluate_function: MmBackward0", 0, 4_000),
        event("aten::mm", 0, 4_000),
        event("shared_memory:all_reduce", 4_000, 6_000, is_user_annotation=True),
        event("aten::add", 5_000, 6_000),
        event("gloo:recv", 6_000, 9_000, is_async=True),  # asked for in advance by the thread that computes
        event("aten::mm", 7_000, 8_000),
    ]
    expected = {"step": 10, "computing": 5, "communication": 5, "exposed_communication": 4, "idle": 1}
    assert milliseconds(events, on_gpu=False) == expected


def assert_profiled(storage: Path, name: str, first: int) -> None:
    """Three steps of a run's ranks 0 and 1, from `first` on: in its folder, in MLflow and as they are shown."""
    steps = f"steps-{first}-{first + 2}"
    for rank in (0, 1):
        packed = storage / name / "profile" / steps / f"rank-{rank}.trace.json.gz"
        events = json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]
        taken = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
        assert len(taken) == 3, "those that were asked for, without the one to warm up"
    ranks = json.loads(CliRunner().invoke(group, ["profile", str(storage / name), "--json"]).stdout)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["communication_seconds"] > 0, "gradients or activations are sent in every step"
        parts = [rank[f"{part}_seconds"] for part in ("computing", "exposed_communication", "idle")]
        assert sum(parts) == pytest.approx(rank["step_seconds"], rel=0.01)
        assert any(row["name"].startswith("aten::") and row["bytes"] > 0 for row in rank["operators"])
    run = mlflow_run(storage, name)
    assert run.data.metrics["profile/step_seconds"] == pytest.approx(ranks[0]["step_seconds"])
    (table,) = mlflow_text(storage, run.info.run_id, f"profile/{steps}")
    assert table in CliRunner().invoke(group, ["profile", str(storage / name)]).stdout
