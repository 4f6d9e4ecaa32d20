"""Checks that end badly (test_gpu_first.py). Imports little, as each is called in a process of its own."""

import os
import signal
import subprocess
import time

from experiments.benchmarks.gpu_first.check import Here, NotHere

NOT_THERE = {"ray", "mlflow", "omegaconf", "antlr4", "click", "cloudpickle", "pandas", "pyarrow", "scipy", "matplotlib"}
NOT_THERE |= {"optuna", "safetensors", "tokenizers", "transformers", "pydantic", "requests"}
"""What a GPU machine that has little but PyTorch does not have."""


def hangs(here: Here) -> None:
    here.expect("never", 0, 1, "it does not get that far")
    here.found(before=1)
    subprocess.Popen(["sleep", "1234.5"])  # must end with it
    time.sleep(1000)


def crashes(here: Here) -> None:
    here.found(before=1)
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(here: Here) -> None:
    raise MemoryError("out of memory")


def is_not_for_here(here: Here) -> None:
    raise NotHere("there is no such thing here")


def is_wrong(here: Here, value: float | None) -> None:
    here.expect("value", 1.0, 2.0, "a guess")
    here.expect("least", 1.0, None, "no more is too much")
    here.found(least=1e9, **{"value": value} if value is not None else {})


def says_its_environment(here: Here) -> None:
    here.found(**{name: value for name, value in os.environ.items() if name.startswith(("TORCH_NCCL_", "PYTORCH_"))})


def lacks(here: Here, module: str) -> None:
    __import__(module)
