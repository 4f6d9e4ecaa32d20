"""The environment of a run.

Code revision, versions and host become tags; CPU, memory, disk, network and GPUs become metrics.
"""

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
"""The device file of each GPU that this machine or container may use."""


def provenance_tags() -> dict[str, str]:
    """Tags of the MLflow run, under MLflow's names where it has one. Never raises."""
    has_script = sys.argv[0] not in ("-", "-c", "-m", "")
    versions = {
        f"trireme.version.{name}": _installed().get(name, "")
        for name in ("torch", "ray", "mlflow", "trireme")
    }
    tags = {
        "mlflow.source.name": sys.argv[0] if has_script else sys.executable,
        "mlflow.source.type": "LOCAL",
        "trireme.command": mask_text(" ".join(sys.argv)),
        "trireme.host": socket.gethostname(),
        "trireme.python": platform.python_version(),
        "trireme.slurm_job_id": os.environ.get("SLURM_JOB_ID", ""),
        **versions,
    }
    with contextlib.suppress(Exception):  # the user has no name
        tags["mlflow.user"] = getpass.getuser()
    with contextlib.suppress(Exception):  # there is no git, git is slow, or the folder is gone
        tags |= {"trireme.directory": os.getcwd(), **_revision()}
    return {key: value for key, value in tags.items() if value}


def environment_text() -> str:
    """The interpreter's version and the installed packages as sorted `name==version` lines."""
    heading = f"# Python {platform.python_version()} on {platform.platform()}"
    lines = [f"{name}=={version}" for name, version in sorted(_installed().items())]
    return "\n".join([heading, *lines, ""])


def _revision() -> dict[str, str]:
    """The git revision of the current folder; {} if it is not in a repository."""
    status = _git("status", "--porcelain=v2", "--branch", "--untracked-files=no")
    branch = dict(re.findall(r"^# branch\.(oid|head) (.+)$", status, re.M))
    if not re.fullmatch(r"[0-9a-f]{40,64}", branch.get("oid", "")):
        return {}
    remote = _git("config", "--get", "remote.origin.url").strip()
    is_dirty = any(not line.startswith("#") for line in status.splitlines())
    return {
        "mlflow.source.git.commit": branch["oid"],
        "mlflow.source.git.branch": branch.get("head", "").replace("(detached)", ""),
        "mlflow.source.git.repoURL": mask_uri(remote),
        "mlflow.source.git.dirty": str(is_dirty).lower(),
    }


def _git(*arguments: str) -> str:
    """The output of a git command; "" if it fails."""
    # Do not take the lock of the index, which another `git commit` may need.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    result = subprocess.run(
        ["git", *arguments], env=environment, capture_output=True, text=True, timeout=1
    )
    return result.stdout


@functools.cache
def _installed() -> dict[str, str]:
    """The versions of packages by name.

    The names of the `.dist-info` folders have both; opening 200 files would take ten times as long.
    """
    folders = [path.stem for entry in sys.path for path in Path(entry).glob("*.dist-info")]
    # Reversed, so that of two versions the first on the path counts: Python imports that one.
    parts = [name.rpartition("-") for name in reversed(folders)]
    return {name.replace("_", "-").lower(): version for name, _, version in parts}


class SystemSampler:
    """A daemon thread, one per node, that samples the machine's metrics.

    Args:
        node: The machine's name in `system/NODE/...`.
        every: Seconds between samples, at least 1; 0 samples nothing.
        sampled: Called with the Unix time of each sample and its values by name; must be quick.
        warn: Called with a sentence for a person if something cannot be sampled.
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
        """Stop, after the current sample."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            sample = Sample()
            if sample.gpu_problem:
                self._warn(f"{self._node} {sample.gpu_problem}")
            prefix = f"system/{self._node}"
            while not self._stop.wait(self._every):
                values = {
                    f"{prefix}/{name}": round(value, 1) for name, value in sample.take().items()
                }
                self._sampled(time.time(), values)
        except Exception:  # a broken sensor or a closed channel must not end training
            _log.warning("no more system metrics", exc_info=True)


class Sample:
    """Samples the machine's metrics; network traffic counts from construction.

    Attributes:
        gpu_problem: Why this machine's GPUs cannot be sampled, as a sentence without its beginning,
            the machine's name; "" if they can, or there are none.
    """

    def __init__(self) -> None:
        psutil.cpu_percent()  # the next call returns the utilization since this one
        self._network = psutil.net_io_counters()
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            self.gpu_problem = ""
        except Exception as error:  # no pynvml or no driver; without pynvml there is no NVMLError
            self._gpus = []
            self.gpu_problem = ""
            count = len(glob.glob(GPU_DEVICES))
            if count:
                self.gpu_problem = (
                    f"has {count} GPU{'s' if count > 1 else ''} whose metrics cannot be recorded "
                    f"({error}): `pip install nvidia-ml-py` there"
                )

    def take(self) -> dict[str, float]:
        """Sample the machine.

        Returns:
            Metrics under the names of MLflow's system metrics: percentages from 0 to 100, megabytes
            of 10^6 bytes, watts.
        """
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(os.sep)
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
            for name, value in self._gpu_metrics(gpu).items():
                values[f"gpu_{index}_{name}"] = value
        return values

    def _gpu_metrics(self, handle: Any) -> dict[str, float]:
        """The metrics that this GPU has; under virtualisation, for example, it has no power."""
        nvml = self._nvml
        values: dict[str, float] = {}
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            values["memory_usage_percentage"] = memory.used / memory.total * 100
            values["memory_usage_megabytes"] = memory.used / 1e6
            values["utilization_percentage"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            milliwatts = nvml.nvmlDeviceGetPowerUsage(handle)
            limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
            values["power_usage_watts"] = milliwatts / 1000
            values["power_usage_percentage"] = milliwatts / limit * 100
        return values
