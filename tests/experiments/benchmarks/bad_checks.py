"""Checks that end badly, for test_gpu_first.py. Each runs in a process, so this imports little."""

import os
import signal
import subprocess
import time

from experiments.benchmarks.gpu_first.check import CannotRun, CheckContext

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
}
NOT_THERE |= {"optuna", "safetensors", "tokenizers", "transformers", "pydantic", "requests"}
"""What a GPU machine that has little but PyTorch does not have."""


def hangs(context: CheckContext) -> None:
    context.expect("never", 0, 1, why="it does not get that far")
    context.measured(before=1)
    subprocess.Popen(["sleep", "1234.5"])  # must end with it
    time.sleep(1000)


def crashes(context: CheckContext) -> None:
    context.measured(before=1)
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(context: CheckContext) -> None:
    raise MemoryError("out of memory")


def is_not_for_here(context: CheckContext) -> None:
    raise CannotRun("there is no such thing here")


def is_wrong(context: CheckContext, value: float | None) -> None:
    context.expect("value", 1.0, 2.0, why="a guess")
    context.expect("least", 1.0, None, why="no more is too much")
    context.measured(least=1e9, **{"value": value} if value is not None else {})


def says_its_environment(context: CheckContext) -> None:
    context.measured(
        **{
            name: value
            for name, value in os.environ.items()
            if name.startswith(("TORCH_NCCL_", "PYTORCH_"))
        }
    )


def lacks(context: CheckContext, module: str) -> None:
    __import__(module)
