"""Sums over the profile of a step. The profile of a run: launchers/test_launchers.py."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from app.training.profiler import seconds_by_kind

pytestmark = pytest.mark.pure

ON_CPU = DeviceType.CPU
ON_GPU = DeviceType.CUDA


def event(name: str, start: float, end: float, device: Any = ON_CPU, **flags: Any) -> Any:
    details = {"thread": 1, "is_async": False, "is_user_annotation": False} | flags
    time_range = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=time_range, device_type=device, **details)


def milliseconds(events: list[Any], on_gpu: bool) -> dict[str, float]:
    seconds = seconds_by_kind(events, steps=1, on_gpu=on_gpu)
    return {name.removesuffix("_seconds"): round(value * 1e3, 6) for name, value in seconds.items()}


def test_communication_that_overlaps_a_gpus_kernels_is_not_exposed() -> None:
    events = [
        event("ProfilerStep*", 0, 8_000, is_user_annotation=True),
        event("aten::mm", 0, 7_000),  # on the host, which does not count for the device
        event("sgemm", 1_000, 4_000, ON_GPU),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3_000, 6_000, ON_GPU),
        event("nccl:all_reduce", 0, 9_000, ON_GPU, is_user_annotation=True),
        event("multi_tensor_apply", 8_000, 10_000, ON_GPU),
    ]
    expected = {
        "step": 10,
        "computing": 5,
        "communication": 3,
        "exposed_communication": 2,
        "idle": 3,
    }
    assert milliseconds(events, on_gpu=True) == expected


def test_on_cpus_operators_inside_a_collective_are_communication() -> None:
    events = [
        event("ProfilerStep*", 0, 10_000, is_user_annotation=True),
        event("autograd::engine::evaluate_function: MmBackward0", 0, 4_000),
        event("aten::mm", 0, 4_000),
        event("gloo:all_reduce", 4_000, 6_000, is_user_annotation=True),
        event("aten::add", 5_000, 6_000),
        # Posted in advance by the thread that computes.
        event("gloo:recv", 6_000, 9_000, is_async=True),
        event("aten::mm", 7_000, 8_000),
    ]
    expected = {
        "step": 10,
        "computing": 5,
        "communication": 5,
        "exposed_communication": 4,
        "idle": 1,
    }
    assert milliseconds(events, on_gpu=False) == expected
