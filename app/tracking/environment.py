"""Where a run runs: code revision, versions and host as tags; CPU, memory, disk, network and GPUs over time."""

import contextlib
import functools
import getpass
import glob
import importlib
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from app.console.masking import mask_text, mask_uri

_log = logging.getLogger(__name__)
GPU_DEVICES = "/dev/nvidia[0-9]*"
"""A file for each GPU that this machine, or container, may use."""


def provenance_tags() -> dict[str, str]:
    """Tags for the MLflow run, under MLflow's own names where it has one. Quick, and never an error."""
    tags = {
        "mlflow.source.name": sys.argv[0] if sys.argv[0] not in ("-", "-c", "-m", "") else sys.executable,
        "mlflow.source.type": "LOCAL",
        "trireme.command": mask_text(" ".join(sys.argv)),
        "trireme.host": socket.gethostname(),
        "trireme.python": platform.python_version(),
        "trireme.slurm_job_id": os.environ.get("SLURM_JOB_ID", ""),
        **{f"trireme.version.{name}": _installed().get(name, "") for name in ("torch", "ray", "mlflow", "trireme")},
    }
    with contextlib.suppress(Exception):  # a user without a name
        tags["mlflow.user"] = getpass.getuser()
    with contextlib.suppress(Exception):  # no git, it takes too long, or the folder is gone
        tags |= {"trireme.directory": os.getcwd(), **_revision()}
    return {key: value for key, value in tags.items() if value}


def environment_text() -> str:
    """The installed packages as `name==version` lines, in alphabetical order, below the interpreter's version."""
    lines = [f"{name}=={version}" for name, version in sorted(_installed().items())]
    return "\n".join([f"# Python {platform.python_version()} on {platform.platform()}", *lines, ""])


def _revision() -> dict[str, str]:
    """The git revision of the current folder."""
    # One command tells commit, branch and changes; it must not take the index lock from another `git commit`.
    status = _git("status", "--porcelain=v2", "--branch", "--untracked-files=no")
    found = dict(re.findall(r"^# branch\.(oid|head) (.+)$", status, re.M))
    if not re.fullmatch(r"[0-9a-f]{40,64}", found.get("oid", "")):
        return {}
    return {
        "mlflow.source.git.commit": found["oid"],
        "mlflow.source.git.branch": found.get("head", "").replace("(detached)", ""),
        "mlflow.source.git.repoURL": mask_uri(_git("config", "--get", "remote.origin.url").strip()),
        "mlflow.source.git.dirty": str(any(not line.startswith("#") for line in status.splitlines())).lower(),
    }


def _git(*arguments: str) -> str:
    """What git prints; "" if it fails."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(["git", *arguments], env=environment, capture_output=True, text=True, timeout=1).stdout


@functools.cache
def _installed() -> dict[str, str]:
    """Versions by name, from the names of the `.dist-info` folders: opening 200 files would take ten times as long."""
    folders = [path.stem for entry in sys.path for path in Path(entry).glob("*.dist-info")]
    parts = [name.rpartition("-") for name in reversed(folders)]  # of two, the first on the path is imported
    return {name.replace("_", "-").lower(): version for name, _, version in parts}


class SystemSampler:
    """A daemon thread, one per node, that takes a sample of the machine every so often.

    Args:
        node: Names the machine in `system/NODE/...`.
        every: Seconds between samples, at least 1; 0 samples nothing.
        sampled: Takes the Unix time of each sample and its values by name, and must be quick.
        warn: Takes a sentence for a person, where something cannot be sampled.
    """

    def __init__(
        self,
        node: str,
        every: float,
        *,
        sampled: Callable[[float, dict[str, float]], object],
        warn: Callable[[str], object],
    ) -> None:
        self._node = node
        self._every = max(1.0, every)
        self._sampled = sampled
        self._warn = warn
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-sampler", daemon=True)
        if every > 0:
            self._thread.start()

    def close(self) -> None:
        """Stop; waits for the sample under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            sample = Sample()
            if sample.blind:
                self._warn(f"{self._node} {sample.blind}")
            while not self._stop.wait(self._every):
                values = {f"system/{self._node}/{key}": round(value, 1) for key, value in sample.take().items()}
                self._sampled(time.time(), values)
        except Exception:  # a broken sensor (or a closed channel) must not end training
            _log.warning("system metrics end here", exc_info=True)


class Sample:
    """Takes one sample after another; rates and sums count from construction. blind: why there is nothing of the GPUs
    that this machine has, with what to do; the sentence goes on after the machine's name."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the next call's answer is the share since this one
        self._network = psutil.net_io_counters()
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
            self.blind = ""
        except Exception as error:  # no pynvml, or no driver; NVMLError exists only where pynvml does
            self._gpus = []
            count = len(glob.glob(GPU_DEVICES))
            why = f"has {count} GPU{'s' if count > 1 else ''} whose metrics cannot be recorded ({error})"
            self.blind = f"{why}: `pip install nvidia-ml-py` there" if count else ""

    def take(self) -> dict[str, float]:
        """Under the names of MLflow's own system metrics; percentages 0 to 100, megabytes of 10^6 bytes, watts."""
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
        network = psutil.net_io_counters()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
            "network_receive_megabytes": (network.bytes_recv - self._network.bytes_recv) / 1e6,
            "network_transmit_megabytes": (network.bytes_sent - self._network.bytes_sent) / 1e6,
        }
        for index, gpu in enumerate(self._gpus):
            values |= {f"gpu_{index}_{key}": value for key, value in self._gpu(gpu).items()}
        return values

    def _gpu(self, handle: Any) -> dict[str, float]:
        """What this GPU can tell; some tell less (no power reading under virtualisation)."""
        nvml, values = self._nvml, {}
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            values["memory_usage_percentage"] = memory.used / memory.total * 100
            values["memory_usage_megabytes"] = memory.used / 1e6
            values["utilization_percentage"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            watts, limit = nvml.nvmlDeviceGetPowerUsage(handle), nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
            values |= {"power_usage_watts": watts / 1000, "power_usage_percentage": watts / limit * 100}
        return values
