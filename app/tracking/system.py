"""Samples a machine: CPU, memory, disk, network and GPUs, under the names of MLflow's own system metrics.

One sampler per node. Its events have no step; the writer gives each the whole seconds since the run began, so that the
curves of a resumed run go on where they were.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


class SystemSampler:
    """A daemon thread, running at once, that hands a metrics event to `emit` every so often.

    Args:
        emit: takes {"type": "metrics", "step": None, "time": Unix seconds, "values": {...}}; must be quick.
        node: names the machine in `system/NODE/...`.
        every: seconds between samples, at least 1; 0 samples nothing.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], object], node: str, every: float) -> None:
        self._emit = emit
        self._prefix = f"system/{node}/"
        self._every = max(1.0, every) if every > 0 else 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-sampler", daemon=True)
        if self._every:
            self._thread.start()

    def close(self) -> None:
        """Stop; waits for the sample under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            sample = Sample()
            while not self._stop.wait(self._every):
                values = {self._prefix + key: value for key, value in sample.take().items()}
                self._emit({"type": "metrics", "step": None, "time": time.time(), "values": values})
        except Exception:  # a broken sensor (or a closed channel) must not end training
            _log.warning("system metrics end here", exc_info=True)


class Sample:
    """Takes one sample after another; rates and sums count from construction.

    Raises: ImportError without psutil.
    """

    def __init__(self) -> None:
        self._psutil = importlib.import_module("psutil")
        self._psutil.cpu_percent()  # the next call's answer is the share since this one
        network = self._psutil.net_io_counters()  # None on a machine without a network
        self._received: int = network.bytes_recv if network else 0
        self._sent: int = network.bytes_sent if network else 0
        self._gpus = _gpus()

    def take(self) -> dict[str, float]:
        """Names as MLflow's; percentages 0 to 100, megabytes of 10^6 bytes, watts."""
        memory, disk = self._psutil.virtual_memory(), self._psutil.disk_usage(os.sep)
        values = {
            "cpu_utilization_percentage": self._psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
        }
        if network := self._psutil.net_io_counters():
            values["network_receive_megabytes"] = (network.bytes_recv - self._received) / 1e6
            values["network_transmit_megabytes"] = (network.bytes_sent - self._sent) / 1e6
        for index, gpu in enumerate(self._gpus):
            values.update({f"gpu_{index}_{key}": value for key, value in _gpu(gpu).items()})
        return {key: round(value, 1) for key, value in values.items()}


def _gpus() -> list[Any]:
    """Handles of this machine's NVIDIA GPUs; none without pynvml or without a driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # NVMLError exists only where pynvml does
        return []


def _gpu(handle: Any) -> dict[str, float]:
    """What this GPU can tell; some tell less (no power reading under virtualisation)."""
    nvml = importlib.import_module("pynvml")
    values: dict[str, float] = {}
    readings: list[Callable[[], dict[str, float]]] = [
        lambda: _gpu_memory(nvml.nvmlDeviceGetMemoryInfo(handle)),
        lambda: {"utilization_percentage": nvml.nvmlDeviceGetUtilizationRates(handle).gpu},
        lambda: _gpu_power(nvml.nvmlDeviceGetPowerUsage(handle), nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
    ]
    for reading in readings:
        try:
            values.update(reading())
        except nvml.NVMLError:
            continue
    return values


def _gpu_memory(memory: Any) -> dict[str, float]:
    return {
        "memory_usage_percentage": memory.used / memory.total * 100,
        "memory_usage_megabytes": memory.used / 1e6,
    }


def _gpu_power(milliwatts: float, limit: float) -> dict[str, float]:
    return {"power_usage_watts": milliwatts / 1000, "power_usage_percentage": milliwatts / limit * 100}
