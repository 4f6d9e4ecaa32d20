"""Checks that end badly, for test_gpu_first.py. Each runs in a process, so this imports little."""

import os
import signal
import subprocess
import time

from experiments.benchmarks.gpu_first.check import Here, NotHere

NOT_THERE = {
    "ray",
    "mlflow",
    "omegaconf",
    "antlr4",
    "click",
    "cloudpickle",
    "pandas",
    "pyarrow",
    "scipy",
    "matplotlib",
    "optuna",
    "safetensors",
    "tokenizers",
    "transformers",
    "pydantic",
    "requests",
}
"""Packages that a GPU machine with little but PyTorch does not have."""


def hangs(measurement: Here) -> None:
    measurement.expect("never", 0, 1, "it does not get that far")
    measurement.found(before=1)
    subprocess.Popen(["sleep", "1234.5"])  # must end with the check
    time.sleep(1000)


def crashes(measurement: Here) -> None:
    measurement.found(before=1)
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(measurement: Here) -> None:
    raise MemoryError("out of memory")


def is_not_for_here(measurement: Here) -> None:
    raise NotHere("there is no such thing here")


def is_wrong(measurement: Here, value: float | None) -> None:
    measurement.expect("value", 1.0, 2.0, "a guess")
    measurement.expect("least", 1.0, None, "no more is too much")
    measurement.found(least=1e9, **{"value": value} if value is not None else {})


def says_its_environment(measurement: Here) -> None:
    prefixes = ("TORCH_NCCL_", "PYTORCH_")
    variables = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    measurement.found(**variables)


def lacks(measurement: Here, module: str) -> None:
    __import__(module)
