"""Profiles of steps: what is added up for their tables. A run's: launchers/test_launchers.py."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from app.training.profiler import seconds_by_kind

pytestmark = pytest.mark.pure

ON_CPU, ON_GPU = DeviceType.CPU, DeviceType.CUDA


def event(name: str, start: float, end: float, device: Any = ON_CPU, **more: Any) -> Any:
    details = {"thread": 1, "is_async": False, "is_user_annotation": False} | more
    time_range = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=time_range, device_type=device, **details)


def milliseconds(events: list[Any], on_gpu: bool) -> dict[str, float]:
    seconds = seconds_by_kind(events, steps=1, on_gpu=on_gpu)
    return {name.removesuffix("_seconds"): round(value * 1e3, 6) for name, value in seconds.items()}


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
        event("gloo:all_reduce", 4_000, 6_000, is_user_annotation=True),
        event("aten::add", 5_000, 6_000),
        event("gloo:recv", 6_000, 9_000, is_async=True),  # asked for in advance by the thread that computes
        event("aten::mm", 7_000, 8_000),
    ]
    expected = {"step": 10, "computing": 5, "communication": 5, "exposed_communication": 4, "idle": 1}
    assert milliseconds(events, on_gpu=False) == expected
